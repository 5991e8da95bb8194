"""The errors of the node agent.

Leaves of the tree in :mod:`api.errors`, below :class:`~integration.errors.IntegrationError`::

    NodeAgentError         E27xx
    ├── AgentRunning, …    the errors of each part, below its heading
    ├── ServingError       E2704 to E2715: between the device plugin and the kubelet
    ├── SettingsError      E2720 to E2725: the device plugin's settings
    └── DraError           E2772 to E2797: resource claims

docs/reference/errors.md has all of them as a table.
"""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class NodeAgentError(IntegrationError):
    """Base of the node agent's errors."""


class AgentRunning(NodeAgentError, code="NVSHIM-E2701", status=Status.ALREADY_EXISTS):
    """Another agent runs on this node. Raised by :func:`integration.node.agent.serve`."""


class AgentStateUnusable(NodeAgentError, code="NVSHIM-E2702", status=Status.FAILED_PRECONDITION):
    """The agent cannot write its status file or lock file."""


# -- the device plugin -------------------------------------------------------------------------


class ServingError(NodeAgentError):
    """Base of the errors between the device plugin and the kubelet."""


class TooManyShares(ServingError, code="NVSHIM-E2704", status=Status.INVALID_ARGUMENT):
    """A container asks for several shares, and ``failRequestsGreaterThanOne`` forbids it.

    A second share of a device is neither a second device nor a larger part of it.
    """


class DeviceGone(ServingError, code="NVSHIM-E2705", status=Status.FAILED_PRECONDITION):
    """The kubelet chose a device that is now missing, or whose presence is now unknown."""


class CdiDeviceUnwritten(ServingError, code="NVSHIM-E2706", status=Status.FAILED_PRECONDITION):
    """The container gets its devices by CDI, but no spec lists them."""


class ChannelsMissing(ServingError, code="NVSHIM-E2707", status=Status.FAILED_PRECONDITION):
    """The settings require an IMEX channel that the node does not have."""


class KubeletRefused(ServingError, code="NVSHIM-E2708", status=Status.FAILED_PRECONDITION):
    """The kubelet refuses the registration of a resource. The agent retries."""


class KubeletUnreachable(ServingError, code="NVSHIM-E2709", status=Status.UNAVAILABLE):
    """No kubelet listens on its socket, or it does not answer. The agent retries."""


class OtherPlugin(ServingError, code="NVSHIM-E2710", status=Status.ALREADY_EXISTS):
    """Another program serves the sockets of NVIDIA's device plugin on this node."""


class PluginSocketUnusable(ServingError, code="NVSHIM-E2711", status=Status.FAILED_PRECONDITION):
    """The agent cannot create a device plugin's socket in the kubelet's directory."""


class PluginSpecUnwritten(ServingError, code="NVSHIM-E2712", status=Status.FAILED_PRECONDITION):
    """The agent cannot write the CDI spec for the device plugin's containers."""

    remedy = "remove it, or name another directory in spec-dirs"


class GrantIneffective(ServingError, code="NVSHIM-E2713", status=Status.FAILED_PRECONDITION):
    """The shim's configuration ignores the configured device list strategy."""


class PluginFailed(ServingError, code="NVSHIM-E2714", status=Status.INTERNAL):
    """A call of the kubelet failed unexpectedly, or a server stopped; the agent's log has more."""


class DeviceDrained(ServingError, code="NVSHIM-E2715", status=Status.FAILED_PRECONDITION):
    """The kubelet chose a device that an administrator has just taken out of service."""


class SettingsError(NodeAgentError):
    """Base of errors in the device plugin's settings."""


class SettingsUnreadable(SettingsError, code="NVSHIM-E2720", status=Status.NOT_FOUND):
    """The configuration file is missing or not readable."""


class SettingsMalformed(SettingsError, code="NVSHIM-E2721", status=Status.INVALID_ARGUMENT):
    """The configuration file is not a YAML or JSON object, or has the configuration as a text."""


