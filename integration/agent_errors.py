"""What can go wrong with the node agent.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.errors.IntegrationError`::

    NodeAgentError         E27xx
    ├── AgentRunning, …    each part's below its heading, in the order of their codes
    ├── ServingError       E2704 to E2715: between the device plugin and a kubelet
    ├── SettingsError      E2720 to E2725: what the device plugin is told to do
    └── DraError           E2772 to E2797: what a kubelet is told of a resource claim

docs/reference/errors.md has all of them as a table.
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class NodeAgentError(IntegrationError):
    """Base of what can go wrong with the node agent."""


class AgentRunning(NodeAgentError, code="NVSHIM-E2701", status=Status.ALREADY_EXISTS):
    """There is an agent for this node already. Raised by :func:`integration.node.agent.serve`."""


class AgentStateUnusable(NodeAgentError, code="NVSHIM-E2702", status=Status.FAILED_PRECONDITION):
    """Where the agent says how it is cannot be written."""


# -- the device plugin -------------------------------------------------------------------------


class ServingError(NodeAgentError):
    """Base of what can go wrong between the device plugin and a kubelet."""


class TooManyShares(ServingError, code="NVSHIM-E2704", status=Status.INVALID_ARGUMENT):
    """A container is to get several shares, and the settings say that nobody does.

    A second share of the same device is no second device, nor more of it.
    """


class DeviceGone(ServingError, code="NVSHIM-E2705", status=Status.FAILED_PRECONDITION):
    """The kubelet was told of the device, and it is not there, or cannot be told to be, now."""


class CdiDeviceUnwritten(ServingError, code="NVSHIM-E2706", status=Status.FAILED_PRECONDITION):
    """The container is to get its devices by CDI, and no spec has them."""


class ChannelsMissing(ServingError, code="NVSHIM-E2707", status=Status.FAILED_PRECONDITION):
    """IMEX channels are required, and the node does not have one of them."""


class KubeletRefused(ServingError, code="NVSHIM-E2708", status=Status.FAILED_PRECONDITION):
    """The kubelet does not accept a resource's registration. It is tried again."""


class KubeletUnreachable(ServingError, code="NVSHIM-E2709", status=Status.UNAVAILABLE):
    """There is no kubelet at its socket, or it does not answer. It is tried again."""


class OtherPlugin(ServingError, code="NVSHIM-E2710", status=Status.ALREADY_EXISTS):
    """Another program serves the sockets of a device plugin of NVIDIA's here."""


class PluginSocketUnusable(ServingError, code="NVSHIM-E2711", status=Status.FAILED_PRECONDITION):
    """A plugin's socket cannot be made beside the kubelet's."""


class PluginSpecUnwritten(ServingError, code="NVSHIM-E2712", status=Status.FAILED_PRECONDITION):
    """The CDI spec that containers are to be made with cannot be put in place."""

    remedy = "remove it, or name another directory in spec-dirs"


class GrantIneffective(ServingError, code="NVSHIM-E2713", status=Status.FAILED_PRECONDITION):
    """The shim's configuration keeps it from believing the way in which devices are given."""


class PluginFailed(ServingError, code="NVSHIM-E2714", status=Status.INTERNAL):
    """A call of the kubelet's could not be answered; what has happened is in the log."""


class DeviceDrained(ServingError, code="NVSHIM-E2715", status=Status.FAILED_PRECONDITION):
    """The kubelet has chosen a device that a person has just taken out of service."""


class SettingsError(NodeAgentError):
    """Base of what can be wrong with its settings."""


class SettingsUnreadable(SettingsError, code="NVSHIM-E2720", status=Status.NOT_FOUND):
    """The configuration file is not there, or cannot be read."""


class SettingsMalformed(SettingsError, code="NVSHIM-E2721", status=Status.INVALID_ARGUMENT):
    """The configuration file is neither YAML nor JSON, or has the configuration inside of it."""


