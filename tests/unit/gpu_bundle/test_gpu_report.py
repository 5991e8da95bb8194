"""The report of the checks, and how answers from inside containers are judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tools.containerd import Completed
from tools.errors import CheckFailed, CheckNotPossible
from tools.gpu.checks import computes, lists
from tools.gpu.report import Report, failed, in_one_line, not_possible

ONE, TWO = "GPU-14b5d60e-717f-5926-8c10-bfa432a3c8f1", "GPU-414dcd81-ed67-5847-8bd5-b8812b045111"
MIG = "MIG-11111111-2222-3333-4444-555555555555"


def report(deadline: float = math.inf) -> Report:
    return Report("a report", lambda line: None, deadline)


def refuse(error: Exception) -> str:
    raise error


@pytest.mark.parametrize(
    ("look", "outcome", "seen"),
    [
        (lambda: "two GPUs", "passed", "two GPUs"),
        (lambda: refuse(failed("three GPUs")), "failed", "three GPUs"),
        (lambda: refuse(not_possible("one GPU")), "not possible", "one GPU"),
        (lambda: refuse(PermissionError(1, "no")), "failed", "[Errno 1] no"),
        (lambda: refuse(KeyError("count")), "failed", "KeyError('count')"),
    ],
)
def test_each_end_of_a_check_has_its_outcome(look: Any, outcome: str, seen: str) -> None:
    made = report()
    assert made.check("a check", look) is (outcome == "passed")
    assert made.as_json()["checks"][0]["outcome"] == outcome
    assert made.checks[0].seen == seen


def test_an_error_that_nobody_expected_brings_its_trace() -> None:
    made = report()
    made.check("a check", lambda: refuse(KeyError("count")))
    assert "test_gpu_report.py" in made.checks[0].trace
    assert made.checks[0].trace.rstrip() in made.markdown()


def test_a_report_has_passed_if_something_did_and_nothing_failed() -> None:
    made = report()
    verdicts = [made.passed]
    for look in (
        lambda: refuse(not_possible("a reason")),
        lambda: "seen",
        lambda: refuse(failed("a fault")),
    ):
        made.check("a check", look)
        verdicts.append(made.passed)
    assert verdicts == [False, False, True, False]
    assert made.summary == "1 passed, 1 failed, 1 not possible"


def test_after_the_time_limit_no_check_is_made() -> None:
    made = report(deadline=0)
    made.check("a check", lambda: refuse(AssertionError("was made")))
    assert made.checks[0].outcome.value == "not possible"


def test_what_containers_print_does_not_break_the_table(tmp_path: Path) -> None:
    made = report()
    made.check("a check", lambda: "a | b\n| c | \x1b[31m")
    made.tell("Facts", [("name", "line\nline")])
    made.write(str(tmp_path))
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if "a check" in line]
    assert rows == ["| a check | passed | a \\| b \\| c \\| ?[31m | 0.0 |"]
    assert json.loads((tmp_path / "report.json").read_text())["facts"] == {
        "Facts": [["name", "line line"]]
    }
    assert len(in_one_line("x" * 10_000)) == 4000


def _done(said: str, code: int = 0) -> Completed:
    return Completed(("gpu",), code, said, "")


def _cuda(*uuids: str, wrong: int = 0) -> Completed:
    lines: list[dict[str, Any]] = [{"version": 13000, "count": len(uuids)}]
    lines += [
        {
            "name": "H100",
            "uuid": uuid.removeprefix("GPU-"),
            "wrong": wrong,
            "of": 9,
            "target": "sm_50",
            "milliseconds": {"context": 1.0, "compile": 2.0, "run": 3.0},
        }
        for uuid in uuids
    ]
    return _done("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("expected", [{ONE}, {ONE, TWO}, {ONE.upper()}])
def test_a_list_of_the_granted_gpus_passes(expected: set[str]) -> None:
    said = "".join(f"GPU {i}: H100 (UUID: {uuid})\n" for i, uuid in enumerate(expected))
    assert "H100" in lists(_done(said), expected)


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        (f"GPU 0: H100 (UUID: {ONE})\nGPU 1: H100 (UUID: {TWO})\n", 0, {ONE}),
        (f"GPU 0: H100 (UUID: {ONE})\n", 0, {ONE, TWO}),
        (f"GPU 0: H100 (UUID: {ONE})\n", 9, {ONE}),
        ("No devices found.\n", 0, {ONE}),
        (f"GPU 0: H100 (UUID: {ONE})\n", 0, {MIG}),
    ],
)
def test_a_list_of_other_gpus_fails(said: str, code: int, expected: set[str]) -> None:
    with pytest.raises(CheckFailed):
        lists(_done(said, code), expected)


def test_a_mig_device_is_listed_below_its_gpu() -> None:
    said = f"GPU 0: H100 (UUID: {ONE})\n  MIG 1g.10gb Device 0: (UUID: {MIG})\n"
    assert MIG in lists(_done(said), {MIG})


def test_cuda_on_the_granted_gpu_passes() -> None:
    assert "CUDA 13.0; H100: 9 right results" in computes(_cuda(ONE), {ONE})


@pytest.mark.parametrize(
    ("done", "why"),
    [
        pytest.param(_cuda(ONE, TWO), "CUDA sees", id="one more"),
        pytest.param(_cuda(), "CUDA sees no device", id="none"),
        pytest.param(_cuda(TWO), "CUDA sees", id="another"),
        pytest.param(_cuda(ONE, wrong=1), "wrong results on H100", id="wrong results"),
        pytest.param(_done("", 139), "exit code 139", id="crash"),
        pytest.param(
            _done('{"version": 13000, "count": 1}\n', 139), "exit code 139", id="crash amid it"
        ),
    ],
)
def test_cuda_fails_on_others_or_with_wrong_results(done: Completed, why: str) -> None:
    with pytest.raises(CheckFailed, match=why):
        computes(done, {ONE})


def test_no_device_is_an_answer_on_a_simulated_node_only() -> None:
    said = '{"failed": "cuInit", "code": 100, "name": "CUDA_ERROR_NO_DEVICE"}\n'
    with pytest.raises(CheckNotPossible, match="simulated"):
        computes(_done(said, 1), {ONE}, simulated=True)
    with pytest.raises(CheckFailed, match=r"cuInit: CUDA_ERROR_NO_DEVICE \(100\)"):
        computes(_done(said, 1), {ONE})


def test_another_failure_fails_on_a_simulated_node_too() -> None:
    said = '{"failed": "dlopen libcuda.so.1", "reason": "no such file"}\n'
    with pytest.raises(CheckFailed, match="no such file"):
        computes(_done(said, 3), {ONE}, simulated=True)
