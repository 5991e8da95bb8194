"""The waits of the child for NVML's events, with a stand-in for NVML."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hooks.config import load_config
from integration.nvml import child_events
from integration.nvml.child import EVENTS
from integration.nvml.child_events import _Watcher
from integration.nvml.inventory import inventory_of
from integration.nvml.session import Children, library_of, uuids_of
from integration.nvml.snapshot import NodeSnapshot
from integration.simulated import Scenario, SimulatedNode

_TIMEOUT = 10


class NvmlError(Exception):
    """Like pynvml's error."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml:
    """An NVML with two GPUs that sends no events."""

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
    # A wait that returns immediately causes no busy loop, and no long delay of events.
    assert 0 < slept[-1] <= child_events._PULSE_UNHEARD


@pytest.mark.anyio
async def test_a_driver_of_580_says_at_once_which_recovery_a_gpu_needs(tmp_path: Path) -> None:
    scenario = Scenario.of(gpus=2, driver="580.65.06")
    with SimulatedNode.create(str(tmp_path / "node"), scenario) as node:
        config = load_config(node.config_path)
        seen = NodeSnapshot(inventory=inventory_of(config))
        children = Children(lambda *_, **__: None, config.state)
        child = children.start(EVENTS, library_of(seen))
        try:
            child.ask({"gpus": uuids_of(seen), "beat": 60})
            while "unwatched" not in await child.answer(20):
                pass
            facts, events = (Path(node.state, f"nvml-{name}") for name in ("facts", "events"))

            async def said(action: int, *kinds: int) -> dict[str, Any]:
                facts.write_text(f"1 recovery-action {action}\n")
                with events.open("a") as file:
                    file.writelines(f"1 {kind} 31\n" for kind in kinds)
                event: dict[str, Any] = (await child.answer(20))["event"]
                return event

            asks = {"kind": "recovery-action", "gpu": seen.gpus[1]}
            assert await said(2, 0x8000) == {**asks, "action": 2}
            assert await said(0, 0x8000) == {**asks, "action": 0}
            # A GPU that is unavailable and requests no action has not recovered, either.
            assert (await said(0, 0x4000, 8))["kind"] == "xid"
            assert await said(6, 0x4000) == {**asks, "action": 6}
            # A GPU that cannot be queried has no known action, and a lost one is lost.
            faults = Path(node.state, "nvml-faults")
            faults.write_text("nvmlDeviceGetFieldValues=error:999")
            assert await said(6, 0x8000) == {**asks, "action": None}
            faults.write_text("nvmlDeviceGetFieldValues=error:15")
            with events.open("a") as file:
                file.write("1 32768 0\n")
            assert (await child.answer(20))["lost"] == {seen.gpus[1]: "GPU is lost"}
        finally:
            await children.end(child)
