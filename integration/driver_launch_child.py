"""The child that becomes a driver program, such as MPS's control daemon. It is run by its path.

    python3 -I -S driver_launch_child.py JSON

JSON is an object. Missing keys are "", or empty::

    program, arguments   the program to execute, as seen below root
    environment          all of its environment
    root                 its root directory; "" for the host's
    binds                host directories to mount at the same paths below root
    dev                  the directory of the host's device nodes
    shm                  a directory to mount at /dev/shm; "" to leave that unchanged
    cgroups              the directories of cgroups to move to; created if they are missing
    lock                 a descriptor that holds a lock as long as the program, or a child of it,
                         lives; -1 for none
    record               what to write into that file, besides "pid" and "start"
    ends_with            the parent's pid, to end with the parent; 0 for none

A daemon leaves the agent's cgroup: the cgroup of a pod, or of a systemd unit, is killed when the
agent ends, and its limits are the agent's. If the daemon may not leave, it reports that and stays.

A program with ``shm`` or ``root`` has its own mount namespace, so that it does not share memory
with the host's programs. Unmounts on the host propagate to it, so it keeps no mount alive.

The starter takes the lock, because this program may be slow to start. If another process found the
lock free in the meantime, this program could become a second daemon, or one that is no longer
wanted.

Exits with 71 on a failure; the last line on stderr says why.

Sources: flock(2), whose locks stay with the open file over execve(2); mount_namespaces(7);
cgroups(7).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

OSERR = 71
_CLONE_NEWNS = 0x20000
_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
_NOTHING = {
    "arguments": [],
    "binds": [],
    "shm": "",
    "cgroups": [],
    "lock": -1,
    "record": {},
    "ends_with": 0,
}
_START_TIME = 19  # among the fields of /proc/PID/stat after the name


def main(text: str) -> None:
    """Become the program. This function does not return."""
    request = {**_NOTHING, **json.loads(text)}
    try:
        if request["ends_with"]:
            _end_with(request["ends_with"])
        _leave(request["cgroups"])
        if request["root"] or request["shm"]:
            _own_mounts(request)
        if request["lock"] >= 0:
            _note(request["lock"], request["record"])
        if request["root"]:
            os.chroot(request["root"])
        os.chdir("/")
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        argv = [request["program"], *request["arguments"]]
        os.execve(request["program"], argv, request["environment"])  # noqa: S606 - the driver's
    except OSError as error:
        sys.stderr.write(f"{error.filename or request['program']}: {error.strerror}\n")
        os._exit(OSERR)


def _end_with(parent: int) -> None:
    """Ask the kernel to kill this process when the parent ends; exit if it has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent:
        os._exit(OSERR)


def _note(lock: int, record: dict[str, Any]) -> None:
    """Write the lock's holder into the lock file. A reader may see only half of it."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    record = {**record, "pid": os.getpid(), "start": int(fields[_START_TIME])}
    os.pwrite(lock, json.dumps(record).encode(), 0)


def _leave(cgroups: list[str]) -> None:
    """Move this process to these cgroups, one in each hierarchy."""
    for path in cgroups:
        try:
            os.makedirs(path, exist_ok=True)
            with open(f"{path}/cgroup.procs", "w", encoding="ascii") as file:
                file.write("0")
        except OSError as error:
            sys.stderr.write(f"cannot move to the cgroup {path}: {error.strerror}\n")


def _own_mounts(request: dict[str, Any]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "/")
    root = request["root"]
    if root:
        # The root of a driver container has these mounts.
        if not os.path.exists(f"{root}/dev/nvidiactl"):
            _bind(libc, request["dev"], root, "/dev", _MS_REC)
        if not os.path.exists(f"{root}/proc/self"):
            _bind(libc, "/proc", root, "/proc", _MS_REC)
        for path in request["binds"]:
            _bind(libc, path, root, path)
    if request["shm"]:
        _bind(libc, request["shm"], root, "/dev/shm")  # noqa: S108 - where shm_open() looks


def _bind(libc: Any, source: str, root: str, path: str, flags: int = 0) -> None:
    """Mount a host directory below a root; refuse a path that leaves the root."""
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