class WrongSetting(SettingsError, code="NVSHIM-E2723", status=Status.INVALID_ARGUMENT):
    """A value in the file, of an option or of a variable is not valid."""


class SettingsConflict(SettingsError, code="NVSHIM-E2724", status=Status.INVALID_ARGUMENT):
    """Two settings exclude each other."""


class NoSettingsChosen(SettingsError, code="NVSHIM-E2725", status=Status.NOT_FOUND):
    """There are several configurations, and none is chosen, or the chosen one does not exist."""


class MigLayoutUnsuitable(NodeAgentError, code="NVSHIM-E2726", status=Status.FAILED_PRECONDITION):
    """``migStrategy`` does not support the MIG layout of the node's GPUs."""


class MigDevicesUnknown(NodeAgentError, code="NVSHIM-E2727", status=Status.UNAVAILABLE):
    """GPUs are in MIG mode, and NVML does not list their MIG devices."""


class SharingUnsuitable(NodeAgentError, code="NVSHIM-E2728", status=Status.FAILED_PRECONDITION):
    """A device cannot be shared as configured: a MIG device by MPS, or a GPU too many times."""


class DeviceUnknown(NodeAgentError, code="NVSHIM-E2730", status=Status.NOT_FOUND):
    """The resource has no device of that name."""


class TooFewAvailable(NodeAgentError, code="NVSHIM-E2731", status=Status.RESOURCE_EXHAUSTED):
    """The request is for more devices than are free."""


class PreferenceUnsuitable(NodeAgentError, code="NVSHIM-E2732", status=Status.INVALID_ARGUMENT):
    """A required device is not free, or more devices are required than requested."""


# -- MPS ---------------------------------------------------------------------------------------


class MpsNotReady(NodeAgentError, code="NVSHIM-E2735", status=Status.UNAVAILABLE):
    """The MPS daemon is not ready: a container would wait for it, or bypass it.

    Raised by :func:`integration.node.mps.clients.refuse_unready`.
    """


class MpsImpossible(NodeAgentError, code="NVSHIM-E2736", status=Status.FAILED_PRECONDITION):
    """MPS cannot share the devices. Raised by :func:`integration.node.mps.plan.plan_of`."""


class MpsProgramMissing(NodeAgentError, code="NVSHIM-E2737", status=Status.FAILED_PRECONDITION):
    """The driver's files lack the MPS control daemon or the MPS server."""


class MpsDaemonFailed(NodeAgentError, code="NVSHIM-E2738", status=Status.UNAVAILABLE):
    """The MPS control daemon failed to start, exited, or gives an unexpected answer."""


class MpsStateUnusable(NodeAgentError, code="NVSHIM-E2739", status=Status.FAILED_PRECONDITION):
    """The agent cannot create the MPS directories and files below ``mpsRoot``."""


class ComputeModeFailed(NodeAgentError, code="NVSHIM-E2740", status=Status.UNAVAILABLE):
    """NVML did not set the compute mode of a GPU."""


# -- the monitor -------------------------------------------------------------------------------


class KernelLogUnusable(NodeAgentError, code="NVSHIM-E2746", status=Status.FAILED_PRECONDITION):
    """The kernel log is not readable, so Xids are not attributed to processes."""


# -- health ------------------------------------------------------------------------------------


class XidListWrong(NodeAgentError, code="NVSHIM-E2755", status=Status.INVALID_ARGUMENT):
    """A list of Xids is not valid. Raised by :func:`integration.node.faults.policy.policy_of`."""


class HealthUnknown(NodeAgentError, code="NVSHIM-E2756", status=Status.FAILED_PRECONDITION):
    """No agent watches the devices of this node, or its health file is not readable."""


class DeviceUnwatched(NodeAgentError, code="NVSHIM-E2757", status=Status.NOT_FOUND):
    """The agent watches no device of that name."""


class AgentSilent(NodeAgentError, code="NVSHIM-E2758", status=Status.UNAVAILABLE):
    """The agent did not answer in time; the request is withdrawn."""


