"""Waiting for NVML's events, and seeing that the GPUs still answer, in the child.

It reads a line, ``{"gpus": {INDEX: UUID, …}, "beat": SECONDS}``: which the node's GPUs are by the
inventory, and for how long it may be silent. Then it says, a line each:

- ``{"lost": {UUID: WHY, …}}`` at first, and whenever that has changed: those that do not answer;
- ``{"mig": {UUID: BOOLEAN, …}}`` once: whether those that can have MIG mode have it. Nobody can
  switch it as long as the child runs;
- ``{"unwatched": {UUID: WHY, …}}`` likewise: those whose events cannot be had. A GPU is watched
  once NVML has been waited for, and that worked;
- ``{"event": {…}}``, with what NVML knows of a :class:`~integration.nvml.values.GpuEvent`;
- ``{"beat": 1}`` if it was silent for a while, so that silence is told from a driver that hangs.

Rules
- Every half second each GPU is asked for its temperature: a GPU that is lost need not have an
  event, and some GPUs have no events at all. One that says that it is lost stays so for this child,
  since NVML takes no notice of one that comes back.
- A GPU that is lost makes the wait for all of them fail. So all others are registered anew then; a
  wait that goes on failing ends the child.
- A driver that has no wait for events has no events: that is said once, and the child goes on.

Source: the NVML API, "Event Handling Methods".
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from api.errors import one_line
from hooks.node.nvml_probe import LOST, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# nvmlReturn_t
_TIMEOUT = 10
_MISSING = frozenset({3, 13})  # not supported, function not found

_FAILURES = 3  # one after the other
_PAUSE = 0.1
_PULSE = 0.5
_TEMPERATURE = 0
_MIG = 1
_MOST_GPUS = 256
_NO_XIDS = "it tells of no Xid"
_UNTOLD = "NVML does not tell of it"

_KINDS = {2: "ecc-double", 8: "xid"}
_HIGHEST_XID = 100_000
_NO_INSTANCE = 0xFFFFFFFF


def watch(nvml: Any, say: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Say what happens, until it cannot be known any more.

    Raises:
        NVMLError: the wait cannot go on.
    """
    asked = json.loads(sys.stdin.readline())
    known = {int(index): uuid for index, uuid in asked["gpus"].items()}
    nvml.nvmlInit()
    watcher = _Watcher(nvml, say, asked["beat"], known)
    failures = 0
    while True:
        watcher.register()
        watcher.say_modes()
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
    """One of them.

    Attributes:
        index: its number.
        uuid: its own word; until there is one, the inventory's.
        handle: None if there is none.
        lost: why it is not there any more; "" if it is.
        failed: why its events cannot be had; "" if they can.
    """

    def __init__(self, index: int, uuid: str) -> None:
        self.index, self.uuid = index, uuid
        self.lost = self.failed = ""
        self.handle: Any = None


