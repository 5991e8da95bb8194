"""The fork server, or what it has forked, is killed at some moment: nobody is the worse for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from integration.patience import PATIENCE
from shim.verbs.warmstart import link_name
from tests.harness.node import words_of
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.harness.node import Node

pytestmark = pytest.mark.anyio


@pytest.fixture
async def warm(node: Node) -> AsyncIterator[Node]:
    """A node with a fork server that has its spares, and with nothing of it left at the end."""
    await node.start("c1")
    _spares(node)
    link = os.path.join(os.path.dirname(node.server_socket()), _link(node))
    assert os.path.islink(link)
    yield node
    node.close()
    assert not os.path.lexists(link)


def _link(node: Node) -> str:
    return link_name(node.address, f"{node.launcher}.py")


def _spares(node: Node) -> list[int]:
    """The process that waits to become a shim, and the one that waits for a verb."""
    eventually(lambda: len(node.spares()) == 2, "there are two spares")
    return node.spares()


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
    await _start_while(warm, *_spares(warm))


@pytest.mark.parametrize("which", [0, 1])
async def test_when_one_of_its_spares_does_not_answer(warm: Node, which: int) -> None:
    (server,) = warm.servers()
    await _start_while(warm, _spares(warm)[which])
    assert warm.servers() == [server]


async def test_a_spare_that_was_stopped_does_not_become_a_second_shim(warm: Node) -> None:
    waiting = _spares(warm)
    os.kill(waiting[0], signal.SIGSTOP)
    pid = await warm.start("c2")
    os.kill(waiting[0], signal.SIGCONT)
    eventually(lambda: not is_alive(waiting[0]), "it has ended")
    assert [p for p in _processes() if {"c2", warm.address} <= set(words_of(p))] == [pid]


async def test_it_and_its_spare_at_once(warm: Node) -> None:
    (server,) = warm.servers()
    await _start_while(warm, *_spares(warm), server)
    assert warm.servers() != [server]


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(2)])
async def test_spares_while_nobody_asks(warm: Node, which: slice) -> None:
    (server,) = warm.servers()
    before = _spares(warm)
    _kill(*before[which])
    await warm.start("c2")
    assert warm.servers() == [server]
    eventually(lambda: set(_spares(warm)).isdisjoint(before), "there are others")


async def test_between_the_fork_and_the_word_to_go(warm: Node) -> None:
    (server,) = warm.servers()
    request = b"\0".join([f"{warm.launcher}.py".encode(), b"2", b"-help", b"start", b""])
    # Before it connects: soon after, there are the next spares, too.
    spares = _spares(warm)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5 * PATIENCE)
        connection.connect(warm.server_socket())
        connection.sendall(len(request).to_bytes(4, sys.byteorder) + request)
        assert connection.recv(1) == b","
        assert connection.recv(1) == b"."
        _kill(server)
        assert all(map(is_alive, spares))  # they do the verb that was asked for
        _kill(*spares)
        assert connection.recv(1) == b""
    eventually(lambda: not any(map(is_alive, warm.spares())), "no spare is left")
    await warm.start("c2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_spares_end_with_it_and_shims_do_not(warm: Node, number: signal.Signals) -> None:
    shim = await warm.start("c2")
    spares = _spares(warm)
    (server,) = warm.servers()
    os.kill(server, number)
    eventually(lambda: not any(map(is_alive, spares)), "the spares end")
    assert all(map(is_alive, (shim, *warm.pids)))
    await warm.start("c3")


async def test_neither_shim_nor_spare_holds_what_is_its_own(warm: Node) -> None:
    shim = await warm.start("c2")
    (server,) = warm.servers()
    spares = _spares(warm)

    def files(pid: int) -> set[str]:
        return {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}

    for pid in (shim, *spares):
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
