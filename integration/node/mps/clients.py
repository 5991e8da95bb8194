"""Make a container a client of MPS, or refuse it while its daemon is not ready.

Rules
- The pipe directory has the same path in the container as with NVIDIA's plugin, so that images find
  it. The mount is read-only, which still allows a client to connect. Otherwise root in one
  container could create sockets there that all other clients connect to.
- The container's /dev/shm is that of the daemon, because the server and its clients share memory.
  It replaces the pod's own, so all MPS clients on the node can see what a container leaves there.
- The daemon enforces the limits. Environment variables of the container could not, since a client
  can change them. A container with two shares of one device has the limits of one share; NVIDIA's
  plugin refuses such requests by default.
- A container is refused while the daemon does not serve its device: its first CUDA call would fail,
  or use the whole GPU.

Source: k8s-device-plugin, cmd/mps-control-daemon; "Multi-Process Service", NVIDIA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from api.values import dataclass
from integration.agent_errors import MpsNotReady
from integration.node.mps.paths import SHM, Places, shm
from integration.node.values.resources import Resource, Settings

if TYPE_CHECKING:  # it imports protobuf, which `nvshim top` and `nvshim ledger` do not need
    from api.proto import deviceplugin_pb2 as pb

__all__ = ["MpsDaemon", "add_client", "refuse_unready", "unready"]


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """The control daemon of one resource."""

    resource: str  # the resource's name ("nvidia.com/gpu.shared")
    devices: tuple[str, ...]  # UUIDs of the GPUs that it serves
    unready: str = ""  # why containers cannot use it now, one line; "" if they can
    pid: int = 0  # its process; 0 for none
    restarts: int = 0  # how often the agent started it again because it had stopped by itself
    has_failed: bool = False  # whether the last attempt failed; the agent tries again


def add_client(
    answer: pb.ContainerAllocateResponse, settings: Settings, resource: Resource
) -> None:
    """Add the mounts and the variable of an MPS client to a response.

    Args:
        answer: the response to Allocate; it already has the devices.
    """
    places = Places(settings.mps_root, resource.name)
    answer.envs["CUDA_MPS_PIPE_DIRECTORY"] = places.container_pipe
    answer.mounts.add(container_path=places.container_pipe, host_path=places.pipe, read_only=True)
    answer.mounts.add(container_path=SHM, host_path=shm(settings.mps_root))


def unready(resource: str, uuids: Iterable[str], daemons: Mapping[str, MpsDaemon]) -> str:
    """Return why containers cannot use some devices now; the plugin reports these as unhealthy.

    Args:
        resource: the name of a resource that is shared by MPS.

    Returns:
        One line; "" if containers can use them.
    """
    daemon = daemons.get(resource)
    if daemon is None:
        return "its MPS control daemon has not started yet"
    if daemon.unready:
        return daemon.unready
    missing = [uuid for uuid in uuids if uuid not in daemon.devices]
    return f"its MPS control daemon does not serve {missing[0]} yet" if missing else ""


def refuse_unready(resource: str, uuids: Iterable[str], daemons: Mapping[str, MpsDaemon]) -> None:
    """Refuse devices shared by MPS while their daemon cannot serve them.

    Raises:
        MpsNotReady: the daemon cannot serve them yet.
    """
    uuids = tuple(uuids)
    if reason := unready(resource, uuids, daemons):
        raise MpsNotReady(
            f"{resource} for a container: {', '.join(uuids)}",
            found=reason,
            do="read the node agent's log; the agent starts the daemon again by itself",
        )
