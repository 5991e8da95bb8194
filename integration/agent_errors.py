"""The errors of the node agent: E27xx."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError


class NodeAgentError(IntegrationError):
    """Base of the node agent's errors."""


class AgentStateUnusable(NodeAgentError, code="NVSHIM-E2702", status=Status.FAILED_PRECONDITION):
    """The agent cannot write its status file or lock file."""


class ServingError(NodeAgentError):
    """Base of the errors between the device plugin and the kubelet."""


class ChannelsMissing(ServingError, code="NVSHIM-E2707", status=Status.FAILED_PRECONDITION):
    """The settings require an IMEX channel that the node does not have."""


class KubeletRefused(ServingError, code="NVSHIM-E2708", status=Status.FAILED_PRECONDITION):
    """The kubelet refuses the registration of a resource. The agent retries."""


class KubeletUnreachable(ServingError, code="NVSHIM-E2709", status=Status.UNAVAILABLE):
    """No kubelet listens on its socket, or it does not answer. The agent retries."""


class SettingsError(NodeAgentError):
    """Base of errors in the device plugin's settings."""


class MigLayoutUnsuitable(NodeAgentError, code="NVSHIM-E2726", status=Status.FAILED_PRECONDITION):
    """``migStrategy`` does not support the MIG layout of the node's GPUs."""


class MigDevicesUnknown(NodeAgentError, code="NVSHIM-E2727", status=Status.UNAVAILABLE):
    """GPUs are in MIG mode, and NVML does not list their MIG devices."""


class MpsNotReady(NodeAgentError, code="NVSHIM-E2735", status=Status.UNAVAILABLE):
    """The MPS daemon is not ready: a container would wait for it, or bypass it.

    Raised by :func:`integration.node.mps.clients.refuse_unready`.
    """


class MpsProgramMissing(NodeAgentError, code="NVSHIM-E2737", status=Status.FAILED_PRECONDITION):
    """The driver's files lack the MPS control daemon or the MPS server."""


class MpsDaemonFailed(NodeAgentError, code="NVSHIM-E2738", status=Status.UNAVAILABLE):
    """The MPS control daemon failed to start, exited, or gives an unexpected answer."""


class ConnectorSilent(NodeAgentError, code="NVSHIM-E2759", status=Status.UNAVAILABLE):
    """NVSentinel's platform connector does not take health events. The agent retries."""


class KernelLogUnusable(NodeAgentError, code="NVSHIM-E2746", status=Status.FAILED_PRECONDITION):
    """The kernel log is not readable, so Xids are not attributed to processes."""


class EventNotMade(
    NodeAgentError,
    code="NVSHIM-E2769",
    status=Status.UNAVAILABLE,
    remedy="check the API server's answer; the agent retries after a minute",
):
    """The API server does not answer, or does not let the agent write an event on a pod."""


class ApiServerSilent(
    NodeAgentError,
    code="NVSHIM-E2770",
    status=Status.UNAVAILABLE,
    remedy="check that the node can reach the API server",
):
    """The cluster's API server does not answer, or its answer is not valid."""


class ApiServerRefused(
    NodeAgentError,
    code="NVSHIM-E2771",
    status=Status.PERMISSION_DENIED,
    remedy="check the ClusterRole of the agent's service account",
):
    """The cluster's API server refuses the call."""

    http: int = 0  # status
    retry_after: float = 0.0  # seconds before the next attempt; 0 if the server does not say
    denied_by: str = ""  # the admission policy or webhook that denied it; "" for none
    invalid: tuple[str, ...] = ()  # each invalid field, with the server's message

    def is_about(self, word: str) -> bool:
        """Return whether an invalid field has this word in its name."""
        return any(word in each.lower() for each in self.invalid)


class KubeconfigUnusable(
    NodeAgentError,
    code="NVSHIM-E2795",
    status=Status.INVALID_ARGUMENT,
    remedy="use one with a server, its CA, and a token or a client certificate",
):
    """A kubeconfig lacks a server or credentials, or asks for something unsupported or insecure."""


class MetricsAddressUnusable(
    NodeAgentError,
    code="NVSHIM-E2786",
    status=Status.UNAVAILABLE,
    remedy="choose another address for the metrics",
):
    """Another program uses the metrics address, or it is not this node's. The agent retries."""


class WebConfigInvalid(
    NodeAgentError,
    code="NVSHIM-E2787",
    status=Status.INVALID_ARGUMENT,
    remedy="correct the file; it is read again after a change",
):
    """The web configuration file of the metrics, or a file that it names, is missing or wrong."""


