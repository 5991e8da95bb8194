"""The child's report of the GPUs: NVML's answers, without impossible values."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace as Answer
from typing import TYPE_CHECKING, Any

import pytest

from integration.nvml import child_samples
from integration.nvml.child_samples import Asker
from integration.nvml.sampler import _sample_of
from integration.nvml.values import COMPUTE, GRAPHICS, DeviceSample, GpuSample, ProcessUse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from integration.nvml.values import Sample

ONE, TWO = (f"GPU-{n}0000000-0000-0000-0000-0000000000ab" for n in (1, 2))
MIG = "MIG-30000000-0000-0000-0000-000000000000"
KNOWN = {0: ONE, 1: TWO}
NONE = 0xFFFFFFFF


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


def process(pid: int, memory: int | None = None, gi: Any = NONE, ci: Any = NONE) -> Answer:
    return Answer(pid=pid, usedGpuMemory=memory, gpuInstanceId=gi, computeInstanceId=ci)


def field(kind: int, **value: float) -> Answer:
    return Answer(nvmlReturn=0, valueType=kind, value=Answer(**value))


ABSENT = Answer(nvmlReturn=3, valueType=0, value=Answer())
# By number; those of NVLinks have the scope of all links.
FIELDS: dict[Any, Answer] = {
    82: field(1, uiVal=70), 94: field(1, uiVal=4), 30: field(3, ullVal=2), 31: field(1, uiVal=1),
    (138, NONE): field(3, ullVal=1 << 40), (139, NONE): field(4, sllVal=5),
    29: field(99),  # an unknown type
}  # fmt: skip

# By the function's name after "nvmlDevice"; a plain value is the answer for each GPU.
WHOLE: dict[str, Any] = {
    "GetMemoryInfo": lambda handle: Answer(
        total=10 if handle == "part" else 80 << 30, used=4 if handle == "part" else 1 << 30
    ),
    "GetUtilizationRates": Answer(gpu=12, memory=3),
    "GetEncoderUtilization": (1, 0),
    "GetDecoderUtilization": (2, 0),
    "GetPowerUsage": 70_500,
    "GetTotalEnergyConsumption": 123_456,
    "GetTemperature": -3,
    "GetClockInfo": lambda _, kind: {1: 345, 2: 2619}[kind],
    "GetTotalEccErrors": lambda _, kind, __: 4 + kind,
    "GetRemappedRows": (5, 6, 1, 0),
    "GetCurrentClocksThrottleReasons": 1,
    "GetFieldValues": lambda _, numbers: [FIELDS.get(number, ABSENT) for number in numbers],
    "GetMigMode": (1, 1),
    "GetMaxMigDeviceCount": 1,
    "GetMigDeviceHandleByIndex": "part",
    "GetGpuInstanceId": 3,
    "GetComputeInstanceId": 0,
    "GetComputeRunningProcesses_v3": [
        process(7, 100), process(8, None, 3, 0), process(0, 5), process(9, 1, 99, 0),
    ],
    "GetMPSComputeRunningProcesses_v3": [process(7, 999), process(8, 6, 3, 0)],
    "GetGraphicsRunningProcesses_v3": [process(7, 5)],
    "GetProcessUtilization": [
        Answer(pid=7, timeStamp=1, smUtil=1, memUtil=1, encUtil=1, decUtil=1),
        Answer(pid=7, timeStamp=2, smUtil=60, memUtil=20, encUtil=500, decUtil=0),
    ],
}  # fmt: skip


def nvml(count: int = 1, **answers: Any) -> Any:
    def uuid(handle: Any) -> bytes:
        return (MIG if handle == "part" else (ONE, TWO, ONE)[handle].upper()).encode()

    told = {"GetUUID": uuid, "GetHandleByIndex": lambda index: index, "GetCount": lambda: count}
    told |= WHOLE | answers
    functions = {
        f"nvmlDevice{name}": told_ if callable(told_) else lambda *_, told_=told_: told_
        for name, told_ in told.items()
    }
    return Answer(NVMLError=NvmlError, nvmlSystemGetDriverVersion=lambda: b"535.1", **functions)


def sample(count: int = 1, known: dict[int, str] | None = None, **answers: Any) -> Sample:
    """Parse the child's answer as the agent does."""
    said = Asker(nvml(count, **answers), known or {}, {}).all(5.0)
    return _sample_of(json.loads(json.dumps(said)))


def failing(value: int) -> Any:
    def fail(*_: Any) -> None:
        raise NvmlError(value)

    return fail


def test_an_answer_in_the_units_of_the_project() -> None:
    found = sample()
    assert found.gpus == (
        GpuSample(
            ONE, 80 << 30, 1 << 30, 12, 3, 1, 2, 70.5, 123.456, -3, 345_000_000, 2_619_000_000,
            4, 5, rows_pending=True, rows_failed=False, throttle_reasons=1,
            mig=(DeviceSample(MIG, 10, 4),), memory_temperature_celsius=70, pcie_replays=4,
            nvlink_sent_bytes=1 << 50, nvlink_received_bytes=5 << 10, rows_corrected=5,
            rows_uncorrected=6, pages_uncorrected=2, pages_pending=True,
            missing=dict.fromkeys(
                ("unrepairable_memory", "channel_repair_pending", "tpc_repair_pending"),
                "pynvml does not know it",
            ),
        ),
    )  # fmt: skip
    assert found.processes == (
        ProcessUse(7, ONE, COMPUTE, 100, 60, 20, None, 0),
        ProcessUse(8, MIG, COMPUTE, 6, 0, 0, 0, 0),
        ProcessUse(9, ONE, COMPUTE, 1, 0, 0, 0, 0),
        ProcessUse(7, ONE, GRAPHICS, 5, 60, 20, None, 0),
    )
    assert (found.driver, found.failure) == ("535.1", "")
    assert found.notes == (f"{ONE}: a process 0, which cannot be named",)


