"""Sockets of plugins: the owner of a socket, and which sockets ours may replace."""

from __future__ import annotations

import os
import socket
import stat
import time
from typing import TYPE_CHECKING

import pytest

from integration.agent_errors import OtherPlugin, PluginSocketUnusable
from integration.kubelet import sockets
from tests.harness.raising import raises

if TYPE_CHECKING:
    from pathlib import Path


def listening(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(1)
    return server


def dead(path: str) -> None:
    listening(path).close()


@pytest.mark.parametrize(
    ("resource", "name"),
    [
        ("nvidia.com/gpu", "nvidia-gpu.sock"),
        ("nvidia.com/mig-1g.10gb.me", "nvidia-mig-1g.10gb.me.sock"),
        ("nvidia.com/gpu.shared", "nvidia-gpu.shared.sock"),
    ],
)
def test_sockets_are_called_as_nvidias_plugin_calls_them(resource: str, name: str) -> None:
    assert sockets.socket_name(resource) == name


def test_a_socket_goes_into_the_place_of_a_dead_one(tmp_path: Path) -> None:
    path = str(tmp_path / "nvidia-gpu.sock")
    dead(path)
    aside = sockets.temporary_path(path)
    with listening(aside):
        identity = sockets.put_in_place(aside, path)
        assert sockets.identity_of(path) == identity
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert sockets.is_served(path)
        assert sockets.others(str(tmp_path), {identity}) == []
    assert os.listdir(tmp_path) == ["nvidia-gpu.sock"]
    sockets.remove(path, (0, 0))  # another's stays
    assert sockets.identity_of(path) == identity
    sockets.remove(path, identity)
    assert os.listdir(tmp_path) == []


def test_what_a_link_leads_to_gets_no_mode_and_no_place(tmp_path: Path) -> None:
    path, aside = str(tmp_path / "nvidia-gpu.sock"), str(tmp_path / "aside.sock")
    theirs = tmp_path / "theirs"
    theirs.write_text("")
    os.chmod(theirs, 0o644)
    os.symlink(theirs, aside)
    with raises(PluginSocketUnusable):
        sockets.put_in_place(aside, path)
    assert stat.S_IMODE(os.stat(theirs).st_mode) == 0o644
    assert os.listdir(tmp_path) == ["theirs"]


def test_a_socket_that_somebody_serves_is_not_touched(tmp_path: Path) -> None:
    path = str(tmp_path / "nvidia-gpu.sock")
    with listening(path):
        before = sockets.identity_of(path)
        aside = sockets.temporary_path(path)
        with listening(aside), raises(OtherPlugin, match=r"nvidia-gpu\.sock"):
            sockets.put_in_place(aside, path)
        assert sockets.identity_of(path) == before
        assert sockets.others(str(tmp_path), ()) == [path]
        assert os.listdir(tmp_path) == ["nvidia-gpu.sock"]


def test_only_sockets_of_nvidias_plugins_that_are_served_are_others(tmp_path: Path) -> None:
    dead(str(tmp_path / "nvidia-gpu.sock"))
    (tmp_path / "nvidia-file.sock").write_text("")
    with listening(str(tmp_path / "kubelet.sock")):
        assert sockets.others(str(tmp_path), ()) == []
    assert sockets.others(str(tmp_path / "absent"), ()) == []


def test_where_no_socket_can_be_is_said(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "absent" / "nvidia-gpu.sock", "does not exist"),
        (tmp_path / f"nvidia-{'x' * 100}.sock", "longer than"),
    ):
        with raises(PluginSocketUnusable, match=why):
            sockets.temporary_path(str(path))
    short = f"{tmp_path}/nvidia-.sock"
    room = sockets.LONGEST - len(short)
    assert sockets.temporary_path(f"{tmp_path}/nvidia-{'x' * room}.sock")


def test_a_socket_that_was_made_anew_is_another(tmp_path: Path) -> None:
    path = str(tmp_path / "kubelet.sock")
    assert sockets.socket_identity(path) is None
    (tmp_path / "file").touch()
    assert sockets.socket_identity(str(tmp_path / "file")) is None
    seen = set()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            seen.add(sockets.socket_identity(path))
        os.unlink(path)
        time.sleep(0.02)  # longer than the resolution of the file system's timestamps
    assert len(seen) == 3