# -- the ledger --------------------------------------------------------------------------------


class LedgerUnwritten(NodeAgentError, code="NVSHIM-E2765", status=Status.FAILED_PRECONDITION):
    """The agent cannot write the ledger's file. It continues with the ledger in memory."""


class ClaimUnknown(NodeAgentError, code="NVSHIM-E2766", status=Status.NOT_FOUND):
    """No [sharing] claim has that name, container or bundle."""


class ClaimHolds(NodeAgentError, code="NVSHIM-E2767", status=Status.FAILED_PRECONDITION):
    """The container of a [sharing] claim may still use its devices, so it is not released."""


class ClaimsUnreadable(NodeAgentError, code="NVSHIM-E2768", status=Status.PERMISSION_DENIED):
    """The [sharing] claims cannot be read or removed."""


class EventNotMade(NodeAgentError, code="NVSHIM-E2769", status=Status.UNAVAILABLE):
    """The API server does not answer, or does not let the agent write an event on a pod."""

    remedy = "check the API server's answer; the agent retries after a minute"


class ApiServerSilent(NodeAgentError, code="NVSHIM-E2770", status=Status.UNAVAILABLE):
    """The cluster's API server does not answer, or its answer is not valid."""

    remedy = "check that the node can reach the API server"


class ApiServerRefused(NodeAgentError, code="NVSHIM-E2771", status=Status.PERMISSION_DENIED):
    """The cluster's API server refuses the call."""

    remedy = "check the ClusterRole of the agent's service account"
    http: int = 0  # the HTTP status
    retry_after: float = 0.0  # seconds before the next attempt; 0 if the server does not say
    denied_by: str = ""  # the admission policy or webhook that denied it; "" for none
    invalid: tuple[str, ...] = ()  # each invalid field, with the server's message

    def is_about(self, word: str) -> bool:
        """Return whether an invalid field has this word in its name."""
        return any(word in each.lower() for each in self.invalid)


class KubeconfigUnusable(NodeAgentError):
    """A kubeconfig lacks a server or credentials, or asks for something unsupported or insecure."""

    code = "NVSHIM-E2795"
    status = Status.INVALID_ARGUMENT
    remedy = "use one with a server, its CA, and a token or a client certificate"


# -- metrics -----------------------------------------------------------------------------------


class MetricsAddressInvalid(NodeAgentError, code="NVSHIM-E2785", status=Status.INVALID_ARGUMENT):
    """The metrics address is not valid. Raised where the metrics service parses it."""


class MetricsAddressUnusable(NodeAgentError, code="NVSHIM-E2786", status=Status.UNAVAILABLE):
    """Another program uses the metrics address, or it is not this node's. The agent retries."""

    remedy = "choose another address for the metrics"


# -- faults of containers, and the memory guard ------------------------------------------------


class ContainerNotKilled(NodeAgentError, code="NVSHIM-E2790", status=Status.UNAVAILABLE):
    """A container exceeds its GPU memory limit, and its shim does not kill it. The agent retries.

    Raised by :mod:`integration.node.services.memory_guard`.
    """

    remedy = "check with `nvshim ps` that the container's shim answers"


class CausesUnreadable(NodeAgentError, code="NVSHIM-E2791", status=Status.PERMISSION_DENIED):
    """The faults of containers are not readable."""


# -- dynamic resource allocation ---------------------------------------------------------------


class DraError(NodeAgentError):
    """Base of the errors of resource claims."""


class ResourceClaimUnusable(DraError, code="NVSHIM-E2772", status=Status.FAILED_PRECONDITION):
    """The kubelet names a claim that was deleted, was replaced, or has no allocation."""

    remedy = "delete the pod; its controller recreates it"


class ClaimedDeviceMissing(DraError, code="NVSHIM-E2773", status=Status.FAILED_PRECONDITION):
    """A claim is allocated a device that is now missing, or whose presence is now unknown."""


