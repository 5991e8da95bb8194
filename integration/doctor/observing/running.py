"""Running the node's programs, and finding its processes.

Anybody may give a process any name and any command line, and what is in a container is seen here
too. So what a process says of itself is believed only of one that is root's and in the node's own
mount namespace (:func:`hosts_processes`): its program is run, its files are read.

Source: proc_pid_status(5), proc_pid_environ(5), mount_namespaces(7).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from api.errors import one_line
from integration.doctor.facts import CouldNotLook, ProgramFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from integration.doctor.places import Places

__all__ = [
    "SYSTEM_PATH",
    "Process",
    "find_program",
    "hosts_processes",
    "processes",
    "read_file",
    "run",
    "started_at",
]

SYSTEM_PATH: Final = (
    "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin",
)  # fmt: skip

_TIMEOUT: Final = 10.0
_MOST_BYTES: Final = 8 << 20
# What chroot(1) says of a program that it could not run: env(1), "exit status".
_NOT_RUN: Final = frozenset({126, 127})


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the node.

    Attributes:
        pid: its number.
        name: the kernel's short name of it.
        words: its command line. For looking at, not for keeping.
        directory: its place in procfs, for us.
    """

    pid: int
    name: str
    words: tuple[str, ...]
    directory: str

    def option(self, *names: str) -> str:
        """The value of an option of its command line; "" if it is not given."""
        for word, following in zip(self.words, (*self.words[1:], ""), strict=True):
            for name in names:
                if word == name:
                    return following
                if word.startswith(f"{name}="):
                    return word.removeprefix(f"{name}=")
        return ""

    def search_path(self) -> tuple[str, ...]:
        """The directories in which it looks for programs; none if that cannot be seen."""
        with contextlib.suppress(OSError), open(f"{self.directory}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(b"PATH="):
                    return tuple(filter(None, os.fsdecode(variable[5:]).split(":")))
        return ()


def processes(places: Places) -> Iterator[Process]:
    """The node's processes, the oldest number first."""
    proc = places.at("/proc")
    names = os.listdir(proc) if os.path.isdir(proc) else []
    for pid in sorted(int(name) for name in names if name.isdecimal()):
        directory = f"{proc}/{pid}"
        # Processes end while they are looked at.
        with contextlib.suppress(OSError):
            name = read_file(f"{directory}/comm").strip()
            words = read_file(f"{directory}/cmdline").split("\0")
            yield Process(pid, name, tuple(word for word in words if word), directory)


def hosts_processes(places: Places) -> Iterator[Process]:
    """The processes that are root's, and see the files that the node's init or we do."""
    proc = places.at("/proc")
    known = {_namespace(f"{proc}/{name}") for name in ("1", "self")} - {""}
    for process in processes(places):
        if _namespace(process.directory) in known and _is_roots(process.directory):
            yield process


def _namespace(directory: str) -> str:
    try:
        return os.readlink(f"{directory}/ns/mnt")
    except OSError:
        return ""


def _is_roots(directory: str) -> bool:
    # The owner of the directory does not tell: of one that may not be dumped it is root.
    with contextlib.suppress(OSError):
        for line in read_file(f"{directory}/status").splitlines():
            if line.startswith("Uid:"):
                return set(line.split()[1:]) == {"0"}
    return False


def read_file(path: str, most: int = _MOST_BYTES) -> str:
    """The text of a file, whatever bytes are in it.

    Args:
        path: for us.
        most: bytes that are read of it.
    """
    # Opening a FIFO would wait for whoever writes.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        return file.read(most).decode(errors="replace")


def find_program(places: Places, name: str, directories: Sequence[str] = SYSTEM_PATH) -> str:
    """Where a program of the node is.

    Args:
        places: of the node.
        name: a name, or an absolute path.
        directories: where names are looked up.

    Returns:
        Its path on the node; "" if there is none that may be executed.
    """
    candidates = [name] if "/" in name else [os.path.join(d, name) for d in directories]
    for candidate in candidates:
        here = places.at(candidate)
        if os.path.isfile(here) and os.access(here, os.X_OK):
            return candidate
    return ""


def run(
    places: Places, argv: Sequence[str], *, timeout: float = _TIMEOUT, in_root: bool = False
) -> str:
    """Run a program of the node to its end.

    Args:
        places: of the node.
        argv: the program's path on the node, and its arguments, which name paths of the node.
        timeout: seconds that it may take.
        in_root: whether it is of no use outside of the node's root, because it opens files that
            its arguments do not name.

    Returns:
        What it wrote to stdout.

    Raises:
        ProgramFailed: it failed; with its last word.
        CouldNotLook: it could not be run, or took too long.
    """
    name = os.path.basename(argv[0])
    done = None
    if places.is_below and os.geteuid() == 0 and (chroot := shutil.which("chroot", path=_OURS)):
        done = _run([chroot, places.root, *argv], name, timeout)
    # Without its own libraries below the root, it may still run with ours.
    if done is None or done.returncode in _NOT_RUN:
        if in_root and places.is_below:
            raise CouldNotLook(f"{name} cannot be run within {places.root}")
        here = places.at(argv[0])
        done = _run([here, *(_here(places, word) for word in argv[1:])], name, timeout)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = one_line(lines[-1]) if lines else "no word why"
        raise ProgramFailed(f"{name} ended with {done.returncode}: {said}")
    return done.stdout[:_MOST_BYTES].decode(errors="replace")


_OURS: Final = ":".join(SYSTEM_PATH)
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_START_TIME: Final = 19  # of the fields behind the name, which may hold anything


def started_at(places: Places, directory: str) -> float | None:
    """When a process was started, in seconds of the epoch; None if that is not to be seen.

    Args:
        places: of the node.
        directory: the process's place in procfs, for us.
    """
    try:
        fields = read_file(f"{directory}/stat").rpartition(")")[2].split()
        for line in read_file(places.at("/proc/stat")).splitlines():
            if line.startswith("btime "):
                return int(line.split()[1]) + int(fields[_START_TIME]) / _TICKS
    except (OSError, ValueError, IndexError):
        pass
    return None


def _here(places: Places, word: str) -> str:
    return places.at(word) if places.is_below and word.startswith("/") else word


def _run(argv: list[str], name: str, timeout: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=timeout,
            env={"PATH": _OURS, "LANG": "C.UTF-8", "HOME": "/root"},
        )
    except subprocess.TimeoutExpired:
        raise CouldNotLook(f"{name} took longer than {timeout:g} s") from None
    except OSError as error:
        raise CouldNotLook(f"{name} cannot be run: {error.strerror}") from error
