"""A program of the node in the node's root: what the DaemonSet of the node agent runs.

The agent writes paths into the CDI spec and asks the driver's own libraries, so it has to see the
node as the node sees itself. The container's process becomes the node's own ``nvshim`` in the
node's root, once there is one: the installer may still be at it.

Source: chroot(2).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NoReturn

from integration.kubernetes.errors import HostUnusable
from integration.kubernetes.host import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from integration.kubernetes.host import Host

__all__ = ["become"]

_POLL = 1.0


def become(host: Host, program: str, words: Sequence[str], *, say: Callable[[], None]) -> NoReturn:
    """Become a program of the node.

    Args:
        host: the node.
        program: its path on the node; it is awaited.
        words: its arguments.
        say: called once if it has to be awaited.

    Raises:
        HostUnusable: the node's root cannot be entered, or the program not executed.
    """
    if host.identity(program) is None:
        say()
    while host.identity(program) is None:
        time.sleep(_POLL)
    try:
        host.enter()
        os.execve(program, [program, *words], ENVIRONMENT)  # noqa: S606 - that is what is wanted
    except OSError as error:
        raise HostUnusable(
            f"to run {program} in {host.root}",
            found=error.strerror or str(error),
            do="the container needs the capability SYS_CHROOT, and the node's root",
        ) from error
