"""Waiting for NVML's events, in the child.

It says, a line each:

- ``{"watching": [UUID, …], "failed": [[INDEX, UUID or "", WHY], …]}`` at first, and whenever that
  has changed;
- ``{"event": {"gpu": UUID or "", "type": …, "data": …, "gi": …, "ci": …}}``, numbers as NVML has
  them;
- ``{"beat": 1}`` if it was silent for a while, so that silence is told from a driver that hangs.

A GPU that is lost makes the wait for all of them fail. So all are registered anew then, and those
that cannot be are left out; a wait that goes on failing ends the child.

Source: the NVML API, "Event Handling Methods".
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

_TIMEOUT = 10  # nvmlReturn_t
_FAILURES = 3  # one after the other
_PAUSE = 0.1


def watch(nvml: Any, say: Callable[[dict[str, Any]], None], beat: int) -> NoReturn:
    """Say what happens, until it cannot be known any more.

    Args:
        nvml: the module pynvml.
        say: takes what is said.
        beat: milliseconds of silence at most.

    Raises:
        NVMLError: the wait cannot go on.
        RuntimeError: there is no GPU whose events could be had.
    """
    nvml.nvmlInit()
    said: Any = None
    failures = 0
    while True:
        events, uuids, failed = register(nvml)
        state = {"watching": sorted(uuids.values()), "failed": failed}
        if state != said:
            say(state)
            said = state
        if not uuids:
            raise RuntimeError("of no GPU events can be had")
        try:
            while True:
                failures = _wait(nvml, events, uuids, say, beat)
        except nvml.NVMLError:
            failures += 1
            if failures == _FAILURES:
                raise
            nvml.nvmlEventSetFree(events)
            time.sleep(_PAUSE)


def register(nvml: Any) -> tuple[Any, dict[int, str], list[list[Any]]]:
    """Ask for the events of every GPU.

    Args:
        nvml: the module pynvml.

    Returns:
        NVML's set of events; the UUID of each GPU that is in it, by the address that its handle
        is; index, UUID and reason of each that is not.

    Raises:
        NVMLError: there is no set, or GPUs cannot be counted.
    """
    events = nvml.nvmlEventSetCreate()
    wanted = (
        nvml.nvmlEventTypeXidCriticalError
        | nvml.nvmlEventTypeDoubleBitEccError
        | nvml.nvmlEventTypeSingleBitEccError
    )
    uuids: dict[int, str] = {}
    failed: list[list[Any]] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        uuid = ""
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            kinds = nvml.nvmlDeviceGetSupportedEventTypes(handle) & wanted
            if not kinds & nvml.nvmlEventTypeXidCriticalError:
                failed.append([index, uuid, "it tells of no Xid"])
                continue
            nvml.nvmlDeviceRegisterEvents(handle, kinds, events)
        except nvml.NVMLError as error:
            failed.append([index, uuid, str(error)])
            continue
        uuids[_address(handle)] = uuid
    return events, uuids, failed


def _wait(
    nvml: Any,
    events: Any,
    uuids: dict[int, str],
    say: Callable[[dict[str, Any]], None],
    beat: int,
) -> int:
    """Wait for one event. How many failures there were in a row: none.

    Raises:
        NVMLError: the wait failed.
    """
    begun = time.monotonic()
    try:
        event = nvml.nvmlEventSetWait(events, beat)
    except nvml.NVMLError as error:
        if error.value != _TIMEOUT:
            raise
        # One that does not wait must not turn in circles.
        time.sleep(max(0.0, beat / 2000 - (time.monotonic() - begun)))
        say({"beat": 1})
        return 0
    say(
        {
            "event": {
                "gpu": uuids.get(_address(event.device), ""),
                "type": event.eventType,
                "data": event.eventData,
                "gi": event.gpuInstanceId,
                "ci": event.computeInstanceId,
            }
        }
    )
    return 0


def _address(handle: Any) -> int:
    """A handle is a pointer, and NVML gives the same for the same GPU.

    The UUID of a GPU that has fallen off the bus cannot be asked for any more.
    """
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _text(value: Any) -> str:
    """A string of NVML: pynvml gives bytes or str, depending on its release."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
