"""Containers that run: D100 to D103."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.doctor.facts import Unseen
from integration.doctor.findings import ERROR, NOTE, Trouble, check, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Container, Driver


@check(
    "NVSHIM-D100",
    ERROR,
    "a container's cgroup does not allow its GPU",
    why=(
        "Failed to initialize NVML: Unknown Error. What systemd does not have in DeviceAllow, "
        "it takes away at the next `systemctl daemon-reload`, if it has not yet."
    ),
    remedy="make the links in /dev/char, then recreate the container",
    command="nvshim devices create",
    reference="https://github.com/NVIDIA/nvidia-container-toolkit/issues/1744",
)
def _denied(containers: tuple[Container, ...]) -> Iterator[Trouble]:
    for container in containers:
        if container.denied:
            yield Trouble(
                f"{container.namespace}/{container.id}: {container.denied_by} does not allow "
                f"{listed(container.denied)}"
            )


@check(
    "NVSHIM-D101",
    ERROR,
    "a container was made with another driver",
    why=(
        "What is mounted in it is of the old driver, and the kernel module is of the new: "
        "each NVIDIA program that is started in it fails."
    ),
    remedy="recreate the container",
    reference="https://github.com/NVIDIA/gpu-operator/issues/416",
)
def _changed(containers: tuple[Container, ...]) -> Iterator[Trouble]:
    for container in containers:
        if container.changed:
            yield Trouble(f"{container.namespace}/{container.id}: {container.changed}")


@check(
    "NVSHIM-D102",
    ERROR,
    "a container has a GPU that is gone",
    why="The GPU has fallen off the bus, was taken out, or is set aside for others.",
    remedy="see the kernel's log for Xid lines, and recreate the container",
)
def _gone(containers: tuple[Container, ...], driver: Driver) -> Iterator[Trouble]:
    present = {gpu.uuid.lower() for gpu in driver.gpus}
    for container in containers:
        gone = [uuid for uuid in container.gpus if uuid.lower() not in present]
        if gone:
            yield Trouble(f"{container.namespace}/{container.id}: {listed(gone)}")


@check(
    "NVSHIM-D103",
    NOTE,
    "a container cannot be judged",
    why="Its record is damaged, it ends just now, or systemd does not answer.",
    remedy="look again; if it stays so, recreate the container",
)
def _unseen(containers: tuple[Container, ...]) -> Iterator[Unseen]:
    blind = [c for c in containers if c.unseen]
    if blind:
        names = listed(f"{c.namespace}/{c.id}" for c in blind)
        yield Unseen(f"{names}: {blind[0].unseen}")
