"""NVML's events, and whether each GPU still answers, in the child.

The child reads one line, ``{"gpus": {INDEX: UUID, …}, "beat": SECONDS}``: the node's GPUs according
to the inventory, and how long the child may be silent. Then it reports, one line each:

- ``{"lost": {UUID: WHY, …}}``: the GPUs that do not answer; at the start, and after each change;
- ``{"mig": {UUID: BOOLEAN, …}}``: whether MIG mode is on, for the GPUs that have it; once, since it
  cannot be switched while the child runs;
- ``{"unwatched": {UUID: WHY, …}}``: the GPUs without events; at the start, and after each change. A
  GPU counts as watched after the first wait that worked;
- ``{"event": {…}}``, with those fields of :class:`~integration.nvml.values.GpuEvent` that NVML
  knows;
- ``{"beat": 1}`` after a silence, so that the agent can tell silence from a driver that hangs.

Rules
- A lost GPU makes the wait for events fail at once. In case it does not, the child asks each GPU
  for its temperature every few seconds, or every half second if a GPU has no events, because
  nothing else would show the loss. A GPU that was lost stays lost for this child, because NVML does
  not notice when a GPU comes back.
- A lost GPU makes the wait fail for all GPUs. So the child registers the others again. If the wait
  keeps failing, the child exits.
- If a driver cannot wait for events, there are none. The child reports that once, and continues.
- Drivers from 580 on have an event for a new recovery action, which does not name the action: the
  child asks for it at once. It does the same after the event for a GPU that became unavailable, but
  then reports only an action that is needed.

Source: the NVML API, "Event Handling Methods"; nvml.h of 580, nvmlEventTypeGpuRecoveryAction and
nvmlEventTypeGpuUnavailableError.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from api.errors import one_line
from hooks.node.nvml_probe import LOST, text_of
from integration.nvml.child_samples import RECOVERY_ACTION, value_of

# nvmlReturn_t
_TIMEOUT = 10
_MISSING = frozenset({3, 13})  # not supported, function not found

_FAILURES = 3  # in a row
_PAUSE = 0.1
# Seconds between two questions to the GPUs: while all have events, and while one has none.
_PULSE = 5.0
_PULSE_UNHEARD = 0.5
_TEMPERATURE = 0
_MIG = 1
_MOST_GPUS = 256
_NO_XIDS = "it reports no Xids"
_UNKNOWN = "NVML does not list it"

_KINDS = {2: "ecc-double", 8: "xid"}
# Older releases of pynvml do not have names for these.
_GPU_UNAVAILABLE, _RECOVERY_ACTION = 0x4000, 0x8000
_HIGHEST_XID = 100_000
_NO_INSTANCE = 0xFFFFFFFF


def run(nvml: Any, say: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Report events until NVML fails for good.

    Raises:
        NVMLError: the wait fails again and again.
    """
    request = json.loads(sys.stdin.readline())
    known = {int(index): uuid for index, uuid in request["gpus"].items()}
    watcher = _Watcher(nvml, say, request["beat"], known)
    failures = 0
    while True:
        watcher.register()
        watcher.report_modes()
        try:
            while True:
                watcher.wait()
                failures = 0
        except nvml.NVMLError:
            failures += 1
            if failures == _FAILURES:
                raise
            time.sleep(_PAUSE)


class _Gpu:
    """A GPU.

    Attributes:
        index: NVML's index of the GPU.
        uuid: the UUID from NVML; until that is known, the inventory's.
        handle: NVML's handle; None until the GPU was opened.
        lost: why the GPU does not answer; "" if it does.
        failed: why the GPU has no events; "" if it has.
    """

    def __init__(self, index: int, uuid: str) -> None:
        self.index, self.uuid = index, uuid
        self.lost = self.failed = ""
        self.handle: Any = None


