"""containerd's configuration: D030 to D039, D045 and D087."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from integration.doctor.facts import Containerd, Docker, Kubernetes
from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check, listed
from shim import RUNTIME_NAME

_BUILT_IN: Final = "runc"
_CONFIGURE: Final = "nvshim configure containerd"
_FEW_DESCRIPTORS: Final = 16384


def _files_of_ours(containerd: Containerd) -> dict[str, list[str]]:
    """Return the shim's handlers by name, with the files that define each."""
    found: dict[str, list[str]] = {}
    for file in containerd.files:
        for name, is_ours in file.handlers:
            if is_ours:
                found.setdefault(name, []).append(file.path)
    return found


@check("D030")
def _refused(containerd: Containerd) -> Iterator[str]:
    for file in containerd.files:
        if file.fault:
            yield f"{file.path}: {file.fault}"
    if containerd.dump_fault and not any(file.fault for file in containerd.files):
        yield f"containerd --config {containerd.path}: {containerd.dump_fault}"


@check("D031")
def _no_handler(
    containerd: Containerd, kubernetes: Kubernetes, docker: Docker | None = None
) -> Iterator[Trouble]:
    if not containerd.cri:
        return
    if any(handler.is_ours for handler in containerd.handlers) or _files_of_ours(containerd):
        return
    if docker is not None and any(r.is_ours for r in docker.runtimes):
        return
    where = containerd.path if containerd.exists else f"{containerd.path}, which does not exist"
    found = f"no handler of type {RUNTIME_NAME} in {where}"
    if not containerd.by_name:
        yield Trouble(found)
        return
    yield Trouble(
        f"{found}; containerd can run {containerd.by_name} by name",
        remedy=f"nothing for ctr and nerdctl (--runtime {RUNTIME_NAME}); pods need a handler",
        command=_CONFIGURE,
        severity=WARNING if kubernetes.cgroup_driver else NOTE,
    )


@check("D032")
def _not_in_effect(containerd: Containerd) -> Iterator[str]:
    if not containerd.cri:
        return
    in_effect = {handler.name for handler in containerd.handlers if handler.is_ours}
    covered = {file.path for file in containerd.files if file.imported}
    for name, files in _files_of_ours(containerd).items():
        if name in in_effect:
            continue
        loose = [file for file in files if file not in covered]
        if loose:
            yield f"{name} is in {listed(loose)}, which {containerd.path} does not import"
        elif not containerd.dump_fault:
            yield f"{name} is in {listed(files)}, but containerd's merged configuration differs"


@check("D033")
def _versions(containerd: Containerd) -> Iterator[str]:
    root = next((file for file in containerd.files if file.root), None)
    for file in containerd.files:
        if root is None or file.root or file.fault or not file.imported:
            continue
        if file.version != root.version:
            yield f"{file.path} has version {file.version}, {root.path} has version {root.version}"


@check("D034")
def _no_default(containerd: Containerd) -> Iterator[str]:
    if not containerd.default_handler:
        return
    names = [handler.name for handler in containerd.handlers]
    if containerd.default_handler not in names:
        yield (
            f"default_runtime_name is {containerd.default_handler}; the handlers are "
            f"{listed(names)}"
        )


@check("D035")
def _no_type(containerd: Containerd) -> Iterable[str]:
    untyped = (handler for handler in containerd.handlers if not handler.runtime_type)
    return (f"the handler {handler.name} in {containerd.path}" for handler in untyped)


@check("D036")
def _old_handler(containerd: Containerd) -> Iterator[str]:
    for handler in containerd.handlers:
        if handler.calls_nvidias and handler.name != containerd.default_handler:
            yield f"the handler {handler.name} calls {handler.binary_name}"


@check("D037")
def _no_shim(containerd: Containerd) -> Iterator[str | Trouble]:
    for handler in containerd.handlers:
        if handler.runtime_type and not handler.shim:
            severity = ERROR if handler.is_ours else WARNING
            where = handler.runtime_path or f"in {':'.join(containerd.search_path)}"
            yield Trouble(
                f"the shim of handler {handler.name} ({handler.runtime_type}) is not found {where}",
                severity=severity,
            )
        if handler.binary_name and not handler.binary:
            yield f"the handler {handler.name} calls {handler.binary_name}, which does not exist"


@check("D045")
def _taken_away(containerd: Containerd) -> Iterator[str]:
    if containerd.dump_fault or not containerd.cri:
        return
    in_effect = {handler.name for handler in containerd.handlers}
    for file in containerd.files:
        lost = [n for n, is_ours in file.handlers if n not in in_effect and not is_ours]
        if file.imported and lost:
            later = [
                f.path for f in containerd.files if f.imported and f is not file and f.handlers
            ]
            yield f"{listed(lost)} of {file.path} is overridden by {listed(later)}"
    drop_ins = [f.path for f in containerd.files if f.imported and not f.root and f.handlers]
    named = {name for file in containerd.files for name, _ in file.handlers}
    if drop_ins and _BUILT_IN not in in_effect | named:
        yield f"containerd's built-in handler {_BUILT_IN} is overridden by {listed(drop_ins)}"


@check("D038")
def _not_reread(containerd: Containerd) -> Iterator[str]:
    if containerd.newer:
        yield f"{listed(containerd.newer)} (containerd is process {containerd.pid})"


@check("D039")
def _overwritten(containerd: Containerd) -> Iterator[str]:
    if not containerd.distribution or containerd.template:
        return
    if any(containerd.path in files for files in _files_of_ours(containerd).values()):
        yield f"{containerd.path} is regenerated by {containerd.distribution}"


@check("D087")
def _descriptors(containerd: Containerd) -> Iterator[str]:
    if (containerd.descriptors or _FEW_DESCRIPTORS) < _FEW_DESCRIPTORS:
        yield f"containerd (process {containerd.pid}) may open {containerd.descriptors} files"
