"""A private containerd starts, leaves nothing behind, and reports why it fails."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from integration.simulated.errors import (
    ContainerdExited,
    CtrFailed,
    CtrTimeout,
)
from shim import syscalls
from tests.harness.raising import raises
from tests.harness.runtime import is_alive
from tools.containerd import PrivateContainerd
from tools.images import BUSYBOX, busybox, write_archive


def test_it_answers_when_it_has_started_and_is_gone_at_the_end(tmp_path: Path) -> None:
    directory = str(tmp_path / "c")
    with PrivateContainerd(directory) as containerd:
        pid = containerd.pid
        assert is_alive(pid)
        assert "Server:" in containerd.ctr("version").stdout
        assert os.path.exists(containerd.ttrpc_address)
    assert not is_alive(pid)
    assert not os.path.exists(directory)


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_it_can_be_stopped_or_killed_and_started_again(tmp_path: Path, way: str) -> None:
    with PrivateContainerd(str(tmp_path / "c")) as containerd:
        containerd.ctr("namespaces", "label", containerd.namespace, "kept=yes")
        getattr(containerd, way)()
        assert containerd.pid == 0
        getattr(containerd, way)()
        containerd.start()
        assert "kept=yes" in containerd.ctr("namespaces", "ls").stdout


def test_two_of_them_know_nothing_of_each_other(tmp_path: Path) -> None:
    with PrivateContainerd(str(tmp_path / "a")) as a, PrivateContainerd(str(tmp_path / "b")) as b:
        assert a.namespace != b.namespace
        a.ctr("namespaces", "create", "of-a")
        assert "of-a" not in b.ctr("namespaces", "ls", "--quiet").lines


def test_one_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    directory.mkdir()
    (directory / "root").write_text("in the way")
    with raises(ContainerdExited, match=r"root.*not a directory"):
        PrivateContainerd(str(directory)).__enter__()
    assert not directory.exists()


def test_failing_ctr_is_quoted(tmp_path: Path) -> None:
    with PrivateContainerd(str(tmp_path / "c")) as containerd:
        with raises(CtrFailed, match=r"no-such.*not found"):
            containerd.ctr("containers", "info", "no-such")
        assert containerd.ctr("containers", "info", "no-such", check=False).code == 1
        with pytest.raises(CtrTimeout, match=r"no end within 0\.2 s"):
            containerd.ctr("events", timeout=0.2)


def test_shims_environment_is_what_it_was_given(tmp_path: Path) -> None:
    with (
        PrivateContainerd(
            str(tmp_path / "c"), shim_directory="/some/bin", shim_config="/some/config.toml"
        ) as containerd,
        open(f"/proc/{containerd.pid}/environ") as file,
    ):
        environment = dict(word.split("=", 1) for word in file.read().split("\0") if word)
    assert environment["PATH"].split(":")[0] == "/some/bin"
    assert environment["NVSHIM_CONFIG"] == "/some/config.toml"
    assert "PYTHONPATH" not in environment


RUN = ("run", "--rm", "--runtime", "io.containerd.runc.v2")


def test_a_user_of_a_container_gets_into_its_root_whatever_our_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        # Not below pytest's directories, which other users cannot enter.
        with PrivateContainerd() as containerd:
            archive = write_archive(str(tmp_path / "images.tar"), [busybox()])
            containerd.ctr("images", "import", archive)
            containerd.ctr("run", "--detach", *RUN[2:], BUSYBOX, "one", "sleep", "1000")
            words = ("tasks", "exec", "--exec-id", "two", "--user", "1000", "one")
            assert containerd.ctr(*words, "sh", "-c", "test -L /bin", check=False).code == 0
    finally:
        os.umask(before)


def test_a_long_name_of_the_temporary_directory_is_not_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("long" * 20)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with PrivateContainerd() as containerd:
        assert "Server:" in containerd.ctr("version").stdout
    assert not os.path.exists(containerd.directory)


def test_a_container_runs_where_the_temporary_directory_is_on_an_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="any-") as directory:
        for name in ("lower", "upper", "work", "t"):
            os.mkdir(f"{directory}/{name}")
        os.chmod(directory, 0o711)
        layers = ",".join(f"{name}dir={directory}/{name}" for name in ("lower", "upper", "work"))
        syscalls.mount("overlay", f"{directory}/t", "overlay", 0, layers)
        try:
            monkeypatch.setattr(tempfile, "tempdir", f"{directory}/t")
            with PrivateContainerd() as containerd:
                assert containerd.directory.startswith(f"{directory}/t/")
                archive = write_archive(str(tmp_path / "images.tar"), [busybox()])
                containerd.ctr("images", "import", archive)
                # The exit code, since this containerd may lose the end of a short output.
                words = (*RUN, BUSYBOX, "one", "sh", "-c", "exit 7")
                assert containerd.ctr(*words, check=False).code == 7
        finally:
            monkeypatch.undo()
            syscalls.umount(f"{directory}/t", syscalls.MNT_DETACH)
