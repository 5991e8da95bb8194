"""Hearing of a directory that comes, goes and changes."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import anyio
import pytest

from integration.node.plugin.watching import Directory, socket_identity

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_a_directory_that_is_not_there_yet_is_heard_of(tmp_path: Path) -> None:
    wanted = tmp_path / "kubelet" / "device-plugins"
    with Directory(str(wanted)) as directory:
        with anyio.fail_after(20):
            await directory.change()  # the first look
        wanted.mkdir(parents=True)
        with anyio.fail_after(20):
            await directory.change()
        (wanted / "kubelet.sock").touch()
        with anyio.fail_after(20):
            await directory.change()
        (wanted / "kubelet.sock").unlink()
        with anyio.fail_after(20):
            await directory.change()
        # What follows the directory's coming is heard as well, so that no look is in vain for ever.
        with anyio.move_on_after(0.3) as quiet:
            while True:
                await directory.change()
        assert quiet.cancelled_caught
        wanted.rmdir()
        with anyio.fail_after(20):
            await directory.change()
        os.makedirs(wanted)
        with anyio.fail_after(20):
            await directory.change()


async def test_a_directory_that_is_made_anew_is_heard(tmp_path: Path) -> None:
    """Many file systems give it the number of the one before."""
    plugins = tmp_path / "device-plugins"
    plugins.mkdir()
    with Directory(str(plugins), quiet=0) as directory:
        directory.listen()
        for _ in range(5):
            plugins.rmdir()
            plugins.mkdir()
            with anyio.move_on_after(0.3):
                while True:
                    await directory.change()
            (plugins / "kubelet.sock").touch()
            with anyio.fail_after(20):
                await directory.change()
            (plugins / "kubelet.sock").unlink()


async def test_a_swarm_is_one_reason(tmp_path: Path) -> None:
    with Directory(str(tmp_path), quiet=0.2) as directory:
        directory.listen()
        for number in range(100):
            (tmp_path / str(number)).touch()
        with anyio.fail_after(20):
            await directory.change()
        with anyio.move_on_after(0.4) as quiet:
            await directory.change()
        assert quiet.cancelled_caught


async def test_a_socket_that_was_made_anew_is_another(tmp_path: Path) -> None:
    path = str(tmp_path / "kubelet.sock")
    assert socket_identity(path) is None
    (tmp_path / "file").touch()
    assert socket_identity(str(tmp_path / "file")) is None
    seen = set()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            seen.add(socket_identity(path))
        os.unlink(path)
        await anyio.sleep(0.02)  # beyond the grain of the file system's clock
    assert len(seen) == 3
