"""Stdio through containerd: logs, and outages of containerd and of readers."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import api, loggers
from tests.harness.loggers import Loggers, loggers_directory
from tests.harness.runtime import Container, Runtime, is_alive, new_name, remove_fifos
from tests.harness.waiting import eventually


@pytest.fixture
def place() -> Iterator[Loggers]:
    with loggers_directory() as place:
        yield place


def _run_with_fifos(runtime: Runtime, directory: Path, *command: str) -> tuple[Container, str]:
    """Run a container whose client is the test: it reads the fifo."""
    container = runtime.expect()
    stdout = str(directory / "out")
    os.mkfifo(stdout)
    runtime.create_with_image(container.name, *command)
    mounts = runtime.prepare_rootfs(container.name)
    # containerd's own shim opens a fifo only once it has a reader.
    reader = os.open(stdout, os.O_RDONLY | os.O_NONBLOCK)
    api.create_task(runtime.containerd, container.name, mounts=mounts, stdout=stdout, stderr=stdout)
    os.close(reader)
    api.start_task(runtime.containerd, container.name)
    return container, stdout


def _read(fifo: str, size: int) -> bytes:
    """Read like a client that connects, takes the available bytes, and disconnects."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        data = b""
        while len(data) < size:
            try:
                data += os.read(reader, size - len(data))
            except BlockingIOError:
                break
        return data
    finally:
        os.close(reader)


def test_containerd_and_the_reader_may_be_away_while_the_container_writes(
    runtime: Runtime, tmp_path: Path
) -> None:
    last = 399_999
    container, fifo = _run_with_fifos(runtime, tmp_path, "seq", "100000", str(last))
    init = container.pid
    data = _read(fifo, 30_000)
    for _ in range(3):
        runtime.containerd.kill()
        time.sleep(0.2)
        # The fifo is full and has no reader: the container waits, and is not killed.
        assert is_alive(init)
        data += _read(fifo, 100_000)
        runtime.containerd.start()
        assert (container.pid, container.status) == (init, "RUNNING")
        data += _read(fifo, 100_000)
    reader = subprocess.Popen(["cat", fifo], stdout=subprocess.PIPE)
    rest, _ = reader.communicate(timeout=60)
    data += rest
    assert data == b"".join(b"%d\n" % number for number in range(100_000, last + 1))
    assert container.exit_code() == 0


def test_a_client_attaches_again_after_containerd_was_killed(runtime: Runtime) -> None:
    script = "i=0; until test -e /tmp/end; do echo $((i+=1)); sleep 0.01; done; exit 3"
    container, ctr = runtime.spawn("sh", "-c", script, stdout=subprocess.PIPE)
    assert ctr.stdout is not None
    with ctr.stdout:
        assert ctr.stdout.readline() == b"1\n"
        # Kill the client before containerd, or it would notice and remove its fifos.
        ctr.kill()
        ctr.wait()
        runtime.containerd.kill()
    runtime.containerd.start()
    words = ("tasks", "attach", container.name)
    again = runtime.containerd.spawn_ctr(
        *words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
    )
    assert again.stdout is not None
    first = int(again.stdout.readline())
    assert int(again.stdout.readline()) == first + 1
    with open(f"/proc/{container.pid}/root/tmp/end", "w"):
        pass
    rest, _ = again.communicate(timeout=60)
    numbers = [int(line) for line in rest.split()]
    assert numbers == list(range(first + 2, first + 2 + len(numbers)))
    assert again.returncode == 3
    container.remove()
    remove_fifos(runtime.containerd)


def test_ctr_gives_a_container_and_an_exec_a_logger(runtime: Runtime, place: Loggers) -> None:
    uri = place.uri(loggers.GOOD)
    container = runtime.start(
        "sh", "-c", "echo of init; echo oops >&2; until test -e /tmp/end; do sleep 0.02; done",
        flags=["--log-uri", uri],
    )  # fmt: skip
    exec_id = new_name("e")
    containerd = runtime.containerd
    words = container.exec_words("echo", "of exec", exec_id=exec_id, flags=["--log-uri", uri])
    assert containerd.ctr(*words).code == 0
    assert place.read(f"{exec_id}.out") == b"of exec\n"
    with open(f"/proc/{container.pid}/root/tmp/end", "w"):
        pass
    assert container.exit_code() == 0
    assert place.read(f"{container.name}.out") == b"of init\n"
    assert place.read(f"{container.name}.err") == b"oops\n"
    for name in (exec_id, container.name):
        eventually(lambda name=name: not is_alive(place.pid(name)), "its logger has exited")  # type: ignore[misc]
    environment = place.read(f"{container.name}.env").decode()
    assert f"CONTAINER_NAMESPACE={containerd.namespace}\n" in environment


def test_ctr_gives_a_container_a_log_file(runtime: Runtime, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "log"
    done = runtime.run(
        "sh", "-c", "dd if=/dev/zero bs=65536 count=128 2>/dev/null; echo oops >&2",
        flags=["--log-uri", f"file://{log}"],
    )  # fmt: skip
    assert (done.code, done.stdout) == (0, "")
    written = log.read_bytes()
    # With containerd's own shim the line may be anywhere, or missing.
    assert written.endswith(b"oops\n") or not runtime.is_ours
    assert written.replace(b"oops\n", b"") == bytes(8 << 20)


@pytest.mark.parametrize(
    ("script", "mode", "code"),
    [(loggers.DYING, 0o755, "E1405"), (loggers.GOOD, 0o777, "E1404")],
    ids=["dies", "anybody may change it"],
)
def test_a_logger_that_will_not_do_is_one_line(
    runtime: Runtime, place: Loggers, script: str, mode: int, code: str
) -> None:
    if not runtime.is_ours:
        pytest.skip("containerd's own shim starts any, and does not notice")
    uri = place.uri(script)
    os.chmod(f"{place.directory}/logger", mode)
    done = runtime.run("true", flags=["--log-uri", uri])
    assert done.code == 1
    assert code in done.stderr
    assert len(done.stderr.splitlines()) == 1
