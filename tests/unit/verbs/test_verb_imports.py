"""Modules that no verb may import, because containerd waits for verbs.

A verb that forks the shim imports its server only in the child.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.launcher import SITE
from tests.unit.verbs.program import INTERPRETER, SOURCES, Program

_NEVER = {"anyio", "asyncio", "grpc", "hooks.engine", "shim.pod.main", "structlog", "yaml"}

_EXIT = """
import os, sys
before = set(sys.modules)
sys.path += [{sources!r}, {site!r}]
from shim.verbs import verbs
def leave(status):
    with open({report!r}, "w") as file:
        file.write("\\n".join(set(sys.modules) - before))
    leave_at_once(status)
leave_at_once, os._exit = os._exit, leave
verbs.main({words!r})
"""


def _imported(words: list[str], cwd: Path) -> set[str]:
    """Return the modules that a verb has imported when it exits."""
    report = cwd / "modules"
    script = _EXIT.format(sources=SOURCES, site=SITE, words=words, report=str(report))
    subprocess.run(
        [INTERPRETER, "-ISc", script],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=60,
        env={"PATH": os.environ["PATH"]},
    )
    modules = set(report.read_text().split())
    assert "shim.verbs.verbs" in modules
    return modules


def _flags(program: Program, verb: str) -> list[str]:
    return ["-namespace", "test", "-address", program.address, "-id", "web-1", verb]


@pytest.mark.parametrize("flag", ["-v", "-info"])
def test_what_version_and_info_import(tmp_path: Path, flag: str) -> None:
    assert _imported([flag], tmp_path).isdisjoint(_NEVER)


def test_what_start_imports(program: Program) -> None:
    bundle = program.bundle("web-1")
    program.start(bundle)  # so that the one below finds a shim, and forks none
    assert _imported(_flags(program, "start"), bundle).isdisjoint(_NEVER)


def test_what_delete_imports_when_all_has_ended_in_good_order(program: Program) -> None:
    bundle = program.bundle("web-1")
    (bundle / "options.json").write_text(
        '{"binary": "runc", "root": "/run/nothing/here", "systemd_cgroup": false}'
    )
    (bundle / "init.pid").write_text("0")
    assert _imported(_flags(program, "delete"), bundle).isdisjoint(_NEVER)
