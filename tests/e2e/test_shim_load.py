"""Requests that pile up: ttrpc cannot cancel one, so requests of disconnected clients stay.

containerd uses one connection to a shim for all of its own clients. The tests write this
connection's bytes themselves, so that thousands of requests cost the test nothing.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread
import pytest

from api import typeurl
from api.errors import Status
from api.proto import task_pb2
from api.ttrpc import ClientConnection, ResponseReceived
from tests.harness.shim import ShimByHand

pytestmark = pytest.mark.anyio

_ABANDONED = 5000
_HOUR = 3600 * 10**9


class _Daemon:
    """containerd's single connection to a shim."""

    def __init__(self, shim: ShimByHand) -> None:
        self.answers: dict[int, ResponseReceived] = {}
        self._service = shim.service
        self._connection = ClientConnection()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(30)
        self._socket.connect(shim.socket_path)

    def close(self) -> None:
        self._socket.close()

    def ask(self, method: str, *, timeout_nano: int = 0, **fields: Any) -> int:
        """Send a request without waiting; return the stream id of its answer."""
        described = task_pb2.DESCRIPTOR.services_by_name["Task"].methods_by_name[method]
        request = getattr(task_pb2, described.input_type.name)(**fields)
        number, frame = self._connection.send_request(
            self._service, method, request.SerializeToString(), timeout_nano=timeout_nano
        )
        self._socket.sendall(frame)
        return number

    async def answer(self, number: int) -> ResponseReceived:
        """Return the answer to one of them."""
        return await anyio.to_thread.run_sync(self._receive, number)

    async def call(self, method: str, **fields: Any) -> ResponseReceived:
        """Send a request, and wait for its answer."""
        return await self.answer(self.ask(method, **fields))

    def _receive(self, number: int) -> ResponseReceived:
        while number not in self.answers:
            for event in self._connection.receive_data(self._socket.recv(1 << 16)):
                assert isinstance(event, ResponseReceived)
                self.answers[event.stream_id] = event
        return self.answers[number]

    async def statuses(self, numbers: Sequence[int]) -> set[int]:
        """Return the statuses of the answers to some of them."""
        return {int((await self.answer(number)).code) for number in numbers}


def _memory_of(pid: int) -> int:
    """Return a process's memory in bytes, with shared pages, which exits of others would change."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return 1024 * int(re.findall(r"^Rss: +(\d+)", file.read(), re.MULTILINE)[0])


@pytest.mark.parametrize("timeout_nano", [0, _HOUR], ids=["for ever", "for an hour"])
async def test_waits_that_were_abandoned_hold_nobody_up(
    shim: ShimByHand, timeout_nano: int
) -> None:
    await shim.run("c1")
    await shim.start_exec("c1", "e1", "sleep", "1000")
    daemon = _Daemon(shim)
    waits = {"": [], "e1": []}  # type: dict[str, list[int]]
    for _ in range(_ABANDONED):
        for exec_id, numbers in waits.items():
            numbers.append(daemon.ask("Wait", id="c1", exec_id=exec_id, timeout_nano=timeout_nano))
    assert (await daemon.call("State", id="c1")).code == Status.OK
    spec = typeurl.pack_json(
        {"args": ["true"], "cwd": "/", "env": ["PATH=/bin"], "user": {}}, typeurl.PROCESS
    )
    for method, more in (("Exec", {"spec": spec}), ("Start", {}), ("Wait", {}), ("Delete", {})):
        answer = await daemon.call(method, id="c1", exec_id="e2", **more)
        assert (method, answer.code, answer.message) == (method, Status.OK, "")
    kill = await daemon.call("Kill", id="c1", exec_id="e1", signal=signal.SIGTERM)
    assert (kill.code, kill.message) == (Status.OK, "")
    # Each gets the answer that it would get alone.
    assert await daemon.statuses(waits["e1"]) == {Status.OK}
    ended = {daemon.answers[number].payload for number in waits["e1"]}
    assert [task_pb2.WaitResponse.FromString(each).exit_status for each in ended] == [143]
    assert not daemon.answers.keys() & set(waits[""])
    assert (await daemon.call("Kill", id="c1", signal=signal.SIGKILL)).code == Status.OK
    assert await daemon.statuses(waits[""]) == {Status.OK}
    assert (await daemon.call("Delete", id="c1")).code == Status.OK
    daemon.close()


async def test_a_wait_costs_next_to_nothing(shim: ShimByHand) -> None:
    await shim.run("c1")
    daemon = _Daemon(shim)
    daemon.ask("Wait", id="c1")
    await daemon.call("State", id="c1")
    before = _memory_of(shim.pid)
    for _ in range(2 * _ABANDONED):
        daemon.ask("Wait", id="c1")
    await daemon.call("State", id="c1")
    assert _memory_of(shim.pid) - before < 2 * _ABANDONED * 400
    # The requests end with their connection.
    daemon.close()
    assert await shim.end("c1") == 128 + signal.SIGKILL


async def test_kill_state_and_delete_are_never_refused_for_load(shim: ShimByHand) -> None:
    # Until the end of the test.
    hang = f'test "$verb" = update && while test -d {shim.directory}; do sleep 0.1; done'
    await shim.run("c1", options=shim.options(before=hang))
    daemon = _Daemon(shim)
    limits = typeurl.pack_json({"pids": {"limit": 99}}, typeurl.LINUX_RESOURCES)
    updates = [daemon.ask("Update", id="c1", resources=limits) for _ in range(1100)]
    last = await daemon.answer(updates[-1])
    assert last.code == Status.RESOURCE_EXHAUSTED
    assert "under way on this connection" in last.message
    wait = daemon.ask("Wait", id="c1")
    assert (await daemon.call("State", id="c1")).code == Status.OK
    assert (await daemon.call("Kill", id="c1", signal=signal.SIGKILL)).code == Status.OK
    assert (await daemon.answer(wait)).code == Status.OK
    assert (await daemon.call("Delete", id="c1")).code == Status.OK
    daemon.close()
