"""If the fork server or one of its forks is killed at any time, starts still succeed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from integration.timeouts import PATIENCE
from tests.harness.node import Node, pids, words_of
from tests.harness.runtime import is_alive
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio


@pytest.fixture
async def warm(node: Node) -> AsyncIterator[Node]:
    """Yield a node with a fork server that has its spares; nothing of it is left at the end."""
    await node.start("c1")
    link = node.server_link()
    assert os.path.islink(link)
    yield node
    node.close()
    assert not os.path.lexists(link)


def _kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, pids)), "they are gone")


async def _start_while(node: Node, *killed: int, name: str = "c2") -> None:
    """Start a shim while some processes are stopped, and kill them before they can continue."""
    for pid in killed:
        os.kill(pid, signal.SIGSTOP)
    script = f"sleep 0.05; kill -9 {' '.join(map(str, killed))}"
    with subprocess.Popen(["sh", "-c", script]):  # noqa: ASYNC220 - as the verb below
        shim = await node.start(name, wait=False)
    eventually(node.no_verb_is_done, "the verb has exited")
    assert _shims_of(node, name) == [shim]
    # A start that gave up on the fork server did not leave a second one behind.
    await node.start(f"after-{name}")


def _shims_of(node: Node, container_id: str) -> list[int]:
    return [pid for pid in pids() if {container_id, node.address} <= set(words_of(pid))]


async def test_before_it_accepts(warm: Node) -> None:
    (server,) = warm.servers()
    await _start_while(warm, server)
    assert warm.servers() != [server]


async def test_when_the_connection_is_with_its_spare(warm: Node) -> None:
    await _start_while(warm, *warm.spares())


async def test_when_one_of_its_spares_does_not_answer(warm: Node) -> None:
    (server,) = warm.servers()
    for which in (0, 1):
        await _start_while(warm, warm.spares()[which], name=f"without-{which}")
        assert warm.servers() == [server], which


async def test_a_spare_that_was_stopped_does_not_become_a_second_shim(warm: Node) -> None:
    waiting = warm.spares()[0]
    os.kill(waiting, signal.SIGSTOP)
    pid = await warm.start("c2", wait=False)
    os.kill(waiting, signal.SIGCONT)
    eventually(lambda: not is_alive(waiting), "it has exited")
    assert _shims_of(warm, "c2") == [pid]


async def test_it_and_its_spare_at_once(warm: Node) -> None:
    (server,) = warm.servers()
    await _start_while(warm, *warm.spares(), server)
    assert warm.servers() != [server]


async def test_spares_while_nobody_asks(warm: Node) -> None:
    (server,) = warm.servers()
    for number, which in enumerate((slice(0, 1), slice(1, 2), slice(2)), start=2):
        before = warm.spares()
        _kill(*before[which])
        await warm.start(f"c{number}")
        assert warm.servers() == [server], which
        assert set(warm.spares()).isdisjoint(before), which


async def test_between_the_fork_and_the_word_to_go(warm: Node) -> None:
    (server,) = warm.servers()
    request = b"\0".join([f"{warm.launcher}.py".encode(), b"2", b"-help", b"start", b""])
    # Before it connects: soon after, the next spares exist, too.
    spares = warm.spares()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20 * PATIENCE)
        connection.connect(warm.server_socket())
        connection.sendall(len(request).to_bytes(4, sys.byteorder) + request)
        assert connection.recv(1) == b","
        assert connection.recv(1) == b"."
        _kill(server)
        assert all(map(is_alive, spares))  # they run the requested verb
        _kill(*spares)
        assert connection.recv(1) == b""
    eventually(lambda: not any(map(is_alive, warm.spares())), "no spare is left")
    await warm.start("c2")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_spares_end_with_it_and_shims_do_not(warm: Node, number: signal.Signals) -> None:
    shim = await warm.start("c2")
    spares = warm.spares()
    (server,) = warm.servers()
    os.kill(server, number)
    eventually(lambda: not any(map(is_alive, spares)), "the spares end")
    assert all(map(is_alive, (shim, *warm.pids)))
    await warm.start("c3")


async def test_neither_shim_nor_spare_holds_what_is_its_own(warm: Node) -> None:
    shim = await warm.start("c2")
    (server,) = warm.servers()
    spares = warm.spares()

    def files(pid: int) -> set[str]:
        found = set()
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # the connection that asked for the shim's pid
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        return found

    for pid in (shim, *spares):
        assert files(pid) & files(server) <= {"/dev/null", "anon_inode:[eventpoll]"}


async def test_who_is_of_another_group_is_not_served(warm: Node) -> None:
    script = f"""
import socket
with socket.socket(socket.AF_UNIX) as connection:
    connection.settimeout({20 * PATIENCE})
    connection.connect({warm.server_socket()!r})
    print(connection.recv(1))
"""
    argv = ["setpriv", "--regid=12345", "--clear-groups", sys.executable, "-c", script]
    done = subprocess.run(  # noqa: ASYNC221 - nothing else runs in this loop
        argv, capture_output=True, text=True, timeout=30 * PATIENCE, check=True
    )
    assert done.stdout == "b''\n"
    await warm.start("c2")
