"""Handlers as Kubernetes uses them, and what they can do: D040 to D044, D046 to D048."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check, listed
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Containerd, Handler, Kubernetes

_CGROUPS: Final = (
    "https://kubernetes.io/docs/setup/production-environment/container-runtimes/#cgroup-drivers"
)
# The releases that ask no handler but runc's type what it can do: from the first to before the
# second.
_ASKS_RUNC_ALONE: Final = (((2, 0, 0), (2, 2, 7)), ((2, 3, 0), (2, 3, 4)))
_CLASSES: Final = "https://kubernetes.io/docs/concepts/containers/runtime-class/"


@check(
    "NVSHIM-D040",
    ERROR,
    "our handler has options that mean nothing",
    why=(
        "An option that is misspelt would be a setting without effect; so our shim refuses to "
        "make containers with it."
    ),
    remedy="correct or remove them; those of containerd.runc.v1.Options are known",
)
def _options(containerd: Containerd) -> Iterator[Trouble]:
    for handler in containerd.handlers:
        if not handler.unknown_options:
            continue
        found = f"the handler {handler.name} has {listed(handler.unknown_options)}"
        if handler.runtime_type == RUNC_TYPE:
            yield Trouble(
                f"{found}, which containerd drops from a handler of the type {RUNC_TYPE}",
                severity=WARNING,
                remedy="remove them, or give the handler our type",
            )
        else:
            yield Trouble(found)


def _used(containerd: Containerd) -> Iterator[Handler]:
    """Handlers whose options matter: ours, and the default."""
    for handler in containerd.handlers:
        default = handler.name == containerd.default_handler
        if handler.is_ours or (default and handler.runtime_type == RUNC_TYPE):
            yield handler


@check(
    "NVSHIM-D041",
    ERROR,
    "kubelet and handler have different cgroup drivers",
    why=(
        "Two managers of one tree of cgroups: limits are lost, pods do not start, and systemd "
        "takes devices away that it knows nothing of."
    ),
    remedy="give the handler SystemdCgroup = true",
    command="nvshim configure containerd --systemd-cgroup yes",
    reference=_CGROUPS,
)
def _cgroup_driver(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    driver = kubernetes.cgroup_driver
    if not driver:
        return
    for handler in _used(containerd):
        if driver == "cgroupfs" and handler.systemd_cgroup:
            yield Trouble(
                f"kubelet has cgroupfs, the handler {handler.name} has SystemdCgroup = true",
                remedy="set cgroupDriver: systemd for kubelet, or SystemdCgroup = false",
            )
        elif driver == "systemd" and not handler.systemd_cgroup:
            # Ours goes by the cgroup's name, which is systemd's; runc's does not. containerd hands
            # the option of runc's type on to the kubelet.
            if handler.is_ours and handler.runtime_type != RUNC_TYPE:
                continue
            yield Trouble(
                f"kubelet has systemd, the handler {handler.name} does not have "
                "SystemdCgroup = true",
                severity=WARNING if handler.is_ours else ERROR,
            )
    if driver == "systemd" and not kubernetes.systemd:
        yield Trouble(
            "kubelet has systemd, and systemd does not run here",
            remedy="set cgroupDriver: cgroupfs for kubelet",
        )


@check(
    "NVSHIM-D042",
    WARNING,
    "handlers have different cgroup drivers",
    why="Containers of one node then are in two trees of cgroups.",
    remedy="give all handlers the same SystemdCgroup",
    command="nvshim configure containerd",
    reference=_CGROUPS,
)
def _unequal(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    if kubernetes.cgroup_driver:
        return  # then it is said of which is right
    said = {
        h.name: bool(h.systemd_cgroup)
        for h in _used(containerd)
        if not (h.is_ours and h.systemd_cgroup is None)  # it goes by the cgroup's name
    }
    if len(set(said.values())) > 1:
        yes = [name for name, systemd in said.items() if systemd]
        no = [name for name, systemd in said.items() if not systemd]
        yield Trouble(f"{listed(yes)} has SystemdCgroup = true, {listed(no)} has not")


@check(
    "NVSHIM-D043",
    ERROR,
    "a RuntimeClass names a handler that containerd does not have",
    why='Its pods stay in ContainerCreating: "no runtime for … is configured".',
    remedy="configure the handler, or keep such pods off this node by the class's scheduling",
    command="nvshim configure containerd",
    reference=_CLASSES,
)
def _no_handler(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    if kubernetes.classes is None:
        return
    names = {handler.name for handler in containerd.handlers}
    for runtime_class in kubernetes.classes:
        if runtime_class.handler not in names:
            yield Trouble(
                f"RuntimeClass {runtime_class.name} of {runtime_class.source} names the handler "
                f"{runtime_class.handler}; containerd has {listed(sorted(names)) or 'none'}"
            )


@check(
    "NVSHIM-D044",
    WARNING,
    "no RuntimeClass leads to our handler",
    why="A pod without one is made by the default handler, and has no GPU.",
    remedy="make a RuntimeClass with that handler, or make the handler the default",
    reference=_CLASSES,
)
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


@check(
    "NVSHIM-D046",
    ERROR,
    "containerd's CRI is turned off",
    why=(
        "kubelet cannot use it, and handlers have no effect. Docker's package of containerd "
        "comes with it turned off."
    ),
    remedy='take "cri" out of disabled_plugins, and restart containerd when that suits',
)
def _no_cri(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    if containerd.cri:
        return
    where = f"disabled_plugins of {containerd.path}"
    if kubernetes.cgroup_driver:
        yield Trouble(f"{where} has the CRI, and there is a kubelet")
    elif any(is_ours for file in containerd.files for _, is_ours in file.handlers):
        yield Trouble(f"{where} has the CRI, whose handlers are for nothing", severity=WARNING)


@check(
    "NVSHIM-D047",
    NOTE,
    "pods in user namespaces are refused under our handler",
    why=(
        "This containerd asks no handler but those of runc's type what it can do. Of ours it tells "
        "the kubelet nothing, and that refuses pods with `hostUsers: false` or "
        "`recursiveReadOnly: Enabled`."
    ),
    remedy="update containerd (2.2.7, 2.3.4 or later), or give the handler runc's type",
    command=f"nvshim configure containerd --runtime-type {RUNC_TYPE}",
    reference="https://github.com/containerd/containerd/pull/13504",
)
def _no_features(containerd: Containerd, kubernetes: Kubernetes) -> Iterator[Trouble]:
    release = tuple(map(int, containerd.version.split("."))) if containerd.version else ()
    if not kubernetes.cgroup_driver or not any(
        first <= release < fixed for first, fixed in _ASKS_RUNC_ALONE
    ):
        return
    silent = [h.name for h in containerd.handlers if h.is_ours and h.runtime_type != RUNC_TYPE]
    if silent:
        yield Trouble(
            f"containerd {containerd.version} does not ask {listed(silent)} for user namespaces "
            "and recursive read-only mounts"
        )


@check(
    "NVSHIM-D048",
    ERROR,
    "a handler's sandboxes are not made by our shim",
    why=(
        "For a sandbox containerd takes the program of the handler's type, and does not look at "
        "runtime_path: it starts runc's shim, which makes none."
    ),
    remedy='take sandboxer = "shim" from the handler, or give it our type',
    command=f"nvshim configure containerd --runtime-type {RUNTIME_TYPE}",
)
def _sandboxes_elsewhere(containerd: Containerd) -> Iterator[Trouble]:
    for handler in containerd.handlers:
        if handler.is_ours and handler.runtime_type == RUNC_TYPE and handler.sandboxer == "shim":
            yield Trouble(
                f'the handler {handler.name} has the type {RUNC_TYPE} and sandboxer = "shim"'
            )
