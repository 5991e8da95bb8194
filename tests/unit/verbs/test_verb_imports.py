"""What each verb may import: the budget that keeps containerd's users from waiting.

A module that is not named here costs milliseconds for every container on a node; before
adding one, measure it (``python3 -X importtime -IS``).
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.unit.verbs.program import INTERPRETER, SOURCES, Program

if TYPE_CHECKING:
    from pathlib import Path

# Each is some C code, or a file of Python that is read in a tenth of a millisecond.
_STANDARD = {"__future__", "errno"}
_ALL = {"api", "api.errors", "shim", "shim.errors", "shim.invocation", "shim.verbs"}
_FILES = {"shim.address", "shim.bundle", "shim.sockets", "shim.wire", "_socket", "fcntl", "gc"}

_VERSION = {*_STANDARD, *_ALL, "shim.info"}
_INFO = {
    *_STANDARD,
    *_ALL,
    "shim.info",
    "shim.bundle",
    "shim.foreground",
    "shim.handleroptions",
    "shim.programs",
    "shim.wire",
    "_json",
    "select",
}
_START = {
    *_STANDARD,
    *_ALL,
    *_FILES,
    "shim.start",
    "shim.detach",
    "shim.handleroptions",
    "shim.warmstart",
    "struct",
    "_struct",
    "_sha256",
    "_sha2",
}
_DELETE = {*_STANDARD, *_ALL, *_FILES, "shim.delete", "shim.mountinfo", "_json"}

_EXIT = """
import os, sys
before = set(sys.modules)
sys.path.append({sources!r})
from shim import verbs
def leave(status):
    with open({report!r}, "w") as file:
        file.write("\\n".join(set(sys.modules) - before))
    leave_at_once(status)
leave_at_once, os._exit = os._exit, leave
verbs.main({words!r})
"""


def _imported(words: list[str], cwd: Path) -> set[str]:
    """The modules that a verb has imported by the time it ends."""
    report = cwd / "modules"
    script = _EXIT.format(sources=SOURCES, words=words, report=str(report))
    subprocess.run(
        [INTERPRETER, "-ISc", script],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=20,
        env={"PATH": os.environ["PATH"]},
    )
    modules = set(report.read_text().split())
    assert "shim.verbs" in modules
    return modules


def _flags(program: Program, verb: str) -> list[str]:
    return ["-namespace", "test", "-address", program.address, "-id", "web-1", verb]


@pytest.mark.parametrize(("flag", "allowed"), [("-v", _VERSION), ("-info", _INFO)])
def test_what_version_and_info_import(tmp_path: Path, flag: str, allowed: set[str]) -> None:
    assert _imported([flag], tmp_path) <= allowed


def test_what_start_imports(program: Program) -> None:
    bundle = program.bundle("web-1")
    program.start(bundle)  # so that the one below finds a shim, and forks none
    assert _imported(_flags(program, "start"), bundle) <= _START


def test_what_start_imports_for_a_pod(program: Program) -> None:
    bundle = program.bundle("web-1", {"io.kubernetes.cri.sandbox-id": "pod"})
    program.start(bundle)
    assert _imported(_flags(program, "start"), bundle) <= {*_START, "_json"}


def test_what_delete_imports_when_all_has_ended_in_good_order(program: Program) -> None:
    bundle = program.bundle("web-1")
    (bundle / "options.json").write_text(
        '{"binary": "runc", "root": "/run/nothing/here", "systemd_cgroup": false}'
    )
    (bundle / "init.pid").write_text("0")
    assert _imported(_flags(program, "delete"), bundle) <= _DELETE