class WrongSetting(SettingsError, code="NVSHIM-E2723", status=Status.INVALID_ARGUMENT):
    """A value of the file, of a flag or of a variable is none that there is."""


class SettingsConflict(SettingsError, code="NVSHIM-E2724", status=Status.INVALID_ARGUMENT):
    """Two settings exclude each other."""


class NoSettingsChosen(SettingsError, code="NVSHIM-E2725", status=Status.NOT_FOUND):
    """There are several configurations, and none of them is chosen, or one that is not there."""


class MigLayoutUnsuitable(NodeAgentError, code="NVSHIM-E2726", status=Status.FAILED_PRECONDITION):
    """The GPUs are cut in a way that ``migStrategy`` cannot tell a kubelet of."""


class MigDevicesUnknown(NodeAgentError, code="NVSHIM-E2727", status=Status.UNAVAILABLE):
    """There are GPUs in MIG mode, and NVML does not say what they are cut into."""


class SharingUnsuitable(NodeAgentError, code="NVSHIM-E2728", status=Status.FAILED_PRECONDITION):
    """A device cannot be shared as it is to be: MIG devices by MPS, or a GPU by too many."""


class DeviceUnknown(NodeAgentError, code="NVSHIM-E2730", status=Status.NOT_FOUND):
    """A device is named that the resource does not have."""


class TooFewAvailable(NodeAgentError, code="NVSHIM-E2731", status=Status.RESOURCE_EXHAUSTED):
    """More devices are asked for than are free."""


class PreferenceUnsuitable(NodeAgentError, code="NVSHIM-E2732", status=Status.INVALID_ARGUMENT):
    """What has to be given is not free, or is more than is asked for."""


# -- MPS ---------------------------------------------------------------------------------------


class MpsNotReady(NodeAgentError, code="NVSHIM-E2735", status=Status.UNAVAILABLE):
    """A container would wait for a daemon that is not there, or would go past it.

    Raised by :func:`integration.node.mps.clients.refuse_unready`.
    """


class MpsImpossible(NodeAgentError, code="NVSHIM-E2736", status=Status.FAILED_PRECONDITION):
    """The devices cannot be shared by MPS. Raised by :func:`integration.node.mps.plan.plan_of`."""


class MpsProgramMissing(NodeAgentError, code="NVSHIM-E2737", status=Status.FAILED_PRECONDITION):
    """The driver's files have no control daemon, or no server."""


class MpsDaemonFailed(NodeAgentError, code="NVSHIM-E2738", status=Status.UNAVAILABLE):
    """The control daemon could not be started, has ended, or does not answer as it should."""


class MpsStateUnusable(NodeAgentError, code="NVSHIM-E2739", status=Status.FAILED_PRECONDITION):
    """What daemons and containers share cannot be made below ``mpsRoot``."""


class ComputeModeFailed(NodeAgentError, code="NVSHIM-E2740", status=Status.UNAVAILABLE):
    """NVML did not set the compute mode of a GPU."""


# -- GPUs that are watched ---------------------------------------------------------------------


class KernelLogUnusable(NodeAgentError, code="NVSHIM-E2746", status=Status.FAILED_PRECONDITION):
    """The kernel's log cannot be read, so that an Xid is not attributed to its process."""


# -- health ------------------------------------------------------------------------------------


class XidListWrong(NodeAgentError, code="NVSHIM-E2755", status=Status.INVALID_ARGUMENT):
    """A list of errors that is none. Raised by :func:`integration.node.faults.policy.policy_of`."""


class HealthUnknown(NodeAgentError, code="NVSHIM-E2756", status=Status.FAILED_PRECONDITION):
    """No agent watches the devices of this node, or it does not say what it sees."""


class DeviceUnwatched(NodeAgentError, code="NVSHIM-E2757", status=Status.NOT_FOUND):
    """No device of that name is watched."""


class AgentSilent(NodeAgentError, code="NVSHIM-E2758", status=Status.UNAVAILABLE):
    """The agent does not answer. What was asked of it is taken back."""


