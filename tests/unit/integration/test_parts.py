"""Programs of other releases: they run with their own libraries, and come first in PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from integration.simulated import programs
from integration.simulated.errors import ContainerdNotInstalled
from tests.harness.raising import raises
from tests.harness.releases import UNSTABLE, of_releases
from tools import parts as module
from tools.containerd import PrivateContainerd
from tools.errors import ProgramNotAdapted
from tools.parts import SYSTEM_PATH, Parts


@pytest.fixture(scope="session", params=of_releases("trixie", UNSTABLE))
def parts(request: pytest.FixtureRequest) -> Parts:
    return Parts.of_release(request.param)


def _loaded(program: str) -> list[str]:
    """Return the libraries of a program, as its dynamic loader reports them."""
    done = subprocess.run(
        [program], env={"LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True, text=True, check=True
    )
    paths = [word for word in done.stdout.split() if word.startswith("/")]
    assert paths, done
    return paths


def test_programs_of_a_release_run_with_nothing_of_the_machines(parts: Parts) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(parts.runc)))
    for program in (parts.containerd, parts.ctr, parts.runc, parts.crun):
        version = subprocess.run([program, "--version"], capture_output=True, check=True).stdout
        assert version.split()[0].decode() == os.path.basename(program)
        assert [path for path in _loaded(program) if not path.startswith(f"{root}/")] == []


def test_private_containerd_is_the_one_that_was_asked_for(parts: Parts, tmp_path: Path) -> None:
    with PrivateContainerd(str(tmp_path / "c"), parts=parts) as containerd:
        assert os.readlink(f"/proc/{containerd.pid}/exe") == parts.containerd
        with open(f"/proc/{containerd.pid}/environ") as file:
            environment = dict(word.split("=", 1) for word in file.read().split("\0") if word)
        for program in (parts.runc, parts.crun, parts.shim):
            name = os.path.basename(program)
            assert shutil.which(name, path=environment["PATH"]) == program
        major, minor = parts.version
        said = [line.split()[1] for line in containerd.ctr("version").lines if "Version:" in line]
        assert [version.startswith(f"{major}.{minor}.") for version in said] == [True, True]
        assert "deprecat" not in containerd.ctr("deprecations", "list", check=False).stdout


@pytest.mark.newest
def test_releases_are_different_and_newer_than_the_installed_one() -> None:
    versions = [Parts.named(name).version for name in ("installed", "trixie", UNSTABLE)]
    assert versions == sorted(set(versions))


def test_low_level_runtimes_of_one_release_go_with_anothers_containerd() -> None:
    installed, other = Parts.installed(), Parts.of_release("trixie")
    mixed = installed.with_low_level_of(other)
    assert (mixed.containerd, mixed.runc, mixed.crun) == (
        installed.containerd, other.runc, other.crun,
    )  # fmt: skip
    assert shutil.which("runc", path=mixed.path) == other.runc
    assert shutil.which("containerd-shim-runc-v2", path=mixed.path) == installed.shim
    mixed = other.with_low_level_of(installed)
    assert shutil.which("runc", path=mixed.path) == installed.runc
    assert shutil.which("containerd-shim-runc-v2", path=mixed.path) == other.shim


def test_path_of_what_is_installed_is_the_systems() -> None:
    assert Parts.installed().path == SYSTEM_PATH


def test_program_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "SYSTEM_PATH", "/no/such/directory")
    with raises(ContainerdNotInstalled, match=r"the program containerd: .*Install"):
        Parts.installed()


def test_without_the_tool_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch", lambda *_, **__: [])
    for name in ("containerd", "ctr", "containerd-shim-runc-v2", "runc", "crun"):
        os.makedirs(tmp_path / "tree/usr/bin", exist_ok=True)
        shutil.copy("/bin/true", tmp_path / "tree/usr/bin" / name)

    def unpack(_: object, __: str, *, finish: object) -> None:
        assert callable(finish)
        finish(str(tmp_path / "tree"))

    monkeypatch.setattr(module, "unpack", unpack)
    with pytest.raises(ProgramNotAdapted, match="no ld-linux"):
        Parts.of_release("trixie", str(tmp_path))
    shutil.rmtree(tmp_path / "tree/parts")
    monkeypatch.setenv("PATH", "/no/such/directory")
    with pytest.raises(ProgramNotAdapted, match="Install the package patchelf"):
        Parts.of_release("trixie", str(tmp_path))
