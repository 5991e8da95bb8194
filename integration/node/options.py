"""The agent's options, as its command line and variables set them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from api.values import dataclass
from hooks.schema import (
    BOOLEAN,
    Declarations,
    Kind,
    choice,
    like,
    list_of,
    number,
    one_of,
    seconds,
    text,
)
from integration.cri.engine import CRI_SOCKETS

if TYPE_CHECKING:  # it imports yaml, which `nvshim top` and `nvshim node --help` do not need
    from integration.node.settings.source import Source

AUTO: Final = "auto"
YES: Final = "yes"
NO: Final = "no"

NONE: Final = "none"
NODE: Final = "node"
NODE_FEATURE: Final = "node-feature"
FILE: Final = "file"

DRA_DRIVER: Final = "gpu.containerd-shim-nvidia"
"""Differs from NVIDIA's name: a kubelet takes a second driver of the same name for an update."""

OWN: Final = "own"
DCGM: Final = "dcgm"
DCGM_4_5: Final = "dcgm-4.5"
DCGM_4_9: Final = "dcgm-4.9"

MEMORY: Final = "memory"
UNLIMITED: Final = "unlimited"
"""Values of ``--dra-shares`` besides a number."""

_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SOCKET: Final = Kind(lambda path: path.removeprefix("unix://"), "a path", metavar="SOCKET")
_set: Final = Declarations()


