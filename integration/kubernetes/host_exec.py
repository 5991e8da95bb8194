"""Replace the container's process by a program in the node's root, for the node agent's DaemonSet.

The agent writes host paths into the CDI spec and loads the driver's libraries, so it must see the
host's file system. The process waits until the installer has put ``nvshim`` on the node, and then
executes it in the node's root. On a node without a GPU the installer never does.

The agent gets the variables of NVIDIA's device plugin (:data:`PASSED_THROUGH`), so that a chart's
settings keep their meaning, and the address of the API server. Other variables come from the image
or the kubelet and do not apply to the host. Paths in the variables are host paths.

Source: chroot(2).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

from integration.kubernetes.errors import HostUnusable
from integration.kubernetes.gpu_detection import has_gpu
from integration.kubernetes.host import ENVIRONMENT, Host
from integration.node.options import OPTIONS
from integration.node.settings import config_choice
from integration.node.settings.table import FLAGS

PASSED_THROUGH: Final = frozenset(
    name for setting in (*FLAGS, *OPTIONS, *config_choice.SETTINGS) for name in setting.variables
)
"""The container's variables that the agent gets."""

_POLL: Final = 1.0


def is_idle(host: Host, program: str) -> bool:
    """Return whether the node has no GPU, and therefore no installed program."""
    return host.identity(program) is None and not has_gpu(host)


def exec_in_host(
    host: Host,
    program: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    on_wait: Callable[[], None],
) -> NoReturn:
    """Wait for a program on the node and execute it in the node's root.

    Args:
        host: the node.
        program: the program's path on the node.
        arguments: the program's arguments.
        environment: the container's environment.
        on_wait: called once if the program does not exist yet.

    Raises:
        HostUnusable: the node's root cannot be entered, or the program cannot be executed.
    """
    if host.identity(program) is None:
        on_wait()
    while host.identity(program) is None:
        time.sleep(_POLL)
    passed = {name: environment[name] for name in sorted(PASSED_THROUGH) if name in environment}
    try:
        host.enter()
        os.execve(program, [program, *arguments], {**ENVIRONMENT, **passed})  # noqa: S606 - wanted
    except OSError as error:
        raise HostUnusable(
            f"to run {program} in {host.root}",
            found=error.strerror or str(error),
            do="give the container the capability SYS_CHROOT and mount the node's root",
        ) from error