# -- the ledger --------------------------------------------------------------------------------


class LedgerUnwritten(NodeAgentError, code="NVSHIM-E2765", status=Status.FAILED_PRECONDITION):
    """The agent cannot write down who holds what; it goes on, and others are told."""


class ClaimUnknown(NodeAgentError, code="NVSHIM-E2766", status=Status.NOT_FOUND):
    """Nobody claims a device by the name that was given."""


class ClaimHolds(NodeAgentError, code="NVSHIM-E2767", status=Status.FAILED_PRECONDITION):
    """A claim was to be released whose container may still use its devices."""


class ClaimsUnreadable(NodeAgentError, code="NVSHIM-E2768", status=Status.PERMISSION_DENIED):
    """Who claims what may not be read, or not be removed."""


class EventNotMade(NodeAgentError, code="NVSHIM-E2769", status=Status.UNAVAILABLE):
    """The API server does not answer, or does not let the agent make an event of a pod."""

    remedy = "see what the API server says of it; it is tried again after a minute"


class ApiServerSilent(NodeAgentError, code="NVSHIM-E2770", status=Status.UNAVAILABLE):
    """The cluster's API server does not answer, or not as one does."""

    remedy = "see that it can be reached from the node"


class ApiServerRefused(NodeAgentError, code="NVSHIM-E2771", status=Status.PERMISSION_DENIED):
    """The cluster's API server says no."""

    remedy = "see the ClusterRole of the agent's service account"
    http: int = 0  # the status of its answer
    retry_after: float = 0.0  # seconds after which it may be asked again; 0 if it does not say
    denied_by: str = ""  # the admission policy or webhook that says no; "" if none does
    invalid: tuple[str, ...] = ()  # what it takes for wrong: each field, and the server's words

    def is_about(self, word: str) -> bool:
        """Return whether the server takes something for wrong that has this word in its name."""
        return any(word in each.lower() for each in self.invalid)


class KubeconfigUnusable(NodeAgentError):
    """A kubeconfig does not say how to ask the API server, or in a way that is not to be used."""

    code = "NVSHIM-E2795"
    status = Status.INVALID_ARGUMENT
    remedy = "give one with a server, its authority, and a token or a client certificate"


# -- metrics -----------------------------------------------------------------------------------


class MetricsAddressInvalid(NodeAgentError, code="NVSHIM-E2785", status=Status.INVALID_ARGUMENT):
    """What was said to be an address is none. Raised by :func:`.metrics.address.parse_address`."""


class MetricsAddressUnusable(NodeAgentError, code="NVSHIM-E2786", status=Status.UNAVAILABLE):
    """Another program listens there, or the address is not this node's. It is tried again."""

    remedy = "choose another address for the metrics"


# -- causes of containers' ends ----------------------------------------------------------------


class ContainerNotKilled(NodeAgentError, code="NVSHIM-E2790", status=Status.UNAVAILABLE):
    """A container exceeds its limit of GPU memory, and its shim does not end it. It is tried again.

    Raised by :mod:`integration.node.services.memory_guard`.
    """

    remedy = "see that the container's shim answers: nvshim ps"


class CausesUnreadable(NodeAgentError, code="NVSHIM-E2791", status=Status.PERMISSION_DENIED):
    """Which faults containers had to do with may not be read."""


# -- dynamic resource allocation ---------------------------------------------------------------


class DraError(NodeAgentError):
    """Base of what a kubelet is told of a resource claim."""


class ResourceClaimUnusable(DraError, code="NVSHIM-E2772", status=Status.FAILED_PRECONDITION):
    """A kubelet names a claim that is gone, is another one of that name, or has no allocation."""

    remedy = "have the pod made anew"


class ClaimedDeviceMissing(DraError, code="NVSHIM-E2773", status=Status.FAILED_PRECONDITION):
    """A claim was given a device that this node does not have, or cannot be told to have, now."""


