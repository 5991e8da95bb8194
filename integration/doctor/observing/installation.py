"""Find the shim's installation and its running processes.

Source: the tree that ``make dist`` builds; shim.verbs.handover for the process names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from integration.containers.node_processes import Process, host_processes
from integration.containers.shims import FORK_SERVER, SPARE_FLAG
from integration.doctor.facts import Installation, Server, Shim
from integration.doctor.observing.running import SYSTEM_PATH, read_file
from integration.doctor.places import Places
from shim import PROGRAM

_LINKS: Final = (PROGRAM, f"{PROGRAM}.py", "nvshim")
# Stopped, traced.
_STUCK: Final = frozenset({"T", "t"})
# Seconds after which a fork server must be ready, even on a busy node.
_PREPARED: Final = 60.0


def look_at_installation(places: Places) -> Installation:
    """Return the installed trees, links and processes."""
    prefix = places.at(places.prefix)
    names = sorted(os.listdir(prefix)) if os.path.isdir(prefix) else []
    trees = [n for n in names if n != "current" and os.path.isdir(os.path.join(prefix, n, "bin"))]
    link = os.path.join(prefix, "current")
    current = os.path.basename(os.readlink(link)) if os.path.islink(link) else ""
    ours = [p for p in host_processes(places.at("/proc")) if _is_ours(p)]
    return Installation(
        prefix=places.prefix,
        trees=tuple(name for name in trees if not os.path.islink(os.path.join(prefix, name))),
        current=current,
        dangling=tuple(_dangling(places)),
        programs=tuple(_programs(places)),
        interpreter_fault=_interpreter_fault(places),
        shims=tuple(_shim(places, p) for p in ours if FORK_SERVER not in p.words),
        servers=tuple(_servers(places, ours)),
    )


def _is_ours(process: Process) -> bool:
    """Return whether it is a shim or a fork server; both set their own command line."""
    return process.words[:1] == [PROGRAM] and (
        bool(process.option("-namespace")) or FORK_SERVER in process.words
    )


def _dangling(places: Places) -> Iterator[str]:
    links = [os.path.join(places.prefix, "current")]
    links += [os.path.join(places.bindir, name) for name in _LINKS]
    for link in links:
        # The link itself, not its target.
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
    """Check the interpreter in the first line of the script that the launcher executes."""
    for path, real in _programs(places):
        here = places.at(real)
        script = f"{here}.py" if os.path.isfile(f"{here}.py") else here
        line = read_file(script, most=256).partition("\n")[0]
        if not line.startswith("#!/"):
            continue
        interpreter = line.removeprefix("#!").split()[0]
        if not os.access(places.at(interpreter), os.X_OK):
            return f"{path} needs {interpreter}, which does not exist"
    return ""


def _shim(places: Places, process: Process) -> Shim:
    tree, gone = _tree(places, process)
    memory, _ = process.procfs.memory(process.pid) or (None, None)
    return Shim(process.pid, process.option("-namespace"), tree, gone, memory)


def _tree(places: Places, process: Process) -> tuple[str, bool]:
    """Return the tree whose files a process has mapped, and whether the tree was removed.

    The command line has only the program's bare name.
    """
    prefix = f"{places.prefix.rstrip('/')}/"
    for path in process.procfs.mapped(process.pid):
        if path.startswith(prefix):
            tree = prefix + path.removeprefix(prefix).partition("/")[0]
            return tree, not os.path.isdir(places.at(tree))
    return "", False


def _servers(places: Places, ours: Sequence[Process]) -> Iterator[Server]:
    """Yield the fork servers that are still running."""
    for process in ours:
        if FORK_SERVER not in process.words or SPARE_FLAG in process.words:
            continue
        tree, _ = _tree(places, process)
        listens = bool(process.procfs.listening(process.pid))
        status = process.procfs.status(process.pid)
        if status is not None and not status.is_zombie:
            # Not tested with a connection, which would use up its pre-forked process.
            works = status.state not in _STUCK and (listens or status.age < _PREPARED)
            yield Server(process.pid, process.option("-address"), works, tree)
