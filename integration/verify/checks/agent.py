"""Checks of the node agent: health on a simulated node, and a restart."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from integration.agent_status import is_ready
from integration.cri.errors import CriRefused
from integration.node.device_health.report import read_health
from integration.node.lock import holds
from integration.timeouts import PATIENCE
from integration.verify.checks.containers import gpu_asked_for
from integration.verify.node import Node, faults_of
from integration.verify.outcomes import NotAsExpected, NotMade
from integration.verify.program import parse
from integration.verify.visibility import Wanted
from shim.causes.agent import agent_of

if TYPE_CHECKING:
    from integration.verify.pods import Pod

_TO_NOTICE: Final = 60.0 * PATIENCE
# A kubelet waits longer and longer before it starts a container again.
_TO_RESTART: Final = 90.0 * PATIENCE
_TO_END: Final = 10
_UNSEEN: Final = "the agent's process is not seen from here"
_POLL: Final = 0.1


# -- health --------------------------------------------------------------------------------------


def health_follows(node: Node) -> str:
    """A GPU that fails is given to nobody, and is given again once it answers."""
    path = faults_of(node.config)
    if not path:
        raise NotMade("a real GPU is not made to fail; this is for a simulated node")
    if _content(path):
        raise NotMade(f"somebody has its NVML fail already: {path}")
    whole = [gpu for gpu in node.inventory.gpus if not gpu.mig and gpu.uuid in _given(node)]
    if not whole:
        raise NotMade("no whole GPU that is given to containers now")
    gpu, before = whole[-1], _given(node)
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(f"gpu{gpu.index}=error:15")  # NVML_ERROR_GPU_IS_LOST
        if not _comes(lambda: _given(node) == before - {gpu.uuid}, _TO_NOTICE):
            raise NotAsExpected(
                f"GPU {gpu.index}, which fails, is given no more, and the others are",
                seen=_difference(before - {gpu.uuid}, _given(node)),
                do="see the log of nvshim node",
            )
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if not _comes(lambda: _given(node) == before, _TO_NOTICE):
        raise NotAsExpected(
            f"GPU {gpu.index}, which answers again, is given again",
            seen=_difference(before, _given(node)),
            do="see `nvshim list --health`, and health.quiet of the configuration",
        )
    return f"GPU {gpu.index} failed, and was given no more; it answered, and was given again"


def _content(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def _given(node: Node) -> frozenset[str]:
    """The UUIDs of what is given to containers: by the kubelet's word, or else the agent's.

    Raises:
        NotMade: neither is there.
    """
    if node.kubelet.is_there:
        ids = frozenset().union(*node.kubelet.allocatable().values())
        return frozenset(each.partition("::")[0] for each in ids)
    known = read_health(node.config)
    if known is None:
        raise NotMade("no node agent that is ready, and no kubelet")
    return frozenset(uuid for uuid, each in known.items() if each["state"] in _GIVEN)


_GIVEN: Final = ("healthy", "suspect")


def _difference(wanted: frozenset[str], found: frozenset[str]) -> str:
    told = [f"{uuid} is not given" for uuid in sorted(wanted - found)]
    told += [f"{uuid} is given" for uuid in sorted(found - wanted)]
    return "; ".join(told) or "it has come too late"


# -- restart -------------------------------------------------------------------------------------


def restart_loses_nothing(node: Node) -> str:
    """The agent ends and is started again; devices, health and containers are as before."""
    if not node.restart_agent:
        raise NotMade("give --restart-agent to have the node agent end, and be started again")
    if not is_ready(node.config):
        raise NotMade("no node agent that is ready")
    if not node.devices:
        raise NotMade("no GPU that can be given")
    before, states = _given(node), _states(node)
    watched = node.pods.attempt(lambda pod: _restart_beside(node, pod, node.devices[0]))
    if not _comes(lambda: _given(node) == before, _TO_NOTICE):
        raise NotAsExpected(
            "the same devices are given as before the restart",
            seen=_difference(before, _given(node)),
            do="see the log of nvshim node",
        )
    if not _comes(lambda: _states(node) == states, _TO_NOTICE):
        raise NotAsExpected(
            "the same health of each device as before the restart",
            seen="; ".join(
                f"{uuid} was {states.get(uuid)}, and is {state}"
                for uuid, state in _states(node).items()
                if states.get(uuid) != state
            ),
            do="see the log of nvshim node, and `nvshim list --health`",
        )
    return f"a new agent gives the same devices with the same health{watched}"


def _restart_beside(node: Node, pod: Pod, device: Wanted) -> str:
    """Restart the agent while a container has a GPU; what is to be said of that container."""
    container = pod.start("hold", env=gpu_asked_for(node, device), trusted=True)
    first = parse(container.looks())
    restart_agent(node)
    try:
        is_running = container.is_running
    except CriRefused:
        is_running = False
    if not is_running and not pod.stays():
        # A kubelet removed it, which knows nothing of it: that is no fault of the agent's.
        return "; the container with a GPU did not last so long"
    if not is_running:
        raise NotAsExpected(
            f"the container with {device.name} goes on while the agent restarts",
            seen="it has ended",
            do="see the engine's log",
        )
    container.stop(_TO_END)
    second = parse(container.looks(2))
    if first != second:
        raise NotAsExpected(
            f"the container with {device.name} sees the same after the restart",
            seen=f"{len(first.nodes)} nodes before, {len(second.nodes)} after, or other errors",
            do="see the log of nvshim node, and the engine's",
        )
    return "; a container kept its GPU"


def restart_agent(node: Node) -> None:
    """Have the agent end, and wait for whoever starts it again to do so.

    Raises:
        NotMade: it cannot be told which process it is.
        NotAsExpected: no other one comes.
    """
    state = node.config.state
    pid = agent_of(state)
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        raise NotMade(_UNSEEN) from error
    try:
        if not holds(pid, node.config):  # its number may be another's here
            raise NotMade(_UNSEEN)
        signal.pidfd_send_signal(fd, signal.SIGTERM)
    finally:
        os.close(fd)
    if not _comes(lambda: is_ready(node.config) and agent_of(state) != pid, _TO_RESTART):
        raise NotAsExpected(
            f"another node agent within {_TO_RESTART:g} s of the end of the first",
            seen="none that is ready",
            do="see `systemctl status nvshim-node`, or `kubectl describe` for its pod",
        )


def _states(node: Node) -> dict[str, str]:
    return {uuid: each["state"] for uuid, each in (read_health(node.config) or {}).items()}


def _comes(test: Callable[[], bool], seconds: float) -> bool:
    """Whether something comes to be so in time; what cannot be asked yet is not so."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(NotAsExpected, NotMade):
            if test():
                return True
        time.sleep(_POLL)
    return False