def test_what_is_not_said_is_none_with_the_reason() -> None:
    [gpu] = sample(**dict.fromkeys(set(WHOLE) - {"GetTemperature"}, failing(3))).gpus
    assert set(gpu.missing) == set(GpuSample.__dataclass_fields__) - {
        "uuid", "temperature_celsius", "fabric", "mig", "lost", "missing", "activity",
    }  # fmt: skip
    assert gpu == GpuSample(ONE, temperature_celsius=-3, missing=gpu.missing)


@pytest.mark.parametrize(
    ("name", "lie", "lacking"),
    [
        ("GetUtilizationRates", Answer(gpu=101, memory=3), "gpu_percent"),
        ("GetMemoryInfo", lambda _: Answer(total=1 << 60, used=5), "memory_total_bytes"),
        ("GetMemoryInfo", lambda _: Answer(total=4, used=5), "memory_used_bytes"),
        ("GetPowerUsage", -1, "power_watts"),
        ("GetPowerUsage", 1 << 40, "power_watts"),
        ("GetTemperature", 5000, "temperature_celsius"),
        ("GetRemappedRows", (0, 0, 0, 2), "rows_failed"),
    ],
)
def test_a_lie_is_not_believed_and_is_noted(name: str, lie: Any, lacking: str) -> None:
    found = sample(**{"GetMigMode": (0, 0), name: lie})
    assert getattr(found.gpus[0], lacking) is None
    assert [note for note in found.notes if lacking in note]


def test_without_the_right_to_know_all_processes_each_instance_is_asked_for_its_own() -> None:
    def of_part(handle: Any) -> list[Answer]:
        if handle != "part":
            raise NvmlError(4)
        return [process(8, 1, 3, 0)]

    found = sample(GetComputeRunningProcesses_v3=of_part, GetProcessUtilization=failing(3))
    assert ProcessUse(8, MIG, COMPUTE, 1) in found.processes


def test_more_processes_than_anybody_has_are_cut_off() -> None:
    many = [process(n, 1) for n in range(1, 9999)]
    found = sample(GetComputeRunningProcesses_v3=many)
    assert len(found.processes) == 4096
    assert f"{ONE}: 10001 processes" in found.notes


def test_gpus_that_are_none_of_ours() -> None:
    found = sample(3, {0: ONE, 7: "GPU-other"})
    assert [gpu.uuid for gpu in found.gpus] == [ONE]
    assert sum("not in the node's inventory" in note for note in found.notes) == 2
    assert "NVML does not list GPU-other" in found.notes
    assert found.uncounted == ()  # it may be one of the others
    assert sample(1, KNOWN).uncounted == (TWO,)


def test_a_lost_gpu_is_known_by_its_number() -> None:
    def handle(index: int) -> int:
        if index:
            raise NvmlError(15)
        return index

    assert sample(2, KNOWN, GetHandleByIndex=handle).gpus[1] == GpuSample(TWO, lost="15")
    assert [gpu.uuid for gpu in sample(2, GetHandleByIndex=handle).gpus] == [ONE]


@pytest.mark.parametrize(
    ("error", "lost"),
    [(999, "it answers no question (nvmlDeviceGetMemoryInfo: 999)"), (15, "15"), (3, ""), (4, "")],
)
def test_a_gpu_that_answers_no_question_is_lost(error: int, lost: str) -> None:
    names = ("GetMemoryInfo", "GetTemperature", "GetUtilizationRates", "GetPowerUsage")
    [gpu] = sample(**dict.fromkeys(names, failing(error))).gpus
    assert gpu.lost == lost


def test_while_a_gpu_is_lost_nvml_is_initialised_again_and_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that comes back is not noticed otherwise; but the others lose their activity."""
    lost = [True]

    def handle(index: int) -> int:
        if index and lost:
            raise NvmlError(15)
        return index

    inits: list[int] = []
    second = 0

    def questions() -> Iterator[str]:
        nonlocal second
        question = {"gpus": KNOWN, "given_up": {}, "alone": True, "patience": 1, "profile": False}
        for second in (*range(1000, 1200), *range(2000, 2003)):
            if second == 2000:
                lost.clear()
            if second == 2002:
                lost.append(True)
            yield json.dumps(question)
        yield json.dumps(question)

    library = nvml(2, GetHandleByIndex=handle)
    library.nvmlShutdown = lambda: None
    library.nvmlInit = lambda: inits.append(second)
    monkeypatch.setattr(child_samples, "time", Answer(monotonic=lambda: second, time=lambda: 0))
    monkeypatch.setattr(sys, "stdin", questions())
    child_samples.run(library, lambda _: None)
    assert inits == [1001, 1002, 1004, 1008, 1016, 1032, 1064, 1124, 1184, 2000, 2002]


def test_what_was_given_up_is_not_asked_and_each_other_is_announced() -> None:
    asker = Asker(nvml(2), KNOWN, {1: "it crashes"})
    asked: list[int] = []
    said = asker.each(asked.append)
    assert asked == [0]
    assert said["gpus"][1] == {"uuid": TWO, "lost": "it crashes"}
    assert not asker.has_lost
