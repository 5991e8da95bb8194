"""The monitor: GPU events from NVML and the kernel's log, and samples of NVML.

::

    events.py      child ──▶ NVML's events ─┐
                                            ├─▶ merging.py ─▶ state.gpu_events
    kernel_log.py  /dev/kmsg ──▶ Xids ──────┘
    NvmlSampler    child ◀──▶ the services that call state.sampler
    nvml_pause.py  stops both children while a file or a mark requests it

One source is enough to report an Xid. Only the kernel log names the process. Only NVML names the
MIG instance if the driver is old, because the log lines of older drivers do not. So an event waits
for the other source, and becomes one of ``state.gpu_events`` when it is complete. The health of a
device does not wait for the process: an Xid that names its devices is also sent to
``state.early_xids`` at once.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import anyio

from hooks.node.gpus import Gpu
from integration.agent_errors import KernelLogUnusable
from integration.containers.procfs import Procfs
from integration.node.faults.xids import Scope, about
from integration.node.service import Context
from integration.node.services.monitor import nvml_pause
from integration.node.services.monitor.events import Watch
from integration.node.services.monitor.kernel_log import follow
from integration.node.services.monitor.merging import Merger
from integration.node.services.monitor.processes import Processes
from integration.node.state.store import State, Unsampled
from integration.node.state.topic import call_on_change
from integration.node.values.service_name import ServiceName
from integration.nvml.sampler import NvmlSampler
from integration.nvml.session import Children, library_of
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import GpuEvent, Sample
from shim.causes.xids import TOLD_BY_TEXT

_KERNEL_LOG: Final = "monitor.kernel-log"
_SAMPLES: Final = "monitor.samples"


async def run(context: Context) -> None:
    """Watch the GPUs until cancelled."""
    state, children = context.state, Children(context.say, context.config.state)
    samples = state.sample.publisher(ServiceName.MONITOR)
    samplers = state.sampler.publisher(ServiceName.MONITOR)
    cliques = state.cliques.publisher(ServiceName.MONITOR)
    forwarder = EventForwarder(state, reads_log=bool(context.options.kernel_log))
    to_answer = context.config.nvml_timeout
    watch = Watch(state, children, forwarder.add, context.say, to_answer=to_answer)

    def look() -> NodeSnapshot:
        return (
            NodeSnapshot(faults=(state.nvml_unavailable,))
            if state.nvml_unavailable
            else state.node.value
        )

    def post(sample: Sample) -> None:
        # On a node without GPUs a failed sample is no fault.
        failed = sample.failure and library_of(look())
        samples.publish(sample)
        if not sample.failure:
            places = (gpu.fabric for gpu in sample.gpus if gpu.fabric is not None)
            cliques.publish(frozenset(place.name for place in places if place.name))
        context.fault(_SAMPLES, f"samples of NVML: {sample.failure}" if failed else "")

    sampler = NvmlSampler(look, children, to_answer=to_answer, post=post)
    samplers.publish(sampler)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nvml_pause.follow, context)  # before any child
            tasks.start_soon(forwarder.keep)
            tasks.start_soon(watch.keep)
            tasks.start_soon(sampler.serve)
            tasks.start_soon(call_on_change, sampler.look_again, *state.nvml_inputs)
            tasks.start_soon(_read_log, context, forwarder)
    finally:
        samplers.publish(Unsampled())
        state.unwatched.publisher(ServiceName.MONITOR).publish({})
        state.lost_gpus.publisher(ServiceName.MONITOR).publish({})
        state.nvml_pause.publisher(ServiceName.MONITOR).publish("")
        state.resetting_gpus.publisher(ServiceName.MONITOR).publish(frozenset())
        for fault in ("monitor.events", _KERNEL_LOG, nvml_pause.FAULT, _SAMPLES):
            state.faults.report(fault, "")


async def _read_log(context: Context, forwarder: EventForwarder) -> None:
    """Follow the kernel log. If it cannot be read, report that once."""
    path = context.options.kernel_log
    if not path:
        return
    try:
        await follow(path, lambda event: forwarder.add(_with_uuid(event, context)))
        line = f"the kernel's log {path} has ended"
    except KernelLogUnusable as error:
        line = str(error)
    context.fault(_KERNEL_LOG, line, level="warning")
    forwarder.reads_log = False


def _with_uuid(event: GpuEvent, context: Context) -> GpuEvent:
    """Return an event of the kernel log with the UUID of the GPU at its PCI address, or port."""
    inventory = context.state.node.value.inventory
    if event.switch is not None:
        ports = {} if inventory is None else context.topologies.at_once(inventory).ports
        return replace(event, gpu=ports.get((event.bus_id, event.switch.link), ""))
    gpus = inventory.gpus if inventory is not None else ()
    prefix = f"{event.bus_id}."
    uuid = next((gpu.uuid for gpu in gpus if gpu.bus_id.startswith(prefix)), "")
    return replace(event, gpu=uuid)


class EventForwarder:
    """Sends the events of both sources, each when it is complete.

    Args:
        state: where the events are sent.
        reads_log: whether the agent reads the kernel log.
    """

    def __init__(self, state: State, *, reads_log: bool = True) -> None:
        self.reads_log = reads_log
        self._state = state
        self._processes = Processes(Procfs())
        self._merger = Merger()
        self._added = anyio.Event()

    def add(self, event: GpuEvent) -> None:
        """Add an event, and send it at once if it need not wait for the other source."""
        if event.pid and not event.cgroups:
            event = replace(event, cgroups=self._processes.cgroups_of(event.pid, event.when))
        is_whole = self._is_whole(event)
        self._merger.add(event, time.monotonic(), is_whole=is_whole)
        if not is_whole and self._is_clear(event):
            self._state.early_xids.send(event)
        self._send_due()
        self._added.set()

    def _is_whole(self, event: GpuEvent) -> bool:
        """Whether the other source cannot add anything to an event."""
        if event.source == "nvml":
            return not self.reads_log
        return self._names_place(event)  # NVML names the instance that older drivers' lines do not

    def _is_clear(self, event: GpuEvent) -> bool:
        """Whether an Xid says by itself which devices it affects, and how much."""
        if event.xid in {0, *TOLD_BY_TEXT}:
            return False
        affects_all = about(event.xid).scope is Scope.GPU and self._gpu_of(event) is not None
        return affects_all or self._names_place(event)

    def _names_place(self, event: GpuEvent) -> bool:
        """Whether an event names the MIG instance, or its GPU has none."""
        if event.gpu_instance is not None:
            return True
        gpu = self._gpu_of(event)
        return gpu is not None and not gpu.mig

    def _gpu_of(self, event: GpuEvent) -> Gpu | None:
        inventory = self._state.node.value.inventory
        gpus = () if inventory is None else inventory.gpus
        return next((gpu for gpu in gpus if gpu.uuid == event.gpu), None)

    async def keep(self) -> None:
        """Send the events that waited, until cancelled."""
        while True:
            self._added = anyio.Event()
            wake = self._merger.wake()
            pause = float("inf") if wake is None else max(0.0, wake - time.monotonic())
            with anyio.move_on_after(pause):
                await self._added.wait()
            self._send_due()

    def _send_due(self) -> None:
        for event in self._merger.due(time.monotonic()):
            self._state.gpu_events.send(event)
