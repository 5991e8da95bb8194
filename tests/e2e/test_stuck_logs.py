"""A log on a hanging file system blocks only its own container."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from api.ttrpc import RemoteError
from tests.harness.fuse import FILE, FuseServer, fuse
from tests.harness.shim import ShimByHand, StartShim
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio

_POD: dict[str, Any] = {"annotations": {"io.kubernetes.cri.sandbox-id": "pod"}}
# Seconds in which a request that does not hang is answered, even on a busy machine; the shim
# gives up a hanging one after ten.
_SOON = 8


@pytest.fixture
def log(tmp_path: Path) -> Iterator[FuseServer]:
    """Yield a file system with one file, which is a log."""
    (tmp_path / "written").touch()
    with fuse(str(tmp_path / "fuse"), str(tmp_path / "written")) as server:
        yield server


async def _asked(server: FuseServer) -> None:
    with anyio.fail_after(60):
        assert await anyio.to_thread.run_sync(server.asked.wait, 60)


async def _a_life_goes_on(shim: ShimByHand, name: str, exec_id: str) -> None:
    """Make requests that need the runtime for another container."""
    with anyio.fail_after(_SOON):
        assert await shim.status(name) == "RUNNING"
        await shim.start_exec(name, exec_id, "true")
        assert await shim.reap(name, exec_id) == 0


@pytest.mark.parametrize(
    ("scheme", "terminal"),
    [
        pytest.param("file://", False, id="file"),
        pytest.param("", True, id="terminal to a path", marks=pytest.mark.thorough),
    ],
)
async def test_a_log_that_cannot_be_written_holds_up_no_neighbour_and_its_container_ends(
    start_shim: StartShim, tmp_path: Path, log: FuseServer, scheme: str, terminal: bool
) -> None:
    path = os.path.join(log.mount_point, FILE)
    async with start_shim("c1", "sleep", "1000", **_POD) as shim:
        await shim.run("c1")
        shim.bundle("c2", "sh", "-c", "echo first; while sleep 0.01; do echo more; done", **_POD)
        await shim.run("c2", stdout=f"{scheme}{path}", terminal=terminal)
        eventually(lambda: b"first" in (tmp_path / "written").read_bytes(), "the first line")
        log.hang()
        await _asked(log)
        await _a_life_goes_on(shim, "c1", "e1")
        with anyio.fail_after(_SOON):
            await shim.call("Kill", id="c2", signal=9)
            assert (await shim.call("Wait", id="c2")).exit_status == 137
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_a_life_goes_on, shim, "c1", "e2")
            await shim.call("Delete", id="c2", timeout=30)
        assert time.monotonic() - began < 20
        # The shim also exits while the log still hangs.
        assert await shim.end("c1") == 137


@pytest.mark.parametrize(
    ("role", "scheme"),
    [
        pytest.param("stdout", "file://", id="file", marks=pytest.mark.thorough),
        pytest.param("stdout", "", id="path"),
        pytest.param("stdin", "", id="input from a path", marks=pytest.mark.thorough),
    ],
)
async def test_a_log_that_cannot_be_opened_is_an_error_in_time(
    start_shim: StartShim, log: FuseServer, role: str, scheme: str
) -> None:
    uri = {role: f"{scheme}{log.mount_point}/{FILE}"}
    async with start_shim("c1", "sleep", "1000", **_POD) as shim:
        await shim.run("c1")
        shim.bundle("c2", "sleep", "1000", **_POD)
        log.hang()
        errors = []

        async def create() -> None:
            with pytest.raises(RemoteError) as caught:
                await shim.create("c2", timeout=30, **uri)
            errors.append(str(caught.value))

        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(create)
            await _asked(log)
            await _a_life_goes_on(shim, "c1", "e1")
        assert "NVSHIM-E1407" in errors[0]
        assert log.mount_point in errors[0]
        assert time.monotonic() - began < 20
        log.go_on()
        shim.bundle("c3", "echo", "hello", **_POD)
        await shim.run("c3", **uri)
        assert await shim.reap("c3") == 0
