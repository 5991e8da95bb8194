"""A started program gets its own descriptors, environment and signals, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from shim import children
from shim.children import Reaper, run, spawn
from shim.errors import ProgramNotFound, ProgramTimeout
from shim.programs import fixed_environment

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _only_our_own_descriptors() -> None:
    """Keep the test runner's own descriptors from children; ``start`` closes them in a shim."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)


async def test_a_child_has_exactly_the_descriptors_meant_for_it(reaper: Reaper) -> None:
    leaks = [os.open("/", os.O_RDONLY | os.O_DIRECTORY) for _ in range(50)]
    try:
        script = "import os, json; print(json.dumps(sorted(map(int, os.listdir('/proc/self/fd')))))"
        done = await run(reaper, [sys.executable, "-ISc", script])
    finally:
        for fd in leaks:
            os.close(fd)
    # 0, 1, 2, and the descriptor of listdir.
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


async def test_dev_null_is_open_for_reading_or_for_writing_as_from_go(reaper: Reaper) -> None:
    # A container's exec inherits them from runc: to write to its stdin is an error, and no loss.
    script = "(echo x >&0) 2>/dev/null || echo input; (read x <&2) 2>/dev/stdout || echo output"
    flags = "for n in 0 2; do grep flags /proc/$$/fdinfo/$n; done"
    done = await run(reaper, ["sh", "-c", f"{script}; {flags}"])
    assert done.output.split() == [
        b"input",
        b"output",
        b"flags:",
        b"0100000",
        b"flags:",
        b"0100001",
    ]


@pytest.fixture
def files_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Give this process a soft limit of open files that is below its hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(children, "_files_of_programs", [])
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    yield before[1] - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_the_shim_may_open_more_files_than_its_programs(
    reaper: Reaper, files_limit: int
) -> None:
    children.raise_file_limit()
    done = await run(reaper, ["sh", "-c", "ulimit -Sn; ulimit -Hn"])
    assert done.output.split() == [b"%d" % files_limit, b"%d" % (files_limit + 1)]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files_limit + 1, files_limit + 1)


async def test_a_limit_of_files_that_was_lowered_since_stays(
    reaper: Reaper, files_limit: int
) -> None:
    children.raise_file_limit()
    lower = (files_limit - 1, files_limit + 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, lower)
    done = await run(reaper, ["sh", "-c", "ulimit -Sn"])
    assert done.output.split() == [b"%d" % lower[0]]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == lower


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
        while reaper._children:  # noqa: ASYNC110 - the kernel notifies only the reaper
            await anyio.sleep(0.01)


# The test runner itself has descriptors 3 to 5.
_WITH_FURTHER = """
import json, os, sys
sys.path += sys.argv[1:]
from shim import loop
from shim.children import Reaper
from shim.children import reserve_numbers, spawn

listener = reserve_numbers(os.open("/dev/zero", os.O_RDONLY))
assert listener > 5
assert os.readlink(f"/proc/self/fd/{listener}") == "/dev/zero"

async def main():
    pipes = [os.pipe() for _ in range(3)]
    leak = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    out, theirs = os.pipe()
    child = spawn(
        Reaper(),
        ["called", "-c", "echo $0 $NAME $PATH; readlink /proc/$$/fd/3 /proc/$$/fd/4 /proc/$$/fd/5;"
         " ls /proc/$$/fd; cat <&4 >&5"],
        program="/bin/sh",
        environment={"NAME": "value"},
        fds={1: theirs, 3: pipes[0][1], 4: pipes[1][0], 5: pipes[2][1]},
    )
    os.close(theirs)
    wanted = [os.readlink(f"/proc/self/fd/{fd}") for fd in (pipes[0][1], pipes[1][0], pipes[2][1])]
    os.write(pipes[1][1], b"through")
    os.close(pipes[1][1])
    assert os.waitpid(child.pid, 0)[1] == 0
    lines = os.read(out, 4096).decode().splitlines()
    assert lines[0] == "called value " + os.environ["PATH"], lines
    assert lines[1:4] == wanted, (lines, wanted)
    assert lines[4:] == ["0", "1", "2", "3", "4", "5"], lines
    assert os.read(pipes[2][0], 100) == b"through"
    for number in (3, 4, 5):
        assert os.path.samestat(os.fstat(number), os.fstat(0))
        assert not os.get_inheritable(number)

loop.run(main)
"""


def test_further_descriptors_arrive_under_their_numbers_and_no_others() -> None:
    argv = [sys.executable, "-c", _WITH_FURTHER, *sys.path]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_numbers_that_are_not_reserved_are_not_given(reaper: Reaper) -> None:
    with pytest.raises(AssertionError, match="reserved"):
        spawn(reaper, ["true"], fds={3: 0})
