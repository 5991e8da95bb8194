"""Stdio of a real shim, called directly: all bytes arrive, and streams close at the right time."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from api import typeurl
from api.proto import runc_options_pb2
from integration.timeouts import PATIENCE
from tests.harness.low_level import crun_for_this_host
from tests.harness.shim import ShimByHand, content_of, shell
from tests.harness.stdio import begin, reading
from tests.harness.waiting import eventually
from tools.parts import Parts

pytestmark = pytest.mark.anyio

# The id of an exec; init's is empty.
EITHER: Final = pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
TERMINAL: Final = pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
MEBIBYTES: Final = ("sh", "-c", "dd if=/dev/zero bs=65536 count=128 2>/dev/null; echo end")
LINES: Final = ("sh", "-c", "seq 100000 254000; echo end")

# Whoever waits for one of these waits for ever.
_NOTHING_TO_WAIT_FOR: Final = pytest.mark.constants(
    {
        "shim.stdio.streams.DRAIN_SECONDS": 3600.0,
        "shim.stdio.streams._READER_SECONDS": 3600.0,
        "shim.stdio.streams._TAKING_SECONDS": 3600.0,
    }
)


def _options(**fields: Any) -> AnyMessage:
    return typeurl.pack(runc_options_pb2.Options(**fields))


@pytest.mark.parametrize("kind", ["fifo", "file"])
@TERMINAL
async def test_output_written_right_before_the_end_arrives_whole(
    shim: ShimByHand, kind: str, *, terminal: bool
) -> None:
    # Each kind of process is tested once here; the tests below cover readers that come and go.
    exec_id = "e1" if terminal == (kind == "fifo") else ""
    command = LINES if terminal else MEBIBYTES
    if kind == "fifo":
        fifo = shim.fifo("out")
        with reading(fifo) as path:
            await begin(shim, exec_id, *command, stdout=fifo, terminal=terminal)
            await shim.reap("c1", exec_id)
    else:
        path = f"{shim.directory}/logs/out"
        await begin(shim, exec_id, *command, stdout=f"file://{path}", terminal=terminal)
        await shim.reap("c1", exec_id)
    lines = b"".join(b"%d\r\n" % number for number in range(100000, 254001))
    expected = lines + b"end\r\n" if terminal else bytes(8 << 20) + b"end\n"
    assert content_of(path) == expected


async def test_a_container_cannot_reach_the_log_that_it_writes_to(shim: ShimByHand) -> None:
    script = """
        echo kept
        for fd in 1 2; do
          : > /proc/self/fd/$fd; truncate -s 0 /proc/self/fd/$fd; chmod 777 /proc/self/fd/$fd
          chown 1000 /proc/self/fd/$fd; readlink /proc/self/fd/$fd
        done
        echo kept too
    """
    path = f"{shim.directory}/log"
    uri = f"file://{path}"
    await begin(shim, "", "sh", "-c", script, stdout=uri, stderr=uri)
    await shim.reap("c1")
    lines = [line for line in content_of(path).split(b"\n") if b"truncate" not in line]
    assert lines[0] == b"kept"
    assert lines[-2:] == [b"kept too", b""]
    assert sum(line.startswith(b"pipe:[") for line in lines) == 2
    found = os.stat(path)
    assert (found.st_mode & 0o777, found.st_uid) == (0o644, 0)


@pytest.mark.parametrize("read", [False, True], ids=["nobody reads", "somebody reads fast"])
async def test_endless_terminal_output_does_not_hold_up_requests(
    shim: ShimByHand, *, read: bool
) -> None:
    stdout = shim.fifo("out")
    reader = shell(f"cat {stdout} >/dev/null") if read else None
    try:
        await begin(shim, "", "yes", stdout=stdout, terminal=True)
        await anyio.sleep(0.2)
        for _ in range(20):
            await shim.call("State", id="c1")
        await shim.call("Kill", id="c1", signal=9)
        await shim.call("Wait", id="c1")
        if not read:
            reader = shell(f"cat {stdout} >/dev/null")
        await shim.call("Delete", id="c1")
    finally:
        if reader is not None:
            reader.wait(10)


@_NOTHING_TO_WAIT_FOR
@TERMINAL
async def test_a_container_that_was_never_started_is_deleted_at_once(
    shim: ShimByHand, *, terminal: bool
) -> None:
    await shim.create("c1", stdout=shim.fifo("out"), terminal=terminal)
    await shim.call("Delete", id="c1")


@EITHER
async def test_input_that_is_closed_before_the_start_arrives_and_ends(
    shim: ShimByHand, exec_id: str
) -> None:
    stdio = {"stdin": shim.fifo("in"), "stdout": shim.fifo("out")}
    if exec_id:
        await shim.run("c1")
        await shim.exec("c1", exec_id, "cat", **stdio)
    else:
        spec = shim.spec("c1")
        spec["process"]["args"] = ["cat"]
        shim.write_spec("c1", spec)
        await shim.create("c1", **stdio)
    writer = os.open(stdio["stdin"], os.O_RDWR)
    os.write(writer, b"early\n")
    await shim.call("CloseIO", id="c1", exec_id=exec_id, stdin=True)
    with reading(stdio["stdout"]) as copy:
        await shim.call("Start", id="c1", exec_id=exec_id)
        os.close(writer)
        assert (await shim.call("Wait", id="c1", exec_id=exec_id, timeout=5)).exit_status == 0
        await shim.call("Delete", id="c1", exec_id=exec_id)
    assert content_of(copy) == b"early\n"


async def test_the_size_of_an_execs_terminal_may_be_told_before_its_start(
    shim: ShimByHand,
) -> None:
    await shim.run("c1")
    stdout = shim.fifo("out")
    command = ("sh", "-c", "sleep 0.3; stty size")
    await shim.exec("c1", "e1", *command, stdout=stdout, terminal=True)
    await shim.call("ResizePty", id="c1", exec_id="e1", width=132, height=43)
    with reading(stdout) as copy:
        await shim.call("Start", id="c1", exec_id="e1")
        await shim.reap("c1", "e1")
    assert content_of(copy) == b"43 132\r\n"


async def test_whether_an_exec_has_a_terminal_is_the_requests_to_say(shim: ShimByHand) -> None:
    script = "if test -t 1; then echo terminal; else echo pipe; fi"
    process = {"args": ["sh", "-c", script], "cwd": "/", "env": ["PATH=/bin"], "user": {}}
    told_by_spec: tuple[dict[str, Any], ...] = ({}, {"terminal": False}, {"terminal": True})
    await shim.run("c1")
    for number, (told, terminal) in enumerate(itertools.product(told_by_spec, (False, True))):
        spec = typeurl.pack_json(process | told, typeurl.PROCESS)
        stdout = shim.fifo(f"out{number}")
        same: dict[str, Any] = {"id": "c1", "exec_id": "e1"}
        await shim.call("Exec", **same, spec=spec, stdout=stdout, terminal=terminal)
        with reading(stdout) as copy:
            await shim.call("Start", **same)
            assert await shim.reap("c1", "e1") == 0
        expected = b"terminal" if terminal else b"pipe"
        assert content_of(copy).split() == [expected], told


async def test_twenty_mebibytes_go_through_an_exec(shim: ShimByHand) -> None:
    stdin, stdout = shim.fifo("in"), shim.fifo("out")
    size = 20 << 20
    feed = shell(f"head -c {size} /dev/zero > {stdin}")
    with reading(stdout) as copy:
        await begin(shim, "e1", "cat", stdin=stdin, stdout=stdout)
        await anyio.to_thread.run_sync(feed.wait)
        await shim.call("CloseIO", id="c1", exec_id="e1", stdin=True)
        assert await shim.reap("c1", "e1") == 0
    assert os.path.getsize(copy) == size


@_NOTHING_TO_WAIT_FOR
async def test_a_daemon_that_an_exec_leaves_does_not_hold_its_client(shim: ShimByHand) -> None:
    await shim.run("c1")
    before = await shim.files_at_rest()
    stdout = shim.fifo("out")
    with reading(stdout) as copy:
        script = "sleep 999 & seq 100000"
        await shim.start_exec("c1", "e1", "sh", "-c", script, stdout=stdout)
        await shim.call("Wait", id="c1", exec_id="e1")
        await shim.call("Delete", id="c1", exec_id="e1")
    # The client has received all output, and its end.
    assert content_of(copy).decode().split() == [str(n) for n in range(1, 100001)]
    assert await shim.files_at_rest(before) == before
    assert await shim.status("c1") == "RUNNING"


@EITHER
@TERMINAL
async def test_readers_come_and_go_and_no_byte_is_lost(
    shim: ShimByHand, exec_id: str, *, terminal: bool
) -> None:
    stdout = shim.fifo("out")
    await begin(shim, exec_id, "seq", "100000", "299999", stdout=stdout, terminal=terminal)
    data = b""
    for _ in range(10):
        # The fifo is full and has no reader: the writer waits, and does not fail or exit.
        await anyio.sleep(0.05)
        assert await shim.status("c1", exec_id) == "RUNNING"
        reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
        with anyio.fail_after(60 * PATIENCE):
            await anyio.wait_readable(reader)
        data += os.read(reader, 40_000)
        os.close(reader)
    with reading(stdout) as copy:
        assert await shim.reap("c1", exec_id) == 0
    data += content_of(copy)
    assert data.split() == [b"%d" % number for number in range(100_000, 300_000)]


@EITHER
@TERMINAL
async def test_only_closing_the_input_ends_it_and_what_was_typed_comes_first(
    shim: ShimByHand, exec_id: str, *, terminal: bool
) -> None:
    script = "stty -echo 2>/dev/null; echo ready; while read -r x; do echo got $x; done; echo end"
    stdin, stdout = shim.fifo("in"), shim.fifo("out")
    with reading(stdout) as copy:
        uris: dict[str, Any] = {"stdin": stdin, "stdout": stdout, "terminal": terminal}
        await begin(shim, exec_id, "sh", "-c", script, **uris)
        for number in range(3):
            with anyio.fail_after(60):
                while b"ready" not in content_of(copy):  # noqa: ASYNC110 - seen from outside
                    await anyio.sleep(0.01)
            shell(f"printf 'line {number}\\n' > {stdin}").wait()
            await anyio.sleep(0.1)
            assert await shim.status("c1", exec_id) == "RUNNING"
        client = os.open(stdin, os.O_WRONLY)
        os.write(client, b"".join(b"more %d\n" % n for n in range(1000)))
        await shim.call("CloseIO", id="c1", exec_id=exec_id, stdin=True)
        os.close(client)
        assert await shim.reap("c1", exec_id) == 0
    lines = content_of(copy).replace(b"\r", b"").splitlines()
    got = [b"got line %d" % n for n in range(3)] + [b"got more %d" % n for n in range(1000)]
    assert lines == [b"ready", *got, b"end"]


def _in_a_user_namespace(shim: ShimByHand) -> None:
    """Run c1 in a user namespace, whose root owns its rootfs."""
    spec = shim.spec("c1")
    mapping = [{"containerID": 0, "hostID": 200_000, "size": 65_536}]
    spec["linux"]["namespaces"].append({"type": "user"})
    spec["linux"].update(uidMappings=mapping, gidMappings=mapping)
    shim.write_spec("c1", spec)
    bundle = f"{shim.directory}/c1"
    for directory in (shim.directory, bundle):
        os.chmod(directory, 0o711)
    shell(f"chown --recursive 200000:200000 {bundle}/rootfs").wait()


@EITHER
@pytest.mark.parametrize("kind", ["fifo", "file"])
async def test_output_in_a_user_namespace_can_be_opened_again(
    shim: ShimByHand, exec_id: str, kind: str
) -> None:
    """Programs that log to /dev/stderr do that."""
    script = "cat /proc/self/uid_map; echo out > /dev/stdout; echo err > /dev/stderr"
    _in_a_user_namespace(shim)
    path = shim.fifo("out") if kind == "fifo" else f"{shim.directory}/log"
    uri = path if kind == "fifo" else f"file://{path}"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "fifo" else -1
    # A client that maps users sets the owner of the pipes.
    owner = _options(io_uid=200_000, io_gid=200_000)
    await begin(shim, exec_id, "sh", "-c", script, options=owner, stdout=uri, stderr=uri)
    assert await shim.reap("c1", exec_id) == 0
    data = os.read(reader, 4096) if kind == "fifo" else content_of(path)
    assert data.split() == [b"0", b"200000", b"65536", b"out", b"err"]
    if kind == "fifo":
        os.close(reader)


def _lines(path: str) -> list[bytes]:
    """Return the complete lines of a growing file; none before it exists."""
    return content_of(path).split(b"\n")[:-1] if os.path.exists(path) else []


async def test_the_hosts_null_device_is_nobody_elses_in_a_user_namespace(
    shim: ShimByHand, parts: Parts, tmp_path: Path
) -> None:
    """crun before 1.28 gives its stdin, stdout and stderr to the container's root."""
    host = os.stat(os.devnull)
    crun = crun_for_this_host(str(tmp_path), parts.crun)
    script = "echo discarded; cat; stat -L -c %t:%T /proc/self/fd/0 /proc/self/fd/2 > /seen"
    _in_a_user_namespace(shim)
    seen = f"{shim.directory}/c1/rootfs/seen"
    try:
        command = ("sh", "-c", f"{script}; sleep 1000")
        await begin(shim, "", *command, options=_options(binary_name=crun))
        eventually(lambda: len(_lines(seen)) == 2, "both were looked at")
        await shim.start_exec("c1", "e1", "true")
        assert await shim.reap("c1", "e1") == 0
        now = os.stat(os.devnull)
    finally:
        os.chown(os.devnull, host.st_uid, host.st_gid)
    assert (now.st_uid, now.st_gid, now.st_mode) == (host.st_uid, host.st_gid, host.st_mode)
    assert _lines(seen) == [b"1:3", b"1:3"]
