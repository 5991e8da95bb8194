"""When a shim exits, and when it stays: Shutdown, and containers that are about to arrive."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import to_thread

from api.errors import Status
from api.ttrpc import ConnectionClosed, RemoteError
from api.ttrpc.client import connect
from integration.containers.shim_client import call
from tests.harness.launcher import INTERPRETER, REPOSITORY, SITE
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, StartShim, gone, shim_by_hand
from tests.harness.stopped import stopped_after

pytestmark = pytest.mark.anyio

POD: Final[dict[str, Any]] = {"annotations": {"io.kubernetes.cri.sandbox-id": "pod"}}


async def test_shutdown_may_be_asked_after_every_delete_and_again(start_shim: StartShim) -> None:
    async with start_shim("c1", "true", **POD) as shim:
        shim.bundle("c2", "sleep", "1000", **POD)
        await shim.run("c1")
        await shim.run("c2")
        await shim.reap("c1")
        for now in (False, True, False):
            await shim.call("Shutdown", id="c1", now=now)
        assert await shim.status("c2") == "RUNNING"
        await shim.end("c2")
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(_shut_down, shim, "c2")
        await shim.until_gone()
        assert shim.leftovers() == []


async def _shut_down(shim: ShimByHand, container_id: str) -> None:
    # A late Shutdown finds no shim, which containerd accepts.
    with suppress(ConnectionClosed):
        await shim.call("Shutdown", id=container_id)


async def test_a_shim_stays_for_a_container_that_was_given_its_address(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true", **POD) as shim:
        await shim.run("c1")
        await shim.call("Wait", id="c1")
        shim.bundle("c2", "sleep", "1000", **POD)
        assert shim.start_verb("c2") == f"unix://{shim.socket_path}"
        await shim.call("Delete", id="c1")
        await shim.call("Shutdown", id="c1")
        await anyio.sleep(0.3)
        assert is_alive(shim.pid)
        await shim.run("c2")


async def test_a_shim_stays_for_its_first_container_when_the_second_one_failed(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000", **POD) as shim:
        shim.bundle("c2", "no-such-program", **POD)
        shim.start_verb("c2")
        with pytest.raises(RemoteError):
            await shim.create("c2")
        await shim.call("Shutdown", id="c2")
        await shim.run("c1")


@pytest.mark.parametrize("way", ["shutdown", "delete", "verb", "no bundle"])
async def test_a_shim_does_not_wait_for_a_container_that_will_not_come(
    start_shim: StartShim, way: str
) -> None:
    async with start_shim("c1", "true", **POD) as shim:
        await shim.run("c1")
        await shim.call("Wait", id="c1")
        bundle = shim.bundle("c2", "sleep", "1000", **POD)
        shim.start_verb("c2")
        if way == "shutdown":
            await shim.call("Shutdown", id="c2")
        elif way == "delete":
            with pytest.raises(RemoteError) as caught:
                await shim.call("Delete", id="c2")
            assert caught.value.status == Status.NOT_FOUND
        elif way == "verb":
            await to_thread.run_sync(shim.delete_verb, "c2")
        else:
            shutil.rmtree(bundle)


async def test_shutdown_while_the_only_create_is_under_way_ends_the_shim_if_that_fails(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        until_told = "until [ -e ${0%/*}/fail ]; do sleep 0.02; done"
        slow = shim.options(before=f'[ "$verb" = create ] && {{ {until_told}; exit 1; }}')

        async def create() -> None:
            with pytest.raises(RemoteError, match="NVSHIM-E"):
                await shim.create("c1", options=slow)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(create)
            await anyio.sleep(0.1)
            await shim.call("Shutdown", id="c1")
            assert is_alive(shim.pid)
            os.mknod(f"{shim.directory}/fail")
        await shim.until_gone()
        assert shim.leftovers() == []


async def test_an_address_that_start_gives_away_is_never_that_of_a_shim_that_goes(
    start_shim: StartShim,
) -> None:
    """A pod's next container starts while the Shutdown of the last one is in progress."""
    answers: list[str] = []
    shims = set()
    async with start_shim("c0", "true", **POD) as shim:
        address = f"unix://{shim.socket_path}"
        for number in range(16):
            name, following = f"c{number}", f"c{number + 1}"
            shim.bundle(following, "true", **POD)

            async def start(following: str = following) -> None:
                answers.append(await to_thread.run_sync(shim.start_verb, following))

            async with connect(address) as shim.client:
                shim.pid = (await shim.call("Connect", id=name)).shim_pid
                shims.add(shim.pid)
                await shim.create(name)
                await shim.call("Delete", id=name)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(start)
                    # A verb takes some 30 ms to reach the socket.
                    await anyio.sleep(0.006 * number)
                    await shim.call("Shutdown", id=name)
            address = answers[-1]
        async with connect(address) as shim.client:
            await gone(shim, "c16")
    assert len(shims) > 1, "sometimes Shutdown was first"


