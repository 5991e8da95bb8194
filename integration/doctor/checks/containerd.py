"""containerd's configuration: D030 to D039, D045 and D087."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check, listed
from shim import RUNTIME_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Containerd, Docker, Kubernetes

_BUILT_IN: Final = "runc"
_CONFIGURE: Final = "nvshim configure containerd"
_FEW_DESCRIPTORS: Final = 16384
_FORMAT: Final = (
    "https://github.com/containerd/containerd/blob/main/docs/man/containerd-config.toml.5.md"
)


def _files_of_ours(containerd: Containerd) -> dict[str, list[str]]:
    """Our handlers by name, with the files that have each."""
    found: dict[str, list[str]] = {}
    for file in containerd.files:
        for name, is_ours in file.handlers:
            if is_ours:
                found.setdefault(name, []).append(file.path)
    return found


@check(
    "NVSHIM-D030",
    ERROR,
    "containerd does not accept its configuration",
    why="It runs on with the old one until it is started the next time, and then not at all.",
    remedy="mend the file that is named",
    command="containerd config dump",
    reference=_FORMAT,
)
def _refused(containerd: Containerd) -> Iterator[Trouble]:
    for file in containerd.files:
        if file.fault:
            yield Trouble(f"{file.path}: {file.fault}")
    if containerd.dump_fault and not any(file.fault for file in containerd.files):
        yield Trouble(f"containerd --config {containerd.path}: {containerd.dump_fault}")


@check(
    "NVSHIM-D031",
    ERROR,
    "containerd has no handler of ours",
    why="No pod and no container is made by this project.",
    remedy="add one, and restart containerd when that suits",
    command=_CONFIGURE,
)
def _no_handler(
    containerd: Containerd, kubernetes: Kubernetes, docker: Docker | None = None
) -> Iterator[Trouble]:
    if not containerd.cri:
        return
    if any(handler.is_ours for handler in containerd.handlers) or _files_of_ours(containerd):
        return
    if docker is not None and any(r.is_ours for r in docker.runtimes):
        return
    where = containerd.path if containerd.exists else f"{containerd.path}, which is not there"
    found = f"none of type {RUNTIME_NAME} in {where}"
    if not containerd.by_name:
        yield Trouble(found)
        return
    yield Trouble(
        f"{found}; containerd finds {containerd.by_name} by its name",
        remedy=f"nothing for ctr and nerdctl: --runtime {RUNTIME_NAME}; pods need a handler",
        command=_CONFIGURE,
        severity=WARNING if kubernetes.cgroup_driver else NOTE,
    )


@check(
    "NVSHIM-D032",
    ERROR,
    "our handler is defined, and not in effect",
    why=(
        "containerd reads the files that `imports` of its root file names, and no others; a "
        "table that is there twice is that of the later file."
    ),
    remedy="let the root file import it",
    command=_CONFIGURE,
    reference=_FORMAT,
)
def _not_in_effect(containerd: Containerd) -> Iterator[Trouble]:
    if not containerd.cri:
        return
    in_effect = {handler.name for handler in containerd.handlers if handler.is_ours}
    covered = {file.path for file in containerd.files if file.imported}
    for name, files in _files_of_ours(containerd).items():
        if name in in_effect:
            continue
        loose = [file for file in files if file not in covered]
        if loose:
            yield Trouble(f"{name} is in {listed(loose)}, which {containerd.path} does not import")
        elif not containerd.dump_fault:
            yield Trouble(
                f"{name} is in {listed(files)}, and containerd makes something else of it"
            )


@check(
    "NVSHIM-D033",
    WARNING,
    "a drop-in is of another version than the root file",
    why=(
        "containerd then ignores it, or converts it wrongly, or does not start (2.3.2 has "
        "crashed of it)."
    ),
    remedy="write the drop-in in the root file's version",
    command=_CONFIGURE,
    reference="https://github.com/azimuth-cloud/capi-helm-charts/issues/838",
)
def _versions(containerd: Containerd) -> Iterator[Trouble]:
    root = next((file for file in containerd.files if file.root), None)
    for file in containerd.files:
        if root is None or file.root or file.fault or not file.imported:
            continue
        if file.version != root.version:
            yield Trouble(
                f"{file.path} is of version {file.version}, {root.path} of version {root.version}"
            )


@check(
    "NVSHIM-D034",
    ERROR,
    "the default handler does not exist",
    why="No pod that names no RuntimeClass starts, those of the control plane among them.",
    remedy="set default_runtime_name to a handler that there is",
)
def _no_default(containerd: Containerd) -> Iterator[Trouble]:
    if not containerd.default_handler:
        return
    names = [handler.name for handler in containerd.handlers]
    if containerd.default_handler not in names:
        yield Trouble(
            f"default_runtime_name is {containerd.default_handler}; there is {listed(names)}"
        )


@check(
    "NVSHIM-D035",
    ERROR,
    "a handler has no runtime_type",
    why='Its pods end with "container.Runtime.Name must be set".',
    remedy="give it a runtime_type",
    command=_CONFIGURE,
    reference="https://github.com/NVIDIA/nvidia-container-toolkit/issues/1956",
)
def _no_type(containerd: Containerd) -> Iterator[Trouble]:
    for handler in containerd.handlers:
        if not handler.runtime_type:
            yield Trouble(f"the handler {handler.name} in {containerd.path}")


@check(
    "NVSHIM-D036",
    WARNING,
    "a handler still calls nvidia-container-runtime",
    why=(
        "Its containers are made by NVIDIA's toolkit and its hooks, not by this project; a "
        "handler that is ours and calls it gives each GPU twice."
    ),
    remedy="let the handler be ours, or remove it",
    command=_CONFIGURE,
)
def _old_handler(containerd: Containerd) -> Iterator[Trouble]:
    for handler in containerd.handlers:
        if handler.calls_nvidias and handler.name != containerd.default_handler:
            yield Trouble(f"the handler {handler.name} calls {handler.binary_name}")


@check(
    "NVSHIM-D037",
    ERROR,
    "the program of a handler is not found",
    why="containerd looks for shims on its own search path, which is not that of a shell.",
    remedy=(
        "install it into a directory of containerd's search path, or give the handler runtime_path"
    ),
    command="nvshim install",
)
def _no_shim(containerd: Containerd) -> Iterator[Trouble]:
    for handler in containerd.handlers:
        if handler.runtime_type and not handler.shim:
            severity = ERROR if handler.is_ours else WARNING
            where = handler.runtime_path or f"in {':'.join(containerd.search_path)}"
            yield Trouble(
                f"the handler {handler.name} ({handler.runtime_type}) has none {where}",
                severity=severity,
            )
        if handler.binary_name and not handler.binary:
            yield Trouble(f"the handler {handler.name} calls {handler.binary_name}: not there")


@check(
    "NVSHIM-D045",
    ERROR,
    "a drop-in takes away what another file says",
    why=(
        "containerd 1 takes a plugin's whole section from the last file that has it: a drop-in "
        "with one handler takes all other handlers and settings of the CRI away."
    ),
    remedy="put the handler into the root file, or the whole section into the drop-in",
    command=_CONFIGURE,
    reference=_FORMAT,
)
def _taken_away(containerd: Containerd) -> Iterator[Trouble]:
    if containerd.dump_fault or not containerd.cri:
        return
    in_effect = {handler.name for handler in containerd.handlers}
    for file in containerd.files:
        lost = [n for n, is_ours in file.handlers if n not in in_effect and not is_ours]
        if file.imported and lost:
            later = [
                f.path for f in containerd.files if f.imported and f is not file and f.handlers
            ]
            yield Trouble(f"{listed(lost)} of {file.path} is lost to {listed(later)}")
    drop_ins = [f.path for f in containerd.files if f.imported and not f.root and f.handlers]
    named = {name for file in containerd.files for name, _ in file.handlers}
    if drop_ins and _BUILT_IN not in in_effect | named:
        yield Trouble(f"containerd's own handler {_BUILT_IN} is lost to {listed(drop_ins)}")


@check(
    "NVSHIM-D038",
    WARNING,
    "containerd was started before its configuration was changed",
    why="It reads its configuration when it starts, and not again.",
    remedy="restart containerd when that suits; containers go on meanwhile",
    command="systemctl restart containerd",
)
def _not_reread(containerd: Containerd) -> Iterator[Trouble]:
    if containerd.newer:
        yield Trouble(f"{listed(containerd.newer)} (containerd is process {containerd.pid})")


@check(
    "NVSHIM-D039",
    WARNING,
    "our handler is in a file that is written anew at each start",
    why="k3s, rke2 and microk8s make containerd's configuration from a template.",
    remedy="put the handler into the template, or a drop-in, of that distribution",
    reference="https://docs.k3s.io/advanced#configuring-containerd",
)
def _overwritten(containerd: Containerd) -> Iterator[Trouble]:
    if not containerd.distribution or containerd.template:
        return
    if any(containerd.path in files for files in _files_of_ours(containerd).values()):
        yield Trouble(f"{containerd.path} is written anew by {containerd.distribution}")


@check(
    "NVSHIM-D087",
    WARNING,
    "containerd may open few files",
    why="Shims inherit the limit, and containers of some engines do.",
    remedy="set LimitNOFILE=infinity in containerd's unit",
)
def _descriptors(containerd: Containerd) -> Iterator[Trouble]:
    if (containerd.descriptors or _FEW_DESCRIPTORS) < _FEW_DESCRIPTORS:
        yield Trouble(f"containerd (process {containerd.pid}) may open {containerd.descriptors}")
