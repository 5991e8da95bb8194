"""Track the health of devices: whether each can be allocated to a container.

::

    events ──────▶ judge ──▶ attribute ──▶ table ──▶ state.health, xid_counts, health.json, the log
    early Xids ──▶ judge ─────────────────▶  │
    inventories ─────────────────────────▶  │
    samples ◀── requested while a device recovers, and every few minutes
    requests of administrators ──────────▶  │

Rules
- The log has a line for each error, with the container that caused it if known. Each error counts
  once: the kernel log and NVML may both report it, and
  :mod:`integration.node.services.monitor.merging` merges the two into one event.
- A serious Xid makes its devices unhealthy before the process that caused it is known, so that no
  pod gets them in the meantime. The complete event follows. It is counted, and names the container.
- The log has a line for each change of a device's state: the reason, the containers involved and
  the remedy.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from api.errors import one_line
from hooks.config import Config
from integration.detached import SlowCall
from integration.node.device_health import health_store as store
from integration.node.device_health import requests
from integration.node.device_health.device_state import Moment, Rules
from integration.node.device_health.health_table import (
    HealthTable,
    Place,
    after_clear,
    after_event,
    after_inventory,
    after_loss,
    after_sample,
    after_watch,
    judge,
    next_sample,
    places_of,
    reports,
)
from integration.node.faults.fault_attribution import Attribution, attribute
from integration.node.faults.policy import Policy, Verdict, policy_of
from integration.node.faults.xids import Severity
from integration.node.service import Context
from integration.node.state.store import Unsampled
from integration.node.state.topic import call_on_change, version_of, wait_any
from integration.node.values.health import HealthState
from integration.node.values.service_name import ServiceName
from integration.nvml.values import GpuEvent, Sample
from integration.watcher import ANY, Watcher

# Seconds between two samples: while all devices are healthy, and while one is lost or unwatched.
_IDLE_INTERVAL: Final = 300.0
_PROBE_INTERVAL: Final = 5.0
_MOST_TOTALS: Final = 4096
_RETRY: Final = 10.0  # seconds until a failed write is retried
_SHUTDOWN: Final = 1.0  # seconds for the last write

_FILE: Final = "health.file"
"""The name of the fault "the file cannot be written"."""

_LEVELS: Final = {
    Severity.IGNORE: "info",
    Severity.SUSPECT: "warning",
    Severity.UNHEALTHY: "error",
    Severity.FATAL: "error",
}
_LEVEL_OF_STATE: Final = {
    HealthState.HEALTHY: "info",
    HealthState.SUSPECT: "warning",
    HealthState.UNHEALTHY: "error",
    HealthState.RECOVERING: "info",
}


async def run(context: Context) -> None:
    """Watch the devices until cancelled.

    Raises:
        XidListWrong: a list of Xids is not valid.
    """
    options = context.options
    policy = policy_of(context.config, options.ignored_xids, options.heeded_xids)
    if not policy.judged:
        context.say("warning", "health checks are disabled", reason="DP_DISABLE_HEALTHCHECKS")
        context.state.health.publisher(ServiceName.HEALTH).publish({})
        with suppress(OSError):  # mark the file of an earlier agent as no longer current
            store.write(context.config, store.read(context.config).table, judged=False)
        await anyio.sleep_forever()
    await _Monitor(context, policy).watch()


def rules_of(config: Config) -> Rules:
    """Return the thresholds of the configuration."""
    return Rules(
        suspects=config.health_suspects,
        window=config.health_window,
        patience=config.health_patience,
        quiet=config.health_quiet,
        longest=config.health_longest_quiet,
    )


def _now() -> Moment:
    return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class _Monitor:
    """Updates the health table, publishes it and logs its changes."""

    def __init__(self, context: Context, policy: Policy) -> None:
        self._config = context.config
        self._options = context.options
        self._state = context.state
        self._health = context.state.health.publisher(ServiceName.HEALTH)
        self._xid_counts = context.state.xid_counts.publisher(ServiceName.HEALTH)
        self._say = context.say
        self._policy = policy
        self._rules = rules_of(context.config)
        self._totals = dict(context.state.xid_counts.value)
        self._sampled = -math.inf
        self._known_lost: dict[str, str] = {}
        self._saving = SlowCall(_SHUTDOWN)  # an older table never replaces a newer one
        self._changed = anyio.Event()
        self._table_changed = anyio.Event()
        record = store.read(context.config)
        if record.fault:
            self._say("warning", record.fault)
        self._table: HealthTable = record.table
        # The log already has a line for each missing GPU; do not repeat it at each start.
        known = reports(record.table)
        self._health.publish({uuid: known[uuid] for uuid in known.keys() & record.table.gone})
        self._put(record.table)

    async def watch(self) -> None:
        """Follow events, inventories, samples and requests until cancelled."""
        with self._state.gpu_events.listen() as events, self._state.early_xids.listen() as early:
            self._on_inventory()
            async with anyio.create_task_group() as tasks:
                follow = partial(call_on_change, at_once=True)
                tasks.start_soon(follow, self._on_inventory, self._state.node)
                tasks.start_soon(follow, self._on_unwatched, self._state.unwatched)
                tasks.start_soon(follow, self._on_lost_gpus, self._state.lost_gpus)
                tasks.start_soon(call_on_change, self._on_sample, self._state.sample)
                tasks.start_soon(self._request_samples)
                tasks.start_soon(self._serve_requests)
                tasks.start_soon(self._keep_file)
                tasks.start_soon(self._follow_early, early)
                async for event in events:
                    self._on_event(event)

    # -- events --------------------------------------------------------------------------------

    def _on_event(self, event: GpuEvent) -> None:
        verdict = judge(self._table, event, self._policy)
        attribution = attribute(
            event, verdict, self._state.ledger.value, self._state.recent_holders
        )
        verdict = replace(verdict, blamed=attribution.titles)
        self._put(after_event(self._table, event, verdict, _now(), self._rules))
        self._log_event(event, verdict, attribution)
        self._count(event, verdict, attribution)

    async def _follow_early(self, early: MemoryObjectReceiveStream[GpuEvent]) -> None:
        """Apply serious Xids before they are complete. They do not count, and name no container."""
        async for event in early:
            verdict = judge(self._table, event, self._policy)
            if verdict.certain and verdict.severity.weight >= Severity.UNHEALTHY.weight:
                alarm = replace(event, times=0)
                self._put(after_event(self._table, alarm, verdict, _now(), self._rules))

    def _count(self, event: GpuEvent, verdict: Verdict, attribution: Attribution) -> None:
        if event.kind != "xid":
            return
        key = (verdict.gpu, event.xid, attribution.titles[0] if attribution.titles else "")
        if key not in self._totals and len(self._totals) >= _MOST_TOTALS:
            key = (verdict.gpu, event.xid, "")
        self._totals[key] = self._totals.get(key, 0) + event.times
        self._xid_counts.publish(dict(self._totals))

    def _log_event(self, event: GpuEvent, verdict: Verdict, attribution: Attribution) -> None:
        address = "" if event.switch else event.bus_id  # an NVSwitch's address names no GPU
        fields: dict[str, Any] = {
            "gpu": verdict.gpu or event.gpu or address or "unknown",
            "severity": verdict.severity.value,
        }
        if len(verdict.devices) == 1 and verdict.devices[0] != verdict.gpu:
            fields["device"] = verdict.devices[0]
        if verdict.severity != Severity.IGNORE:
            fields["do"] = verdict.remedy.value
        if attribution.titles:
            fields |= {
                "container": one_line(", ".join(attribution.titles)),
                "known": attribution.how.value,
            }
        if event.pid:
            fields |= {"process": event.pid, "program": one_line(event.process)}
        if event.times > 1:
            fields["times"] = event.times
        if not verdict.gpu and verdict.devices:
            fields["note"] = "it is unknown which GPU it is about; all GPUs are checked"
        self._say(_LEVELS[verdict.severity], verdict.reason, source=event.source, **fields)

    # -- inventories and samples ---------------------------------------------------------------

    def _on_inventory(self) -> None:
        node, now = self._state.node.value, _now()
        load = store.load_of_driver(self._config)
        inventory = node.inventory
        if inventory is None:
            if not node.faults:
                return  # the agent has not read the inventory yet
            table = after_inventory(
                self._table, None, {}, now, self._rules, load=load, why=node.faults[0]
            )
        else:
            # A cached inventory may list a GPU as lost that has answered since.
            lost = {
                gpu.uuid: gpu.lost
                for gpu in inventory.gpus
                if gpu.uuid and gpu.lost and self._answered(gpu.uuid) < inventory.taken
            }
            table = after_inventory(
                self._table,
                places_of(inventory, self._present_places()),
                lost,
                now,
                self._rules,
                load=load,
                complete=not inventory.nvml_failure,
            )
        self._put(after_watch(table, self._state.unwatched.value, now, self._rules))

    def _answered(self, uuid: str) -> float:
        """Return when a lost device answered again, in seconds since boot; 0 if it has not."""
        known = self._table.conditions.get(uuid)
        return 0.0 if known is None or known.lost else known.answers_since

    def _present_places(self) -> dict[str, Place]:
        """Return the places of the devices that are not missing."""
        table = self._table
        return {uuid: place for uuid, place in table.places.items() if uuid not in table.gone}

    def _on_unwatched(self) -> None:
        self._put(after_watch(self._table, self._state.unwatched.value, _now(), self._rules))

    def _on_lost_gpus(self) -> None:
        """Apply new losses at once. Only samples prove that a GPU is back."""
        before, self._known_lost = self._known_lost, dict(self._state.lost_gpus.value)
        lost = {gpu: why for gpu, why in self._known_lost.items() if gpu not in before}
        self._put(after_loss(self._table, lost, _now(), self._rules))

    def _on_sample(self) -> None:
        if self._state.sample.value is not None:
            self._apply_sample(self._state.sample.value)

    def _apply_sample(self, sample: Sample) -> None:
        if sample.when <= self._sampled or isinstance(self._state.sampler.value, Unsampled):
            return
        if sample.failure and self._state.nvml_unavailable:
            return  # NVML is paused on purpose: its devices are unwatched, not unhealthy
        self._sampled = sample.when
        self._put(after_sample(self._table, sample, _now(), self._rules))

    async def _request_samples(self) -> None:
        """Request a sample while a device recovers, and every few minutes."""
        last = -math.inf
        while True:
            await self._until_due(last)
            sampler = self._state.sampler.value
            if isinstance(sampler, Unsampled):
                version = version_of(self._state.sampler)
                await wait_any(self._state.sampler, since=version, timeout=self._options.poll)
            else:
                last = _now().boot
                self._apply_sample(await sampler.sample(max_age=0))

    async def _until_due(self, last: float) -> None:
        """Wait until the next sample is due.

        Args:
            last: the time of the last sample, in seconds since boot.
        """
        while True:
            interval = min(self._options.poll, _PROBE_INTERVAL)
            when = next_sample(self._table, last, self._rules, interval)
            pause = min(when, last + _IDLE_INTERVAL) - _now().boot
            if pause <= 0:
                return
            with anyio.move_on_after(pause):
                await self._table_changed.wait()  # a new table may change when the sample is due

    # -- requests of administrators ------------------------------------------------------------

    async def _serve_requests(self) -> None:
        directory = requests.directory_of(self._config)
        with suppress(OSError):  # without the directory there are no requests
            os.makedirs(directory, mode=0o700, exist_ok=True)
        reported = ""
        with Watcher(quiet=0) as watcher:
            while True:
                for name in requests.waiting(self._config):
                    await self._clear(name)
                await watcher.change({directory: ANY})
                if watcher.deaf and watcher.deaf != reported:
                    self._say(
                        "warning", "polling for health requests: no file watch", reason=watcher.deaf
                    )
                reported = watcher.deaf

    async def _clear(self, name: str) -> None:
        """Return a device to service; acknowledge the request once the file is saved."""
        self._say("warning", "returned to service by hand", device=name)
        self._put(after_clear(self._table, [name], _now(), self._rules))
        await self._save()
        requests.taken(self._config, name)

    # -- publishing ----------------------------------------------------------------------------

    def _put(self, table: HealthTable) -> None:
        """Replace the table, publish the health of devices and log each change of state."""
        before, self._table = self._state.health.value, table
        now = reports(table)
        worse = False
        for uuid, health in now.items():
            was = before[uuid].state if uuid in before else HealthState.HEALTHY
            if health.state == was:
                continue
            worse = worse or not health.state.is_allocatable
            fields: dict[str, Any] = {"device": uuid, "state": health.state.value, "was": was.value}
            if health.reason:
                fields["reason"] = one_line(health.reason)
            if health.xid and health.state != HealthState.HEALTHY:
                fields["xid"] = health.xid
            if health.blamed:
                fields["containers"] = one_line(", ".join(health.blamed))
            if health.remedy:
                fields["do"] = health.remedy
            self._say(_LEVEL_OF_STATE[health.state], f"a device is {health.state.value}", **fields)
        self._health.publish(now)
        self._table_changed.set()
        self._table_changed = anyio.Event()
        if worse:  # the inventory may be outdated
            self._state.look_requested.send()
        self._changed.set()

    async def _keep_file(self) -> None:
        try:
            while True:
                # Retry after a failed write (a full disk, say), even if nothing has changed.
                is_failed = self._state.faults.lines.get(_FILE)
                with anyio.move_on_after(_RETRY if is_failed else math.inf):
                    await self._changed.wait()
                self._changed = anyio.Event()
                await self._save()
        finally:  # an error may have arrived just before the agent stopped
            with anyio.move_on_after(_SHUTDOWN, shield=True):
                await self._save()

    async def _save(self) -> None:
        line = ""
        try:
            await self._saving.run(lambda: store.write(self._config, self._table), math.inf)
        except OSError as error:  # TimeoutError at the end, if the file system does not answer
            line = f"{store.path_of(self._config)}: {error.strerror or 'does not answer'}"
        if line and self._state.faults.lines.get(_FILE) != line:
            self._say("warning", "cannot save device health; a restart loses it", reason=line)
        self._state.faults.report(_FILE, line)
