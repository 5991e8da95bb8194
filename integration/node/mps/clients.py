"""What a container needs to be a client of MPS, and when it may not be one.

Rules
- The pipe directory is seen where NVIDIA's plugin shows it, so that images find it. It is mounted
  read-only: a client connects to the sockets in it, which that allows; root of one container could
  otherwise put sockets of its own there, for all others to connect to.
- /dev/shm is that of the daemon, for the server and its clients have memory in common. It is not
  the pod's own: what containers leave there, all clients of MPS on the node may see.
- The container's limits are the daemon's, and no environment variables of the container: there a
  client could take them away. Two shares of one device are limited as one is; the plugin refuses
  such requests unless it was told not to.
- While the daemon does not serve its device, a container gets nothing: its first call of CUDA would
  fail, or take the whole GPU.

Source: k8s-device-plugin, cmd/mps-control-daemon; "Multi-Process Service", NVIDIA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from integration.agent_errors import MpsNotReady
from integration.node.mps.paths import SHM, Places, shm

if TYPE_CHECKING:
    from api.proto import deviceplugin_pb2 as pb
    from integration.node.values.resources import Resource, Settings

__all__ = ["MpsDaemon", "add_client", "refuse_unready", "unready"]


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """The control daemon of one resource."""

    resource: str  # the resource's name ("nvidia.com/gpu.shared")
    devices: tuple[str, ...]  # UUIDs of the GPUs that it serves
    unready: str = ""  # why no container can use it now, one line; "" if it can
    pid: int = 0  # its process; 0 while there is none
    restarts: int = 0  # how often it was started again because it had ended by itself
    has_failed: bool = False  # whether what was tried last has failed; it is tried again


def add_client(
    answer: pb.ContainerAllocateResponse, settings: Settings, resource: Resource
) -> None:
    """Add what a container needs that got devices of a resource that is shared by MPS.

    Args:
        answer: to Allocate, with any way of telling the runtime which devices they are.
    """
    places = Places(settings.mps_root, resource.name)
    answer.envs["CUDA_MPS_PIPE_DIRECTORY"] = places.container_pipe
    answer.mounts.add(container_path=places.container_pipe, host_path=places.pipe, read_only=True)
    answer.mounts.add(container_path=SHM, host_path=shm(settings.mps_root))


def unready(resource: str, uuids: Iterable[str], daemons: Mapping[str, MpsDaemon]) -> str:
    """Why containers cannot have devices now: such a device is not healthy for the kubelet.

    Args:
        resource: the resource's name; it is shared by MPS.

    Returns:
        One line; "" if they can.
    """
    daemon = daemons.get(resource)
    if daemon is None:
        return "its MPS control daemon is not started yet"
    if daemon.unready:
        return daemon.unready
    missing = [uuid for uuid in uuids if uuid not in daemon.devices]
    return f"its MPS control daemon does not serve {missing[0]} yet" if missing else ""


def refuse_unready(resource: str, uuids: Iterable[str], daemons: Mapping[str, MpsDaemon]) -> None:
    """Refuse devices of a resource that is shared by MPS while its daemon cannot serve them.

    Raises:
        MpsNotReady: it cannot.
    """
    uuids = tuple(uuids)
    if reason := unready(resource, uuids, daemons):
        raise MpsNotReady(
            f"{resource} for a container: {', '.join(uuids)}",
            found=reason,
            do="see what the node agent says of it: it starts the daemon again by itself",
        )
