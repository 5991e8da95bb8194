"""More processes in a running container."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.harness.runtime import (
    NO_SUCH_PROGRAM,
    Container,
    Runtime,
    is_alive,
    is_refused,
    new_name,
    one_line,
)
from tests.harness.waiting import eventually


@pytest.fixture
def container(runtime: Runtime) -> Container:
    """A container that does nothing of its own."""
    return runtime.start_idle(flags=["--env", "COLOUR=green"])


def test_exec_runs_in_its_container_as_asked_and_its_output_and_exit_code_come_back(
    container: Container,
) -> None:
    script = (
        "echo $COLOUR; for n in mnt pid; do readlink /proc/self/ns/$n; done;"
        " id -u; pwd; echo to stderr >&2; exit 42"
    )
    done = container.exec("sh", "-c", script, flags=["--user", "1000", "--cwd", "/tmp"])
    namespaces = [os.readlink(f"/proc/{container.pid}/ns/{name}") for name in ("mnt", "pid")]
    assert done.lines == ["green", *namespaces, "1000", "/tmp"]
    assert (done.stderr, done.code) == ("to stderr\n", 42)
    assert container.status == "RUNNING"


def test_long_input_and_output_of_an_exec_arrive_whole(container: Container) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    done = container.exec("cat", stdin=text)
    assert (done.code, done.stdout) == (0, text)
    done = container.exec("sh", "-c", "yes 0123456789abcde | head -c 4000000")
    assert done.stdout == "0123456789abcde\n" * 250_000


def test_killed_exec_leaves_init_alone(container: Container) -> None:
    exec_id = new_name("e")
    process = container.runtime.containerd.spawn_ctr(
        *container.exec_words("sh", "-c", "echo ready; exec sleep 1000", exec_id=exec_id),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
        assert container.kill("KILL", flags=["--exec-id", exec_id]).code == 0
        assert process.wait(10) == 128 + 9
    assert container.status == "RUNNING"
    assert is_alive(container.pid)


def test_id_of_a_running_exec_is_not_given_twice_and_free_again_after_its_end(
    container: Container,
) -> None:
    exec_id = new_name("e")
    containerd = container.runtime.containerd
    process = containerd.spawn_ctr(
        *container.exec_words("sh", "-c", "echo ready; cat", exec_id=exec_id),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"ready\n"
        done = containerd.ctr(*container.exec_words("true", exec_id=exec_id), check=False)
        assert is_refused(done, "already exists", "NVSHIM-E1304")
        process.stdin.close()
        assert process.wait(10) == 0
    again = containerd.ctr(*container.exec_words("echo", "again", exec_id=exec_id))
    assert again.stdout == "again\n"


def test_missing_program_is_a_readable_error(container: Container) -> None:
    done = container.exec("no-such-program")
    assert done.code == 1
    assert NO_SUCH_PROGRAM.search(done.stderr)
    assert one_line(done)
    assert container.exec("echo", "still here").stdout == "still here\n"


def test_detached_exec_runs_on_and_can_be_killed(container: Container, tmp_path: Path) -> None:
    exec_id = new_name("e")
    containerd = container.runtime.containerd
    # A ctr that detaches leaves its fifos to nobody; a file needs none.
    flags = ["--detach", "--log-uri", f"file://{tmp_path}/log"]
    containerd.ctr(*container.exec_words("sleep", "1000", exec_id=exec_id, flags=flags))
    lines = containerd.ctr("tasks", "ps", container.name).stdout
    (pid,) = (int(line.split()[0]) for line in lines.splitlines() if exec_id in line)
    assert is_alive(pid)
    assert container.kill("TERM", flags=["--exec-id", exec_id]).code == 0
    eventually(lambda: not is_alive(pid), "the exec ends")
    assert container.status == "RUNNING"
