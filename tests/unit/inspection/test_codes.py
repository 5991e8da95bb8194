"""The command's explanations of codes match the reference, and need no installation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest

from integration import exits
from integration.cli.app import main
from integration.doctor.checks import CHECKS
from integration.doctor.codes import code_of, explain_code
from tools.reference.error_codes import every_error
from tools.reference.sources import remedies

if TYPE_CHECKING:
    from pathlib import Path

SOME: Final = ("E0001", "E0102", "E0202", "E0501", "E1001", "E2511", "E2551", "E2757")


def test_an_error_means_what_the_reference_says() -> None:
    kinds = {kind.code: kind for kind in every_error()}
    advice = remedies()
    for short in SOME:
        kind = kinds[f"NVSHIM-{short}"]
        meaning = explain_code(kind.code)
        assert meaning.name == kind.slug.replace("-", " ")
        assert meaning.meaning[0].isupper()
        assert not any(mark in meaning.meaning for mark in ("``", ":class:", "Raised by"))
        assert set(advice.get(kind.name, ())) <= {*meaning.remedies}


def test_a_finding_means_what_the_doctor_s_table_says() -> None:
    for check in CHECKS:
        meaning = explain_code(check.code)
        assert (meaning.name, meaning.meaning) == (check.title, check.why)
        assert meaning.remedies == (check.remedy,)


@pytest.mark.parametrize(
    ("text", "code"),
    [("E0202", "NVSHIM-E0202"), ("nvshim-e0202", "NVSHIM-E0202"), ("d096", "NVSHIM-D096"),
     ("E02", None), ("F0202", None), ("D0960", None), ("web", None)],
)  # fmt: skip
def test_a_code_may_be_short_and_small(text: str, code: str | None) -> None:
    assert code_of(text) == code


def test_a_code_is_explained_though_nothing_else_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "config.toml"
    broken.write_text("= no TOML")
    where = ("--config", str(broken), "--containerd-state", str(tmp_path))
    for word in ("NVSHIM-D096", "D096", "d096"):
        assert main(["explain", word, *where]) == exits.OK
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "D096       a fork server does not work"
        assert [line.split()[0] for line in lines if line[0] != " "] == ["D096", "meaning", "do"]
        assert max(map(len, lines)) <= 80
    assert main(["explain", "NVSHIM-E9999", *where]) == exits.FAILED
    assert capsys.readouterr().err.startswith("NVSHIM-E2518 code-unknown: ")
    assert main(["explain", "e0202", "-o", "json", *where]) == exits.OK
    assert json.loads(capsys.readouterr().out)["code"] == "NVSHIM-E0202"


def test_a_container_that_is_called_like_a_code_is_meant(
    make_bundle: object, tmp_path: Path, config_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bundle("d096aaaa")  # type: ignore[operator]
    where = ("--config", config_file, "--containerd-state", str(tmp_path / "state"))
    assert main(["explain", "d096", *where]) == exits.OK
    assert capsys.readouterr().out.startswith("container  d096aaaa (")
    assert main(["explain", "D096", *where]) == exits.OK
    assert capsys.readouterr().out.startswith("D096       a fork server")
