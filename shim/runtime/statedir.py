"""The files in a low-level runtime's state directory for a container.

=======  ================  ==================================================================
runtime  file              what is in it
=======  ================  ==================================================================
runc     ``state.json``    init, the configuration as runc understood it, cgroup directories
crun     ``status``        init, and the path of the cgroup
crun     ``config.json``   the OCI spec that the container was created from
both     ``exec.fifo``     where init waits to be started; removed afterwards
=======  ================  ==================================================================

Parsing is strict: if the directory contains an unknown file, key or value, :func:`read` returns
None, and the caller must call the runtime.

Source: runc libcontainer State, configs.Config; crun libcrun_container_status_t.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any, Final

from api.values import dataclass
from shim import files
from shim.bundle import has_own_pid_namespace
from shim.errors import BundleUnusable

FIFO: Final = "exec.fifo"

_CGROUPS: Final = "/sys/fs/cgroup"
_LONGEST: Final = 4 << 20

_RUNC_STATE: Final = "state.json"
_CRUN_STATUS: Final = "status"
_CRUN_SPEC: Final = "config.json"

_RUNC_FILES: Final = frozenset({_RUNC_STATE, FIFO})
_CRUN_FILES: Final = frozenset({_CRUN_STATUS, _CRUN_SPEC, FIFO})

_RUNC_KEYS: Final = frozenset(
    {
        "cgroup_paths",
        "config",
        "created",
        "external_descriptors",
        "id",
        "init_process_pid",
        "init_process_start",
        "intel_rdt_path",
        "namespace_paths",
        "rootless",
    }
)
_CRUN_KEYS: Final = frozenset(
    {
        "bundle",
        "cgroup-path",
        "created",
        "detached",
        "external_descriptors",
        "intelrdt",
        "owner",
        "pid",
        "process-start-time",
        "rootfs",
        "scope",
        "systemd-cgroup",
    }
)

# crun's annotations that involve other programs.
_CRUN_ANNOTATIONS: Final = "run.oci."


class Kind(Enum):
    """The runtime of a state directory."""

    RUNC = auto()
    CRUN = auto()


@dataclass(frozen=True, slots=True)
class RuntimeState:
    """A runtime's state of a container."""

    kind: Kind  # the runtime
    pid: int  # its init process
    start_time: int  # when init started, in clock ticks since boot
    hooks: frozenset[str]  # the kinds of its hooks
    own_pids: bool  # whether its processes end with its init
    cgroups: tuple[str, ...]  # the directories of its cgroup
    # whether the runtime would only remove those directories and the state itself: all processes
    # end with init, and systemd and resctrl are not involved
    plain: bool


def read(directory: str) -> RuntimeState | None:
    """Read a runtime's recorded state.

    Args:
        directory: the runtime's state directory of one container.

    Returns:
        The state; None unless everything in the directory is known.
    """
    try:
        names = frozenset(os.listdir(directory))
        if FIFO in names and not stat.S_ISFIFO(os.lstat(os.path.join(directory, FIFO)).st_mode):
            return None
        if _RUNC_STATE in names and names <= _RUNC_FILES:
            return _of_runc(_object(directory, _RUNC_STATE))
        if {_CRUN_STATUS, _CRUN_SPEC} <= names <= _CRUN_FILES:
            return _of_crun(_object(directory, _CRUN_STATUS), _object(directory, _CRUN_SPEC))
    except (
        BundleUnusable, OSError, AttributeError, KeyError, OverflowError, TypeError, ValueError,
    ):  # fmt: skip
        pass  # the form is unknown
    return None


def remove(directory: str) -> None:
    """Remove a state directory that :func:`read` has parsed, its identifying file last.

    Like a runtime, this also removes files added meanwhile: without the identifying file, no
    runtime would.

    Raises:
        OSError: something in it cannot be removed, or something is mounted there.
    """
    for name in (FIFO, _CRUN_SPEC, _CRUN_STATUS, _RUNC_STATE):
        files.remove(os.path.join(directory, name))
    files.remove_tree(directory)


def _object(directory: str, name: str) -> dict[str, Any]:
    path = os.path.join(directory, name)
    return files.parse_object(files.read(path, _LONGEST), path)


def _of_runc(state: dict[str, Any]) -> RuntimeState | None:
    if not state.keys() <= _RUNC_KEYS:
        return None
    config = state["config"]
    cgroups = tuple(state["cgroup_paths"].values())
    if not all(isinstance(path, str) for path in cgroups):
        return None
    by_systemd = any(config["cgroups"].get(key) for key in ("Systemd", "systemd"))
    with_resctrl = bool(state["intel_rdt_path"]) or any(
        key.lower().replace("_", "") == "intelrdt" and value is not None
        for key, value in config.items()
    )
    pids = [n for n in config["namespaces"] if n["type"] == "NEWPID"]
    own_pids = len(pids) == 1 and not pids[0]["path"]
    plain = (
        not (state["rootless"] or by_systemd or with_resctrl)
        and own_pids
        and all(_is_below_cgroups(path) for path in cgroups)
    )
    hooks = frozenset(_kinds_of(config["Hooks"]))
    pid, start_time = int(state["init_process_pid"]), int(state["init_process_start"])
    return RuntimeState(Kind.RUNC, pid, start_time, hooks, own_pids, cgroups, plain)


def _of_crun(status: dict[str, Any], spec: dict[str, Any]) -> RuntimeState | None:
    if not status.keys() <= _CRUN_KEYS:
        return None
    annotations = spec.get("annotations") or {}
    path = status["cgroup-path"]
    own_pids = has_own_pid_namespace(spec)
    plain = (
        not (status["systemd-cgroup"] or status.get("scope") or status.get("intelrdt"))
        and not (spec.get("linux") or {}).get("intelRdt")
        and not any(name.startswith(_CRUN_ANNOTATIONS) for name in annotations)
        and own_pids
        and ".." not in path.split("/")
    )
    cgroups = tuple(_below_each_hierarchy(path)) if path else ()
    hooks = frozenset(_kinds_of(spec.get("hooks")))
    pid, start_time = int(status["pid"]), int(status["process-start-time"])
    return RuntimeState(Kind.CRUN, pid, start_time, hooks, own_pids, cgroups, plain)


def _kinds_of(hooks: dict[str, Any] | None) -> list[str]:
    return [kind.lower() for kind, programs in (hooks or {}).items() if programs]


def _is_below_cgroups(path: str) -> bool:
    return path.startswith(f"{_CGROUPS}/") and os.path.normpath(path) == path


def _below_each_hierarchy(path: str) -> Iterator[str]:
    """Yield where crun has created a cgroup: in the hierarchies that it is in, like us."""
    below = path.strip("/")
    if os.path.exists(os.path.join(_CGROUPS, "cgroup.procs")):  # version 2 alone
        roots = [""]
    else:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            fields = [line.split(":", 2) for line in file]
        roots = [names.removeprefix("name=") for _, names, _ in fields if names]
        if os.path.exists(os.path.join(_CGROUPS, "unified", "cgroup.procs")):
            roots.append("unified")
    for root in roots if below else ():
        directory = os.path.join(_CGROUPS, root, below)
        if os.path.exists(os.path.join(directory, "cgroup.procs")):
            yield directory
