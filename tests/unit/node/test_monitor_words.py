"""What a child says: believed where it makes sense, and never more than that."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.node.monitor.events import event_of, failures_of
from integration.node.monitor.samples import sample_of
from integration.node.monitor.values import COMPUTE, GRAPHICS, DeviceSample, GpuSample, ProcessUse
from integration.node.refresh import Seen

ONE, TWO = (f"GPU-{n}0000000-0000-0000-0000-000000000000" for n in (1, 2))
MIG = "MIG-30000000-0000-0000-0000-000000000000"
KNOWN = {ONE: 0, TWO: 1}
NONE = 0xFFFFFFFF

WHOLE = {
    "index": 0,
    "uuid": ONE.upper(),
    "memory_total_bytes": 80 << 30,
    "memory_used_bytes": 1 << 30,
    "gpu_percent": 12,
    "memory_percent": 3,
    "encoder_percent": 1,
    "decoder_percent": 2,
    "power_watts": 70.5,
    "energy_joules": 123.456,
    "temperature_celsius": -3,
    "sm_clock_hz": 345_000_000,
    "memory_clock_hz": 2_619_000_000,
    "ecc_corrected": 4,
    "ecc_uncorrected": 5,
    "rows_pending": 1,
    "rows_failed": 0,
    "throttle_reasons": 1,
    "mig": [{"uuid": MIG, "gi": 3, "ci": 0, "memory_total_bytes": 10, "memory_used_bytes": 4}],
    "processes": [
        [COMPUTE, 7, 100, NONE, NONE],
        [COMPUTE, 8, None, 3, 0],
        [GRAPHICS, 7, 5, None, None],
        [COMPUTE, 0, 5, NONE, NONE],
        [COMPUTE, 9, 1, NONE, NONE],
    ],
    "use": [[7, 60, 20, 5, 0]],
}


def sample(*gpus: Any, known: dict[str, int] | None = None, **more: Any) -> Any:
    return sample_of(json.dumps({"driver": "1", "gpus": gpus, **more}).encode(), 5.0, known or {})


def test_an_answer_in_the_units_of_the_project() -> None:
    found = sample(WHOLE, notes=["nvmlX: Unknown Error"])
    assert found.gpus == (
        GpuSample(
            ONE, 80 << 30, 1 << 30, 12, 3, 1, 2, 70.5, 123.456, -3, 345_000_000, 2_619_000_000,
            4, 5, rows_pending=True, rows_failed=False, throttle_reasons=1,
            mig=(DeviceSample(MIG, 10, 4),),
        ),
    )  # fmt: skip
    assert found.processes == (
        ProcessUse(7, ONE, COMPUTE, 100, 60, 20, 5, 0),
        ProcessUse(8, MIG, COMPUTE, None, 0, 0, 0, 0),
        ProcessUse(7, ONE, GRAPHICS, 5, 60, 20, 5, 0),
        ProcessUse(9, ONE, COMPUTE, 1, 0, 0, 0, 0),
    )
    assert (found.driver, found.when, found.failure) == ("1", 5.0, "")
    assert found.notes == (f"{ONE}: a process 0, which cannot be named", "nvmlX: Unknown Error")


def test_what_is_not_said_is_none() -> None:
    [gpu] = sample({"uuid": ONE, **dict.fromkeys(set(WHOLE) - {"uuid"})}).gpus
    assert gpu == GpuSample(ONE)


@pytest.mark.parametrize(
    "lie",
    [
        {"gpu_percent": 101},
        {"memory_total_bytes": 1 << 60},
        {"memory_total_bytes": 5},
        {"power_watts": -1},
        {"power_watts": 1 << 40},
        {"power_watts": float("nan")},
        {"temperature_celsius": 5000},
        {"encoder_percent": "many"},
        {"ecc_corrected": True},
        {"sm_clock_hz": 1.5},
        {"rows_failed": 2},
        {"mig": [{"uuid": "MIG-x"}]},
        {"mig": [7]},
        {"processes": [["other", 7, 1, None, None]]},
        {"processes": [[COMPUTE, 1 << 40, 1, None, None]]},
        {"processes": [7]},
        {"processes": [[[], 7, 1, None, None]]},
    ],
)
def test_a_lie_is_not_believed_and_is_noted(lie: dict[str, Any]) -> None:
    truth = {**WHOLE, "processes": []}
    before, found = sample(truth), sample({**truth, **lie})
    assert len(found.notes) == 1
    assert found.gpus != before.gpus or "processes" in lie
    assert not found.processes


def test_a_process_of_an_instance_that_nobody_has_is_the_gpus() -> None:
    pairs: list[tuple[Any, Any]] = [([], {}), (99, 0), (3, "x")]
    for pair in pairs:
        [process] = sample({**WHOLE, "processes": [[COMPUTE, 7, 1, *pair]]}).processes
        assert process.device == ONE


def test_gpus_that_are_none_of_ours() -> None:
    stranger = "GPU-90000000-0000-0000-0000-000000000000"
    found = sample(WHOLE, {**WHOLE, "uuid": stranger}, WHOLE, 5, known=KNOWN)
    assert [gpu.uuid for gpu in found.gpus] == [ONE]
    assert sum("none of this node's" in note for note in found.notes) == 2
    assert f"NVML does not tell of {TWO}" in found.notes


def test_a_lost_gpu_is_known_by_its_number() -> None:
    found = sample({"index": 1, "uuid": "", "lost": "GPU is lost"}, known=KNOWN)
    assert found.gpus == (GpuSample(TWO, lost="GPU is lost"),)


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        (b'{"error": "NVMLError: Driver Not Loaded"}', "NVMLError: Driver Not Loaded"),
        (b'{"error": 5}', "NVML failed"),
        (b"[]", "an answer that makes no sense"),
        (b"\xff", "an answer that makes no sense"),
        (b"[" * 100_000, "an answer that makes no sense"),
        (b'{"gpus": 7}', "an answer that makes no sense"),
    ],
)
def test_no_answer(line: bytes, failure: str) -> None:
    assert sample_of(line, 1.0, KNOWN).failure == failure


def test_more_processes_than_anybody_has_are_cut_off() -> None:
    found = sample({**WHOLE, "processes": [[COMPUTE, n, 1, None, None] for n in range(1, 9999)]})
    assert len(found.processes) == 4096


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*WHOLE, "lost"]), JSON), JSON, JSON)
def test_any_answer_is_read(lies: dict[str, Any], other: Any, notes: Any) -> None:
    found = sample({**WHOLE, **lies}, other, known=KNOWN, notes=notes)
    assert all(gpu.uuid in KNOWN for gpu in found.gpus)
    for gpu in found.gpus:
        assert gpu.gpu_percent is None or 0 <= gpu.gpu_percent <= 100
    for process in found.processes:
        assert 0 < process.pid <= 1 << 22
        assert process.device in {ONE, TWO, MIG}
    assert all(note.isprintable() and len(note) <= 600 for note in found.notes)


def seen() -> Seen:
    gpus = [SimpleNamespace(uuid=u, index=i, bus_id=f"0000:0{i}:00.0") for u, i in KNOWN.items()]
    return Seen(cast("Any", SimpleNamespace(gpus=gpus)))


def test_events_of_nvml() -> None:
    said = {"gpu": TWO, "type": 8, "data": 79, "gi": NONE, "ci": NONE}
    event = event_of(said, seen(), 3.0)
    assert event is not None
    assert (event.kind, event.gpu, event.xid, event.bus_id) == ("xid", TWO, 79, "0000:01:00.0")
    assert (event.gpu_instance, event.compute_instance) == (None, None)
    part = event_of({**said, "gi": 3, "ci": 0}, seen(), 3.0)
    ecc = event_of({**said, "type": 2}, seen(), 3.0)
    assert part is not None
    assert ecc is not None
    assert (part.gpu_instance, part.compute_instance) == (3, 0)
    assert (ecc.kind, ecc.xid) == ("ecc-double", 0)
    other = event_of({**said, "gpu": MIG.replace("MIG", "GPU")}, seen(), 3.0)
    assert other is not None
    assert (other.gpu, other.text[:8]) == ("", "of GPU-3")
    for nonsense in (
        None,
        {},
        {**said, "type": 1},
        {**said, "type": 16},
        {**said, "data": -1},
        {**said, "data": "79"},
    ):
        assert event_of(nonsense, seen(), 3.0) is None


def test_who_is_not_watched() -> None:
    assert failures_of({"watching": [ONE, TWO], "failed": []}, seen()) == {}
    assert failures_of({"watching": [ONE]}, seen()) == {TWO: "NVML does not tell of it"}
    assert failures_of({"watching": [ONE], "failed": [[1, "", "lost"]]}, seen()) == {TWO: "lost"}
    assert failures_of({"watching": 5, "failed": [[7, ONE, "old"], 5, []]}, seen()) == {
        ONE: "old",
        TWO: "NVML does not tell of it",
    }


@given(JSON, JSON)
def test_any_word_of_the_watch_is_read(one: Any, other: Any) -> None:
    event_of(one, seen(), 1.0)
    assert set(failures_of({"watching": one, "failed": other}, seen())) <= set(KNOWN)
