"""Letting go of NVML when somebody needs the GPUs for himself.

A process that has NVML keeps the kernel module in use: no GPU can be reset, MIG mode cannot be
switched, and the module cannot be removed. The agent lets go by itself when it is told to end, and
when the driver's files go. For the rest there is a file, ``let-go`` in the agent's state directory:
as long as it is there no child of the monitor's runs, and its first line is the reason that people
are told. Only root can make it.

Source: inotify(7); nvidia-smi(1), "--gpu-reset" and "--multi-instance-gpu".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NoReturn

import anyio

from api.errors import one_line
from integration.node import inotify
from shim import syscalls

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FILE", "follow"]

FILE: Final = "let-go"
"""The file's name in the state directory."""

_LONGEST: Final = 200
_DEAF: Final = 2.0


async def follow(
    directory: str, told: Callable[[str], None], deaf: Callable[[str], None]
) -> NoReturn:
    """Tell whether the file is there, now and whenever that changes.

    Args:
        directory: the agent's.
        told: takes why NVML is to be let go; "" if it is not.
        deaf: takes why the directory cannot be watched, so that one looks every now and then; ""
            once it can.
    """
    while True:
        try:
            await _listen(directory, told, deaf)
        except OSError as error:
            deaf(str(error.strerror))
            told(_reason(os.path.join(directory, FILE)))
            await anyio.sleep(_DEAF)


async def _listen(directory: str, told: Callable[[str], None], deaf: Callable[[str], None]) -> None:
    """Tell it until the directory is another.

    Raises:
        OSError: the directory cannot be watched.
    """
    fd = syscalls.inotify_init()
    try:
        syscalls.inotify_watch_changes(fd, directory)
        deaf("")
        ends = False
        while not ends:
            told(_reason(os.path.join(directory, FILE)))
            await anyio.wait_readable(fd)
            ends = any(event.ends for event in inotify.drain(fd))
    finally:
        os.close(fd)


def _reason(path: str) -> str:
    """Why, if the file is there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError:
        return f"{path} is there"
    try:
        first = os.read(fd, _LONGEST).decode(errors="replace").partition("\n")[0]
    except OSError:
        first = ""
    finally:
        os.close(fd)
    return one_line(first) or f"{path} is there"