async def test_a_shim_stays_for_a_start_that_is_stopped_while_it_finds_it(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true", **POD) as shim:
        await shim.run("c1")
        await shim.reap("c1")
        bundle = shim.bundle("c2", "sleep", "1000", **POD)
        # It has found the shim, and has not named its container yet.
        words, environment = shim.start_words("c2"), {**os.environ, **shim.environment}
        trace = f"{shim.directory}/trace"
        with stopped_after("connect", words, trace=trace, cwd=bundle, env=environment) as stopped:
            await shim.call("Shutdown", id="c1")
            assert (await shim.call("Connect", id="c1")).shim_pid == shim.pid
            assert stopped.go_on().decode() == f"unix://{shim.socket_path}"
        await shim.run("c2")


async def test_what_a_shim_has_left_that_was_killed_before_anybody_came_is_swept(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "true") as shim:
        for name in ("killed", "alive"):
            shim.bundle(name, "true", rootfs=f"{shim.directory}/c1/rootfs")
        paths = {n: shim.start_verb(n).removeprefix("unix://") for n in ("killed", "alive")}
        pids = {}
        for name, path in paths.items():
            async with connect(path) as client:
                pids[name] = (await call(client, "Connect", timeout=20, id=name)).shim_pid
        os.kill(pids["killed"], signal.SIGKILL)
        for name in paths:
            # As containerd does without an address.
            shutil.rmtree(f"{shim.directory}/{name}")
        foreign = os.path.join(os.path.dirname(shim.socket_path), f"foreign-{os.getpid()}")
        # From a start that was killed with the lock, and from a pod without other files.
        sockets, name = os.path.split(paths["killed"])
        lock = os.path.join(sockets, f"{name[::-1]}~")
        os.mknod(lock)
        os.utime(lock, (0, 0))
        try:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(foreign)
            await shim.run("c1")
            await shim.reap("c1")
            await gone(shim, "c1")
            assert glob.glob(f"{paths['killed']}*") == []
            assert not os.path.lexists(lock)
            async with connect(paths["alive"]) as client:
                await call(client, "Shutdown", timeout=20, id="alive")
            assert os.path.exists(foreign)
        finally:
            for path in (foreign, lock, *paths.values()):
                for each in (path, *glob.glob(f"{path}.*")):
                    with suppress(FileNotFoundError):
                        os.unlink(each)


async def test_sigterm_ends_a_shim_although_a_runtime_hangs(start_shim: StartShim) -> None:
    async with start_shim("c1", "true") as shim:
        hanging = shim.options(before='[ "$verb" = create ] && kill -STOP $$')

        async def create() -> None:
            with suppress(ConnectionClosed, RemoteError):
                await shim.create("c1", options=hanging)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(create)
            await anyio.sleep(0.2)
            os.kill(shim.pid, signal.SIGTERM)
            await shim.until_gone(seconds=4)
            tasks.cancel_scope.cancel()
        await to_thread.run_sync(shim.delete_verb, "c1")


# The launcher, with timeouts of fractions of seconds instead of minutes.
_IMPATIENT: Final = f"""\
#!{INTERPRETER} -IS
import sys

sys.path += [{REPOSITORY!r}, {SITE!r}]
from shim.__main__ import main
from shim.pod import service

service.UNUSED, service.UNHEARD = 0.1, 1.0
main()
"""


async def test_a_shim_without_tasks_ends_though_nobody_takes_its_events_and_says_so(
    tmp_path: Path,
) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(_IMPATIENT)
    launcher.chmod(0o755)
    async with shim_by_hand(str(launcher), "c1", "sleep", "1000") as shim:
        await shim.run("c1")
        await shim.events.until("TaskStart")
        shim.events.stop()
        await anyio.sleep(1.5)  # the shim stays while it has a task
        assert await shim.end("c1") == 128 + signal.SIGKILL
        log = os.open(f"{shim.directory}/c1/log", os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(log, "rb") as reader:
            await shim.until_gone()
            said = reader.read().decode()
        assert "events were not delivered before the end" in said
        assert "count=2" in said
        assert shim.leftovers() == []
