"""The agent's options, from its command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.cri.engine import CRI_SOCKETS

if TYPE_CHECKING:  # it imports yaml, which `nvshim top` and `nvshim node --help` do not need
    from integration.node.settings.source import Source

AUTO: Final = "auto"
YES: Final = "yes"
NO: Final = "no"

DRA_DRIVER: Final = "gpu.containerd-shim-nvidia"
"""Differs from NVIDIA's name: a kubelet treats two drivers of one name as an update."""


@dataclass(frozen=True, slots=True)
class Options:
    """The agent's options."""

    spec: str  # the path of the CDI spec to keep up to date; "" for none
    poll: float  # seconds between two reads of an unchanged node
    # whether to run the device plugin: AUTO (if a kubelet runs here and no other plugin serves the
    # same resources), YES, NO
    device_plugin: str = AUTO
    # the kubelet's registration socket; sockets of plugins are made in its directory
    kubelet_socket: str = "/var/lib/kubelet/device-plugins/kubelet.sock"
    # the kubelet's pod-resources socket
    pod_resources: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    # where the device plugin's settings come from; None for the defaults of NVIDIA's plugin
    settings: Source | None = None
    metrics: str = ""  # "ADDRESS:PORT" of /metrics; "" not to serve it
    # sockets of container engines; the first that answers is used
    cri_sockets: tuple[str, ...] = CRI_SOCKETS
    api_server: str = ""  # the address of the cluster's API server; "" for none
    api_port: int = 443  # of the API server
    # the directory of the agent's token for it
    service_account: str = "/run/containerd-shim-nvidia/service-account"
    # used instead of the address and the token; "" for none
    kubeconfig: str = ""
    api_timeout: float = 10.0  # seconds that a call to the API server may take
    dra: bool = False  # whether to run the driver of dynamic resource allocation
    dra_driver: str = DRA_DRIVER  # the driver's name
    # what to do with devices that no new pod should get: ``taint``, ``evict`` or ``omit``
    dra_unhealthy: str = "taint"
    # how many claims may share one device; 0 for one claim that has all of it
    dra_shares: int = 0
    dra_mig: bool = False  # whether to create MIG devices for claims
    node_condition: bool = False  # whether to set the condition on the Node
    node_name: str = ""  # of this Node in the cluster
    # the UID of the agent's pod; during an update another agent's pod may run at the same time
    pod_uid: str = ""
    states: tuple[str, ...] = ()  # containerd's state directories; empty for the usual ones
    ignored_xids: str = ""  # the value of ``DP_DISABLE_HEALTHCHECKS``
    heeded_xids: str = ""  # the value of ``DP_ENABLE_HEALTHCHECKS``
    kernel_log: str = "/dev/kmsg"  # the kernel's log; "" not to read it