class DeviceTaken(DraError, code="NVSHIM-E2774", status=Status.FAILED_PRECONDITION):
    """Another claim holds the device or too much of it, or a device plugin has allocated it."""

    remedy = "wait until the pod that holds it has terminated; the kubelet retries"


class ClaimConfigUnknown(DraError, code="NVSHIM-E2775", status=Status.INVALID_ARGUMENT):
    """A claim or its DeviceClass has a configuration that this driver does not know."""

    remedy = "remove it from the claim or its DeviceClass"


class EngineReadsNoCdi(DraError, code="NVSHIM-E2776", status=Status.FAILED_PRECONDITION):
    """The container engine does not read the CDI names of a claim's devices.

    The pod would run without its devices, and without an error.
    """


class DraStateUnwritten(DraError, code="NVSHIM-E2777", status=Status.FAILED_PRECONDITION):
    """The checkpoint of prepared claims cannot be written, so no claim is prepared."""

    remedy = "check the directory's permissions and free space"


class SlicesRefused(DraError, code="NVSHIM-E2778", status=Status.INTERNAL):
    """The API server calls the node's ResourceSlices invalid. The previous ones stay."""

    remedy = "report a bug, with the message"


class CountersMissing(DraError, code="NVSHIM-E2797", status=Status.FAILED_PRECONDITION):
    """The API server drops shared counters, so MIG devices made on demand are not published."""

    remedy = (
        "enable DRAPartitionableDevices in the API server, controller manager and scheduler (it "
        "is from Kubernetes 1.36), or create the MIG devices by hand"
    )


class DraFailed(DraError, code="NVSHIM-E2779", status=Status.INTERNAL):
    """A bug in an answer to the kubelet or in publishing; the agent's log has the details."""

    remedy = "see the agent's log"


class ClaimUnfinished(DraError, code="NVSHIM-E2783", status=Status.UNAVAILABLE):
    """A call for a claim takes longer than the kubelet waits; the work continues."""

    remedy = "wait: the kubelet retries; check the node agent's faults for what hangs"


class MigDeviceNotMade(DraError, code="NVSHIM-E2780", status=Status.FAILED_PRECONDITION):
    """The driver cannot create the MIG device that a claim is allocated."""

    remedy = (
        "check `nvidia-smi mig -lgi` on the node; the kubelet retries, or delete the pod and its "
        "controller recreates it"
    )


class MigModeNotSwitched(DraError, code="NVSHIM-E2782", status=Status.FAILED_PRECONDITION):
    """A claim needs a GPU with MIG mode on or off, and the mode cannot be switched now."""

    remedy = (
        "close the programs that use the GPU: `nvshim drain GPU` lists them, and DCGM and "
        "nvidia-persistenced count, too; the kubelet retries"
    )


class MigDeviceNotUndone(DraError, code="NVSHIM-E2781", status=Status.FAILED_PRECONDITION):
    """A claim's MIG device cannot be destroyed now. Its pod stays until it is destroyed."""

    remedy = "run `nvshim ps` on the node to see which container uses it; the kubelet retries"


class TimeSliceFailed(DraError, code="NVSHIM-E2788", status=Status.FAILED_PRECONDITION):
    """nvidia-smi did not set the time slice that a claim asks for on its GPU."""

    remedy = "remove the time slice from the claim; some GPUs do not support one"


class SharingConflict(DraError, code="NVSHIM-E2789", status=Status.FAILED_PRECONDITION):
    """A claim asks for another kind of sharing than the claims that share the GPU already."""

    remedy = "give all these claims the same configuration, or wait until the others are released"


class ExtendedResourceClash(DraError, code="NVSHIM-E2796", status=Status.FAILED_PRECONDITION):
    """Both a DeviceClass and the device plugin serve a resource that a pod asks for.

    Only one of them may serve it on a node: the scheduler and the kubelet count devices separately.
    """

    remedy = "run the agent with --device-plugin no on nodes with that DeviceClass"