class ContainerNotKilled(
    NodeAgentError,
    code="NVSHIM-E2790",
    status=Status.UNAVAILABLE,
    remedy="check with `nvshim ps` that the container's shim answers",
):
    """A container exceeds its GPU memory limit, and its shim does not kill it. The agent retries.

    Raised by :mod:`integration.node.services.memory_guard`.
    """


class ResourceClaimUnusable(
    NodeAgentError,
    code="NVSHIM-E2772",
    status=Status.FAILED_PRECONDITION,
    remedy="delete the pod; its controller recreates it",
):
    """The kubelet names a claim that was deleted, was replaced, or has no allocation."""


class ClaimedDeviceMissing(NodeAgentError, code="NVSHIM-E2773", status=Status.FAILED_PRECONDITION):
    """A claim is allocated a device that is now missing, or whose presence is now unknown."""


class DraStateUnwritten(
    NodeAgentError,
    code="NVSHIM-E2777",
    status=Status.FAILED_PRECONDITION,
    remedy="check the directory's permissions and free space",
):
    """The checkpoint of prepared claims cannot be written, so no claim is prepared."""


class FilesSilent(
    NodeAgentError,
    code="NVSHIM-E2798",
    status=Status.UNAVAILABLE,
    remedy="check its disk, or the server that it is mounted from; the agent tries again",
):
    """The file system of a directory does not answer. The agent continues without its files."""


class MigModeNotSwitched(
    NodeAgentError,
    code="NVSHIM-E2782",
    status=Status.FAILED_PRECONDITION,
    remedy=(
        "close the programs that use the GPU: `nvshim drain GPU` lists them, and DCGM and "
        "nvidia-persistenced count, too; the kubelet retries"
    ),
):
    """A claim needs a GPU with MIG mode on or off, and the mode cannot be switched now."""


class TimeSliceFailed(
    NodeAgentError,
    code="NVSHIM-E2788",
    status=Status.FAILED_PRECONDITION,
    remedy="remove the time slice from the claim; some GPUs do not support one",
):
    """nvidia-smi did not set the time slice that a claim asks for on its GPU."""


# fmt: off
AgentRunning = NodeAgentError.row("NVSHIM-E2701 agent-running", Status.ALREADY_EXISTS,
    "Another agent runs on this node.")

# -- the device plugin -------------------------------------------------------------------------
TooManyShares = ServingError.row("NVSHIM-E2704 too-many-shares", Status.INVALID_ARGUMENT,
    "A container asks for several shares, and ``failRequestsGreaterThanOne`` forbids it. A second "
    "share of a device is neither a second device nor a larger part of it.")
DeviceGone = ServingError.row("NVSHIM-E2705 device-gone", Status.FAILED_PRECONDITION,
    "The kubelet chose a device that is now missing, or whose presence is now unknown.")
CdiDeviceUnwritten = ServingError.row(
    "NVSHIM-E2706 cdi-device-unwritten", Status.FAILED_PRECONDITION,
    "The container gets its devices by CDI, but no spec lists them.")
OtherPlugin = ServingError.row("NVSHIM-E2710 other-plugin", Status.ALREADY_EXISTS,
    "Another program serves the sockets of NVIDIA's device plugin on this node.")
PluginSocketUnusable = ServingError.row(
    "NVSHIM-E2711 plugin-socket-unusable", Status.FAILED_PRECONDITION,
    "The agent cannot create a device plugin's socket in the kubelet's directory.")
PluginSpecUnwritten = ServingError.row(
    "NVSHIM-E2712 plugin-spec-unwritten", Status.FAILED_PRECONDITION,
    "The agent cannot write the CDI spec for the device plugin's containers.",
    remedy="remove it, or name another directory in spec-dirs")
GrantIneffective = ServingError.row("NVSHIM-E2713 grant-ineffective", Status.FAILED_PRECONDITION,
    "The shim's configuration ignores the configured device list strategy.")
PluginFailed = ServingError.row("NVSHIM-E2714 plugin-failed", Status.INTERNAL,
    "A call of the kubelet failed unexpectedly, or a server stopped; the agent's log has more.")
DeviceDrained = ServingError.row("NVSHIM-E2715 device-drained", Status.FAILED_PRECONDITION,
    "The kubelet chose a device that an administrator has just taken out of service.")
SettingsUnreadable = SettingsError.row("NVSHIM-E2720 settings-unreadable", Status.NOT_FOUND,
    "The configuration file is missing or not readable.")
SettingsMalformed = SettingsError.row("NVSHIM-E2721 settings-malformed", Status.INVALID_ARGUMENT,
    "The configuration file is not a YAML or JSON object, or has the configuration as a text.")
WrongSetting = SettingsError.row("NVSHIM-E2723 wrong-setting", Status.INVALID_ARGUMENT,
    "A value in the file, of an option or of a variable is not valid.")
