"""The node agent, and device plugins: D104 to D112."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hooks.config import Mode
from integration.doctor.facts import Driver, NodeAgent, Plugins, Policy
from integration.doctor.findings import Trouble, check, listed


@check("D104")
def _not_running(agent: NodeAgent) -> Iterator[str | Trouble]:
    who = "the unit nvshim-node" if agent.unit else f"the pod of {agent.pod}"
    if agent.runs and not agent.ready:
        checked = "never" if agent.age is None else f"{agent.age:.0f} s ago"
        yield Trouble(
            f"it is running, but last checked the node {checked} instead of every {agent.poll:g} s",
            remedy="read its log and check that nvidia-smi answers: the agent waits for the driver "
            "or cannot write its state",
            command="nvshim info",
        )
    elif not agent.runs and agent.unit:
        yield f"{who} is enabled, but no agent runs on the node"
    elif not agent.runs and agent.pod:
        yield Trouble(
            f"{who} exists, but no agent runs on the node",
            remedy="read the pod's log: it waits until the installer has installed the shim, and "
            "exits if another agent runs on the node",
            command=f"tail {agent.pod}/*.log",
        )


@check("D105")
def _faults(agent: NodeAgent) -> Iterable[str]:
    return agent.faults if agent.runs else ()


@check("D106")
def _no_plugin(plugins: Plugins, driver: Driver, agent: NodeAgent) -> Iterator[str]:
    if not driver.gpus or plugins.dra:
        return
    registered = plugins.registered or ()
    if not registered:
        who = "the node agent serves none" if agent.runs else "no node agent runs"
        yield f"{plugins.directory} has no nvidia.com/… resource, and {who}"
        return
    for name, healthy in registered:
        if not healthy and all(name != each for each, _, _ in agent.resources):
            yield f"{name} is registered, but its plugin is gone or all its devices are unhealthy"


@check("D107")
def _two_plugins(plugins: Plugins, agent: NodeAgent) -> Iterator[Trouble]:
    if not plugins.nvidias or not agent.runs or not agent.resources:
        return
    names = listed(name for name, _, _ in agent.resources)
    yield Trouble(
        f"the node agent serves {names}, and NVIDIA's device plugin runs "
        f"(process {listed(plugins.nvidias)})"
    )


@check("D108")
def _unhealthy(agent: NodeAgent) -> Iterator[str]:
    if agent.runs:
        for name, devices, healthy in agent.resources:
            if healthy < devices:
                yield f"{name}: {devices - healthy} of {devices} are reported as unhealthy"


@check("D109")
def _kernel_log(agent: NodeAgent) -> Iterable[str]:
    return [agent.kernel_log] if agent.runs and agent.kernel_log else ()


@check("D110")
def _unheard(agent: NodeAgent) -> Iterator[str]:
    if agent.runs and agent.resources and agent.unheard:
        used = listed(agent.strategies)
        yield f"{agent.unheard}: devices are passed to containers by {used}"


@check("D111")
def _missing(agent: NodeAgent) -> Iterable[str]:
    return agent.missing if agent.runs else ()


@check("D112")
def _unread(plugins: Plugins, policy: Policy) -> Iterable[str]:
    return [plugins.unread] if plugins.unread and policy.mode != Mode.NVIDIA else ()
