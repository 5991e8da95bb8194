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
        looked = "never" if agent.age is None else f"{agent.age:.0f} s ago"
        yield Trouble(
            f"it runs, has looked at the node {looked}, and was to look every {agent.poll:g} s",
            remedy="see its log, and that nvidia-smi answers: it waits for the driver, or cannot "
            "write its state",
            command="nvshim info",
        )
    elif not agent.runs and agent.unit:
        yield f"{who} is enabled, and no agent has the node"
    elif not agent.runs and agent.pod:
        yield Trouble(
            f"there is {who}, and no agent has the node",
            remedy="see the pod's log; it waits for the installer's tree if there is none, and "
            "ends if another agent has the node",
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
        yield f"{plugins.directory} knows no nvidia.com/… resource, and {who}"
        return
    for name, healthy in registered:
        if not healthy and all(name != each for each, _, _ in agent.resources):
            yield f"{name} was registered, and nobody serves it any more, or all of it is unhealthy"


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
                yield f"{name}: {devices - healthy} of {devices} are told as unhealthy"


@check("D109")
def _kernel_log(agent: NodeAgent) -> Iterable[str]:
    return [agent.kernel_log] if agent.runs and agent.kernel_log else ()


@check("D110")
def _unheard(agent: NodeAgent) -> Iterator[str]:
    if agent.runs and agent.resources and agent.unheard:
        by = listed(agent.strategies)
        yield f"{agent.unheard}: containers are told of their devices by {by}"


@check("D111")
def _missing(agent: NodeAgent) -> Iterable[str]:
    return agent.missing if agent.runs else ()


@check("D112")
def _unread(plugins: Plugins, policy: Policy) -> Iterable[str]:
    return [plugins.unread] if plugins.unread and policy.mode != Mode.NVIDIA else ()