SettingsConflict = SettingsError.row("NVSHIM-E2724 settings-conflict", Status.INVALID_ARGUMENT,
    "Two settings exclude each other.")
NoSettingsChosen = SettingsError.row("NVSHIM-E2725 no-settings-chosen", Status.NOT_FOUND,
    "There are several configurations, and none is chosen, or the chosen one does not exist.")
SharingUnsuitable = NodeAgentError.row(
    "NVSHIM-E2728 sharing-unsuitable", Status.FAILED_PRECONDITION,
    "A device cannot be shared as configured: a MIG device by MPS, or a GPU too many times.")
DeviceUnknown = NodeAgentError.row("NVSHIM-E2730 device-unknown", Status.NOT_FOUND,
    "The resource has no device of that name.")
TooFewAvailable = NodeAgentError.row("NVSHIM-E2731 too-few-available", Status.RESOURCE_EXHAUSTED,
    "The request is for more devices than are free.")
PreferenceUnsuitable = NodeAgentError.row(
    "NVSHIM-E2732 preference-unsuitable", Status.INVALID_ARGUMENT,
    "A required device is not free, or more devices are required than requested.")

# -- MPS ---------------------------------------------------------------------------------------
MpsImpossible = NodeAgentError.row("NVSHIM-E2736 mps-impossible", Status.FAILED_PRECONDITION,
    "MPS cannot share the devices.")
MpsStateUnusable = NodeAgentError.row("NVSHIM-E2739 mps-state-unusable", Status.FAILED_PRECONDITION,
    "The agent cannot create the MPS directories and files below ``mpsRoot``.")
ComputeModeFailed = NodeAgentError.row("NVSHIM-E2740 compute-mode-failed", Status.UNAVAILABLE,
    "NVML did not set the compute mode of a GPU.")

# -- health ------------------------------------------------------------------------------------
XidListWrong = NodeAgentError.row("NVSHIM-E2755 xid-list-wrong", Status.INVALID_ARGUMENT,
    "A list of Xids is not valid.")
HealthUnknown = NodeAgentError.row("NVSHIM-E2756 health-unknown", Status.FAILED_PRECONDITION,
    "No agent watches the devices of this node, or its health file is not readable.")
DeviceUnwatched = NodeAgentError.row("NVSHIM-E2757 device-unwatched", Status.NOT_FOUND,
    "The agent does not watch a device of that name.")
AgentSilent = NodeAgentError.row("NVSHIM-E2758 agent-silent", Status.UNAVAILABLE,
    "The agent did not answer in time; the request is withdrawn.")

# -- the ledger --------------------------------------------------------------------------------
LedgerUnwritten = NodeAgentError.row("NVSHIM-E2765 ledger-unwritten", Status.FAILED_PRECONDITION,
    "The agent cannot write the ledger's file. It continues with the ledger in memory.")
ClaimUnknown = NodeAgentError.row("NVSHIM-E2766 claim-unknown", Status.NOT_FOUND,
    "No [sharing] claim has that name, container or bundle.")
ClaimHolds = NodeAgentError.row("NVSHIM-E2767 claim-holds", Status.FAILED_PRECONDITION,
    "The container of a [sharing] claim may still use its devices, so it is not released.")
ClaimsUnreadable = NodeAgentError.row("NVSHIM-E2768 claims-unreadable", Status.PERMISSION_DENIED,
    "The [sharing] claims cannot be read or removed.")

# -- labels ------------------------------------------------------------------------------------
NodeLabelsUnwritten = NodeAgentError.row(
    "NVSHIM-E2760 node-labels-unwritten", Status.FAILED_PRECONDITION,
    "The agent cannot write the node's labels to the file of ``--node-labels-file``.")

# -- metrics -----------------------------------------------------------------------------------
MetricsAddressInvalid = NodeAgentError.row(
    "NVSHIM-E2785 metrics-address-invalid", Status.INVALID_ARGUMENT,
    "The metrics address is not valid.")

# -- faults of containers, and the memory guard ------------------------------------------------
CausesUnreadable = NodeAgentError.row("NVSHIM-E2791 causes-unreadable", Status.PERMISSION_DENIED,
    "The faults of containers are not readable.")

# -- NRI ---------------------------------------------------------------------------------------
NriEnded = NodeAgentError.row("NVSHIM-E2750 nri-ended", Status.UNAVAILABLE,
    "The container engine ended the NRI connection, for example to restart. The agent reconnects.",
    remedy="see the engine's log if this lasts")
NriUnsynchronized = NodeAgentError.row("NVSHIM-E2754 nri-unsynchronized", Status.UNAVAILABLE,
    "The container engine accepted the agent as an NRI plugin, but does not synchronize with it. "
    "It waits until no container is being created, stopped or removed; such a call may hang.",
    remedy="see which call hangs in the engine's log")