class _Watcher:
    """Who waits.

    Args:
        beat: seconds of silence at most.
        known: the UUIDs of the node's GPUs by their indices.
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
        self._unheard = ""  # why no events can be had
        self._tried = False  # the wait, since they were registered
        self._modes_said = False
        self._said: dict[str, Any] = {}
        self._spoke = self._pulsed = time.monotonic()

    def register(self) -> None:
        """Ask for the events of every GPU that is there.

        Raises:
            NVMLError: there is no set of events, or GPUs cannot be counted.
        """
        nvml, before = self._nvml, self._gpus
        if self._events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._events)
            self._events = None
        self._tried = False
        if not self._unheard:
            try:
                self._events = nvml.nvmlEventSetCreate()
            except nvml.NVMLError as error:
                self._cannot_hear(error)
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
        self._say_lost()

    def say_modes(self) -> None:
        """Say which GPUs are in MIG mode, the first time."""
        if self._modes_said:
            return
        self._modes_said = True
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
        wanted = xids | nvml.nvmlEventTypeDoubleBitEccError
        kinds = nvml.nvmlDeviceGetSupportedEventTypes(gpu.handle) & wanted
        if not kinds & xids:
            gpu.failed = _NO_XIDS
            return
        nvml.nvmlDeviceRegisterEvents(gpu.handle, kinds, self._events)

    def wait(self) -> None:
        """Wait for one event, for as long as the GPUs need not be asked.

        Raises:
            NVMLError: the wait failed.
        """
        seconds = min(_PULSE, self._beat)
        if self._hears:
            # That it can be waited at all is seen before anybody is told so.
            self._wait(seconds if self._tried else 0.0)
        else:
            time.sleep(seconds)
        self._tried = True
        self._say_watching()
        now = time.monotonic()
        if now - self._pulsed >= _PULSE:
            self._pulsed = now
            self._ask_all()
        if now - self._spoke >= self._beat:
            self._say({"beat": 1})

    @property
    def _hears(self) -> bool:
        return self._events is not None and any(map(self._is_watched, self._gpus))

    def _is_watched(self, gpu: _Gpu) -> bool:
        return not (gpu.lost or gpu.failed or self._unheard)

    def _wait(self, seconds: float) -> None:
        begun = time.monotonic()
        try:
            event = self._nvml.nvmlEventSetWait(self._events, int(seconds * 1000))
        except self._nvml.NVMLError as error:
            if error.value != _TIMEOUT:
                self._cannot_hear(error)
                return
            # One that does not wait must not turn in circles.
            time.sleep(max(0.0, seconds / 2 - (time.monotonic() - begun)))
            return
        kind = _KINDS.get(event.eventType)
        if kind is None or (kind == "xid" and event.eventData > _HIGHEST_XID):
            return
        uuids = {_address(gpu.handle): gpu.uuid for gpu in self._gpus if gpu.handle is not None}
        self._say(
            {
                "event": {
                    "kind": kind,
                    "gpu": uuids.get(_address(event.device), ""),
                    "xid": event.eventData if kind == "xid" else 0,
                    "gpu_instance": _instance(event.gpuInstanceId),
                    "compute_instance": _instance(event.computeInstanceId),
                }
            }
        )

    def _cannot_hear(self, error: Any) -> None:
        """Go on without events if the driver has none.

        Raises:
            NVMLError: it has, and they failed.
        """
        if error.value not in _MISSING:
            raise error
        self._unheard = str(error)

    def _ask_all(self) -> None:
        """See that every GPU still answers; if one is lost, the others are registered anew."""
        lost = False
        for gpu in self._gpus:
            if gpu.handle is not None and not gpu.lost:
                lost |= not self._answers(gpu)
        if lost:
            self.register()

    def _answers(self, gpu: _Gpu) -> bool:
        """Whether a GPU is still there."""
        try:
            self._nvml.nvmlDeviceGetTemperature(gpu.handle, _TEMPERATURE)
        except self._nvml.NVMLError as error:
            self._lose(gpu, error)
        return not gpu.lost

    def _lose(self, gpu: _Gpu, error: Any) -> None:
        """Say that a GPU is lost, if that is what an error means; others may be slow to answer."""
        if error.value in LOST:
            gpu.lost = str(error)
            self._say_lost()

    # What is said

    def _say_lost(self) -> None:
        self._say_once("lost", {gpu.uuid: gpu.lost for gpu in self._gpus if gpu.lost})

    def _say_watching(self) -> None:
        why = dict.fromkeys(self._known.values(), _UNTOLD)
        for gpu in self._gpus:
            if self._is_watched(gpu):
                why.pop(gpu.uuid, None)
            else:
                why[gpu.uuid] = gpu.lost or gpu.failed or self._unheard
        self._say_once("unwatched", why)

    def _say_once(self, name: str, why: Mapping[str, str]) -> None:
        """Say something of the node's own GPUs, unless that was said before."""
        own = frozenset(self._known.values())
        line = {uuid: one_line(text) for uuid, text in why.items() if uuid in own}
        if self._said.get(name) != line:
            self._said[name] = line
            self._say({name: line})

    def _say(self, line: dict[str, Any]) -> None:
        self._spoke = time.monotonic()
        self._say_line(line)


def _address(handle: Any) -> int:
    """A handle is a pointer, and NVML gives the same for the same GPU.

    The UUID of a GPU that has fallen off the bus cannot be asked for any more.
    """
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _instance(number: int) -> int | None:
    return None if number == _NO_INSTANCE else number
