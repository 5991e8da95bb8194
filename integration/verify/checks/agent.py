"""Checks of the node agent: GPU health on a simulated node, and a restart."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final

from integration.agent_status import is_ready
from integration.cri.errors import CriRefused
from integration.node.device_health.report import read_health
from integration.node.lock import holds
from integration.node.values.health import HealthState
from integration.timeouts import PATIENCE
from integration.verify.checks.containers import gpu_request
from integration.verify.node import Node, nvml_faults_path
from integration.verify.outcomes import CheckFailed, CheckSkipped
from integration.verify.pods import Pod
from integration.verify.probe import parse
from integration.verify.visibility import ExpectedDevice
from shim.causes.agent import agent_of

_HEALTH_TIMEOUT: Final = 60.0 * PATIENCE
# The kubelet's restart back-off grows with each restart.
_RESTART_TIMEOUT: Final = 90.0 * PATIENCE
_STOP_GRACE: Final = 10
_NOT_VISIBLE: Final = "the agent's process is not visible from here; run the check on the host"
_POLL: Final = 0.1


# -- health --------------------------------------------------------------------------------------


def health_follows(node: Node) -> str:
    """Check that a failing GPU is withdrawn, and returned once it answers again."""
    path = nvml_faults_path(node.config)
    if not path:
        raise CheckSkipped("only a simulated node's GPU can be made to fail")
    if _read_faults(path):
        raise CheckSkipped(f"NVML faults are already injected on this node: {path}")
    whole = [gpu for gpu in node.inventory.gpus if not gpu.mig and gpu.uuid in _allocatable(node)]
    if not whole:
        raise CheckSkipped("no whole GPU is allocatable now")
    gpu, before = whole[-1], _allocatable(node)
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(f"gpu{gpu.index}=error:15")  # NVML_ERROR_GPU_IS_LOST
        if not _eventually(lambda: _allocatable(node) == before - {gpu.uuid}, _HEALTH_TIMEOUT):
            raise CheckFailed(
                f"GPU {gpu.index}, which fails, is withdrawn, and the other GPUs stay",
                seen=_difference(before - {gpu.uuid}, _allocatable(node)),
                do="see the log of nvshim node",
            )
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    if not _eventually(lambda: _allocatable(node) == before, _HEALTH_TIMEOUT):
        raise CheckFailed(
            f"GPU {gpu.index}, which answers again, is returned to service",
            seen=_difference(before, _allocatable(node)),
            do="see `nvshim list --health`, and health.quiet of the configuration",
        )
    return f"GPU {gpu.index} failed and was withdrawn; it answered and was returned to service"


def _read_faults(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def _allocatable(node: Node) -> frozenset[str]:
    """Return the UUIDs that can be allocated, from the kubelet, or else from the agent.

    Raises:
        CheckSkipped: the node has neither.
    """
    if node.kubelet.is_there:
        ids = frozenset().union(*node.kubelet.allocatable().values())
        return frozenset(each.partition("::")[0] for each in ids)
    known = read_health(node.config)
    if known is None:
        raise CheckSkipped("no node agent is ready, and no kubelet runs")
    return frozenset(uuid for uuid, each in known.items() if each["state"] in _ALLOCATABLE_STATES)


_ALLOCATABLE_STATES: Final = tuple(state for state in HealthState if state.is_allocatable)


def _difference(expected: frozenset[str], found: frozenset[str]) -> str:
    texts = [f"{uuid} is not allocatable" for uuid in sorted(expected - found)]
    texts += [f"{uuid} is allocatable" for uuid in sorted(found - expected)]
    return "; ".join(texts) or "it changed only after the time limit"


# -- restart -------------------------------------------------------------------------------------


def restart_loses_nothing(node: Node) -> str:
    """Restart the agent and check that devices, health and containers are as before."""
    if not node.restart_agent:
        raise CheckSkipped("use --restart-agent to allow a restart of the node agent")
    if not is_ready(node.config):
        raise CheckSkipped("no node agent is ready")
    if not node.devices:
        raise CheckSkipped("no GPU is available to containers")
    states, before = _states(node), _allocatable(node)
    recovering = {uuid for uuid, state in states.items() if state == HealthState.RECOVERING}
    watched = node.pods.attempt(lambda pod: _restart_with_container(node, pod, node.devices[0]))
    if not _eventually(lambda: _allocatable(node) - recovering == before, _HEALTH_TIMEOUT):
        raise CheckFailed(
            "the same devices are allocatable as before the restart",
            seen=_difference(before, _allocatable(node) - recovering),
            do="see the log of nvshim node",
        )
    if not _eventually(lambda: not _differing(states, _states(node)), _HEALTH_TIMEOUT):
        raise CheckFailed(
            "the same health of each device as before the restart",
            seen=_differing(states, _states(node)) or "it changed only after the time limit",
            do="see the log of nvshim node, and `nvshim list --health`",
        )
    return f"the new agent offers the same devices with the same health{watched}"


def _restart_with_container(node: Node, pod: Pod, device: ExpectedDevice) -> str:
    """Restart the agent while a container holds a GPU, and return a note on that container."""
    container = pod.start("hold", env=gpu_request(node, device), trusted=True)
    first = parse(container.looks())
    restart_agent(node)
    try:
        is_running = container.is_running
    except CriRefused:
        is_running = False
    if not is_running and not pod.stays():
        # The kubelet removed a pod that it does not know; the agent is not at fault.
        return "; the kubelet removed the container with a GPU meanwhile"
    if not is_running:
        raise CheckFailed(
            f"the container with {device.name} keeps running while the agent restarts",
            seen="it has exited",
            do="see the engine's log",
        )
    container.stop(_STOP_GRACE)
    second = parse(container.looks(2))
    if first != second:
        raise CheckFailed(
            f"the container with {device.name} sees the same after the restart",
            seen=f"{len(first.nodes)} device nodes before and {len(second.nodes)} after, or other "
            "errors when it opens them",
            do="see the logs of nvshim node and of the engine",
        )
    return "; a container kept its GPU"


def restart_agent(node: Node) -> None:
    """Stop the agent and wait until its supervisor has started it again.

    Raises:
        CheckSkipped: the agent's process cannot be identified.
        CheckFailed: no new agent becomes ready.
    """
    state = node.config.state
    pid = agent_of(state)
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        raise CheckSkipped(_NOT_VISIBLE) from error
    try:
        if not holds(
            pid, node.config
        ):  # in another PID namespace the pid may belong to another process
            raise CheckSkipped(_NOT_VISIBLE)
        signal.pidfd_send_signal(fd, signal.SIGTERM)
    finally:
        os.close(fd)
    if not _eventually(lambda: is_ready(node.config) and agent_of(state) != pid, _RESTART_TIMEOUT):
        raise CheckFailed(
            f"a new node agent within {_RESTART_TIMEOUT:g} s after the first one stopped",
            seen="none is ready",
            do="see `systemctl status nvshim-node`, or `kubectl describe` its pod",
        )


def _states(node: Node) -> dict[str, str]:
    return {uuid: each["state"] for uuid, each in (read_health(node.config) or {}).items()}


# A device may heal meanwhile. An unhealthy one that seems healthy was more likely forgotten.
_OR_BETTER: Final[Mapping[str, tuple[str, ...]]] = {
    HealthState.SUSPECT: (HealthState.SUSPECT, HealthState.HEALTHY),
    HealthState.RECOVERING: (HealthState.RECOVERING, HealthState.SUSPECT, HealthState.HEALTHY),
}


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return how the health of the devices differs; "" if each is as it was, or has healed."""
    return "; ".join(
        f"{uuid} was {state} and is {now.get(uuid, 'not known')}"
        for uuid, state in before.items()
        if now.get(uuid) not in _OR_BETTER.get(state, (state,))
    )


def _eventually(test: Callable[[], bool], seconds: float) -> bool:
    """Return whether the test becomes true in time; a query that fails counts as false."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(CheckFailed, CheckSkipped):
            if test():
                return True
        time.sleep(_POLL)
    return False
