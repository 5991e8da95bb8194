"""The node agent, and device plugins: D104 to D112."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hooks.config import Mode
from integration.doctor.findings import ERROR, NOTE, WARNING, Trouble, check, listed
from integration.node.plugin.engine_cdi import ENABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.doctor.facts import Driver, NodeAgent, Plugins, Policy


@check(
    "NVSHIM-D104",
    ERROR,
    "the node agent is to run, and does not",
    why=(
        "The kubelet has no GPUs to give, nobody notices a GPU that breaks, and the CDI spec "
        "is that of the last time."
    ),
    remedy="see its log, and start it",
    command="systemctl restart nvshim-node",
)
def _not_running(agent: NodeAgent) -> Iterator[Trouble]:
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
        yield Trouble(f"{who} is enabled, and no agent has the node")
    elif not agent.runs and agent.pod:
        yield Trouble(
            f"there is {who}, and no agent has the node",
            remedy="see the pod's log; it waits for the installer's tree if there is none, and "
            "ends if another agent has the node",
            command=f"tail {agent.pod}/*.log",
        )


@check(
    "NVSHIM-D105",
    WARNING,
    "the node agent says that something is wrong",
    why="What it cannot do is not done until that is mended; it tries again by itself.",
    remedy="do what the line says; it goes away when it is over",
)
def _faults(agent: NodeAgent) -> Iterator[Trouble]:
    if agent.runs:
        for fault in agent.faults:
            yield Trouble(fault)


@check(
    "NVSHIM-D106",
    ERROR,
    "the kubelet has no device plugin for GPUs",
    why="Pods that ask for nvidia.com/gpu stay Pending: Insufficient nvidia.com/gpu.",
    remedy="run the node agent; if it runs, its log says why it does not serve the kubelet",
    command="systemctl enable --now nvshim-node",
)
def _no_plugin(plugins: Plugins, driver: Driver, agent: NodeAgent) -> Iterator[Trouble]:
    if not driver.gpus or plugins.dra:
        return
    registered = plugins.registered or ()
    if not registered:
        who = "the node agent serves none" if agent.runs else "no node agent runs"
        yield Trouble(f"{plugins.directory} knows no nvidia.com/… resource, and {who}")
        return
    for name, healthy in registered:
        if not healthy and all(name != each for each, _, _ in agent.resources):
            yield Trouble(
                f"{name} was registered, and nobody serves it any more, or all of it is unhealthy"
            )


@check(
    "NVSHIM-D107",
    ERROR,
    "two device plugins serve the same GPUs",
    why=(
        "The one that registered last has the kubelet, and what the other has given is given "
        "again. They take turns with each restart of the kubelet."
    ),
    remedy=(
        "turn one of them off: devicePlugin.enabled=false in the values of NVIDIA's GPU "
        "operator, or --device-plugin=no for the node agent"
    ),
)
def _two_plugins(plugins: Plugins, agent: NodeAgent) -> Iterator[Trouble]:
    if not plugins.nvidias or not agent.runs or not agent.resources:
        return
    names = listed(name for name, _, _ in agent.resources)
    yield Trouble(
        f"the node agent serves {names}, and NVIDIA's device plugin runs "
        f"(process {listed(plugins.nvidias)})"
    )


@check(
    "NVSHIM-D108",
    WARNING,
    "the kubelet is told that GPUs are unhealthy",
    why="No new pod gets them. Those that have them go on.",
    remedy="see why in the health of each; what has recovered is given again without a restart",
    command="nvshim list",
)
def _unhealthy(agent: NodeAgent) -> Iterator[Trouble]:
    if agent.runs:
        for name, devices, healthy in agent.resources:
            if healthy < devices:
                yield Trouble(f"{name}: {devices - healthy} of {devices} are told as unhealthy")


@check(
    "NVSHIM-D109",
    NOTE,
    "the kernel's log cannot be read",
    why=(
        "Which process an error of a GPU (XID) came from is told by the kernel's log alone: "
        "health is watched without it, and nobody is named."
    ),
    remedy="let the agent read /dev/kmsg: it needs CAP_SYSLOG, and the node in its /dev",
)
def _kernel_log(agent: NodeAgent) -> Iterator[Trouble]:
    if agent.runs and agent.kernel_log:
        yield Trouble(agent.kernel_log)


@check(
    "NVSHIM-D110",
    WARNING,
    "the engine does not read CDI names, by which the kubelet hands devices on",
    why=(
        "The node agent has the shim told in another way, so pods of the shim's handler get "
        "their GPUs. Pods of any other handler begin, without an error and without a GPU."
    ),
    remedy=(
        "have the engine read them, which containerd does from 1.7.2 on, and restart it; or "
        "see that every pod which asks for GPUs names the RuntimeClass"
    ),
    command=ENABLE,
)
def _unheard(agent: NodeAgent) -> Iterator[Trouble]:
    if agent.runs and agent.resources and agent.unheard:
        by = listed(agent.strategies)
        yield Trouble(f"{agent.unheard}: containers are told of their devices by {by}")


@check(
    "NVSHIM-D111",
    ERROR,
    "a container runs without a device that the kubelet has given it",
    why="Its pod is Running and Ready, and has no GPU; nobody else gets the device meanwhile.",
    remedy=(
        "see that its pod names the RuntimeClass of the shim, or that the engine reads CDI "
        "names (D110); then have the pod made anew"
    ),
    command="nvshim ledger check",
)
def _missing(agent: NodeAgent) -> Iterator[Trouble]:
    if agent.runs:
        yield from map(Trouble, agent.missing)


@check(
    "NVSHIM-D112",
    WARNING,
    "a shim does not go by what the kubelet has recorded",
    why=(
        "In a pod, the kubelet's record says which GPUs were given. Without it, a container that "
        "is told of its GPU by a variable, a mount or an annotation starts without."
    ),
    remedy="name the kubelet's root in [node] of config.toml; the record has to be root's alone",
    command="nvshim config set node.kubelet-root DIRECTORY",
)
def _unread(plugins: Plugins, policy: Policy) -> Iterator[Trouble]:
    if plugins.unread and policy.mode != Mode.NVIDIA:
        yield Trouble(plugins.unread)