class _Watcher:
    """Waits for events.

    Args:
        beat: the longest silence in seconds.
        known: the UUIDs of the node's GPUs by index.
    """

    def __init__(
        self,
        nvml: Any,
        say: Callable[[dict[str, Any]], None],
        beat: float,
        known: Mapping[int, str],
    ) -> None:
        self._nvml, self._beat, self._known = nvml, beat, known
        self._say_line = say
        self._gpus: list[_Gpu] = []
        self._events: Any = None
        self._no_events = ""  # why no GPU has events
        self._has_waited = False  # since the GPUs were registered
        self._modes_reported = False
        self._reported: dict[str, Any] = {}
        self._spoke = self._pulsed = time.monotonic()

    def register(self) -> None:
        """Register for the events of every GPU that answers.

        Raises:
            NVMLError: the event set cannot be created, or the GPUs cannot be counted.
        """
        nvml, before = self._nvml, self._gpus
        if self._events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._events)
            self._events = None
        self._has_waited = False
        if not self._no_events:
            try:
                self._events = nvml.nvmlEventSetCreate()
            except nvml.NVMLError as error:
                self._give_up_events(error)
        count = min(nvml.nvmlDeviceGetCount(), _MOST_GPUS)
        self._gpus = [_Gpu(index, self._known.get(index, "")) for index in range(count)]
        if len(before) == len(self._gpus):
            for gpu, known in zip(self._gpus, before, strict=True):
                gpu.uuid, gpu.lost, gpu.handle = known.uuid, known.lost, known.handle
        for gpu in self._gpus:
            if not gpu.lost:
                try:
                    self._register(gpu)
                except nvml.NVMLError as error:
                    gpu.failed = str(error)
                    self._lose(gpu, error)
        self._report_lost()

    def report_modes(self) -> None:
        """Report which GPUs are in MIG mode, the first time."""
        if self._modes_reported:
            return
        self._modes_reported = True
        modes: dict[str, bool] = {}
        for gpu in self._gpus:
            if gpu.handle is not None and not gpu.lost:
                with contextlib.suppress(self._nvml.NVMLError):
                    modes[gpu.uuid] = self._nvml.nvmlDeviceGetMigMode(gpu.handle)[0] == _MIG
        if modes:
            self._say({"mig": modes})

    def _register(self, gpu: _Gpu) -> None:
        nvml = self._nvml
        gpu.handle = nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        kind, dash, rest = text_of(nvml.nvmlDeviceGetUUID(gpu.handle)).partition("-")
        gpu.uuid = kind + dash + rest.lower()  # as the inventory has it
        if self._events is None or not self._answers(gpu):
            return
        xids = nvml.nvmlEventTypeXidCriticalError
        wanted = xids | nvml.nvmlEventTypeDoubleBitEccError | _GPU_UNAVAILABLE | _RECOVERY_ACTION
        kinds = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & wanted
        if not kinds & xids:
            gpu.failed = _NO_XIDS
            return
        nvml.nvmlDeviceRegisterEvents(gpu.handle, kinds, self._events)

    def wait(self) -> None:
        """Wait for one event, or until it is time to ask the GPUs.

        Raises:
            NVMLError: the wait failed.
        """
        pulse = self._pulse()
        seconds = min(pulse, self._beat)
        if self._has_events:
            # The first wait returns at once: it shows whether waiting works.
            self._wait(seconds if self._has_waited else 0.0)
        else:
            time.sleep(seconds)
        self._has_waited = True
        self._report_unwatched()
        now = time.monotonic()
        if now - self._pulsed >= pulse:
            self._pulsed = now
            self._ask_all()
        if now - self._spoke >= self._beat:
            self._say({"beat": 1})

    def _pulse(self) -> float:
        """Return the seconds between two questions to the GPUs."""
        heard = all(gpu.lost or self._is_watched(gpu) for gpu in self._gpus)
        return _PULSE if heard else _PULSE_UNHEARD

    @property
    def _has_events(self) -> bool:
        return self._events is not None and any(map(self._is_watched, self._gpus))

    def _is_watched(self, gpu: _Gpu) -> bool:
        return not (gpu.lost or gpu.failed or self._no_events)

    def _wait(self, seconds: float) -> None:
        started = time.monotonic()
        try:
            event = self._nvml.nvmlEventSetWait(self._events, int(seconds * 1000))
        except self._nvml.NVMLError as error:
            if error.value != _TIMEOUT:
                self._give_up_events(error)
                return
            # A wait that returns at once must not become a busy loop.
            shortest = min(seconds, _PULSE_UNHEARD) / 2
            time.sleep(max(0.0, shortest - (time.monotonic() - started)))
            return
        if event.eventType in {_GPU_UNAVAILABLE, _RECOVERY_ACTION}:
            self._report_action(event)
            return
        kind = _KINDS.get(event.eventType)
        if kind is None or (kind == "xid" and event.eventData > _HIGHEST_XID):
            return
        gpu = self._gpu_of(event)
        self._say(
            {
                "event": {
                    "kind": kind,
                    "gpu": "" if gpu is None else gpu.uuid,
                    "xid": event.eventData if kind == "xid" else 0,
                    "gpu_instance": _instance(event.gpuInstanceId),
                    "compute_instance": _instance(event.computeInstanceId),
                }
            }
        )

    def _gpu_of(self, event: Any) -> _Gpu | None:
        gpus = {_address(gpu.handle): gpu for gpu in self._gpus if gpu.handle is not None}
        return gpus.get(_address(event.device))

    def _report_action(self, event: Any) -> None:
        """Report the recovery action of the GPU that an event is about, or that it is lost."""
        gpu = self._gpu_of(event)
        if gpu is None or not self._answers(gpu):
            return
        action = None
        try:
            (field,) = self._nvml.nvmlDeviceGetFieldValues(gpu.handle, [RECOVERY_ACTION])
            action = value_of(field)
        except self._nvml.NVMLError as error:
            self._lose(gpu, error)
        if not gpu.lost and (action or event.eventType == _RECOVERY_ACTION):
            self._say({"event": {"kind": "recovery-action", "gpu": gpu.uuid, "action": action}})

    def _give_up_events(self, error: Any) -> None:
        """Continue without events if the driver has none.

        Raises:
            NVMLError: the driver supports events, but they failed.
        """
        if error.value not in _MISSING:
            raise error
        self._no_events = str(error)

    def _ask_all(self) -> None:
        """Check that every GPU still answers; if one is lost, register the others again."""
        lost = False
        for gpu in self._gpus:
            if gpu.handle is not None and not gpu.lost:
                lost |= not self._answers(gpu)
        if lost:
            self.register()

    def _answers(self, gpu: _Gpu) -> bool:
        """Return whether a GPU still answers."""
        try:
            self._nvml.nvmlDeviceGetTemperature(gpu.handle, _TEMPERATURE)
        except self._nvml.NVMLError as error:
            self._lose(gpu, error)
        return not gpu.lost

    def _lose(self, gpu: _Gpu, error: Any) -> None:
        """Report a GPU as lost if an error means that; the next GPUs may be slow to answer."""
        if error.value in LOST:
            gpu.lost = str(error)
            self._report_lost()

    def _report_lost(self) -> None:
        self._report_change("lost", {gpu.uuid: gpu.lost for gpu in self._gpus if gpu.lost})

    def _report_unwatched(self) -> None:
        why = dict.fromkeys(self._known.values(), _UNKNOWN)
        for gpu in self._gpus:
            if self._is_watched(gpu):
                why.pop(gpu.uuid, None)
            else:
                why[gpu.uuid] = gpu.lost or gpu.failed or self._no_events
        self._report_change("unwatched", why)

    def _report_change(self, name: str, why: Mapping[str, str]) -> None:
        """Report something about the node's own GPUs if it has changed."""
        own = frozenset(self._known.values())
        line = {uuid: one_line(text) for uuid, text in why.items() if uuid in own}
        if self._reported.get(name) != line:
            self._reported[name] = line
            self._say({name: line})

    def _say(self, line: dict[str, Any]) -> None:
        self._spoke = time.monotonic()
        self._say_line(line)


def _address(handle: Any) -> int:
    """Return a GPU's identity: a handle is a pointer, and NVML gives the same for the same GPU.

    A GPU that has fallen off the bus does not report its UUID.
    """
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _instance(number: int) -> int | None:
    return None if number == _NO_INSTANCE else number
