"""How the child that waits for NVML's events waits, with an NVML of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from integration.nvml import child_events
from integration.nvml.child_events import _Watcher

_TIMEOUT = 10


class NvmlError(Exception):
    """As pynvml raises it."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml:
    """Two GPUs; no event ever comes."""

    NVMLError = NvmlError
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - NVML's name
    nvmlEventTypeDoubleBitEccError = 2  # noqa: N815 - the same

    def __init__(self, kinds: tuple[int, int]) -> None:
        self.kinds = kinds
        self.waits: list[int] = []
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlEventSetCreate": SimpleNamespace,
            "nvmlEventSetFree": lambda _: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetSupportedEventTypes": lambda handle: self.kinds[handle],
            "nvmlDeviceRegisterEvents": lambda *_: None,
        }
        return answers[name]

    def nvmlDeviceGetTemperature(self, *_: object) -> int:  # noqa: N802 - NVML's name
        self.asked += 1
        return 30

    def nvmlEventSetWait(self, _: object, milliseconds: int) -> None:  # noqa: N802 - the same
        self.waits.append(milliseconds)
        raise NvmlError(_TIMEOUT)


@pytest.mark.parametrize(
    ("kinds", "longest"),
    [((10, 10), child_events._PULSE), ((10, 2), child_events._PULSE_UNHEARD)],
)
def test_gpus_are_asked_often_only_if_one_has_no_events(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[int, int], longest: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    nvml = Nvml(kinds)
    watcher = _Watcher(nvml, lambda _: None, 60.0, {0: "GPU-0", 1: "GPU-1"})
    watcher.register()
    watcher.wait()
    watcher.wait()
    assert nvml.waits == [0, longest * 1000]
    # A wait that returns at once is no busy loop; and an event does not wait for long meanwhile.
    assert 0 < slept[-1] <= child_events._PULSE_UNHEARD
