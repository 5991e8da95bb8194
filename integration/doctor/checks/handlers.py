"""Handlers as Kubernetes uses them, and their features: D040 to D044, D046 to D049."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from integration.doctor.facts import Containerd, Handler, Kubernetes
from integration.doctor.findings import ERROR, WARNING, Trouble, check, listed
from integration.handlers import RUNC_TYPE, SURVIVES_SANDBOXER, parse_release

# Releases that query features only of handlers of runc's type: from the first to before the
# second.
_QUERIES_RUNC_ONLY: Final = (((2, 0, 0), (2, 2, 7)), ((2, 3, 0), (2, 3, 4)))


@check("D040")
def _options(containerd: Containerd) -> Iterator[Trouble]:
    for handler in containerd.handlers:
        if not handler.unknown_options:
            continue
        found = f"the handler {handler.name} has {listed(handler.unknown_options)}"
        if handler.runtime_type == RUNC_TYPE:
            yield Trouble(
                f"{found}, which containerd drops from a handler of type {RUNC_TYPE}",
                severity=WARNING,
                remedy="remove them, or use the shim's type for the handler",
            )
        else:
            yield Trouble(found)


def _used(containerd: Containerd) -> Iterator[Handler]:
    """Yield the handlers whose options matter: the shim's, and the default."""
    for handler in containerd.handlers:
        default = handler.name == containerd.default_handler
        if handler.is_ours or (default and handler.runtime_type == RUNC_TYPE):
            yield handler


@check("D041")
def _cgroup_driver(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    driver = kubernetes.cgroup_driver
    if not driver:
        return
    for handler in _used(containerd):
        if driver == "cgroupfs" and handler.systemd_cgroup:
            yield Trouble(
                f"the kubelet uses cgroupfs, the handler {handler.name} has SystemdCgroup = true",
                remedy="set cgroupDriver: systemd for the kubelet, or SystemdCgroup = false",
            )
        elif driver == "systemd" and not handler.systemd_cgroup:
            # The shim detects the driver from the cgroup's name; runc's shim does not. containerd
            # reports the option of runc's type to the kubelet.
            if handler.is_ours and handler.runtime_type != RUNC_TYPE:
                continue
            yield Trouble(
                f"the kubelet uses systemd, the handler {handler.name} does not have "
                "SystemdCgroup = true",
                severity=WARNING if handler.is_ours else ERROR,
            )
    if driver == "systemd" and not kubernetes.systemd:
        yield Trouble(
            "the kubelet uses systemd, but systemd does not run here",
            remedy="set cgroupDriver: cgroupfs for the kubelet",
        )


@check("D042")
def _unequal(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[str]:
    if kubernetes.cgroup_driver:
        return  # D041 then reports which handler is wrong
    options = {
        h.name: bool(h.systemd_cgroup)
        for h in _used(containerd)
        if not (h.is_ours and h.systemd_cgroup is None)  # detects it from the cgroup's name
    }
    if len(set(options.values())) > 1:
        yes = [name for name, systemd in options.items() if systemd]
        no = [name for name, systemd in options.items() if not systemd]
        yield f"{listed(yes)} has SystemdCgroup = true, {listed(no)} does not"


@check("D043")
def _no_handler(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    if kubernetes.classes is None:
        return
    names = {handler.name for handler in containerd.handlers}
    for runtime_class in kubernetes.classes:
        if runtime_class.handler not in names:
            yield Trouble(
                f"RuntimeClass {runtime_class.name} in {runtime_class.source} names the handler "
                f"{runtime_class.handler}; containerd has {listed(sorted(names)) or 'none'}"
            )


@check("D044")
def _no_class(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    if kubernetes.classes is None:
        return
    named = {runtime_class.handler for runtime_class in kubernetes.classes}
    handlers = [h.name for h in containerd.handlers if h.is_ours]
    if handlers and named.isdisjoint(handlers) and containerd.default_handler not in handlers:
        yield Trouble(
            f"no RuntimeClass names {listed(handlers)}, and the default handler is "
            f"{containerd.default_handler or 'runc'}"
        )


@check("D046")
def _no_cri(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[str | Trouble]:
    if containerd.cri:
        return
    where = f"disabled_plugins of {containerd.path}"
    if kubernetes.cgroup_driver:
        yield f"{where} has the CRI, but a kubelet runs on this node"
    elif any(is_ours for file in containerd.files for _, is_ours in file.handlers):
        yield Trouble(f"{where} has the CRI, so its handlers have no effect", severity=WARNING)


@check("D047")
def _no_features(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    release = (parse_release(containerd.version) or ())[:3]
    if not kubernetes.cgroup_driver or not any(
        first <= release < fixed for first, fixed in _QUERIES_RUNC_ONLY
    ):
        return
    silent = [h.name for h in containerd.handlers if h.is_ours and h.runtime_type != RUNC_TYPE]
    if silent:
        yield Trouble(
            f"containerd {containerd.version} does not ask {listed(silent)} about support for user "
            "namespaces and recursive read-only mounts"
        )


@check("D048")
def _runc_sandboxer(containerd: Containerd) -> Iterator[Trouble]:
    for handler in containerd.handlers:
        if handler.is_ours and handler.runtime_type == RUNC_TYPE and handler.sandboxer == "shim":
            yield Trouble(
                f'the handler {handler.name} has the type {RUNC_TYPE} and sandboxer = "shim"'
            )


@check("D049")
def _sandboxer_crashes_containerd(containerd: Containerd) -> Iterator[Trouble]:
    release = parse_release(containerd.version)
    if release is not None and release >= SURVIVES_SANDBOXER:
        return
    for handler in containerd.handlers:
        if handler.is_ours and handler.runtime_type != RUNC_TYPE and handler.sandboxer == "shim":
            which = f"containerd {containerd.version or 'of an unknown version'}"
            yield Trouble(
                f'the handler {handler.name} has sandboxer = "shim" on {which}',
                severity=WARNING if release is None else ERROR,
            )
