"""Docker, CRI-O, and two who inject at once: D050 to D056."""

from __future__ import annotations

from typing import TYPE_CHECKING

from integration.doctor.facts import NVIDIAS
from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Cdi, Containerd, Crio, Docker, Injector


@check(
    "NVSHIM-D050",
    ERROR,
    "an engine's configuration is malformed",
    why="Docker or CRI-O does not start with it.",
    remedy="mend the file",
)
def _unreadable(docker: Docker | None = None, crio: Crio | None = None) -> Iterator[Trouble]:
    if docker is not None and docker.fault:
        yield Trouble(f"{docker.path}: {docker.fault}")
    for fault in crio.faults if crio is not None else ():
        yield Trouble(fault)


@check(
    "NVSHIM-D051",
    WARNING,
    "a runtime of Docker is NVIDIA's, or is not there",
    why="Its containers are made by NVIDIA's toolkit and its hooks, not by this project.",
    remedy="let ours take its place; --remove puts it back",
    command="nvshim configure docker --replace",
)
def _docker_runtime(docker: Docker) -> Iterator[Trouble]:
    for runtime in docker.runtimes:
        if NVIDIAS in runtime.path:
            yield Trouble(f"the runtime {runtime.name} of {docker.path} is {runtime.path}")
    known = {"runc", "io.containerd.runc.v2", *(runtime.name for runtime in docker.runtimes)}
    default = docker.default_runtime
    if default and default not in known and not default.startswith(("io.containerd.", "/")):
        yield Trouble(
            f"default-runtime is {default}, which {docker.path} does not define",
            severity=ERROR,
            remedy="define it, or take default-runtime away",
        )


@check(
    "NVSHIM-D052",
    WARNING,
    "`docker run --gpus` is not known to dockerd",
    why=(
        "dockerd offers --gpus only if it sees a program of that name when it starts; without "
        'it: could not select device driver "" with capabilities: [[gpu]].'
    ),
    remedy="put one there, which dockerd only has to see",
    command="nvshim configure docker",
)
def _docker_gpus(docker: Docker) -> Iterator[Trouble]:
    if docker.hook:
        return
    mine = [runtime.name for runtime in docker.runtimes if runtime.is_ours]
    if mine:
        yield Trouble(f"the runtime {listed(mine)} is there, nvidia-container-runtime-hook is not")


@check(
    "NVSHIM-D053",
    WARNING,
    "NVIDIA's runtime injects as well",
    why="Each container goes through nvidia-container-runtime, whoever's handler it has.",
    remedy="let ours take its place; --remove puts it back",
    command="nvshim configure containerd --replace",
)
def _two_defaults(containerd: Containerd) -> Iterator[Trouble]:
    for handler in containerd.handlers:
        if handler.calls_nvidias and handler.is_ours:
            yield Trouble(
                f"the handler {handler.name} is ours, and calls {handler.binary_name}",
                severity=ERROR,
                remedy="take BinaryName from the handler, or let it name runc or crun",
            )
        elif handler.calls_nvidias and handler.name == containerd.default_handler:
            yield Trouble(f"containerd's default handler {handler.name} is {handler.binary_name}")


@check(
    "NVSHIM-D054",
    WARNING,
    "somebody else puts GPUs into containers",
    why=(
        "A container that both act on has each device twice, and hooks of NVIDIA's run in it "
        "as root. Our shim leaves alone what is there already; others do not."
    ),
    remedy=(
        "remove the hook, or let the GPU operator run without its toolkit "
        "(toolkit.enabled=false, cdi.nriPluginEnabled=false)"
    ),
)
def _injectors(injectors: tuple[Injector, ...]) -> Iterator[Trouble]:
    for injector in injectors:
        yield Trouble(f"{injector.kind}: {injector.where}")


@check(
    "NVSHIM-D055",
    NOTE,
    "containerd and our shim read CDI specs of different directories",
    why="A device that one knows, the other does not.",
    remedy="give spec-dirs in [cdi] of config.toml and cdi_spec_dirs of containerd the same",
)
def _cdi_twice(containerd: Containerd, cdi: Cdi) -> Iterator[Trouble]:
    if not containerd.enable_cdi:
        return
    unread = [d for d in containerd.cdi_dirs if d not in cdi.directories]
    unknown = [d for d in cdi.directories if d not in containerd.cdi_dirs]
    if containerd.cdi_dirs and (unread or unknown):
        yield Trouble(
            f"containerd reads {listed(containerd.cdi_dirs)}, our shim {listed(cdi.directories)}"
        )


@check(
    "NVSHIM-D056",
    NOTE,
    "CRI-O calls nvidia-container-runtime",
    why="Its containers are made by NVIDIA's toolkit and its hooks.",
    remedy="let ours take its place; --remove puts it back",
    command="nvshim configure crio --replace",
)
def _crio(crio: Crio) -> Iterator[Trouble]:
    for name, path in crio.handlers:
        if NVIDIAS in path:
            yield Trouble(f"the runtime {name} of CRI-O is {path}")
