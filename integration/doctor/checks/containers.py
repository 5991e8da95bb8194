"""Running containers: D100 to D103, D113, D114."""

from __future__ import annotations

from collections.abc import Iterator

from integration.doctor.facts import Container, Driver, Unseen
from integration.doctor.findings import Trouble, check, listed


@check("D100")
def _denied(containers: tuple[Container, ...]) -> Iterator[Trouble]:
    for container in containers:
        if container.denied:
            yield Trouble(
                f"{container.namespace}/{container.id}: {container.denied_by} does not allow "
                f"{listed(container.denied)}"
            )


@check("D101")
def _changed(containers: tuple[Container, ...]) -> Iterator[str]:
    for container in containers:
        if container.changed:
            yield f"{container.namespace}/{container.id}: {container.changed}"


@check("D102")
def _gone(containers: tuple[Container, ...], driver: Driver) -> Iterator[str]:
    present = {gpu.uuid.lower() for gpu in driver.gpus}
    for container in containers:
        gone = [uuid for uuid in container.gpus if uuid.lower() not in present]
        if gone:
            yield f"{container.namespace}/{container.id}: {listed(gone)}"


@check("D103")
def _unseen(containers: tuple[Container, ...]) -> Iterator[Unseen]:
    blind = [c for c in containers if c.unseen]
    if blind:
        names = listed(f"{c.namespace}/{c.id}" for c in blind)
        yield Unseen(f"{names}: {blind[0].unseen}")


@check("D113")
def _names_no_capabilities(containers: tuple[Container, ...]) -> Iterator[str]:
    found = [c for c in containers if c.has_default_capabilities]
    if found:
        images = sorted({c.image for c in found if c.image})
        named = f" (image{'s'[: len(images) > 1]} {listed(images)})" if images else ""
        yield f"{len(found)} of {len(containers)} running containers with GPUs name none{named}"


@check("D114")
def _left_by_verify(verify_pods: tuple[str, ...]) -> Iterator[str]:
    if verify_pods:
        yield listed(verify_pods)
