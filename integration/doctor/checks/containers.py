"""Containers that run: D100 to D103."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.facts import CouldNotLook, seen
from integration.doctor.findings import Check, Severity, Trouble, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Node

__all__ = ["CONTAINERS"]

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def _denied(node: Node) -> Iterator[Trouble]:
    for container in seen(node.containers):
        if container.denied:
            yield Trouble(
                f"{container.namespace}/{container.id}: {container.denied_by} does not allow "
                f"{listed(container.denied)}"
            )


def _changed(node: Node) -> Iterator[Trouble]:
    for container in seen(node.containers):
        if container.changed:
            yield Trouble(f"{container.namespace}/{container.id}: {container.changed}")


def _gone(node: Node) -> Iterator[Trouble]:
    present = {gpu.uuid.lower() for gpu in seen(node.driver).gpus}
    for container in seen(node.containers):
        gone = [uuid for uuid in container.gpus if uuid.lower() not in present]
        if gone:
            yield Trouble(f"{container.namespace}/{container.id}: {listed(gone)}")


def _unseen(node: Node) -> Iterator[Trouble]:
    blind = [c for c in seen(node.containers) if c.unseen]
    if blind:
        names = listed(f"{c.namespace}/{c.id}" for c in blind)
        raise CouldNotLook(f"{names}: {blind[0].unseen}")
    yield from ()


CONTAINERS: Final = (
    Check(
        code="NVSHIM-D100",
        severity=_ERROR,
        title="a container's cgroup does not allow its GPU",
        why="Failed to initialize NVML: Unknown Error. What systemd does not have in DeviceAllow, "
        "it takes away at the next `systemctl daemon-reload`, if it has not yet.",
        remedy="make the links in /dev/char, then recreate the container",
        command="nvshim devices create",
        reference="https://github.com/NVIDIA/nvidia-container-toolkit/issues/1744",
        needs=("containers",),
        look=_denied,
    ),
    Check(
        code="NVSHIM-D101",
        severity=_ERROR,
        title="a container was made with another driver",
        why="What is mounted in it is of the old driver, and the kernel module is of the new: "
        "each NVIDIA program that is started in it fails.",
        remedy="recreate the container",
        reference="https://github.com/NVIDIA/gpu-operator/issues/416",
        needs=("containers",),
        look=_changed,
    ),
    Check(
        code="NVSHIM-D102",
        severity=_ERROR,
        title="a container has a GPU that is gone",
        why="The GPU has fallen off the bus, was taken out, or is set aside for others.",
        remedy="see the kernel's log for Xid lines, and recreate the container",
        needs=("containers", "driver"),
        look=_gone,
    ),
    Check(
        code="NVSHIM-D103",
        severity=_NOTE,
        title="a container cannot be judged",
        why="Its record is damaged, it ends just now, or systemd does not answer.",
        remedy="look again; if it stays so, recreate the container",
        needs=("containers",),
        look=_unseen,
    ),
)
