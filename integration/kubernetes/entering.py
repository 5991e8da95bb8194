"""A program of the node in the node's root: what the DaemonSet of the node agent runs.

The agent writes paths into the CDI spec and asks the driver's own libraries, so it has to see the
node as the node sees itself. The container's process becomes the node's own ``nvshim`` in the
node's root, once there is one: the installer may still be at it, and on a node without a GPU it
puts none there.

Of the container's variables the agent gets those by which NVIDIA's device plugin is told what to do
(:data:`HANDED_ON`), so that what a chart sets means the same, those that say where the API server
is, and no others: an image's own, or the kubelet's, say nothing about a node. Paths in them are the
node's.

Source: chroot(2).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, NoReturn

from integration.kubernetes.errors import HostUnusable
from integration.kubernetes.gpus import has_gpu
from integration.kubernetes.host import ENVIRONMENT
from integration.node.settings.table import FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from integration.kubernetes.host import Host

HANDED_ON: Final = frozenset(
    {
        *(name for flag in FLAGS for name in flag.variables),
        "CONFIG_FILE",
        "CONFIG_FILE_SRCDIR",
        "DEFAULT_CONFIG",
        "DP_DISABLE_HEALTHCHECKS",
        "DP_ENABLE_HEALTHCHECKS",
        "FALLBACK_STRATEGIES",
        "KUBERNETES_SERVICE_HOST",
        "KUBERNETES_SERVICE_PORT",
        "KUBELET_SOCKET",
        "NODE_LABEL",
        "NODE_NAME",
        "NVSHIM_CONTAINERD_STATE",
        "POD_UID",
    }
)
"""The variables by which a container's agent is told what to do."""

_POLL: Final = 1.0


def is_idle(host: Host, program: str) -> bool:
    """Return whether the node has no GPU, and so no program either."""
    return host.identity(program) is None and not has_gpu(host)


def become(
    host: Host,
    program: str,
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    say: Callable[[], None],
) -> NoReturn:
    """Become a program of the node.

    Args:
        host: the node.
        program: its path on the node; it is awaited.
        words: its arguments.
        environment: the container's.
        say: called once if it has to be awaited.

    Raises:
        HostUnusable: the node's root cannot be entered, or the program not executed.
    """
    if host.identity(program) is None:
        say()
    while host.identity(program) is None:
        time.sleep(_POLL)
    handed_on = {name: environment[name] for name in sorted(HANDED_ON) if name in environment}
    try:
        host.enter()
        os.execve(program, [program, *words], {**ENVIRONMENT, **handed_on})  # noqa: S606 - wanted
    except OSError as error:
        raise HostUnusable(
            f"to run {program} in {host.root}",
            found=error.strerror or str(error),
            do="the container needs the capability SYS_CHROOT, and the node's root",
        ) from error