NriUndecided = NodeAgentError.row("NVSHIM-E2751 nri-undecided", Status.UNAVAILABLE,
    "The kubelet may have allocated a GPU to a container, and the agent cannot decide now what it "
    "gets. The container is refused, since it would start without its GPU.",
    remedy="wait: the kubelet retries; check the node agent's faults")
NriUnlimited = NodeAgentError.row("NVSHIM-E2752 nri-unlimited", Status.FAILED_PRECONDITION,
    "NRI cannot keep the limits of [sharing], since shims count the holders of devices.",
    remedy="name the shim's RuntimeClass in the pod, or remove the limits")
NriUnmapped = NodeAgentError.row("NVSHIM-E2753 nri-unmapped", Status.FAILED_PRECONDITION,
    "NRI cannot give a device to a container in a user namespace: its node has to be mounted, and "
    "not every engine can be told to allow it in the device cgroup.",
    remedy="name the shim's RuntimeClass in the pod, or set hostUsers: true")
NriVariableLost = NodeAgentError.row("NVSHIM-E2749 nri-variable-lost", Status.FAILED_PRECONDITION,
    "A container has a variable twice, usually from its image and its pod. Engines let NRI replace "
    "the first, and keep the last. So the driver's libraries would not be found.",
    remedy="set the variable in the image or the pod only, or name the shim's RuntimeClass")

# -- dynamic resource allocation ---------------------------------------------------------------
DeviceTaken = NodeAgentError.row("NVSHIM-E2774 device-taken", Status.FAILED_PRECONDITION,
    "Another claim holds the device or too much of it, or a device plugin has allocated it.",
    remedy="wait until the pod that holds it has terminated; the kubelet retries")
ClaimConfigUnknown = NodeAgentError.row(
    "NVSHIM-E2775 claim-config-unknown", Status.INVALID_ARGUMENT,
    "A claim or its DeviceClass has a configuration that this driver does not know.",
    remedy="remove it from the claim or its DeviceClass")
EngineReadsNoCdi = NodeAgentError.row(
    "NVSHIM-E2776 engine-reads-no-cdi", Status.FAILED_PRECONDITION,
    "The container engine does not read the CDI names of a claim's devices. The pod would run "
    "without its devices, and without an error.")
SlicesRefused = NodeAgentError.row("NVSHIM-E2778 slices-refused", Status.INTERNAL,
    "The API server calls the node's ResourceSlices invalid. The previous ones stay.",
    remedy="report a bug, with the message")
CountersMissing = NodeAgentError.row("NVSHIM-E2797 counters-missing", Status.FAILED_PRECONDITION,
    "The API server drops shared counters, so MIG devices made on demand are not published.",
    remedy="enable DRAPartitionableDevices in the API server, controller manager and scheduler "
           "(it is from Kubernetes 1.36), or create the MIG devices by hand")
DraFailed = NodeAgentError.row("NVSHIM-E2779 dra-failed", Status.INTERNAL,
    "A bug in an answer to the kubelet or in publishing; the agent's log has the details.",
    remedy="see the agent's log")
ClaimUnfinished = NodeAgentError.row("NVSHIM-E2783 claim-unfinished", Status.UNAVAILABLE,
    "A call for a claim takes longer than the kubelet waits; the work continues.",
    remedy="wait: the kubelet retries; check the node agent's faults for what hangs")
MigDeviceNotMade = NodeAgentError.row(
    "NVSHIM-E2780 mig-device-not-made", Status.FAILED_PRECONDITION,
    "The driver cannot create the MIG device that a claim is allocated.",
    remedy="check `nvidia-smi mig -lgi` on the node; the kubelet retries, or delete the pod and "
           "its controller recreates it")
MigDeviceNotUndone = NodeAgentError.row(
    "NVSHIM-E2781 mig-device-not-undone", Status.FAILED_PRECONDITION,
    "A claim's MIG device cannot be destroyed now. Its pod stays until it is destroyed.",
    remedy="run `nvshim ps` on the node to see which container uses it; the kubelet retries")
SharingConflict = NodeAgentError.row("NVSHIM-E2789 sharing-conflict", Status.FAILED_PRECONDITION,
    "A claim requests another kind of sharing than the claims that already share the GPU.",
    remedy="give all these claims the same configuration, or wait until the others are released")
ExtendedResourceClash = NodeAgentError.row(
    "NVSHIM-E2796 extended-resource-clash", Status.FAILED_PRECONDITION,
    "Both a DeviceClass and the device plugin serve a resource that a pod asks for. Only one of "
    "them may serve it on a node: the scheduler and the kubelet count devices separately.",
    remedy="run the agent with --device-plugin no on nodes with that DeviceClass")
