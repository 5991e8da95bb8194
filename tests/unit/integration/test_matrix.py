"""The runs of the matrix, and how their results are read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from integration.simulated.errors import PackagesError
from tests import matrix
from tests.harness.launcher import REPOSITORY
from tests.matrix import Outcome, read_outcome, runs
from tools.reference import tables


def test_each_containerd_meets_each_runc_and_its_own_crun() -> None:
    names = [run.name for run in runs()]
    assert len(names) == len(set(names)) == 13
    for containerd in ("installed", "trixie", "sid"):
        assert f"{containerd}/runc" in names
        assert f"{containerd}/crun" in names
    assert {"trixie+installed/runc", "installed+sid/runc"} < set(names)


def test_every_path_that_is_run_is_there() -> None:
    for run in runs():
        paths = [word for word in run.tests if word.startswith("tests")]
        assert paths
        assert [path for path in paths if not os.path.exists(f"{REPOSITORY}/{path}")] == []


def test_release_that_cannot_be_had_is_named_and_not_counted_as_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: matrix.Run) -> str:
        raise PackagesError("packages of sid", found="no archive has them")

    monkeypatch.setattr(matrix, "describe", refuse)
    monkeypatch.setattr(sys, "argv", ["matrix", "--only", "newest"])
    assert matrix.main() == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("newest"))
    assert line.split(maxsplit=1)[1] == "not run, unavailable: no archive has them"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>',
            Outcome(3, 3, 3, 5.0),
        ),
        ("<testsuites/>", Outcome(0, 1, 0, 5.0)),
        ("<testsui", Outcome(0, 1, 0, 5.0)),
        (None, Outcome(0, 1, 0, 5.0)),
    ],
)
def test_what_pytest_says_is_counted_and_its_silence_is_a_failure(
    tmp_path: Path, text: str | None, expected: Outcome
) -> None:
    path = tmp_path / "report.xml"
    if text is not None:
        path.write_text(text)
    assert read_outcome(str(path), 5.0) == expected


def test_what_ran_is_kept_and_only_what_passed_counts_as_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "support.json")
    (tmp_path / "support.json").write_text("{}\n")
    by_name = {run.name: run for run in runs()}
    good, bad = Outcome(9, 0, 1, 5.0), Outcome(8, 1, 1, 5.0)
    for name, versions, outcome in (
        ("installed/runc", "containerd 1.6.20, runc 1.1.5", bad),
        ("installed/runc", "containerd 1.6.20, runc 1.1.5", good),  # the last one counts
        ("installed/crun", "containerd 1.6.20, crun 1.8.1", good),
        ("trixie/runc", "containerd 1.7.24, runc 1.1.15", bad),
    ):
        matrix.record(by_name[name], versions, outcome, path)
    monkeypatch.setattr(tables, "RECORD", path)
    tested = [line.split(" | ")[:2] for line in tables.tested().splitlines()[2:]]
    assert tested == [["| containerd 1.6.20", "crun 1.8.1, runc 1.1.5"]]
    assert "| `trixie/runc` | containerd 1.7.24 | runc 1.1.15 |" in tables.tested_runs()


def test_a_run_of_some_tests_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr(matrix, "describe", lambda _: "containerd 1, runc 1")
    monkeypatch.setattr(matrix, "_perform", lambda *_: Outcome(1, 0, 0, 1.0))
    monkeypatch.setattr(matrix, "record", lambda run, *_: kept.append(run.name))
    for more, expected in ((["--", "-k", "one"], []), ([], ["newest"])):
        monkeypatch.setattr(sys, "argv", ["matrix", "--only", "newest", *more])
        assert matrix.main() == 0
        assert kept == expected
