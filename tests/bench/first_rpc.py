"""How long it takes from ``start`` to the first answered call of a shim.

The verb is called as containerd calls it, in a bundle; then Connect is called over ttrpc.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
from google.protobuf.empty_pb2 import Empty

from api.proto import task_pb2
from api.ttrpc import ConnectionClosed, connect
from tests.harness.runtime import is_alive, new_name
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from integration.containerd import PrivateContainerd

_SERVICE = "containerd.task.v2.Task"


@dataclass(frozen=True, slots=True)
class Start:
    """One start.

    Attributes:
        verb: seconds until ``start`` had answered and ended.
        answered: seconds until the first call was answered.
    """

    verb: float
    answered: float


def measure_start(
    containerd: PrivateContainerd, program: str, spec: dict[str, Any], environment: dict[str, str]
) -> Start:
    """Start a shim by hand, call it once, and let it end.

    Args:
        containerd: the one that the shim believes to belong to.
        program: the shim's path.
        spec: what config.json holds.
        environment: more variables for the verb.
    """
    name = new_name("start")
    with tempfile.TemporaryDirectory(prefix="nvshim-bench-") as bundle:
        with open(os.path.join(bundle, "config.json"), "w") as file:
            json.dump(spec, file)
        log = os.path.join(bundle, "log")
        os.mkfifo(log, 0o700)
        # containerd holds it open in both directions, so that no shim waits for a reader.
        reader = os.open(log, os.O_RDWR | os.O_NONBLOCK)
        try:
            return anyio.run(_start, containerd, program, name, bundle, environment)
        finally:
            os.close(reader)


async def _start(
    containerd: PrivateContainerd, program: str, name: str, bundle: str, more: dict[str, str]
) -> Start:
    argv = [
        program, "-namespace", containerd.namespace, "-address", containerd.address,
        "-publish-binary", "/usr/bin/containerd", "-id", name, "start",
    ]  # fmt: skip
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "TTRPC_ADDRESS": containerd.ttrpc_address,
        **more,
    }
    begin = time.perf_counter()
    # Nothing else runs in this loop, and a thread or a child watcher would be measured too.
    done = subprocess.run(  # noqa: ASYNC221
        argv, cwd=bundle, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=True
    )
    verb = time.perf_counter() - begin
    address = done.stdout.decode()
    async with connect(address) as client:
        request = task_pb2.ConnectRequest(id=name)
        answer = await client.call(_SERVICE, "Connect", request, task_pb2.ConnectResponse)
        answered = time.perf_counter() - begin
        try:
            await client.call(_SERVICE, "Shutdown", task_pb2.ShutdownRequest(id=name), Empty)
        except ConnectionClosed:
            pass  # containerd's own shim ends before it has answered
    eventually(lambda: not is_alive(answer.shim_pid), "the shim ends")
    return Start(verb, answered)
