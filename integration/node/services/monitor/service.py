"""The monitor: GPU events from NVML and the kernel's log, and samples of NVML.

::

    events.py      child ──▶ NVML's events ─┐
                                            ├─▶ merging.py ─▶ state.gpu_events
    kernel_log.py  /dev/kmsg ──▶ Xids ──────┘
    sampling.py    child ◀──▶ whoever asks state.sampler
    nvml_pause.py  a file at which both children end

Without the kernel's log an Xid has no process, without NVML it has no MIG instance but the log's;
either alone is enough to know of it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio

from integration.agent_errors import KernelLogUnusable
from integration.containers.procfs import Procfs
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

if TYPE_CHECKING:
    from integration.node.service import Context

_KERNEL_LOG: Final = "monitor.kernel-log"
_SAMPLES: Final = "monitor.samples"


async def run(context: Context) -> None:
    """Watch the GPUs, until cancelled."""
    state, children = context.state, Children(context.say, context.config.state)
    samples = state.sample.publisher(ServiceName.MONITOR)
    samplers = state.sampler.publisher(ServiceName.MONITOR)
    teller = Teller(state, reads_log=bool(context.options.kernel_log))
    to_answer = context.config.nvml_timeout
    watch = Watch(state, children, teller.add, context.say, to_answer=to_answer)

    def look() -> NodeSnapshot:
        return (
            NodeSnapshot(faults=(state.nvml_unavailable,))
            if state.nvml_unavailable
            else state.node.value
        )

    def post(sample: Sample) -> None:
        # A node without GPUs lacks nothing.
        failed = sample.failure and library_of(look())
        samples.publish(sample)
        context.fault(_SAMPLES, f"samples of NVML: {sample.failure}" if failed else "")

    sampler = NvmlSampler(look, children, to_answer=to_answer, post=post)
    samplers.publish(sampler)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nvml_pause.follow, context)  # before any child
            tasks.start_soon(teller.keep)
            tasks.start_soon(watch.keep)
            tasks.start_soon(sampler.serve)
            tasks.start_soon(call_on_change, sampler.look_again, *state.nvml_inputs)
            tasks.start_soon(_read_log, context, teller)
    finally:
        samplers.publish(Unsampled())
        state.unwatched.publisher(ServiceName.MONITOR).publish({})
        state.lost_gpus.publisher(ServiceName.MONITOR).publish({})
        state.nvml_pause.publisher(ServiceName.MONITOR).publish("")
        for fault in ("monitor.events", _KERNEL_LOG, nvml_pause.FAULT, _SAMPLES):
            state.faults.report(fault, "")


async def _read_log(context: Context, teller: Teller) -> None:
    """Hear the kernel, if that can be had; otherwise say so once."""
    path, state = context.options.kernel_log, context.state
    if not path:
        return
    try:
        await follow(path, lambda event: teller.add(_with_uuid(event, state.node.value)))
        line = f"the kernel's log {path} has ended"
    except KernelLogUnusable as error:
        line = str(error)
    context.fault(_KERNEL_LOG, line, level="warning")
    teller.reads_log = False


def _with_uuid(event: GpuEvent, seen: NodeSnapshot) -> GpuEvent:
    """An event of the kernel's log, whose GPU is found by its address."""
    gpus = seen.inventory.gpus if seen.inventory is not None else ()
    prefix = f"{event.bus_id}."
    uuid = next((gpu.uuid for gpu in gpus if gpu.bus_id.startswith(prefix)), "")
    return replace(event, gpu=uuid)


class Teller:
    """Sends the events of both sources, when each is complete.

    Args:
        reads_log: whether the kernel's log is read.
    """

    def __init__(self, state: State, *, reads_log: bool = True) -> None:
        self.reads_log = reads_log
        self._state = state
        self._processes = Processes(Procfs())
        self._merger = Merger()
        self._news = anyio.Event()

    def add(self, event: GpuEvent) -> None:
        """Take in what happened; what can be told at once is."""
        if event.pid and not event.cgroups:
            event = replace(event, cgroups=self._processes.cgroups_of(event.pid, event.when))
        self._merger.add(event, time.monotonic(), is_whole=self._is_whole(event))
        self._tell()
        self._news.set()

    def _is_whole(self, event: GpuEvent) -> bool:
        """Whether the other source knows nothing more of an event."""
        if event.source == "nvml":
            return not self.reads_log
        if event.gpu_instance is not None:
            return True
        # NVML names the instance that older drivers' lines do not.
        inventory = self._state.node.value.inventory
        gpus = () if inventory is None else inventory.gpus
        return any(gpu.uuid == event.gpu and not gpu.mig for gpu in gpus)

    async def keep(self) -> None:
        """Tell what was held back, until cancelled."""
        while True:
            self._news = anyio.Event()
            wake = self._merger.wake()
            pause = float("inf") if wake is None else max(0.0, wake - time.monotonic())
            with anyio.move_on_after(pause):
                await self._news.wait()
            self._tell()

    def _tell(self) -> None:
        for event in self._merger.due(time.monotonic()):
            self._state.gpu_events.send(event)
