"""The child that becomes a control daemon, or speaks to one: run by path and never imported.

    python3 -I -S driver_launch_child.py JSON

JSON is an object; what is not said of it is "", or empty::

    program, arguments   what is executed at last, as seen below root
    environment          all of its environment
    root                 its root directory; "" for the host's
    binds                host directories that it has to see, at the same places
    dev                  the host's device nodes
    shm                  what it sees as /dev/shm; "" to leave that as it is
    cgroup               the name of a cgroup at the top of every hierarchy; "" to stay where it is
    lock                 a file that is locked as long as it, or a child of it, lives; "" for none
    record               what is written into that file, besides "pid" and "start"
    ends_with            the process with which it ends, its parent; 0 for none

A daemon leaves the agent's cgroup: that of a pod, or of a unit of systemd, is emptied when the
agent ends, and its limits were made for the agent alone. Where it may not leave it says so, and
stays.

It has mounts of its own, so that it has other shared memory than the host's programs; so has
whatever gets another root. Mounts that go on the host go there too: they are not kept.

Ends with 75 if another has the lock, with 71 if something fails; its last line on stderr says what.

Sources: flock(2), whose locks stay with the open file over execve(2); mount_namespaces(7);
cgroups(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
from typing import Any

TEMPFAIL, OSERR = 75, 71
_CLONE_NEWNS = 0x20000
_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
_NOTHING = {
    "arguments": [],
    "binds": [],
    "shm": "",
    "cgroup": "",
    "lock": "",
    "record": {},
    "ends_with": 0,
}
_START_TIME = 19  # among the fields of /proc/PID/stat after the name


def main(text: str) -> None:
    """Becomes the program. Does not return."""
    wish = {**_NOTHING, **json.loads(text)}
    try:
        lock = _lock(wish["lock"]) if wish["lock"] else -1
        if lock < -1:
            sys.stderr.write("another one has the lock\n")
            os._exit(TEMPFAIL)
        if wish["ends_with"]:
            _end_with(wish["ends_with"])
        if wish["cgroup"]:
            _leave(wish["cgroup"])
        if wish["root"] or wish["shm"]:
            _own_mounts(wish)
        if lock >= 0:
            _note(lock, wish["record"])
            os.set_inheritable(lock, True)
        if wish["root"]:
            os.chroot(wish["root"])
        os.chdir("/")
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        argv = [wish["program"], *wish["arguments"]]
        os.execve(wish["program"], argv, wish["environment"])  # noqa: S606 - the driver's
    except OSError as error:
        sys.stderr.write(f"{error.filename or wish['program']}: {error.strerror}\n")
        os._exit(OSERR)


def _end_with(parent: int) -> None:
    """Be killed once the parent is no more, if it is not already."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(OSERR)


def _lock(path: str) -> int:
    """Take the lock; the descriptor, or -2 if another has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return -2
    os.ftruncate(fd, 0)  # what it says is of one who is dead
    return fd


def _note(lock: int, record: dict[str, Any]) -> None:
    """Say in the lock whose it is. Who only looks whether it is taken may read half of it."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    record = {**record, "pid": os.getpid(), "start": int(fields[_START_TIME])}
    os.pwrite(lock, json.dumps(record).encode(), 0)


def cgroup_tops() -> dict[str, bool]:
    """Where the top of each hierarchy of cgroups is mounted, and whether it has cpusets.

    A new cgroup of theirs has no processors, so that nobody can be in it: their top is used.
    """
    found = {}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            words = line.split()
            kind, options, top = words[words.index("-") + 1], words[-1].split(","), words[4]
            # A container may have a part of a hierarchy mounted where others have all of it.
            is_top = (
                not os.path.exists(f"{top}/cgroup.type")
                if kind == "cgroup2"
                else os.path.exists(f"{top}/release_agent")
            )
            if kind in {"cgroup", "cgroup2"} and is_top:
                found[top] = "cpuset" in options
    return found


def _leave(name: str) -> None:
    """Leave the cgroups that this was started in for those of a name."""
    for top, has_cpusets in cgroup_tops().items():
        own = top if has_cpusets else f"{top}/{name}"
        try:
            os.makedirs(own, exist_ok=True)
            with open(f"{own}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
        except OSError as error:
            sys.stderr.write(f"stays in its cgroup of {top}: {error.strerror}\n")


def _own_mounts(wish: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "/")
    root = wish["root"]
    if root:
        # A driver container's root has these itself.
        if not os.path.exists(f"{root}/dev/nvidiactl"):
            _bind(libc, wish["dev"], root, "/dev", _MS_REC)
        if not os.path.exists(f"{root}/proc/self"):
            _bind(libc, "/proc", root, "/proc", _MS_REC)
        for path in wish["binds"]:
            _bind(libc, path, root, path)
    if wish["shm"]:
        _bind(libc, wish["shm"], root, "/dev/shm")  # noqa: S108 - where shm_open() looks


def _bind(libc: Any, source: str, root: str, path: str, flags: int = 0) -> None:
    """Make a directory of the host seen below a root; what leads out of that is refused."""
    target = root + path
    if root:
        real = os.path.realpath(target)
        if not real.startswith(f"{os.path.realpath(root)}/"):
            raise OSError(0, f"a link leads out of {root}", target)
        os.makedirs(target, mode=0o755, exist_ok=True)
    arguments = (os.fsencode(source), os.fsencode(target), None, _MS_BIND | flags, None)
    _check(libc.mount(*arguments), target)


def _check(result: int, path: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
