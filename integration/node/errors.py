"""What can go wrong with the node agent.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.errors.IntegrationError`::

    NodeAgentError         E27xx
    ├── AgentRunning, …    each part's below its heading, in the order of their codes
    ├── ServingError       E2704 to E2715: between the device plugin and a kubelet
    ├── SettingsError      E2720 to E2725: what the device plugin is told to do
    └── DraError           E2772 to E2781: what a kubelet is told of a resource claim

docs/reference/errors.md has all of them as a table.
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class NodeAgentError(IntegrationError):
    """Base of what can go wrong with the node agent."""


class AgentRunning(NodeAgentError):
    """There is an agent for this node already. Raised by :func:`integration.node.agent.serve`."""

    code = "NVSHIM-E2701"
    status = Status.ALREADY_EXISTS


class AgentStateUnusable(NodeAgentError):
    """Where the agent says how it is cannot be written."""

    code = "NVSHIM-E2702"
    status = Status.FAILED_PRECONDITION


# -- the device plugin -------------------------------------------------------------------------


class ServingError(NodeAgentError):
    """Base of what can go wrong between the device plugin and a kubelet."""


class TooManyShares(ServingError):
    """A container is to get several shares, and the settings say that nobody does.

    A second share of the same device is no second device, nor more of it.
    """

    code = "NVSHIM-E2704"
    status = Status.INVALID_ARGUMENT


class DeviceGone(ServingError):
    """The kubelet was told of the device, and it is not there, or cannot be told to be, now."""

    code = "NVSHIM-E2705"
    status = Status.FAILED_PRECONDITION


class CdiDeviceUnwritten(ServingError):
    """The container is to get its devices by CDI, and no spec has them."""

    code = "NVSHIM-E2706"
    status = Status.FAILED_PRECONDITION


class ChannelsMissing(ServingError):
    """IMEX channels are required, and the node does not have one of them."""

    code = "NVSHIM-E2707"
    status = Status.FAILED_PRECONDITION


class KubeletRefused(ServingError):
    """The kubelet does not accept a resource's registration. It is tried again."""

    code = "NVSHIM-E2708"
    status = Status.FAILED_PRECONDITION


class KubeletUnreachable(ServingError):
    """There is no kubelet at its socket, or it does not answer. It is tried again."""

    code = "NVSHIM-E2709"
    status = Status.UNAVAILABLE


class OtherPlugin(ServingError):
    """Another program serves the sockets of a device plugin of NVIDIA's here."""

    code = "NVSHIM-E2710"
    status = Status.ALREADY_EXISTS


class PluginSocketUnusable(ServingError):
    """A plugin's socket cannot be made beside the kubelet's."""

    code = "NVSHIM-E2711"
    status = Status.FAILED_PRECONDITION


class PluginSpecUnwritten(ServingError):
    """The CDI spec that containers are to be made with cannot be put in place."""

    code = "NVSHIM-E2712"
    status = Status.FAILED_PRECONDITION


class GrantIneffective(ServingError):
    """The shim's configuration keeps it from believing the way in which devices are given."""

    code = "NVSHIM-E2713"
    status = Status.FAILED_PRECONDITION


class PluginFailed(ServingError):
    """A call of the kubelet's could not be answered; what has happened is in the log."""

    code = "NVSHIM-E2714"
    status = Status.INTERNAL


class DeviceDrained(ServingError):
    """The kubelet has chosen a device that a person has just taken out of service."""

    code = "NVSHIM-E2715"
    status = Status.FAILED_PRECONDITION


class SettingsError(NodeAgentError):
    """Base of what can be wrong with its settings."""


class SettingsUnreadable(SettingsError):
    """The configuration file is not there, or cannot be read."""

    code = "NVSHIM-E2720"
    status = Status.NOT_FOUND


class SettingsMalformed(SettingsError):
    """The configuration file is neither YAML nor JSON, or of a version that is not known."""

    code = "NVSHIM-E2721"
    status = Status.INVALID_ARGUMENT


class UnknownSetting(SettingsError):
    """The configuration file has a key that means nothing: a setting that would be ignored."""

    code = "NVSHIM-E2722"
    status = Status.INVALID_ARGUMENT


class WrongSetting(SettingsError):
    """A value of the file, of a flag or of a variable is none that there is."""

    code = "NVSHIM-E2723"
    status = Status.INVALID_ARGUMENT


class SettingsConflict(SettingsError):
    """Two settings exclude each other."""

    code = "NVSHIM-E2724"
    status = Status.INVALID_ARGUMENT


class NoSettingsChosen(SettingsError):
    """There are several configurations, and none of them is chosen, or one that is not there."""

    code = "NVSHIM-E2725"
    status = Status.NOT_FOUND


