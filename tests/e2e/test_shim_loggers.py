"""Loggers of a real shim, called directly: they get all output, and nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import anyio
import pytest

from api.errors import Status
from api.ttrpc import RemoteError
from tests.harness import loggers as programs
from tests.harness.loggers import Loggers, loggers_directory
from tests.harness.runtime import is_alive
from tests.harness.shim import ShimByHand, StartShim, wait_for_file
from tests.harness.stdio import begin

pytestmark = pytest.mark.anyio

EIGHT_MEBIBYTES = "dd if=/dev/zero bs=65536 count=128 2>/dev/null; echo end"


@pytest.fixture
def loggers() -> Iterator[Loggers]:
    with loggers_directory() as loggers:
        yield loggers


# It exits by itself, before any signal.
@pytest.mark.constants({"shim.stdio.logger._OWN_END_SECONDS": 3600.0})
@pytest.mark.parametrize("scheme", ["binary", "binary-v2"])
async def test_a_logger_takes_both_outputs_whole_and_ends(
    start_shim: StartShim, loggers: Loggers, scheme: str
) -> None:
    script = programs.GOOD if scheme == "binary" else programs.SPEAKING
    async with start_shim("c1", "sh", "-c", f"{EIGHT_MEBIBYTES}; echo oops >&2") as shim:
        uri = loggers.uri(script, scheme) + "&flag&env.COLOUR=green"
        await shim.run("c1", stdout=uri, stderr=uri)
        await shim.call("Wait", id="c1")
        await shim.call("Delete", id="c1")
        assert loggers.read("c1.out") == bytes(8 << 20) + b"end\n"
        assert loggers.read("c1.err") == b"oops\n"
        assert loggers.read("c1.end") == b"ended\n"
        assert not is_alive(loggers.pid("c1"))
        program = f"{loggers.directory}/logger"
        argv = loggers.read("c1.argv").decode().splitlines()
        assert argv == [program, "out", loggers.directory, "flag", ""]
        # The shell's own descriptors start at 10.
        numbers = {int(number) for number in loggers.read("c1.fds").split()}
        assert {number for number in numbers if number < 10} == {0, 1, 2, 3, 4, 5}
        lines = loggers.read("c1.env").decode().splitlines()
        environment = dict(line.split("=", 1) for line in lines)
        del environment["PWD"]  # the shell's own
        assert set(environment) == {
            "COLOUR", "CONTAINER_ID", "CONTAINER_NAMESPACE", "LANG", "PATH",
        }  # fmt: skip
        assert environment["COLOUR"] == "green"
        # The logger's exit is not reported for any task.
        await shim.events.until("TaskDelete")
        assert shim.events.of("c1") == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]


async def test_an_exec_has_a_logger_of_its_own(shim: ShimByHand, loggers: Loggers) -> None:
    await shim.run("c1")
    before = await shim.files_at_rest()
    uri = loggers.uri(programs.SLOW)
    await shim.start_exec("c1", "e1", "sh", "-c", EIGHT_MEBIBYTES, stdout=uri, stderr=uri)
    await shim.reap("c1", "e1")
    assert loggers.read("e1.out") == bytes(8 << 20) + b"end\n"
    assert not is_alive(loggers.pid("e1"))
    assert await shim.files_at_rest(before) == before


@pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
async def test_a_terminal_can_have_a_logger(
    shim: ShimByHand, loggers: Loggers, exec_id: str
) -> None:
    uri = loggers.uri(programs.GOOD)
    script = "seq 100000 254000; echo end"
    await begin(shim, exec_id, "sh", "-c", script, stdout=uri, terminal=True)
    await shim.reap("c1", exec_id)
    lines = loggers.read(f"{exec_id or 'c1'}.out").split(b"\r\n")
    assert lines == [*(b"%d" % n for n in range(100000, 254001)), b"end", b""]
    assert not is_alive(loggers.pid(exec_id or "c1"))


async def test_a_logger_that_waits_to_be_told_is_told(
    start_shim: StartShim, loggers: Loggers
) -> None:
    async with start_shim("c1", "echo", "hello") as shim:
        uri = loggers.uri(programs.WAITING)
        await shim.run("c1", stdout=uri, stderr=uri)
        await shim.reap("c1")
        assert loggers.read("c1.out") == b"hello\n"
        assert loggers.read("c1.end") == b"told\n"
        assert not is_alive(loggers.pid("c1"))


@pytest.mark.constants(
    {"shim.stdio.logger._OWN_END_SECONDS": 0.2, "shim.stdio.logger._TERM_SECONDS": 0.5}
)
async def test_a_logger_that_does_not_end_when_told_is_killed(
    start_shim: StartShim, loggers: Loggers
) -> None:
    async with start_shim("c1", "echo", "hello") as shim:
        uri = loggers.uri(programs.WAITING.replace("trap '", "trap '' TERM; : '"))
        await shim.run("c1", stdout=uri, stderr=uri)
        await shim.call("Wait", id="c1")
        await shim.call("Delete", id="c1")
        assert not is_alive(loggers.pid("c1"))


@pytest.mark.parametrize(
    ("scheme", "script", "code", "exec_id"),
    [
        ("binary", programs.DYING, "E1405", ""),
        ("binary", programs.DYING, "E1405", "e1"),
        ("binary-v2", programs.DYING, "E1405", ""),
        ("binary-v2", programs.GOOD, "E1405", "e1"),
        ("binary", programs.SILENT, "E1406", ""),
        ("binary", "\0no program", "E1201", ""),
        ("binary", "#!/no/such/interpreter\n", "E1201", "e1"),
    ],
)
async def test_a_logger_that_is_not_ready_is_one_error_and_leaves_nothing(
    shim: ShimByHand, loggers: Loggers, scheme: str, script: str, code: str, exec_id: str
) -> None:
    uri = loggers.uri(script, scheme)
    if exec_id:
        await shim.run("c1")
        await shim.exec("c1", "e1", "echo", "hello", stdout=uri, stderr=uri)
    before = await shim.files_at_rest()
    if exec_id:
        begin = shim.call("Start", id="c1", exec_id="e1")
    else:
        begin = shim.create("c1", stdout=uri, stderr=uri)
    with pytest.raises(RemoteError, match=code) as caught:
        await begin
    assert "\n" not in str(caught.value)
    assert not is_alive(loggers.pid(exec_id or "c1"))
    assert await shim.files_at_rest(before) == before
    if exec_id:
        await shim.end("c1")
    with anyio.fail_after(20):
        while shim.children():  # noqa: ASYNC110 - seen from outside
            await anyio.sleep(0.01)


async def test_only_loggers_that_the_operator_allows_are_started(
    start_shim: StartShim, loggers: Loggers
) -> None:
    config = f"{loggers.directory}/config.toml"
    uri = loggers.uri(programs.GOOD)

    def allow(content: str) -> None:
        with open(config, "w", encoding="utf-8") as file:
            file.write(content)

    allow("")
    environment = {"NVSHIM_CONFIG": config}
    async with start_shim("c1", "echo", "hello", environment=environment) as shim:

        async def refused(uri: str) -> str:
            with pytest.raises(RemoteError) as caught:
                await shim.create("c1", stdout=uri, stderr=uri)
            assert loggers.pid("c1") == 0
            assert caught.value.status == Status.PERMISSION_DENIED
            return str(caught.value)

        os.chmod(f"{loggers.directory}/logger", 0o775)
        assert "written by others" in await refused(uri)
        os.chmod(f"{loggers.directory}/logger", 0o755)
        allow('[stdio]\nloggers = ["/usr/bin/other"]\n')
        assert "list of loggers" in await refused(uri)
        allow(f'[stdio]\nloggers = ["{loggers.directory}/logger"]\n')
        assert "LD_PRELOAD" in await refused(f"{uri}&env.LD_PRELOAD=/tmp/evil.so")
        allow("[stdio]\nloggers = true\n")
        with pytest.raises(RemoteError, match="E0504"):
            await shim.create("c1", stdout=uri, stderr=uri)
        allow(f'[stdio]\nloggers = ["{loggers.directory}/logger"]\n')
        await shim.run("c1", stdout=uri, stderr=uri)
        await shim.reap("c1")
        assert loggers.read("c1.out") == b"hello\n"


@pytest.mark.constants(
    {
        "shim.stdio.streams.DRAIN_SECONDS": 3600.0,
        "shim.stdio.logger._OWN_END_SECONDS": 3600.0,
        "shim.stdio.logger._TERM_SECONDS": 3600.0,
    }
)
async def test_a_container_outlives_its_logger(start_shim: StartShim, loggers: Loggers) -> None:
    script = "echo first; sleep 0.3; dd if=/dev/zero bs=65536 count=64 2>/dev/null; exit 5"
    async with start_shim("c1", "sh", "-c", script) as shim:
        uri = loggers.uri(programs.SHORT_LIVED)
        await shim.run("c1", stdout=uri, stderr=uri)
        # SIGPIPE has not killed it, and it is not blocked.
        assert (await shim.call("Wait", id="c1", timeout=10)).exit_status == 5
        await shim.call("Delete", id="c1")
        assert loggers.read("c1.out") == b"first\n"
        assert any("output is lost" in line for line in await shim.log_lines("c1"))


async def test_a_logger_is_ended_if_its_container_cannot_be_created(
    start_shim: StartShim, loggers: Loggers
) -> None:
    async with start_shim("c1", "no-such-program") as shim:
        uri = loggers.uri(programs.WAITING)
        before = await shim.files_at_rest()
        with pytest.raises(RemoteError, match="no-such-program"):
            await shim.run("c1", stdout=uri, stderr=uri)
        with anyio.fail_after(60):
            while is_alive(loggers.pid("c1")) or shim.open_files() != before:  # noqa: ASYNC110 - seen from outside
                await anyio.sleep(0.01)


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
async def test_a_logger_beside_a_stdin_that_is_missing_is_ended_and_the_pod_lives_on(
    shim: ShimByHand, loggers: Loggers, *, terminal: bool
) -> None:
    await shim.run("c1")
    before = await shim.files_at_rest()
    uri = loggers.uri(programs.WAITING)
    places = {"stdin": "/no/such/fifo", "stdout": uri, "stderr": "" if terminal else uri}
    await shim.exec("c1", "e1", "true", terminal=terminal, **places)
    with pytest.raises(RemoteError, match="/no/such/fifo"):
        await shim.call("Start", id="c1", exec_id="e1")
    with anyio.fail_after(60):
        while is_alive(loggers.pid("e1")) or shim.open_files() != before:  # noqa: ASYNC110 - seen from outside
            await anyio.sleep(0.01)
    await shim.call("Delete", id="c1", exec_id="e1")


@pytest.mark.parametrize("script", [programs.GOOD, programs.WAITING], ids=["good", "waiting"])
async def test_a_logger_ends_with_the_container_of_a_shim_that_was_killed(
    start_shim: StartShim, loggers: Loggers, script: str
) -> None:
    async with start_shim("c1", "sh", "-c", "echo hello; echo yes > /said; sleep 1000") as shim:
        uri = loggers.uri(script)
        await shim.run("c1", stdout=uri, stderr=uri)
        wait_for_file(f"{shim.directory}/c1/rootfs/said")
        os.kill(shim.pid, signal.SIGKILL)
        await shim.until_gone()
        assert shim.delete_verb("c1") < 3
        assert not is_alive(loggers.pid("c1"))
        assert loggers.read("c1.out") == b"hello\n"


async def test_nothing_of_a_logger_stays_in_the_bundle(shim: ShimByHand, loggers: Loggers) -> None:
    await shim.run("c1")
    bundle = f"{shim.directory}/c1"
    before = sorted(os.listdir(bundle))
    for number, script in enumerate((programs.GOOD, programs.DYING)):
        uri = loggers.uri(script)
        await shim.exec("c1", f"e{number}", "sleep", "1000", stdout=uri, stderr=uri)
        with suppress(RemoteError):
            await shim.call("Start", id="c1", exec_id=f"e{number}")
            assert len(os.listdir(bundle)) == len(before) + 1
            await shim.call("Kill", id="c1", exec_id=f"e{number}", signal=9)
            await shim.call("Wait", id="c1", exec_id=f"e{number}")
        await shim.call("Delete", id="c1", exec_id=f"e{number}")
        assert sorted(os.listdir(bundle)) == before
