"""What of ours is installed, and what of it runs.

Source: the tree that ``make dist`` makes; shim.detach for the names of processes;
proc_pid_maps(5), proc_pid_smaps(5).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from integration.doctor.facts import Installation, Server, Shim
from integration.doctor.observing.running import SYSTEM_PATH, hosts_processes, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.observing.running import Process
    from integration.doctor.places import Places

__all__ = ["PROGRAM", "look_at_installation"]

PROGRAM: Final = "containerd-shim-nvidia-v1"
_LINKS: Final = (PROGRAM, f"{PROGRAM}.py", "nvshim")
_FORK_SERVER: Final = "fork-server"
_SPARE: Final = "-spare"
# Stopped, being traced, dead.
_STUCK: Final = frozenset({"T", "t", "Z", "X"})


def look_at_installation(places: Places) -> Installation:
    """Our trees, links, and processes."""
    prefix = places.at(places.prefix)
    names = sorted(os.listdir(prefix)) if os.path.isdir(prefix) else []
    trees = [n for n in names if n != "current" and os.path.isdir(os.path.join(prefix, n, "bin"))]
    link = os.path.join(prefix, "current")
    current = os.path.basename(os.readlink(link)) if os.path.islink(link) else ""
    ours = [p for p in hosts_processes(places) if _is_ours(p)]
    return Installation(
        prefix=places.prefix,
        trees=tuple(name for name in trees if not os.path.islink(os.path.join(prefix, name))),
        current=current,
        dangling=tuple(_dangling(places)),
        programs=tuple(_programs(places)),
        interpreter_fault=_interpreter_fault(places),
        shims=tuple(_shim(places, p) for p in ours if _FORK_SERVER not in p.words),
        servers=tuple(
            _server(places, p) for p in ours if _FORK_SERVER in p.words and _SPARE not in p.words
        ),
    )


def _is_ours(process: Process) -> bool:
    """A shim or a fork server: both write their own command line."""
    return process.words[:1] == (PROGRAM,) and (
        bool(process.option("-namespace")) or _FORK_SERVER in process.words
    )


def _dangling(places: Places) -> Iterator[str]:
    links = [os.path.join(places.prefix, "current")]
    links += [os.path.join(places.bindir, name) for name in _LINKS]
    for link in links:
        # The last link itself, and not what it leads to.
        directory, name = os.path.split(link)
        here = os.path.join(places.at(directory), name)
        if os.path.islink(here) and not os.path.exists(places.at(link)):
            yield f"{link} leads to {os.readlink(here)}"


def _programs(places: Places) -> Iterator[tuple[str, str]]:
    known = set()
    for directory in SYSTEM_PATH:
        path = os.path.join(directory, PROGRAM)
        here = os.path.realpath(places.at(path))
        if os.path.isfile(here) and here not in known:
            known.add(here)
            yield path, places.within(here)


def _interpreter_fault(places: Places) -> str:
    """The script that the launcher becomes names its interpreter in the first line."""
    for path, real in _programs(places):
        here = places.at(real)
        script = f"{here}.py" if os.path.isfile(f"{here}.py") else here
        line = read_file(script, most=256).partition("\n")[0]
        if not line.startswith("#!/"):
            continue
        interpreter = line.removeprefix("#!").split()[0]
        if not os.access(places.at(interpreter), os.X_OK):
            return f"{path} is run by {interpreter}, which is not there"
    return ""


def _shim(places: Places, process: Process) -> Shim:
    tree, gone = _tree(places, process)
    return Shim(
        pid=process.pid,
        namespace=process.option("-namespace"),
        tree=tree,
        gone=gone,
        memory=_memory(process),
    )


def _tree(places: Places, process: Process) -> tuple[str, bool]:
    """The tree that a process has files of, and whether it is gone.

    The command line does not tell: it has the program's bare name. What is mapped does.
    """
    prefix = f"{places.prefix.rstrip('/')}/"
    with contextlib.suppress(OSError):
        for line in read_file(f"{process.directory}/maps").splitlines():
            path = line.partition("/")[2].removesuffix(" (deleted)")
            if f"/{path}".startswith(prefix):
                tree = prefix + f"/{path}".removeprefix(prefix).partition("/")[0]
                return tree, not os.path.isdir(places.at(tree))
    return "", False


def _memory(process: Process) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in read_file(f"{process.directory}/smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return None


def _server(places: Places, process: Process) -> Server:
    tree, _ = _tree(places, process)
    address = process.option("-address")
    return Server(process.pid, address, _answers(places, process), tree)


def _answers(places: Places, process: Process) -> bool:
    """Whether it listens, and runs: to ask it would cost it the process that it has ready."""
    if _state(process) in _STUCK:
        return False
    sockets = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{process.directory}/fd"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(f"{process.directory}/fd/{name}"))
    lines = read_file(places.at("/proc/net/unix")).splitlines()[1:]
    words = (line.split() for line in lines)
    # Flags 00010000 is SO_ACCEPTCON: it listens. The seventh word is the socket's inode.
    return any(f"socket:[{w[6]}]" in sockets for w in words if w[6:] and w[3] == "00010000")


def _state(process: Process) -> str:
    with contextlib.suppress(OSError, IndexError):
        return read_file(f"{process.directory}/stat").rpartition(")")[2].split()[0]
    return ""
