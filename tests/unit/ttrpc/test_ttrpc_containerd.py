"""Our client with another implementation: the ttrpc server in containerd."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

import anyio
import pytest
from google.protobuf.empty_pb2 import Empty

from api import typeurl
from api.errors import Status
from api.proto import events_pb2, events_service_pb2, task_pb2, types_pb2
from api.ttrpc import ConnectionClosed, Context, RemoteError, Service
from api.ttrpc.client import Client, connect
from api.ttrpc.frames import DATA_MAX, REQUEST, RESPONSE, Frame, FrameReader, encode
from api.ttrpc.server import Server
from tests.harness.events import Recorder
from tools.containerd import PrivateContainerd

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0, reason="containerd needs root"),
    pytest.mark.skipif(shutil.which("containerd") is None, reason="needs containerd"),
]

SERVICE = "containerd.services.events.ttrpc.v1.Events"
SOCKETS = "/run/containerd/s"


@pytest.fixture(scope="module")
def containerd() -> Iterator[PrivateContainerd]:
    with PrivateContainerd() as containerd:
        yield containerd


async def _forward(client: Client, namespace: str, event: events_pb2.TaskExit) -> Empty:
    envelope = types_pb2.Envelope(
        namespace=namespace, topic="/tasks/exit", event=typeurl.pack(event)
    )
    envelope.timestamp.GetCurrentTime()
    return await client.call(
        SERVICE,
        "Forward",
        events_service_pb2.ForwardRequest(envelope=envelope),
        Empty,
        timeout=5,
        metadata=[("containerd-namespace-ttrpc", namespace)],
    )


def test_an_event_we_forward_is_seen_by_those_who_listen(containerd: PrivateContainerd) -> None:
    event = events_pb2.TaskExit(container_id="web", id="web", pid=42, exit_status=7)
    event.exited_at.FromSeconds(1)

    async def main() -> None:
        async with connect(containerd.ttrpc_address) as client:
            for _ in range(3):
                assert await _forward(client, containerd.namespace, event) == Empty()

    with Recorder(containerd) as recorder:
        anyio.run(main)
        recorder.wait_for("web", lambda names: names == ["exit"] * 3)
        fields = recorder.of("web")[0].fields
        # The time formats of ctr 1.6 and 1.7.
        assert fields.pop("exited_at") in ("1970-01-01T00:00:01Z", {"seconds": 1})
        assert fields == {"container_id": "web", "id": "web", "pid": 42, "exit_status": 7}


def test_what_containerd_does_not_have_is_unimplemented(containerd: PrivateContainerd) -> None:
    async def main() -> None:
        async with connect(containerd.ttrpc_address) as client:
            for service, method in ((SERVICE, "Backward"), ("no.such.Service", "Forward")):
                with pytest.raises(RemoteError) as caught:
                    await client.call(service, method, Empty(), Empty, timeout=5)
                assert caught.value.status == Status.UNIMPLEMENTED
                assert (method if service == SERVICE else service) in caught.value.message
            # The connection has survived both.
            event = events_pb2.TaskExit(container_id="after")
            await _forward(client, containerd.namespace, event)

    anyio.run(main)


def test_many_calls_at_once_are_told_apart(containerd: PrivateContainerd) -> None:
    async def main() -> None:
        answers = 0
        async with connect(containerd.ttrpc_address) as client:

            async def call(number: int) -> None:
                nonlocal answers
                if number % 2:
                    with pytest.raises(RemoteError, match=f"Missing{number}$"):
                        await client.call(SERVICE, f"Missing{number}", Empty(), Empty, timeout=5)
                else:
                    event = events_pb2.TaskExit(container_id=f"many{number}")
                    await _forward(client, containerd.namespace, event)
                answers += 1

            async with anyio.create_task_group() as tasks:
                for number in range(100):
                    tasks.start_soon(call, number)
        assert answers == 100

    anyio.run(main)


def test_a_stopped_containerd_is_noticed_at_once(containerd: PrivateContainerd) -> None:
    async def main() -> None:
        async with connect(containerd.ttrpc_address) as client:
            containerd.stop()
            with anyio.fail_after(20):
                await client.wait_closed()

    try:
        anyio.run(main)
    finally:
        containerd.start()


def test_gos_client_is_served_by_our_server(containerd: PrivateContainerd) -> None:
    """``ctr shim`` calls a shim's socket directly, at the conventional path."""
    asked: list[Context] = []

    async def state(context: Context, request: task_pb2.StateRequest) -> task_pb2.StateResponse:
        asked.append(context)
        if request.id != "web":
            raise ConnectionClosed(f"task {request.id}", found="a test's typed error")
        return task_pb2.StateResponse(id=request.id, pid=42, bundle="/bundle of web")

    service = Service(task_pb2.DESCRIPTOR.services_by_name["Task"], {"State": state})

    async def ctr(task: str) -> subprocess.CompletedProcess[bytes]:
        argv = containerd.ctr_argv("shim", "--id", task, "state")
        digest = hashlib.sha256(f"{containerd.address}/{containerd.namespace}/{task}".encode())
        path = os.path.join(SOCKETS, digest.hexdigest())
        os.makedirs(SOCKETS, mode=0o711, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            try:
                listener.listen()
                server = Server([service])
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(server.serve, listener)
                    with anyio.fail_after(10):
                        done = await anyio.run_process(argv, check=False)
                    await server.shutdown(0)
            finally:
                os.unlink(path)
        return done

    done = anyio.run(ctr, "web")
    assert done.returncode == 0, done.stderr
    assert b"/bundle of web" in done.stdout
    assert (asked[0].service, asked[0].method) == ("containerd.task.v2.Task", "State")

    done = anyio.run(ctr, "other")
    assert done.returncode == 1
    assert b"a test's typed error" in done.stderr


def test_both_servers_say_the_same_to_an_oversized_request(containerd: PrivateContainerd) -> None:
    """Our answer (tested with our server) is the same as containerd's."""

    async def main() -> None:
        length = DATA_MAX + 1
        async with await anyio.connect_unix(containerd.ttrpc_address) as stream:
            await stream.send(length.to_bytes(4, "big") + encode(1, REQUEST, 0)[4:] + bytes(length))
            reader = FrameReader()
            with anyio.fail_after(5):
                frames: list[object] = []
                while not frames:
                    frames += reader.feed(await stream.receive())
        (frame,) = frames
        assert isinstance(frame, Frame)
        assert (frame.stream_id, frame.type) == (1, RESPONSE)
        # Response.status.code = 8, RESOURCE_EXHAUSTED.
        assert frame.data[2:4] == b"\x08\x08"

    anyio.run(main)