@dataclass(frozen=True, slots=True)
class Options:
    """The agent's options. The text of each field says what it does."""

    # fmt: off
    spec: str = _set(choice({"none": ""}, text("FILE")),
        "Maintain this CDI spec; 'none' for none.  [default: nvidia.yaml in the last of the "
        "configuration's spec-dirs, /var/run/cdi]",
        options=["--cdi-spec"], default="")
    poll: float = _set(seconds(86400, 0.1),
        "Check the node this often, even without a change event.", options=["--poll"], default=60)
    device_plugin: str = _set(one_of(AUTO, YES, NO),
        "Run the device plugin; auto: if a kubelet runs here and no other plugin serves it.",
        options=["--device-plugin"], default=AUTO)
    # sockets of plugins are made in its directory
    kubelet_socket: str = _set(_SOCKET,
        "The kubelet's socket for registering device plugins; '' for none.", "KUBELET_SOCKET",
        options=["--kubelet-socket"], default="/var/lib/kubelet/device-plugins/kubelet.sock")
    pod_resources: str = _set(_SOCKET, "The kubelet's socket that lists the devices of pods.",
        options=["--pod-resources"], default="/var/lib/kubelet/pod-resources/kubelet.sock")
    metrics: str = _set(choice({"none": ""}, text("ADDRESS:PORT")),
        "Serve /metrics at this address, such as :9477.  [default: do not serve]",
        options=["--metrics"], default="")
    metrics_names: tuple[str, ...] = _set(
        list_of(one_of(OWN, DCGM, DCGM_4_5, DCGM_4_9), f"{OWN}, {DCGM}, {DCGM_4_5}, {DCGM_4_9}"),
        "The names of metrics, comma-separated: nvshim_..., or those of dcgm-exporter 4.6 to 4.8"
        " (dcgm), up to 4.5 (with the label Hostname), or since 4.9.",
        options=["--metrics-names"], default=(OWN,))
    metrics_pod_labels: tuple[str, ...] = _set(
        list_of(like("[A-Za-z0-9][A-Za-z0-9._/-]{0,316}", "a label's key"), "keys of labels"),
        "Add these pod labels to the metrics with dcgm-exporter's names: comma-separated keys such"
        " as app.kubernetes.io/name.",
        options=["--metrics-pod-labels"], default=())
    metrics_jobs: str = _set(text("DIR"),
        "Add the label hpc_job to the same metrics. This directory has a file for each GPU"
        " (INDEX or INDEX.INSTANCE) with one job id per line.",
        options=["--metrics-jobs"], default="")
    metrics_web_config: str = _set(text("FILE"),
        "Serve metrics with TLS or passwords, as this web configuration file says (in the format"
        " of Prometheus' exporters).", options=["--metrics-web-config"], default="")
    # the first that answers is used
    cri_sockets: tuple[str, ...] = _set(list_of(text("SOCKET"), "sockets", commas=False),
        "The engine's CRI socket, to check whether the engine reads CDI names.  "
        "[default: the known sockets that exist]",
        options=["--cri-socket"], default=CRI_SOCKETS)
    api_server: str = _set(text("HOST"),
        "The cluster's API server, for events on pods; '' for none.",
        "KUBERNETES_SERVICE_HOST", options=["--api-server"], default="")
    api_port: int = _set(number(1, 65535, metavar="PORT"), "The API server's port.",
        "KUBERNETES_SERVICE_PORT", options=["--api-port"], default=443)
    service_account: str = _set(text("DIR"),
        "The directory with the agent's token; without a token no events are sent.",
        options=["--service-account"], default="/run/containerd-shim-nvidia/service-account")
    kubeconfig: str = _set(text("FILE"),
        "Use the current context of this kubeconfig instead of the three options above. It needs"
        " a token or a client certificate; the kubelet's own file works.",
        options=["--kubeconfig"], default="")
    api_timeout: float = _set(seconds(15, 0.1), "The time limit of a call to the API server.",
        options=["--api-timeout"], default=10)
    dra: bool = _set(BOOLEAN,
        "Run a driver for dynamic resource allocation: publish the node's devices and prepare"
        " resource claims, with or without the device plugin.", options=["--dra"], default=False)
    dra_driver: str = _set(
        like(rf"(?=.{{1,63}}\Z){_LABEL}(\.{_LABEL})*",
             "a DNS name of at most 63 lower-case letters, digits, hyphens and dots"),
        "The DRA driver's name. gpu.nvidia.com replaces NVIDIA's driver.",
        options=["--dra-driver"], default=DRA_DRIVER)
    dra_unhealthy: str = _set(one_of("taint", "evict", "omit"),
        "How to publish unhealthy, lost and out-of-service devices: with taints (NoSchedule),"
        " also evicting their pods (NoExecute), or not at all.",
        options=["--dra-unhealthy"], default="taint")
    dra_shares: int | str = _set(
        choice({MEMORY: MEMORY, UNLIMITED: UNLIMITED}, number(0, 64),
               f"a number from 0 to 64, {MEMORY} or {UNLIMITED}"),
        "Publish each GPU and MIG device with N shares, so that N claims can use it; memory: as"
        " many claims as its memory allows; unlimited: any number; 0 for exclusive use.",
        options=["--dra-shares"], default=0)
    dra_mig: bool = _set(BOOLEAN,
        "Create MIG devices on demand for resource claims, and destroy them afterwards: on"
        " GPUs in MIG mode, and on GPUs that enter it without a reset (Hopper and newer).",
        options=["--dra-mig"], default=False)
    dra_metadata: bool = _set(BOOLEAN,
        "Give containers of resource claims files with the attributes of their devices (KEP-5304).",
        options=["--dra-metadata"], default=False)
    nri: bool = _set(BOOLEAN,
        "Give pods without the shim's RuntimeClass the GPUs that the kubelet allocated to them, as"
        " an NRI plugin of containerd or CRI-O.", options=["--nri"], default=False)
    nri_socket: str = _set(_SOCKET, "The engine's NRI socket.",
        options=["--nri-socket"], default="/var/run/nri/nri.sock")
    nri_name: str = _set(like(r"[A-Za-z0-9_.+-]{1,63}", "letters, digits and _.+-", "NAME"),
        "The NRI plugin's name, for the engine's list of required plugins.",
        options=["--nri-name"], default="nvshim")
    nri_index: str = _set(like("[0-9]{2}", "two digits", "NN"),
        "The NRI plugin's place in the order of plugins; each sees the changes of lower numbers.",
        options=["--nri-index"], default="90")
    nri_handlers: tuple[str, ...] = _set(list_of(text("HANDLER"), "handlers"),
        "Skip pods with these runtime handlers, which inject devices themselves.",
        options=["--nri-handlers"], default=("nvidia",))
    mig_config_file: str = _set(text("FILE"),
        "Apply the MIG layout in this file that the node's label nvidia.com/mig.config names, as"
        " `nvshim mig apply` does.", options=["--mig-config-file"], default="")
    node_condition: bool = _set(BOOLEAN,
        "Report GPUs that no pod can use in the Node's condition GPUOutOfService.",
        options=["--node-condition"], default=False)
    node_labels: str = _set(one_of(NONE, NODE, NODE_FEATURE, FILE),
        "Label the node as NVIDIA's GPU feature discovery does: in the Node itself, or through"
        " node feature discovery with a NodeFeature object or a file. The agent needs permission"
        " in the cluster, and must be the only writer of these labels.",
        options=["--node-labels"], default=NONE)
    node_labels_remove: bool = _set(BOOLEAN,
        "Remove these labels when the agent stops, also for an update.",
        options=["--node-labels-remove"], default=False)
    node_labels_namespace: str = _set(text("NAMESPACE"),
        "The namespace of the NodeFeature object.", "NAMESPACE",
        options=["--node-labels-namespace"], default="containerd-shim-nvidia")
    node_labels_file: str = _set(text("FILE"), "The file for the labels.",
        options=["--node-labels-file"],
        default="/etc/kubernetes/node-feature-discovery/features.d/nvshim")
    machine_type_file: str = _set(text("FILE"),
        "Read the label nvidia.com/gpu.machine from this file.  [default: the product name in"
        " sysfs]", "GFD_MACHINE_TYPE_FILE", options=["--machine-type-file"], default="")
    nvsentinel: str = _set(choice({"none": ""}, _SOCKET),
        "Send the health of GPUs to NVSentinel's platform connector at this socket, such as"
        " /var/run/nvsentinel/nvsentinel.sock.  [default: do not send]",
        options=["--nvsentinel"], default="")
    nvsentinel_acts: bool = _set(BOOLEAN,
        "Let NVSentinel act on what --nvsentinel sends: cordon, drain, reset, reboot. Without this"
        " it only stores the events.", options=["--nvsentinel-acts"], default=False)
    node_name: str = _set(text("NAME"),
        "The node's name in the cluster.  [default: the host's name]",
        "NODE_NAME", options=["--node-name"], default="")
    pod_uid: str = _set(like("[A-Za-z0-9-]{0,63}", "a pod's UID", "UID"),
        "The UID of the agent's pod, for rolling updates: with --dra the agent forwards the"
        " kubelet's calls to the old pod's agent until that has stopped.",
        "POD_UID", options=["--pod-uid"], default="")
    states: tuple[str, ...] = _set(list_of(text("DIR"), "directories", commas=False),
        "containerd's state directory; repeatable.  [default: those of distribution packages,"
        " Docker, k3s, k0s and MicroK8s]",
        "NVSHIM_CONTAINERD_STATE", options=["--containerd-state", "--state"], default=())
    kernel_log: str = _set(choice({"none": ""}, text("FILE")),
        "Read the kernel log from this file; 'none' to not read it.",
        options=["--kernel-log"], default="/dev/kmsg")
    ignored_xids: str = _set(text("XIDS"),
        "Ignore these additional XIDs in health checks: a comma-separated list, or all.",
        "DP_DISABLE_HEALTHCHECKS", options=["--disable-healthchecks"], default="")
    heeded_xids: str = _set(text("XIDS"),
        "Honour these XIDs even if they are ignored by default or by --disable-healthchecks: a"
        " comma-separated list, or all.",
        "DP_ENABLE_HEALTHCHECKS", options=["--enable-healthchecks"], default="")
    # fmt: on
    # the source of the device plugin's settings; None for the defaults of NVIDIA's plugin
    settings: Source | None = None


OPTIONS: Final = _set.of(Options)
"""The options of the command line, by field."""