class MigLayoutUnsuitable(NodeAgentError):
    """The GPUs are cut in a way that ``migStrategy`` cannot tell a kubelet of."""

    code = "NVSHIM-E2726"
    status = Status.FAILED_PRECONDITION


class MigDevicesUnknown(NodeAgentError):
    """There are GPUs in MIG mode, and NVML does not say what they are cut into."""

    code = "NVSHIM-E2727"
    status = Status.UNAVAILABLE


class SharingUnsuitable(NodeAgentError):
    """A device cannot be shared as it is to be: MIG devices by MPS, or a GPU by too many."""

    code = "NVSHIM-E2728"
    status = Status.FAILED_PRECONDITION


class DeviceUnknown(NodeAgentError):
    """A device is named that the resource does not have."""

    code = "NVSHIM-E2730"
    status = Status.NOT_FOUND


class TooFewAvailable(NodeAgentError):
    """More devices are asked for than are free."""

    code = "NVSHIM-E2731"
    status = Status.RESOURCE_EXHAUSTED


class PreferenceUnsuitable(NodeAgentError):
    """What has to be given is not free, or is more than is asked for."""

    code = "NVSHIM-E2732"
    status = Status.INVALID_ARGUMENT


# -- MPS ---------------------------------------------------------------------------------------


class MpsNotReady(NodeAgentError):
    """A container would wait for a daemon that is not there, or would go past it.

    Raised by :func:`integration.node.mps.containers.refuse_unready`.
    """

    code = "NVSHIM-E2735"
    status = Status.UNAVAILABLE


class MpsImpossible(NodeAgentError):
    """The devices cannot be shared by MPS. Raised by :func:`integration.node.mps.plan.plan_of`."""

    code = "NVSHIM-E2736"
    status = Status.FAILED_PRECONDITION


class MpsProgramMissing(NodeAgentError):
    """The driver's files have no control daemon, or no server."""

    code = "NVSHIM-E2737"
    status = Status.FAILED_PRECONDITION


class MpsDaemonFailed(NodeAgentError):
    """The control daemon could not be started, has ended, or does not answer as it should."""

    code = "NVSHIM-E2738"
    status = Status.UNAVAILABLE


class MpsStateUnusable(NodeAgentError):
    """What daemons and containers share cannot be made below ``mpsRoot``."""

    code = "NVSHIM-E2739"
    status = Status.FAILED_PRECONDITION


class ComputeModeFailed(NodeAgentError):
    """NVML did not set the compute mode of a GPU."""

    code = "NVSHIM-E2740"
    status = Status.UNAVAILABLE


# -- GPUs that are watched ---------------------------------------------------------------------


class ChildFailed(NodeAgentError):
    """A child that talks with NVML hangs, crashed, makes no sense, or says that NVML failed."""

    code = "NVSHIM-E2745"
    status = Status.UNAVAILABLE
    remedy = "see that nvidia-smi works on the node"


class KernelLogUnusable(NodeAgentError):
    """The kernel's log cannot be read, so that an Xid is not attributed to its process."""

    code = "NVSHIM-E2746"
    status = Status.FAILED_PRECONDITION


# -- health ------------------------------------------------------------------------------------


class XidListWrong(NodeAgentError):
    """A list of errors that is none. Raised by :func:`integration.node.health.policy.policy_of`."""

    code = "NVSHIM-E2755"
    status = Status.INVALID_ARGUMENT


class HealthUnknown(NodeAgentError):
    """No agent watches the devices of this node, or it does not say what it sees."""

    code = "NVSHIM-E2756"
    status = Status.FAILED_PRECONDITION


class DeviceUnwatched(NodeAgentError):
    """No device of that name is watched."""

    code = "NVSHIM-E2757"
    status = Status.NOT_FOUND


class AgentSilent(NodeAgentError):
    """The agent does not answer. What was asked of it is taken back."""

    code = "NVSHIM-E2758"
    status = Status.UNAVAILABLE


# -- the ledger --------------------------------------------------------------------------------


class LedgerUnwritten(NodeAgentError):
    """The agent cannot write down who holds what; it goes on, and others are told."""

    code = "NVSHIM-E2765"
    status = Status.FAILED_PRECONDITION


class ClaimUnknown(NodeAgentError):
    """Nobody claims a device by the name that was given."""

    code = "NVSHIM-E2766"
    status = Status.NOT_FOUND


class ClaimHolds(NodeAgentError):
    """A claim was to be released whose container may still use its devices."""

    code = "NVSHIM-E2767"
    status = Status.FAILED_PRECONDITION


class ClaimsUnreadable(NodeAgentError):
    """Who claims what may not be read, or not be removed."""

    code = "NVSHIM-E2768"
    status = Status.PERMISSION_DENIED


