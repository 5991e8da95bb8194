"""What the other parts of the agent are told of MPS."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MpsDaemon"]


@dataclass(frozen=True, slots=True)
class MpsDaemon:
    """The control daemon of one resource.

    Attributes:
        resource: the resource's name ("nvidia.com/gpu.shared").
        devices: UUIDs of the GPUs that it serves.
        unready: why no container can use it now, one line; "" if it can.
        pid: its process; 0 while there is none.
        restarts: how often it was started again because it had ended by itself.
    """

    resource: str
    devices: tuple[str, ...]
    unready: str = ""
    pid: int = 0
    restarts: int = 0
