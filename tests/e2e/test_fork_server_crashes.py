"""The fork server, or what it has forked, is killed at some moment: nobody is the worse for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shim.warmverb import link_name
from tests.harness.node import words_of
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.harness.node import Node

pytestmark = pytest.mark.anyio


@pytest.fixture
async def warm(node: Node) -> AsyncIterator[Node]:
    """A node with a fork server that has its spare, and with nothing of it left at the end."""
    await node.start("c1")
    eventually(node.spares, "there is a spare")
    link = os.path.join(os.path.dirname(node.server_socket()), _link(node))
    assert os.path.islink(link)
    yield node
    node.close()
    assert not os.path.lexists(link)


def _link(node: Node) -> str:
    return link_name(node.address, f"{node.launcher}.py")


def _kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, pids)), "they are gone")


async def _start_while(node: Node, *killed: int) -> None:
    """Start c2 while some processes are stopped, which are killed before they can go on."""
    for pid in killed:
        os.kill(pid, signal.SIGSTOP)
    script = f"sleep 0.05; kill -9 {' '.join(map(str, killed))}"
    with subprocess.Popen(["sh", "-c", script]):  # noqa: ASYNC220 - as the verb below
        await node.start("c2")
    shims = [p for p in _processes() if {"c2", node.address} <= set(words_of(p))]
    assert shims == node.pids[-1:]


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


async def test_before_it_accepts(warm: Node) -> None:
    (server,) = warm.servers()
    await _start_while(warm, server)
    assert warm.servers() != [server]


async def test_when_the_connection_is_with_its_spare(warm: Node) -> None:
    await _start_while(warm, *warm.spares())


async def test_it_and_its_spare_at_once(warm: Node) -> None:
    (server,) = warm.servers()
    await _start_while(warm, *warm.spares(), server)
    assert warm.servers() != [server]


async def test_the_spare_while_nobody_asks(warm: Node) -> None:
    (server,) = warm.servers()
    _kill(*warm.spares())
    await warm.start("c2")
    assert warm.servers() == [server]
    eventually(warm.spares, "there is another one")


async def test_between_the_fork_and_the_word_to_go(warm: Node) -> None:
    (server,) = warm.servers()
    request = b"\0".join([f"{warm.launcher}.py".encode(), b"2", b"-help", b"start", b""])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(warm.server_socket())
        (spare,) = warm.spares()
        connection.sendall(len(request).to_bytes(4, sys.byteorder) + request)
        assert connection.recv(1) == b","
        assert connection.recv(1) == b"."
        _kill(server)
        assert is_alive(spare)  # it does the verb that it was asked for
        _kill(spare)
        assert connection.recv(1) == b""
    eventually(lambda: not any(map(is_alive, warm.spares())), "no spare is left")
    await warm.start("c2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_the_spare_ends_with_it_and_shims_do_not(warm: Node, number: signal.Signals) -> None:
    shim = await warm.start("c2")
    (spare,) = eventually(warm.spares, "there is a spare")
    (server,) = warm.servers()
    os.kill(server, number)
    eventually(lambda: not is_alive(spare), "the spare ends")
    assert all(map(is_alive, (shim, *warm.pids)))
    await warm.start("c3")


async def test_neither_shim_nor_spare_holds_what_is_its_own(warm: Node) -> None:
    shim = await warm.start("c2")
    (server,) = warm.servers()
    eventually(warm.spares, "there is a spare")

    def files(pid: int) -> set[str]:
        return {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}

    for pid in (shim, *warm.spares()):
        assert files(pid) & files(server) <= {"/dev/null", "anon_inode:[eventpoll]"}


async def test_who_is_of_another_group_is_not_served(warm: Node) -> None:
    script = f"""
import socket
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout(5)
    connection.connect({warm.server_socket()!r})
    print(connection.recv(1))
"""
    argv = ["setpriv", "--regid=12345", "--clear-groups", sys.executable, "-c", script]
    done = subprocess.run(  # noqa: ASYNC221 - nothing else runs in this loop
        argv, capture_output=True, text=True, timeout=10, check=True
    )
    assert done.stdout == "b''\n"
    await warm.start("c2")
