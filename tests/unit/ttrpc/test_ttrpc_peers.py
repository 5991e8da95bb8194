"""Only processes of our user and our group may connect."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from api.proto import ttrpc_pb2
from api.ttrpc import Context
from api.ttrpc.client import connect
from api.ttrpc.frames import REQUEST, encode
from api.ttrpc.sockets import peer_credentials

# A client in its own process. It becomes another user, connects, sends a request and prints how
# many bytes it read until the end of the stream.
_STRANGER = """
import os, socket, sys
path, uid, gid, request = sys.argv[1:]
os.setgroups([])
os.setresgid(int(gid), int(gid), int(gid))
os.setresuid(int(uid), int(uid), int(uid))
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(60)
    sock.connect(path)
    try:
        sock.sendall(bytes.fromhex(request))
        print(len(sock.recv(1000)))
    except (BrokenPipeError, ConnectionResetError):
        print(0)
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")


async def _echo(_: Context, request: StringValue) -> StringValue:
    return request


@pytest.mark.anyio
@needs_root
@pytest.mark.parametrize(
    ("uid", "gid", "served"),
    [
        (0, 0, True),
        (65534, 65534, False),
        (65534, 0, False),
        (0, 65534, False),
    ],
)
async def test_only_our_user_with_our_group_is_served_and_others_get_not_a_byte(
    serve: Any, service: str, tmp_path: Path, uid: int, gid: int, *, served: bool
) -> None:
    request = ttrpc_pb2.Request(service=service, method="Say").SerializeToString()
    async with serve({"Say": _echo}) as serving:
        # All users can reach the socket, so that the server has to refuse them.
        os.chmod(serving.path, 0o666)
        for directory in (tmp_path, *tmp_path.parents):
            if os.stat(directory).st_mode & 0o005 != 0o005:
                os.chmod(directory, 0o755)
        argv = [
            sys.executable, "-I", "-S", "-c", _STRANGER,
            serving.path, str(uid), str(gid), encode(1, REQUEST, 0, request).hex(),
        ]  # fmt: skip
        ask = partial(subprocess.run, argv, capture_output=True, check=True)
        done = await anyio.to_thread.run_sync(ask)
        answered = int(done.stdout)
        assert (answered > 0) is served
        assert serving.calls == int(served)
        logged = [event for event, _ in serving.log]
        assert logged == ([] if served else ["a connection was rejected"])
        if not served:
            assert f"uid {uid} and gid {gid}" in serving.log[0][1]["error"]
        # The server continues.
        async with connect(serving.path) as client:
            await client.call(service, "Say", StringValue(), StringValue)


def test_credentials_are_those_of_the_time_of_the_connection(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        child = os.fork()
        if child == 0:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(path)
                signal.pause()
            os._exit(0)
        try:
            accepted, _ = listener.accept()
            with accepted:
                assert peer_credentials(accepted) == (child, os.geteuid(), os.getegid())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
