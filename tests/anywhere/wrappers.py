"""Commands that set up a circumstance and run another command in it.

Each function returns the words to put before that command. It gets a directory for its files.

Source: unshare(1), time_namespaces(7), prlimit(1), taskset(1); tmpfs(5), overlayfs.rst.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Final

TIME_NAMESPACE: Final = "/proc/self/ns/time"
"""Exists where the kernel has time namespaces."""

_OFFSETS: Final = "/proc/self/timens_offsets"
_CLOCKS: Final = {"monotonic": time.CLOCK_MONOTONIC, "boottime": time.CLOCK_BOOTTIME}

# The longest name that both the kernel (HOST_NAME_MAX is 64) and DNS accept.
_HOSTNAME: Final = ("node-" * 13)[:62] + "x"
_LONG: Final = 90  # letters of a path, which leaves 17 for the address of a socket in it

# The directory is $0. The mounts end with the mount namespace. They are shared, as under systemd;
# unshare makes them private. They are on /tmp because addresses of sockets must be short.
_SHARE: Final = "mount --make-rshared / && "
_SHARED: Final = f'{_SHARE}exec "$@"'
_IN_TMP: Final = f"{_SHARE}export TMPDIR=/tmp && "
_IN_TMPDIR: Final = 'chmod 1777 "$0" && export TMPDIR="$0" && exec "$@"'
_ON_TMP: Final = 'chmod 1777 /tmp && exec "$@"'
_TMPFS: Final = f"{_IN_TMP}mount -t tmpfs tmpfs /tmp && {_ON_TMP}"
_OVERLAY: Final = (
    f'{_IN_TMP}mkdir -p "$0.lower" "$0.upper" "$0.work" && '
    'mount -t overlay overlay -o "lowerdir=$0.lower,upperdir=$0.upper,workdir=$0.work" /tmp && '
    f"{_ON_TMP}"
)
# A valid name that is not UTF-8, with a tab, a space and a parenthesis.
_ODD: Final = (
    f'{_SHARE}name="$(printf "a\\377\\t b)")" && odd="$0/$name" && mkdir "$odd" && '
    'mount -t tmpfs tmpfs "$odd" && cp /bin/sleep "$odd/$name" && '
    '{ setpriv --pdeathsig KILL "$odd/$name" infinity & } && '
    'until [ /proc/$!/exe -ef "$odd/$name" ]; do :; done && "$@" && code=0 || code=$?; '
    "kill $! && exit $code"
)


def uptime(_: str, seconds: int) -> list[str]:
    """Run on a machine that booted some seconds ago, with a time namespace.

    The kernel log (/dev/kmsg) keeps the machine's own clock.
    """
    with open(_OFFSETS, encoding="ascii") as file:
        # "monotonic  SECONDS  NANOSECONDS", relative to the initial namespace.
        ours = {words[0]: int(words[1]) for words in map(str.split, file)}
    offsets = [
        f"--{name}={seconds - int(time.clock_gettime(clock)) + ours[name]}"
        for name, clock in _CLOCKS.items()
    ]
    return ["unshare", "--time", *offsets, "--fork", "--kill-child", "--"]


def hostname(_: str) -> list[str]:
    """Run on a machine with the longest possible name."""
    script = f'printf %s {_HOSTNAME} >/proc/sys/kernel/hostname && exec "$@"'
    return ["unshare", "--uts", "sh", "-c", script, "sh"]


def tmpfs(directory: str) -> list[str]:
    """Run with TMPDIR in memory."""
    return [*_mounting(), "sh", "-c", _TMPFS, _made(directory, "t")]


def overlay(directory: str) -> list[str]:
    """Run with TMPDIR on an overlay, as in a container."""
    return [*_mounting(), "sh", "-c", _OVERLAY, _made(directory, "t")]


def long_tmpdir(directory: str) -> list[str]:
    """Run with a long TMPDIR, which leaves little room for a socket's address."""
    name = "a-directory-with-a-long-name-" * 3
    path = _made(directory, name[: _LONG - len(directory) - 1])
    return ["sh", "-c", _IN_TMPDIR, path]


def no_home(_: str) -> list[str]:
    """Run without the variable HOME, as a service does."""
    return ["env", "--unset=HOME"]


def timezone(_: str, rule: str) -> list[str]:
    """Run in another time zone.

    Args:
        rule: in POSIX format, which needs no time zone database.
    """
    return ["env", f"TZ={rule}"]


def one_processor(_: str) -> list[str]:
    """Run on one of the processors that this process may use."""
    return ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))]


def few_files(_: str, limit: int) -> list[str]:
    """Run with a soft limit of open files; the hard limit stays."""
    return ["prlimit", f"--nofile={limit}:"]


def installed(_: str) -> list[str]:
    """Run while the product is installed and in use."""
    return [
        *_mounting(),
        "sh",
        "-c",
        _SHARED,
        "sh",
        sys.executable,
        "-m",
        "tests.anywhere.installed",
        "--",
    ]


def stuck_mount(directory: str) -> list[str]:
    """Run while a file system is mounted that never answers."""
    # Shims that tests start in /tmp consider the directories two levels below /tmp to be bundles.
    path = os.path.join(_made(directory, "below"), "stuck")
    stuck = [sys.executable, "-m", "tests.anywhere.stuck", path, "--"]
    return [*_mounting(), "sh", "-c", _SHARED, "sh", *stuck]


def odd_names(directory: str) -> list[str]:
    """Run next to a mount, a program and a command line with odd names."""
    return [*_mounting(), "sh", "-c", _ODD, _made(directory, "below")]


def in_root(_: str, release: str, umask: str = "022") -> list[str]:
    """Run in a clone, on a Debian with only the packages that the README requires."""
    return [sys.executable, "-m", "tests.anywhere.root", release, f"--umask={umask}", "--"]


def in_guest(_: str, options: Sequence[str]) -> list[str]:
    """Run in a virtual machine.

    Args:
        options: of tools.vm.
    """
    return ["nice", sys.executable, "-m", "tools.vm", *options, "--"]


def clock_of_guest(directory: str, change: str) -> list[str]:
    """Run in a virtual machine whose clock is changed first.

    Args:
        directory: unused by virtual machines.
        change: a change of :mod:`tests.anywhere.clock`.
    """
    change_it = ["python3", "-m", "tests.anywhere.clock", change]
    return [*in_guest(directory, ["--guest=debian-12"]), *change_it]


def _mounting() -> list[str]:
    """Return a command that creates mount and PID namespaces with a first process of their own."""
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
    return [*namespaces, sys.executable, "-m", "tests.anywhere.first", "--"]


def _made(directory: str, name: str) -> str:
    path = os.path.join(directory, name)
    os.makedirs(path, exist_ok=True)
    return path
