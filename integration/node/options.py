"""What the agent is to do, as its command line says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.cri.engine import CRI_SOCKETS

if TYPE_CHECKING:
    from integration.node.settings.source import Source

AUTO: Final = "auto"
YES: Final = "yes"
NO: Final = "no"

DRA_DRIVER: Final = "gpu.containerd-shim-nvidia"
"""Not NVIDIA's: a kubelet would take two drivers of one name for the same at its update."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the agent is to do."""

    spec: str  # the path of the CDI spec that it keeps; "" for none
    poll: float  # seconds between two looks that nothing gave a reason for
    # whether it serves kubelets: AUTO (if there is one here, and no other plugin for its
    # resources), YES, NO
    device_plugin: str = AUTO
    # where a kubelet registers device plugins; theirs are made beside it
    kubelet_socket: str = "/var/lib/kubelet/device-plugins/kubelet.sock"
    # the socket on which the kubelet tells what it has given to whom
    pod_resources: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    # where the device plugin's come from; None for what NVIDIA's has by default
    settings: Source | None = None
    metrics: str = ""  # "ADDRESS:PORT" where /metrics is served; "" for nowhere
    # where an engine may serve the kubelet; the first that answers is meant
    cri_sockets: tuple[str, ...] = CRI_SOCKETS
    api_server: str = ""  # the address of the cluster's API server; "" for none
    api_port: int = 443  # likewise
    # where the agent's token for it is, if it has one
    service_account: str = "/run/containerd-shim-nvidia/service-account"
    # one that says how the API server is asked, in place of those; "" for none
    kubeconfig: str = ""
    api_timeout: float = 10.0  # seconds that a call to the API server may take
    dra: bool = False  # whether it is a driver of dynamic resource allocation
    dra_driver: str = DRA_DRIVER  # what that is called
    # what becomes of devices that no new pod should get: ``taint``, ``evict`` or ``omit``
    dra_unhealthy: str = "taint"
    # how many claims may have a part of one device; 0 for one that has all of it
    dra_shares: int = 0
    dra_mig: bool = False  # whether it makes MIG devices for claims
    node_condition: bool = False  # whether the Node is told which of its GPUs no pod can have
    node_name: str = ""  # of the Node that this is in the cluster
    # of the pod that the agent runs in, which may run beside another's for a while; "" for none
    pod_uid: str = ""
    states: tuple[str, ...] = ()  # containerd's state directories; none for those that are known
    ignored_xids: str = ""  # what ``DP_DISABLE_HEALTHCHECKS`` says
    heeded_xids: str = ""  # what ``DP_ENABLE_HEALTHCHECKS`` says
    kernel_log: str = "/dev/kmsg"  # where the kernel's log is read; "" for nowhere
