"""Docker, CRI-O, and other components that inject GPUs: D050 to D056."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from integration.doctor.facts import NVIDIAS, Cdi, Containerd, Crio, Docker, Injector
from integration.doctor.findings import ERROR, Trouble, check, listed


@check("D050")
def _unreadable(docker: Docker | None = None, crio: Crio | None = None) -> Iterator[str]:
    if docker is not None and docker.fault:
        yield f"{docker.path}: {docker.fault}"
    yield from crio.faults if crio is not None else ()


@check("D051")
def _docker_runtime(docker: Docker) -> Iterator[str | Trouble]:
    for runtime in docker.runtimes:
        if NVIDIAS in runtime.path:
            yield f"the runtime {runtime.name} in {docker.path} is {runtime.path}"
    known = {"runc", "io.containerd.runc.v2", *(runtime.name for runtime in docker.runtimes)}
    default = docker.default_runtime
    if default and default not in known and not default.startswith(("io.containerd.", "/")):
        yield Trouble(
            f"default-runtime is {default}, which {docker.path} does not define",
            severity=ERROR,
            remedy="define it, or remove default-runtime",
        )


@check("D052")
def _docker_gpus(docker: Docker) -> Iterator[str]:
    if docker.hook:
        return
    mine = [runtime.name for runtime in docker.runtimes if runtime.is_ours]
    if mine:
        yield f"the runtime {listed(mine)} exists, but nvidia-container-runtime-hook does not"


@check("D053")
def _two_defaults(containerd: Containerd) -> Iterator[str | Trouble]:
    for handler in containerd.handlers:
        if handler.calls_nvidias and handler.is_ours:
            yield Trouble(
                f"the shim's handler {handler.name} calls {handler.binary_name}",
                severity=ERROR,
                remedy="remove BinaryName from the handler, or set it to runc or crun",
            )
        elif handler.calls_nvidias and handler.name == containerd.default_handler:
            yield f"containerd's default handler {handler.name} is {handler.binary_name}"


@check("D054")
def _injectors(injectors: tuple[Injector, ...]) -> Iterable[str]:
    return (f"{injector.kind}: {injector.where}" for injector in injectors)


@check("D055")
def _cdi_twice(containerd: Containerd, cdi: Cdi) -> Iterator[str]:
    if not containerd.enable_cdi:
        return
    unread = [d for d in containerd.cdi_dirs if d not in cdi.directories]
    unknown = [d for d in cdi.directories if d not in containerd.cdi_dirs]
    if containerd.cdi_dirs and (unread or unknown):
        yield f"containerd reads {listed(containerd.cdi_dirs)}, the shim {listed(cdi.directories)}"


@check("D056")
def _crio(crio: Crio) -> Iterable[str]:
    theirs = ((name, path) for name, path in crio.handlers if NVIDIAS in path)
    return (f"the runtime {name} of CRI-O is {path}" for name, path in theirs)