class DeviceTaken(DraError, code="NVSHIM-E2774", status=Status.FAILED_PRECONDITION):
    """A device is to be given that another claim has, or that a device plugin has given."""

    remedy = "wait for the end of the pod that has it: it is tried again"


class ClaimConfigUnknown(DraError, code="NVSHIM-E2775", status=Status.INVALID_ARGUMENT):
    """A claim or its DeviceClass has a configuration for this driver that it does not know."""

    remedy = "remove it from the claim or its DeviceClass"


class EngineReadsNoCdi(DraError, code="NVSHIM-E2776", status=Status.FAILED_PRECONDITION):
    """The container engine does not read the CDI names by which a claim's devices are given.

    The pod would run without its devices, and nobody would say so.
    """


class DraStateUnwritten(DraError, code="NVSHIM-E2777", status=Status.FAILED_PRECONDITION):
    """It cannot be written down what was prepared, so nothing is."""

    remedy = "see who may write there, and whether there is space"


class SlicesRefused(DraError, code="NVSHIM-E2778", status=Status.INTERNAL):
    """The API server takes the node's ResourceSlices for wrong. They are kept as they were."""

    remedy = "report it, with the message"


class CountersMissing(DraError, code="NVSHIM-E2797", status=Status.FAILED_PRECONDITION):
    """The API server keeps no counters, so devices that could be made for claims are left out."""

    remedy = (
        "switch DRAPartitionableDevices on in API server, controllers and scheduler (it is from "
        "Kubernetes 1.36), or make the MIG devices by hand"
    )


class DraFailed(DraError, code="NVSHIM-E2779", status=Status.INTERNAL):
    """A mistake of ours, in an answer to a kubelet or in publishing; the agent's log has more."""

    remedy = "see the agent's log"


class ClaimUnfinished(DraError, code="NVSHIM-E2783", status=Status.UNAVAILABLE):
    """What a kubelet asks for a claim takes longer than it waits; it goes on."""

    remedy = "wait: it is asked for again; see the node agent's faults for what hangs"


class MigDeviceNotMade(DraError, code="NVSHIM-E2780", status=Status.FAILED_PRECONDITION):
    """A claim was given a MIG device that is made for it, and it cannot be made now."""

    remedy = (
        "see `nvidia-smi mig -lgi` on the node; have the pod made anew, or wait: it is tried again"
    )


class MigModeNotSwitched(DraError, code="NVSHIM-E2782", status=Status.FAILED_PRECONDITION):
    """A claim needs a GPU in MIG mode, or out of it, and its mode cannot be switched now."""

    remedy = (
        "see who has it open: `nvshim drain GPU` lists them, and DCGM and nvidia-persistenced "
        "count, too; it is tried again"
    )


class MigDeviceNotUndone(DraError, code="NVSHIM-E2781", status=Status.FAILED_PRECONDITION):
    """A MIG device that was made for a claim cannot be undone now. Its pod stays until it is."""

    remedy = "see on the node who uses it (`nvshim ps`); it is tried again"


class TimeSliceFailed(DraError, code="NVSHIM-E2788", status=Status.FAILED_PRECONDITION):
    """nvidia-smi did not set the time slice that a claim asks for on its GPU."""

    remedy = "ask for no time slice; some GPUs have none that can be set"


class SharingConflict(DraError, code="NVSHIM-E2789", status=Status.FAILED_PRECONDITION):
    """A claim asks for a GPU to be shared in another way than claims that share it already."""

    remedy = "give both claims the same configuration, or wait for the end of the other"


class ExtendedResourceClash(DraError, code="NVSHIM-E2796", status=Status.FAILED_PRECONDITION):
    """A pod asked for a resource that the scheduler makes claims for and a device plugin serves.

    A node can have it in one of the two ways only: the scheduler and the kubelet count it apart.
    """

    remedy = "run the agent with --device-plugin no on nodes with that DeviceClass"