class EventNotMade(NodeAgentError):
    """The API server does not answer, or does not let the agent make an event of a pod."""

    code = "NVSHIM-E2769"
    status = Status.UNAVAILABLE


class ApiServerSilent(NodeAgentError):
    """The cluster's API server does not answer, or not as one does."""

    code = "NVSHIM-E2770"
    status = Status.UNAVAILABLE


class ApiServerRefused(NodeAgentError):
    """The cluster's API server says no.

    Attributes:
        http: the status of its answer.
        retry_after: seconds after which it may be asked again; 0 if it does not say.
    """

    code = "NVSHIM-E2771"
    status = Status.PERMISSION_DENIED
    remedy = "see the ClusterRole of the agent's service account"
    http: int = 0
    retry_after: float = 0.0


# -- metrics -----------------------------------------------------------------------------------


class MetricsAddressInvalid(NodeAgentError):
    """What was said to be an address is none. Raised by :func:`.metrics.address.parse_address`."""

    code = "NVSHIM-E2785"
    status = Status.INVALID_ARGUMENT


class MetricsAddressUnusable(NodeAgentError):
    """Another program listens there, or the address is not this node's. It is tried again."""

    code = "NVSHIM-E2786"
    status = Status.UNAVAILABLE
    remedy = "choose another address for the metrics"


# -- causes of containers' ends ----------------------------------------------------------------


class ContainerNotKilled(NodeAgentError):
    """A container exceeds its limit of GPU memory, and its shim does not end it. It is tried again.

    Raised by :func:`integration.node.causes.killing.kill`.
    """

    code = "NVSHIM-E2790"
    status = Status.UNAVAILABLE
    remedy = "see that the container's shim answers: nvshim ps"


class CausesUnreadable(NodeAgentError):
    """Which faults containers had to do with may not be read."""

    code = "NVSHIM-E2791"
    status = Status.PERMISSION_DENIED


# -- dynamic resource allocation ---------------------------------------------------------------


class DraError(NodeAgentError):
    """Base of what a kubelet is told of a resource claim."""


class ResourceClaimUnusable(DraError):
    """A kubelet names a claim that is gone, is another one of that name, or has no allocation."""

    code = "NVSHIM-E2772"
    status = Status.FAILED_PRECONDITION
    remedy = "have the pod made anew"


class ClaimedDeviceMissing(DraError):
    """A claim was given a device that this node does not have, or cannot be told to have, now."""

    code = "NVSHIM-E2773"
    status = Status.FAILED_PRECONDITION


class DeviceTaken(DraError):
    """A device is to be given that another claim has, or that a device plugin has given."""

    code = "NVSHIM-E2774"
    status = Status.FAILED_PRECONDITION
    remedy = "wait for the end of the pod that has it: it is tried again"


class ClaimConfigUnknown(DraError):
    """A claim or its DeviceClass has a configuration for this driver that it does not know."""

    code = "NVSHIM-E2775"
    status = Status.INVALID_ARGUMENT
    remedy = "remove it from the claim or its DeviceClass"


class EngineReadsNoCdi(DraError):
    """The container engine does not read the CDI names by which a claim's devices are given.

    The pod would run without its devices, and nobody would say so.
    """

    code = "NVSHIM-E2776"
    status = Status.FAILED_PRECONDITION


class DraStateUnwritten(DraError):
    """It cannot be written down what was prepared, so nothing is."""

    code = "NVSHIM-E2777"
    status = Status.FAILED_PRECONDITION
    remedy = "see who may write there, and whether there is space"


class SlicesRefused(DraError):
    """The API server takes the node's ResourceSlices for wrong. They are kept as they were."""

    code = "NVSHIM-E2778"
    status = Status.INTERNAL
    remedy = "report it, with the message"


class DraFailed(DraError):
    """A mistake of ours. Raised where a kubelet is answered; the agent's log has more."""

    code = "NVSHIM-E2779"
    status = Status.INTERNAL
    remedy = "see the agent's log"


class MigDeviceNotMade(DraError):
    """A claim was given a MIG device that is made for it, and it cannot be made now."""

    code = "NVSHIM-E2780"
    status = Status.FAILED_PRECONDITION
    remedy = (
        "see `nvidia-smi mig -lgi` on the node; have the pod made anew, or wait: it is tried again"
    )


class MigDeviceNotUndone(DraError):
    """A MIG device that was made for a claim cannot be undone now. Its pod stays until it is."""

    code = "NVSHIM-E2781"
    status = Status.FAILED_PRECONDITION
    remedy = "see on the node who uses it (`nvshim ps`); it is tried again"
