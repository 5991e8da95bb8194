"""Finding a CRIU for the running kernel: the installed one, a newer release's, or a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.simulated.errors import ArchiveUnreachable
from tests.harness.raising import raises
from tools import criu
from tools.errors import CriuUnusable

WORKS = "#!/bin/sh\n[ $1 = check ] && echo Looks good.\n"
REFUSES = """#!/bin/sh
echo 'Error (criu/util.c:642): exited, status=1' >&2
echo 'Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds' >&2
exit 1
"""


def _program(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_installed_one_is_taken_if_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _program(tmp_path / "criu", WORKS)
    monkeypatch.setattr(criu, "SYSTEM_PATH", str(tmp_path))
    assert criu.find_criu() == program


def test_later_release_is_asked_if_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path / "criu", REFUSES)
    newer = _program(tmp_path / "newer" / "criu", WORKS)
    asked = []

    def of_release(program: str, release: str, **_: Any) -> str:
        asked.append((program, release))
        return newer

    monkeypatch.setattr(criu, "SYSTEM_PATH", str(tmp_path))
    monkeypatch.setattr(criu, "program_of_release", of_release)
    assert criu.find_criu() == newer
    assert asked == [("criu", "trixie")]


def test_without_one_each_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = _program(tmp_path / "criu", REFUSES)

    def of_release(_: str, release: str, **__: Any) -> str:
        if release == "sid":
            raise ArchiveUnreachable("read the lists", found="no network")
        return refusing

    monkeypatch.setattr(criu, "SYSTEM_PATH", str(tmp_path))
    monkeypatch.setattr(criu, "program_of_release", of_release)
    with raises(CriuUnusable) as caught:
        criu.find_criu()
    message = str(caught.value)
    assert message.count("vdso: Unexpected rt vDSO area bounds") == 2
    assert "that of sid: no network" in message
    assert "\n" not in message
