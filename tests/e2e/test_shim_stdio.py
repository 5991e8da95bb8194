"""Stdio of a real shim, called by hand: what is written arrives, whole, and ends when it should."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from api import typeurl
from api.proto import runc_options_pb2
from integration.timeouts import PATIENCE
from tests.harness.low_level import crun_for_this_host
from tests.harness.shim import StartShim, content_of, gone, shell
from tests.harness.waiting import eventually
from tests.tools.parts import Parts

pytestmark = pytest.mark.anyio


@contextmanager
def _reading(fifo: str, name: str) -> Iterator[str]:
    """Somebody else reads a fifo to its end, into a file whose path this is."""
    path = f"{fifo}.{name}"
    with open(path, "wb") as file, subprocess.Popen(["cat", fifo], stdout=file) as reader:
        try:
            yield path
            reader.wait(10)
        finally:
            reader.kill()


@pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
@pytest.mark.parametrize("kind", ["fifo", "file"])
async def test_output_written_right_before_the_end_arrives_whole(
    start_shim: StartShim, exec_id: str, kind: str
) -> None:
    script = "dd if=/dev/zero bs=65536 count=128 2>/dev/null; echo end"
    command = ("sleep", "1000") if exec_id else ("sh", "-c", script)
    async with start_shim("c1", *command) as shim:
        path = shim.fifo("out") if kind == "fifo" else f"{shim.directory}/logs/out"
        uri = path if kind == "fifo" else f"file://{path}"

        async def live() -> None:
            if exec_id:
                await shim.run("c1")
                await shim.exec("c1", "e1", "sh", "-c", script, stdout=uri)
                await shim.call("Start", id="c1", exec_id="e1")
            else:
                await shim.run("c1", stdout=uri)
            await shim.call("Wait", id="c1", exec_id=exec_id)
            await shim.call("Delete", id="c1", exec_id=exec_id)

        if kind == "fifo":
            with _reading(path, "copy") as path:
                await live()
        else:
            await live()
        assert content_of(path) == bytes(8 << 20) + b"end\n"
        if exec_id:
            await shim.end("c1")
        await gone(shim, "c1")


async def test_a_container_cannot_reach_the_log_that_it_writes_to(start_shim: StartShim) -> None:
    script = """
        echo kept
        for fd in 1 2; do
          : > /proc/self/fd/$fd; truncate -s 0 /proc/self/fd/$fd; chmod 777 /proc/self/fd/$fd
          chown 1000 /proc/self/fd/$fd; readlink /proc/self/fd/$fd
        done
        echo kept too
    """
    async with start_shim("c1", "sh", "-c", script) as shim:
        path = f"{shim.directory}/log"
        await shim.run("c1", stdout=f"file://{path}", stderr=f"file://{path}")
        await shim.call("Wait", id="c1")
        await shim.call("Delete", id="c1")
        lines = [line for line in content_of(path).split(b"\n") if b"truncate" not in line]
        assert lines[0] == b"kept"
        assert lines[-2:] == [b"kept too", b""]
        assert sum(line.startswith(b"pipe:[") for line in lines) == 2
        found = os.stat(path)
        assert (found.st_mode & 0o777, found.st_uid) == (0o644, 0)
        await gone(shim, "c1")


async def test_a_terminal_can_write_to_a_file(start_shim: StartShim) -> None:
    async with start_shim("c1", "sh", "-c", "seq 100000 254000") as shim:
        path = f"{shim.directory}/log"
        await shim.run("c1", stdout=f"file://{path}", terminal=True)
        await shim.call("Wait", id="c1")
        await shim.call("Delete", id="c1")
        assert content_of(path) == b"".join(b"%d\r\n" % n for n in range(100000, 254001))
        await gone(shim, "c1")


async def test_terminal_output_written_right_before_the_end_arrives_whole(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sh", "-c", "seq 100000 254000; echo end") as shim:
        stdout = shim.fifo("out")
        with _reading(stdout, "copy") as copy:
            await shim.run("c1", stdout=stdout, terminal=True)
            await shim.call("Wait", id="c1")
            await shim.call("Delete", id="c1")
        lines = content_of(copy).split(b"\r\n")
        assert lines[-2:] == [b"end", b""]
        assert lines[:-2] == [str(number).encode() for number in range(100000, 254001)]
        await gone(shim, "c1")


@pytest.mark.parametrize("read", [False, True], ids=["nobody reads", "somebody reads fast"])
@pytest.mark.serial
async def test_endless_terminal_output_does_not_hold_up_requests(
    start_shim: StartShim, *, read: bool
) -> None:
    async with start_shim("c1", "yes") as shim:
        stdout = shim.fifo("out")
        reader = shell(f"cat {stdout} >/dev/null") if read else None
        try:
            await shim.run("c1", stdout=stdout, terminal=True)
            await anyio.sleep(0.2)
            for _ in range(20):
                began = time.monotonic()
                await shim.call("State", id="c1", timeout=5)
                assert time.monotonic() - began < 1
            await shim.call("Kill", id="c1", signal=9, timeout=5)
            await shim.call("Wait", id="c1", timeout=5)
            if not read:
                reader = shell(f"cat {stdout} >/dev/null")
            await shim.call("Delete", id="c1")
        finally:
            if reader is not None:
                reader.wait(10)
        await gone(shim, "c1")


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
@pytest.mark.serial
async def test_a_container_that_was_never_started_is_deleted_at_once(
    start_shim: StartShim, *, terminal: bool
) -> None:
    async with start_shim("c1", "true") as shim:
        await shim.create("c1", stdout=shim.fifo("out"), terminal=terminal)
        began = time.monotonic()
        await shim.call("Delete", id="c1")
        assert time.monotonic() - began < 3
        await gone(shim, "c1")


async def test_input_written_and_closed_before_the_start_arrives(start_shim: StartShim) -> None:
    async with start_shim("c1", "cat") as shim:
        stdin, stdout = shim.fifo("in"), shim.fifo("out")
        with _reading(stdout, "copy") as copy:
            await shim.create("c1", stdin=stdin, stdout=stdout)
            shell(f"printf early > {stdin}").wait()
            await shim.call("CloseIO", id="c1", stdin=True)
            await shim.call("Start", id="c1")
            assert (await shim.call("Wait", id="c1", timeout=5)).exit_status == 0
            await shim.call("Delete", id="c1")
        assert content_of(copy) == b"early"
        await gone(shim, "c1")


async def test_input_of_an_exec_closed_before_its_start_ends(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        stdin, stdout = shim.fifo("in"), shim.fifo("out")
        await shim.exec("c1", "e1", "cat", stdin=stdin, stdout=stdout)
        await shim.call("CloseIO", id="c1", exec_id="e1", stdin=True)
        writer = os.open(stdin, os.O_RDWR)
        os.write(writer, b"early\n")
        with _reading(stdout, "copy") as copy:
            await shim.call("Start", id="c1", exec_id="e1")
            os.close(writer)
            waited = await shim.call("Wait", id="c1", exec_id="e1", timeout=5)
            assert waited.exit_status == 0
            await shim.call("Delete", id="c1", exec_id="e1")
        assert content_of(copy) == b"early\n"
        await shim.end("c1")
        await gone(shim, "c1")


async def test_the_size_of_an_execs_terminal_may_be_told_before_its_start(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        stdout = shim.fifo("out")
        command = ("sh", "-c", "sleep 0.3; stty size")
        await shim.exec("c1", "e1", *command, stdout=stdout, terminal=True)
        await shim.call("ResizePty", id="c1", exec_id="e1", width=132, height=43)
        with _reading(stdout, "copy") as copy:
            await shim.call("Start", id="c1", exec_id="e1")
            await shim.call("Wait", id="c1", exec_id="e1")
            await shim.call("Delete", id="c1", exec_id="e1")
        assert content_of(copy) == b"43 132\r\n"
        await shim.end("c1")


async def test_whether_an_exec_has_a_terminal_is_the_requests_to_say(
    start_shim: StartShim,
) -> None:
    script = "if test -t 1; then echo terminal; else echo pipe; fi"
    process = {"args": ["sh", "-c", script], "cwd": "/", "env": ["PATH=/bin"], "user": {}}
    told_by_spec: tuple[dict[str, Any], ...] = ({}, {"terminal": False}, {"terminal": True})
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        for number, (told, terminal) in enumerate(itertools.product(told_by_spec, (False, True))):
            spec = typeurl.pack_json(process | told, typeurl.PROCESS)
            stdout = shim.fifo(f"out{number}")
            reader = shell(f"cat {stdout} > {stdout}.copy")
            same: dict[str, Any] = {"id": "c1", "exec_id": "e1"}
            await shim.call("Exec", **same, spec=spec, stdout=stdout, terminal=terminal)
            await shim.call("Start", **same)
            assert (await shim.call("Wait", **same)).exit_status == 0
            await shim.call("Delete", **same)
            assert reader.wait(10) == 0
            expected = b"terminal" if terminal else b"pipe"
            assert content_of(f"{stdout}.copy").split() == [expected], told
        await shim.end("c1")
        await gone(shim, "c1")


async def test_twenty_mebibytes_go_through_an_exec(start_shim: StartShim) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        stdin, stdout = shim.fifo("in"), shim.fifo("out")
        await shim.exec("c1", "e1", "cat", stdin=stdin, stdout=stdout)
        size = 20 << 20
        feed = shell(f"head -c {size} /dev/zero > {stdin}")
        with _reading(stdout, "copy") as copy:
            await shim.call("Start", id="c1", exec_id="e1")
            await anyio.to_thread.run_sync(feed.wait)
            await shim.call("CloseIO", id="c1", exec_id="e1", stdin=True)
            assert (await shim.call("Wait", id="c1", exec_id="e1", timeout=10)).exit_status == 0
            await shim.call("Delete", id="c1", exec_id="e1")
        assert os.path.getsize(copy) == size
        await shim.end("c1")


@pytest.mark.serial
async def test_a_daemon_that_an_exec_leaves_does_not_hold_its_client(
    start_shim: StartShim,
) -> None:
    async with start_shim("c1", "sleep", "1000") as shim:
        await shim.run("c1")
        before = await shim.files_at_rest()
        stdout = shim.fifo("out")
        await shim.exec("c1", "e1", "sh", "-c", "sleep 999 & seq 100000", stdout=stdout)
        with _reading(stdout, "copy") as copy:
            await shim.call("Start", id="c1", exec_id="e1")
            await shim.call("Wait", id="c1", exec_id="e1")
            began = time.monotonic()
            await shim.call("Delete", id="c1", exec_id="e1")
        # The client has seen the end of the output, all of which was there.
        assert time.monotonic() - began < 3
        assert content_of(copy).decode().split() == [str(n) for n in range(1, 100001)]
        assert await shim.files_at_rest(before) == before
        assert await shim.status("c1") == "RUNNING"
        await shim.end("c1")
        await gone(shim, "c1")


@pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
async def test_readers_come_and_go_and_no_byte_is_lost(
    start_shim: StartShim, exec_id: str, *, terminal: bool
) -> None:
    script = "seq 100000 299999"
    command = ("sleep", "1000") if exec_id else ("sh", "-c", script)
    async with start_shim("c1", *command) as shim:
        stdout = shim.fifo("out")
        if exec_id:
            await shim.run("c1")
            await shim.exec("c1", "e1", "sh", "-c", script, stdout=stdout, terminal=terminal)
            await shim.call("Start", id="c1", exec_id="e1")
        else:
            await shim.run("c1", stdout=stdout, terminal=terminal)
        data = b""
        for _ in range(10):
            # All that fits is written, nobody reads, and the writer waits: it neither fails
            # nor ends.
            await anyio.sleep(0.05)
            assert await shim.status("c1", exec_id) == "RUNNING"
            reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
            with anyio.fail_after(10 * PATIENCE):
                await anyio.wait_readable(reader)
            data += os.read(reader, 40_000)
            os.close(reader)
        with _reading(stdout, "copy") as copy:
            assert (await shim.call("Wait", id="c1", exec_id=exec_id, timeout=10)).exit_status == 0
            await shim.call("Delete", id="c1", exec_id=exec_id)
        data += content_of(copy)
        assert data.split() == [b"%d" % number for number in range(100_000, 300_000)]
        if exec_id:
            await shim.end("c1")
        await gone(shim, "c1")


@pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "terminal"])
async def test_only_closing_the_input_ends_it_and_what_was_typed_comes_first(
    start_shim: StartShim, exec_id: str, *, terminal: bool
) -> None:
    script = "stty -echo 2>/dev/null; echo ready; while read -r x; do echo got $x; done; echo end"
    command = ("sleep", "1000") if exec_id else ("sh", "-c", script)
    async with start_shim("c1", *command) as shim:
        uris = {"stdin": shim.fifo("in"), "stdout": shim.fifo("out"), "terminal": terminal}
        with _reading(str(uris["stdout"]), "copy") as copy:
            if exec_id:
                await shim.run("c1")
                await shim.exec("c1", "e1", "sh", "-c", script, **uris)
                await shim.call("Start", id="c1", exec_id="e1")
            else:
                await shim.run("c1", **uris)
            for number in range(3):
                with anyio.fail_after(5):
                    while b"ready" not in content_of(copy):  # noqa: ASYNC110 - seen from outside
                        await anyio.sleep(0.01)
                shell(f"printf 'line {number}\\n' > {uris['stdin']}").wait()
                await anyio.sleep(0.1)
                assert await shim.status("c1", exec_id) == "RUNNING"
            client = os.open(str(uris["stdin"]), os.O_WRONLY)
            os.write(client, b"".join(b"more %d\n" % n for n in range(1000)))
            await shim.call("CloseIO", id="c1", exec_id=exec_id, stdin=True)
            os.close(client)
            assert (await shim.call("Wait", id="c1", exec_id=exec_id, timeout=10)).exit_status == 0
            await shim.call("Delete", id="c1", exec_id=exec_id)
        lines = content_of(copy).replace(b"\r", b"").splitlines()
        got = [b"got line %d" % n for n in range(3)] + [b"got more %d" % n for n in range(1000)]
        assert lines == [b"ready", *got, b"end"]
        if exec_id:
            await shim.end("c1")
        await gone(shim, "c1")


@pytest.mark.parametrize("exec_id", ["", "e1"], ids=["init", "exec"])
@pytest.mark.parametrize("kind", ["fifo", "file"])
async def test_output_in_a_user_namespace_can_be_opened_again(
    start_shim: StartShim, exec_id: str, kind: str
) -> None:
    """As programs do that log to /dev/stderr."""
    script = "cat /proc/self/uid_map; echo out > /dev/stdout; echo err > /dev/stderr"
    command = ("sleep", "1000") if exec_id else ("sh", "-c", script)
    async with start_shim("c1", *command) as shim:
        spec = shim.spec("c1")
        mapping = [{"containerID": 0, "hostID": 200_000, "size": 65_536}]
        spec["linux"]["namespaces"].append({"type": "user"})
        spec["linux"].update(uidMappings=mapping, gidMappings=mapping)
        shim.write_spec("c1", spec)
        bundle = f"{shim.directory}/c1"
        for directory in (shim.directory, bundle):
            os.chmod(directory, 0o711)
        shell(f"chown --recursive 200000:200000 {bundle}/rootfs").wait()
        path = shim.fifo("out") if kind == "fifo" else f"{shim.directory}/log"
        uri = path if kind == "fifo" else f"file://{path}"
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "fifo" else -1
        stdio = {"stdout": uri, "stderr": uri}
        # What a client says that maps users: whom the pipes belong to.
        owner = typeurl.pack(runc_options_pb2.Options(io_uid=200_000, io_gid=200_000))
        if exec_id:
            await shim.run("c1", options=owner)
            await shim.exec("c1", "e1", "sh", "-c", script, **stdio)
            await shim.call("Start", id="c1", exec_id="e1")
        else:
            await shim.run("c1", options=owner, **stdio)
        waited = await shim.call("Wait", id="c1", exec_id=exec_id)
        await shim.call("Delete", id="c1", exec_id=exec_id)
        data = os.read(reader, 4096) if kind == "fifo" else content_of(path)
        assert data.split() == [b"0", b"200000", b"65536", b"out", b"err"]
        assert waited.exit_status == 0
        if kind == "fifo":
            os.close(reader)
        if exec_id:
            await shim.end("c1")
        await gone(shim, "c1")


def _lines(path: str) -> list[bytes]:
    """The whole lines of a file that is being written; none before it is there."""
    return content_of(path).split(b"\n")[:-1] if os.path.exists(path) else []


async def test_the_hosts_null_device_is_nobody_elses_in_a_user_namespace(
    start_shim: StartShim, parts: Parts, tmp_path: Path
) -> None:
    """crun before 1.28 gives its stdin, stdout and stderr to the container's root."""
    host = os.stat(os.devnull)
    crun = crun_for_this_host(str(tmp_path), parts.crun)
    script = "echo to nobody; cat; stat -L -c %t:%T /proc/self/fd/0 /proc/self/fd/2 > /seen"
    async with start_shim("c1", "sh", "-c", f"{script}; sleep 1000") as shim:
        spec = shim.spec("c1")
        mapping = [{"containerID": 0, "hostID": 200_000, "size": 65_536}]
        spec["linux"]["namespaces"].append({"type": "user"})
        spec["linux"].update(uidMappings=mapping, gidMappings=mapping)
        shim.write_spec("c1", spec)
        bundle = f"{shim.directory}/c1"
        seen = f"{bundle}/rootfs/seen"
        for directory in (shim.directory, bundle):
            os.chmod(directory, 0o711)
        shell(f"chown --recursive 200000:200000 {bundle}/rootfs").wait()
        try:
            await shim.run("c1", options=typeurl.pack(runc_options_pb2.Options(binary_name=crun)))
            eventually(lambda: len(_lines(seen)) == 2, "both were looked at")
            await shim.exec("c1", "e1", "true")
            await shim.call("Start", id="c1", exec_id="e1")
            assert (await shim.call("Wait", id="c1", exec_id="e1")).exit_status == 0
            await shim.call("Delete", id="c1", exec_id="e1")
            now = os.stat(os.devnull)
        finally:
            os.chown(os.devnull, host.st_uid, host.st_gid)
        assert (now.st_uid, now.st_gid, now.st_mode) == (host.st_uid, host.st_gid, host.st_mode)
        assert _lines(seen) == [b"1:3", b"1:3"]
        await shim.end("c1")
        await gone(shim, "c1")
