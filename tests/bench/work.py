"""What a running container costs: execs, output, calls, and many containers at once.

Source: proc(5), /proc/PID/status and /proc/PID/fd; containerd api/runtime/task/v2/shim.proto.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import anyio
from google.protobuf.empty_pb2 import Empty

from api import typeurl
from api.proto import task_pb2
from api.ttrpc import connect
from tests.harness.runtime import new_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from api.ttrpc import Client
    from tests.harness.runtime import Container, Runtime

_SERVICE: Final = "containerd.task.v2.Task"
_MEGABYTES: Final = 1000
_CALLS: Final = 500
_TRUE: Final = {"args": ["true"], "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}}


def execs(container: Container) -> Callable[[], float]:
    """What runs ``true`` in a container, and returns the milliseconds that it took."""

    def once() -> float:
        begin = time.perf_counter()
        done = container.exec("true")
        milliseconds = (time.perf_counter() - begin) * 1000
        if done.code != 0:
            raise RuntimeError(f"an exec failed: {done.stderr}")
        return milliseconds

    return once


def output(runtime: Runtime) -> Callable[[], float]:
    """What runs a container that writes a gigabyte to stdout, and returns the MB a second."""
    command = ("dd", "if=/dev/zero", "bs=64k", f"count={_MEGABYTES * 1000 * 1000 // 65536}")

    def once() -> float:
        container, ctr = runtime.spawn(
            *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        begin = time.perf_counter()
        code = ctr.wait()
        seconds = time.perf_counter() - begin
        if code != 0:
            raise RuntimeError(f"{container.name} ended with {code}")
        return _MEGABYTES / seconds

    return once


def many(runtime: Runtime, count: int) -> Callable[[], float]:
    """What runs containers to their end at the same time, and returns the seconds for all."""

    def once() -> float:
        begin = time.perf_counter()
        # What they say is not read while they run: it would be a part of what is measured.
        running = [
            runtime.containerd.spawn_ctr(
                *runtime.words("true", flags=("--rm",)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(count)
        ]
        codes = [ctr.wait() for ctr in running]
        seconds = time.perf_counter() - begin
        if any(codes):
            raise RuntimeError(f"{sum(map(bool, codes))} of {count} containers failed")
        return seconds

    return once


def calls(container: Container, method: str) -> Callable[[], float]:
    """What calls a method of a container's shim over and over, and returns calls a second."""

    async def measure() -> float:
        described = task_pb2.DESCRIPTOR.services_by_name["Task"].methods_by_name[method]
        request = getattr(task_pb2, described.input_type.name)(id=container.name)
        response = getattr(task_pb2, described.output_type.name)
        async with _shim_of(container) as client:
            begin = time.perf_counter()
            for _ in range(_CALLS):
                await client.call(_SERVICE, method, request, response)
            return _CALLS / (time.perf_counter() - begin)

    return lambda: anyio.run(measure)


@dataclass(frozen=True, slots=True)
class Growth:
    """What a shim had before many execs, and after.

    Attributes:
        resident: KiB of resident memory, before and after.
        descriptors: open descriptors, before and after.
    """

    resident: tuple[int, int]
    descriptors: tuple[int, int]


def measure_growth(container: Container, *, warm_up: int, count: int) -> Growth:
    """Let a container's shim run many execs.

    Args:
        container: it runs.
        warm_up: execs before the first look.
        count: execs between the two looks.
    """
    return anyio.run(_grow, container, warm_up, count)


async def _grow(container: Container, warm_up: int, count: int) -> Growth:
    async with _shim_of(container) as client:
        request = task_pb2.ConnectRequest(id=container.name)
        shim = (await client.call(_SERVICE, "Connect", request, task_pb2.ConnectResponse)).shim_pid
        await _run_execs(client, container.name, warm_up)
        before = _resident(shim), _descriptors(shim)
        await _run_execs(client, container.name, count)
        after = _resident(shim), _descriptors(shim)
    return Growth((before[0], after[0]), (before[1], after[1]))


async def _run_execs(client: Client, container: str, count: int) -> None:
    spec = typeurl.pack_json(_TRUE, typeurl.PROCESS)
    for _ in range(count):
        both: dict[str, Any] = {"id": container, "exec_id": new_name("e")}
        await client.call(_SERVICE, "Exec", task_pb2.ExecProcessRequest(**both, spec=spec), Empty)
        await client.call(_SERVICE, "Start", task_pb2.StartRequest(**both), task_pb2.StartResponse)
        await client.call(_SERVICE, "Wait", task_pb2.WaitRequest(**both), task_pb2.WaitResponse)
        await client.call(
            _SERVICE, "Delete", task_pb2.DeleteRequest(**both), task_pb2.DeleteResponse
        )


@asynccontextmanager
async def _shim_of(container: Container) -> AsyncIterator[Client]:
    bundle = container.runtime.containerd.bundle(container.name)
    address = await anyio.Path(bundle, "address").read_text()
    async with connect(address) as client:
        yield client


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
