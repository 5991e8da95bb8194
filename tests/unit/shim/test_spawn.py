"""What a started program has: its descriptors, its environment, its signals, and no more."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import anyio
import pytest

from shim.errors import ProgramNotFound, ProgramTimeout
from shim.programs import fixed_environment
from shim.reaper import Reaper
from shim.spawn import run, spawn

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _only_our_own_descriptors() -> None:
    """What the test runner was started with is not for children; ``start`` closes it too."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)


@pytest.fixture
async def reaper() -> AsyncIterator[Reaper]:
    reaper = Reaper()

    async def reap(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGCHLD) as signals:
            task_status.started()
            async for _ in signals:
                reaper.reap()

    async with anyio.create_task_group() as tasks:
        await tasks.start(reap)
        yield reaper
        tasks.cancel_scope.cancel()


async def test_a_child_has_exactly_the_descriptors_meant_for_it(reaper: Reaper) -> None:
    leaks = [os.open("/", os.O_RDONLY | os.O_DIRECTORY) for _ in range(50)]
    try:
        script = "import os, json; print(json.dumps(sorted(map(int, os.listdir('/proc/self/fd')))))"
        done = await run(reaper, [sys.executable, "-ISc", script])
    finally:
        for fd in leaks:
            os.close(fd)
    # 0, 1, 2, and the one by which listdir reads.
    assert json.loads(done.output) == [0, 1, 2, 3]


async def test_descriptors_arrive_under_their_numbers(reaper: Reaper, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("from stdin")
    with (
        (tmp_path / "in").open("rb") as stdin,
        (tmp_path / "out").open("wb") as stdout,
        (tmp_path / "err").open("wb") as stderr,
    ):
        fds = {0: stdin.fileno(), 1: stdout.fileno(), 2: stderr.fileno()}
        child = spawn(reaper, ["sh", "-c", "cat; echo to stderr >&2"], fds=fds)
        assert (await child.wait()).status == 0
    assert (tmp_path / "out").read_text() == "from stdin"
    assert (tmp_path / "err").read_text() == "to stderr\n"


async def test_what_is_not_named_is_dev_null(reaper: Reaper) -> None:
    done = await run(reaper, ["sh", "-c", "readlink /proc/$$/fd/0 /proc/$$/fd/2"])
    assert done.output == b"/dev/null\n/dev/null\n"


async def test_the_environment_is_fixed(reaper: Reaper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/image/evil.so")
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "all")
    done = await run(reaper, ["env", "-0"])
    got = dict(line.split("=", 1) for line in done.output.decode().split("\0") if line)
    assert got == fixed_environment()
    assert set(got) <= {"PATH", "LANG", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"}


async def test_what_one_program_is_given_besides_is_given_to_it_alone(
    reaper: Reaper, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb") as out:
        more = {"PATH": "/first:/usr/bin:/bin", "CRIU_CONFIG_FILE": "/w"}
        child = spawn(reaper, ["env"], fds={1: out.fileno()}, environment=more)
        assert (await child.wait()).status == 0
    got = dict(line.split("=", 1) for line in (tmp_path / "out").read_text().splitlines())
    assert got == {**fixed_environment(), **more}
    assert "CRIU_CONFIG_FILE" not in (await run(reaper, ["env"])).output.decode()


def _mask(status: str, name: str) -> int:
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith(name))


async def test_no_signal_is_ignored_or_blocked_in_a_child(reaper: Reaper) -> None:
    own = await anyio.Path("/proc/self/status").read_text()
    child = (await run(reaper, ["cat", "/proc/self/status"])).output.decode()
    python_ignores = (1 << signal.SIGPIPE - 1) | (1 << signal.SIGXFSZ - 1)
    assert _mask(child, "SigIgn") == _mask(own, "SigIgn") & ~python_ignores
    assert _mask(child, "SigBlk") == 0


async def test_output_is_read_to_its_end_and_bounded(reaper: Reaper) -> None:
    done = await run(reaper, ["head", "-c", "3000000", "/dev/zero"], limit=1000)
    assert (done.exit.status, len(done.output)) == (0, 1000)


async def test_a_missing_program_is_named(reaper: Reaper) -> None:
    with pytest.raises(ProgramNotFound, match="no-such-runtime"):
        spawn(reaper, ["no-such-runtime"], fds={})


async def test_a_program_that_is_no_program_is_named(reaper: Reaper, tmp_path: Path) -> None:
    text = tmp_path / "runc"
    text.write_bytes(b"\x00not a program")
    text.chmod(0o755)
    with pytest.raises(ProgramNotFound, match="Exec format error"):
        spawn(reaper, [str(text)], fds={})


async def test_a_program_that_hangs_is_killed_and_reaped(reaper: Reaper) -> None:
    with pytest.raises(ProgramTimeout, match="sleep"):
        await run(reaper, ["sleep", "1000"], timeout=0.1)
    with anyio.fail_after(5):
        while reaper._children:  # noqa: ASYNC110 - the kernel tells nobody but the reaper
            await anyio.sleep(0.01)
