"""Docker, CRI-O, and two who inject at once: D050 to D056."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.checks.containerd import NVIDIAS, OURS, ours
from integration.doctor.facts import seen
from integration.doctor.findings import Check, Severity, Trouble, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Node

__all__ = ["ENGINES"]

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def _unreadable(node: Node) -> Iterator[Trouble]:
    docker, crio = seen(node.docker), seen(node.crio)
    if docker is not None and docker.fault:
        yield Trouble(f"{docker.path}: {docker.fault}")
    for fault in crio.faults if crio is not None else ():
        yield Trouble(fault)


def _docker_runtime(node: Node) -> Iterator[Trouble]:
    docker = seen(node.docker)
    if docker is None:
        return
    for runtime in docker.runtimes:
        if NVIDIAS in runtime.path:
            yield Trouble(f"the runtime {runtime.name} of {docker.path} is {runtime.path}")
    known = {"runc", "io.containerd.runc.v2", *(runtime.name for runtime in docker.runtimes)}
    default = docker.default_runtime
    if default and default not in known and not default.startswith(("io.containerd.", "/")):
        yield Trouble(
            f"default-runtime is {default}, which {docker.path} does not define",
            severity=_ERROR,
            remedy="define it, or take default-runtime away",
        )


def _docker_gpus(node: Node) -> Iterator[Trouble]:
    docker = seen(node.docker)
    if docker is None or docker.hook:
        return
    mine = [runtime.name for runtime in docker.runtimes if runtime.runtime_type == OURS]
    if mine:
        yield Trouble(f"the runtime {listed(mine)} is there, nvidia-container-runtime-hook is not")


def _two_defaults(node: Node) -> Iterator[Trouble]:
    containerd = seen(node.containerd)
    if containerd is None:
        return
    for handler in containerd.handlers:
        both = NVIDIAS in handler.binary_name and ours(handler)
        default = NVIDIAS in handler.binary_name and handler.name == containerd.default_handler
        if both:
            yield Trouble(
                f"the handler {handler.name} is ours, and calls {handler.binary_name}",
                severity=_ERROR,
                remedy="take BinaryName from the handler, or let it name runc or crun",
            )
        elif default:
            yield Trouble(f"containerd's default handler {handler.name} is {handler.binary_name}")


def _injectors(node: Node) -> Iterator[Trouble]:
    for injector in seen(node.injectors):
        yield Trouble(f"{injector.kind}: {injector.where}")


def _cdi_twice(node: Node) -> Iterator[Trouble]:
    containerd, cdi = seen(node.containerd), seen(node.cdi)
    if containerd is None or not containerd.enable_cdi:
        return
    unread = [d for d in containerd.cdi_dirs if d not in cdi.directories]
    unknown = [d for d in cdi.directories if d not in containerd.cdi_dirs]
    if containerd.cdi_dirs and (unread or unknown):
        yield Trouble(
            f"containerd reads {listed(containerd.cdi_dirs)}, our shim {listed(cdi.directories)}"
        )


def _crio(node: Node) -> Iterator[Trouble]:
    crio = seen(node.crio)
    for name, path in crio.handlers if crio is not None else ():
        if NVIDIAS in path:
            yield Trouble(f"the runtime {name} of CRI-O is {path}")


ENGINES: Final = (
    Check(
        code="NVSHIM-D050",
        severity=_ERROR,
        title="an engine's configuration is malformed",
        why="Docker or CRI-O does not start with it.",
        remedy="mend the file",
        needs=("docker", "crio"),
        look=_unreadable,
    ),
    Check(
        code="NVSHIM-D051",
        severity=_WARNING,
        title="a runtime of Docker is NVIDIA's, or is not there",
        why="Its containers are made by NVIDIA's toolkit and its hooks, not by this project.",
        remedy="let Docker's runtime be ours",
        command="nvshim configure docker",
        needs=("docker",),
        look=_docker_runtime,
    ),
    Check(
        code="NVSHIM-D052",
        severity=_WARNING,
        title="`docker run --gpus` is not known to dockerd",
        why="dockerd offers --gpus only if it sees a program of that name when it starts; without "
        'it: could not select device driver "" with capabilities: [[gpu]].',
        remedy="put one there, which dockerd only has to see",
        command="nvshim configure docker",
        needs=("docker",),
        look=_docker_gpus,
    ),
    Check(
        code="NVSHIM-D053",
        severity=_WARNING,
        title="NVIDIA's runtime injects as well",
        why="Each container goes through nvidia-container-runtime, whoever's handler it has.",
        remedy="make another handler the default",
        command="nvshim configure containerd --set-default",
        needs=("containerd",),
        look=_two_defaults,
    ),
    Check(
        code="NVSHIM-D054",
        severity=_WARNING,
        title="somebody else puts GPUs into containers",
        why="A container that both act on has each device twice, and hooks of NVIDIA's run in it "
        "as root. Our shim leaves alone what is there already; others do not.",
        remedy="remove the hook, or let the GPU operator run without its toolkit "
        "(toolkit.enabled=false, cdi.nriPluginEnabled=false)",
        needs=("injectors",),
        look=_injectors,
    ),
    Check(
        code="NVSHIM-D055",
        severity=_NOTE,
        title="containerd and our shim read CDI specs of different directories",
        why="A device that one knows, the other does not.",
        remedy="give spec-dirs in [cdi] of config.toml and cdi_spec_dirs of containerd the same",
        needs=("containerd", "cdi"),
        look=_cdi_twice,
    ),
    Check(
        code="NVSHIM-D056",
        severity=_NOTE,
        title="CRI-O calls nvidia-container-runtime",
        why="Its containers are made by NVIDIA's toolkit and its hooks.",
        remedy="let CRI-O inject by CDI",
        command="nvshim configure crio",
        needs=("crio",),
        look=_crio,
    ),
)
