"""Results are stored without loss, and shown in tables with the goals that were reached."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from tests.bench.report import costs, fill, main, places, report, table, targets
from tests.bench.results import Comparison, Curve, Figure, Figures, Results, Row
from tests.harness.launcher import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

# The files of a whole benchmark run, by their names in the documentation.
KNOWN = {
    "machine", "targets", "costs", "curves", "runs", "crun", "start", "first-call", "cpu",
    "at-once-10", "at-once-30", "exec", "state", "connect", "output", "growth-figures",
    "injection-figures", "idle-figures", "pods-create", "pods-remove", "pods-figures",
    "agent-targets", "agent-figures", "claims-figures",
}  # fmt: skip
STOCK, OURS = (100.0, 200.0, 120.0), (80.0, 160.0, 132.0)


def _results(ours: tuple[float, ...] = OURS) -> Results:
    runs = Comparison("runs", "ms", {"stock": Row("a", STOCK), "ours": Row("b", ours, "stock")})
    idle = Figures(
        "idle",
        {"stock": "runc-v2", "gpus": "GPUs"},
        "stock",
        {
            "pss": Figure("PSS", "MB", {"stock": 2.0, "gpus": 3.5}),
            "wakeups": Figure("wake-ups", "", {"stock": 120.0, "gpus": 0.0}),
            "server": Figure("server", "MB", {"gpus": 9.0}),
        },
    )
    curve = Curve("a start", "GPUs", "ms", (1, 8, 16), {"ours": Row("ours", (100, 170, 250))})
    return Results({"Linux": "6"}, {"runs": runs}, {"idle": idle}, {"gpus": curve})


def _line(text: str, title: str) -> list[str]:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {title} ")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_results_survive_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "below" / "bench.json")
    _results().write(path)
    assert Results.read(path) == _results()
    assert [entry.name for entry in (tmp_path / "below").iterdir()] == ["bench.json"]


def test_file_of_another_kind_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"run_ms": {}}')
    with pytest.raises(KeyError):
        Results.read(str(path))


def test_ratio_is_the_median_of_ratios_within_a_round() -> None:
    # The ratio of medians would be 132 ÷ 120.
    assert _line(report(_results()), "b")[3] == "0.80"


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        (0.64, "better than aimed at"),
        (0.65, "as aimed at"),
        (0.66, "reached"),
        (0.70, "reached"),
        (0.71, "**missed**"),
    ],
)
def test_verdict_is_by_must_and_aim(times: float, verdict: str) -> None:
    told = targets(_results(tuple(value * times for value in STOCK)))
    assert _line(told, "`ctr run --rm true`, no GPU, warm, ÷ stock shim")[1:] == [
        "≤ 0.70", "0.65", f"{times:.2f}", verdict,
    ]  # fmt: skip


def test_figures_are_judged_too_and_what_was_not_measured_is_said() -> None:
    told = targets(_results())
    title = "PSS of a running idle shim among many, with GPUs, ÷ stock without"
    assert _line(told, title)[3:] == ["1.75", "**missed**"]
    assert _line(told, "idle wake-ups per minute")[3:] == ["0", "as aimed at"]
    assert _line(told, "ten at once with 2 GPUs ÷ stock without")[3:] == ["", "not measured"]
    assert targets(Results()) == ""


def test_figure_without_a_base_has_no_ratio() -> None:
    assert _line(report(_results()), "server") == ["server", "", "9 MB", ""]
    assert _line(report(_results()), "wake-ups") == ["wake-ups", "120", "0", "0.00"]


def test_curve_tells_how_it_grows() -> None:
    cells = _line(report(_results()), "ours")
    assert cells[1:5] == ["100", "170", "250", "2.50"]
    assert float(cells[5]) == pytest.approx(1, abs=0.01)


def test_table_is_aligned_markdown() -> None:
    lines = table(("what", "ms"), [("a", "1"), ("longer", "12345")]).splitlines()
    assert lines[1] == "| ------ | ----: |"
    assert len({len(line) for line in lines}) == 1


def test_later_file_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    _results().write(paths[0])
    later = Results({"Linux": "7"}, {"runs": _results(STOCK).comparisons["runs"]})
    later.write(paths[1])
    assert main(paths) == 0
    told = capsys.readouterr().out
    assert told.startswith("Linux 7\n")
    assert _line(told, "b")[3] == "1.00"
    assert "PSS" in told
    assert json.loads((tmp_path / "a.json").read_text())["machine"] == {"Linux": "6"}


def test_costs_are_told_with_both_values_and_their_ratio() -> None:
    told = costs(_results())
    assert _line(told, "`ctr run --rm` of `true`, no GPU")[1:] == ["120 ms", "132 ms", "0.80"]
    memory = "memory (PSS) of an idle shim among a hundred; ours with two GPUs"
    assert _line(told, memory)[1:] == ["2 MB", "3.50 MB", "1.75"]
    assert "crun" not in told
    assert costs(Results()) == ""


def test_document_gets_its_tables_and_keeps_the_rest() -> None:
    before = (
        "a\n<!-- bench: targets -->\nold\n<!-- bench: end -->\nb\n"
        "<!-- bench: unknown -->\nkept\n<!-- bench: end -->\nc\n"
    )
    after = fill(before, {"targets": "| new |\n"})
    assert after == before.replace("old", "\n| new |\n")
    assert fill(after, {"targets": "| new |\n"}) == after
    assert places(before) == ["targets", "unknown"]


def test_report_is_written_into_documents(tmp_path: Path) -> None:
    path, document = str(tmp_path / "a.json"), tmp_path / "README.md"
    _results().write(path)
    document.write_text("# a\n<!-- bench: costs -->\n<!-- bench: end -->\n")
    assert main([path, "--into", str(document)]) == 0
    assert "132 ms |" in document.read_text()


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_tables_of_our_documents_are_ones_that_are_made(name: str) -> None:
    with open(os.path.join(REPOSITORY, name), encoding="utf-8") as file:
        found = places(file.read())
    assert found
    assert set(found) <= KNOWN
