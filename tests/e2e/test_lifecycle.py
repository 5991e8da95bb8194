"""From ``ctr run`` to the exit code: a container's life, its execs, and its events."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cgroup import read_cgroup
from tests.harness.events import Recorder
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
from tools.containerd import PrivateContainerd
from tools.images import GLIBC


@pytest.mark.parametrize("code", [0, 255])
def test_stdout_and_stderr_arrive_apart_and_the_exit_code_is_the_programs(
    runtime: Runtime, code: int
) -> None:
    done = runtime.run("sh", "-c", f"echo to stdout; echo to stderr >&2; exit {code}")
    assert (done.stdout, done.stderr, done.code) == ("to stdout\n", "to stderr\n", code)


def test_a_program_that_a_signal_ends_exits_with_128_and_its_number(runtime: Runtime) -> None:
    # The shell is init, so signals without a handler do not kill it; its child is not init.
    container, ctr = runtime.spawn(
        "sh", "-c", "sleep 1000 & echo ready; wait $!; exit $?", stdout=subprocess.PIPE
    )
    assert ctr.stdout is not None
    with ctr.stdout:
        assert ctr.stdout.readline() == b"ready\n"
        init = container.pid
        (child,) = (pid for pid in container.pids if pid != init)
        os.kill(child, signal.SIGUSR1)
        assert ctr.wait(60) == 128 + signal.SIGUSR1


def test_kill_delivers_the_signal_it_was_asked_for(runtime: Runtime) -> None:
    container, ctr = runtime.spawn("probe", "signals", image=GLIBC, stdout=subprocess.PIPE)
    assert ctr.stdout is not None
    with ctr.stdout:
        assert ctr.stdout.readline() == b"ready\n"
        for name in ("HUP", "USR1", "WINCH", "TERM"):
            assert container.kill(name).code == 0
            assert ctr.stdout.readline() == f"got {name}\n".encode()
        assert ctr.wait(60) == 0


def test_kill_of_all_reaches_children_of_init(runtime: Runtime) -> None:
    container = runtime.start("sh", "-c", "trap '' TERM; sleep 1000; sleep 1000")
    eventually(lambda: len(container.pids) > 1, "init has a child")
    assert container.kill("KILL", flags=["--all"]).code == 0
    assert container.exit_code() == 128 + 9


def test_output_just_before_the_end_is_not_lost(runtime: Runtime) -> None:
    script = "head -c 60000 /dev/zero | tr '\\0' x; echo; echo last; exit 3"
    for _ in range(3):
        done = runtime.run("sh", "-c", script)
        assert (len(done.stdout), done.stdout[-5:], done.code) == (60_006, "last\n", 3)


def test_stdin_is_read_to_its_end(runtime: Runtime) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    done = runtime.run("cat", stdin=text)
    assert (done.code, done.stdout) == (0, text)


def test_closing_stdin_is_the_end_that_the_program_sees(runtime: Runtime) -> None:
    _, ctr = runtime.spawn(
        "sh", "-c", "echo ready; cat; echo end", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert ctr.stdin is not None
    assert ctr.stdout is not None
    with ctr.stdin, ctr.stdout:
        assert ctr.stdout.readline() == b"ready\n"
        ctr.stdin.write(b"a line\n")
        ctr.stdin.flush()
        assert ctr.stdout.readline() == b"a line\n"
        ctr.stdin.close()
        assert ctr.stdout.read() == b"end\n"
        assert ctr.wait(60) == 0


def test_null_io_loses_output_and_keeps_the_exit_code(runtime: Runtime) -> None:
    done = runtime.run("sh", "-c", "echo lost; cat; exit 5", flags=["--null-io"])
    assert (done.stdout, done.code) == ("", 5)


def test_detached_container_runs_on_and_is_listed(runtime: Runtime) -> None:
    container = runtime.start_idle()
    assert container.status == "RUNNING"
    assert is_alive(container.pid)
    assert container.pid in container.pids
    container.kill("KILL")
    container.wait_for("STOPPED")
    assert not is_alive(container.pid)
    assert container.delete_task() == 128 + 9
    assert container.status == ""


def test_task_of_a_stopped_container_can_be_started_again(runtime: Runtime) -> None:
    container = runtime.start("sh", "-c", "exit 7")
    assert container.exit_code() == 7
    runtime.containerd.ctr(
        "tasks", "start", "--detach", "--fifo-dir", runtime.containerd.fifo_directory,
        container.name,
    )  # fmt: skip
    assert container.exit_code() == 7


def test_running_task_is_not_deleted_without_force(runtime: Runtime) -> None:
    container = runtime.start_idle()
    done = runtime.containerd.ctr("tasks", "rm", container.name, check=False)
    assert done.code != 0
    assert container.status == "RUNNING"


def test_paused_container_stands_still_until_it_is_resumed(runtime: Runtime) -> None:
    container = runtime.start("sh", "-c", "while :; do date +%s%N >/tmp/now; done")
    containerd = runtime.containerd
    eventually(lambda: container.exec("test", "-s", "/tmp/now").code == 0, "it has started")
    assert containerd.ctr("tasks", "pause", container.name).code == 0
    assert container.status == "PAUSED"
    now = f"/proc/{container.pid}/root/tmp/now"
    assert len({os.stat(now).st_mtime_ns for _ in range(20)}) == 1
    before = os.stat(now).st_mtime_ns
    assert containerd.ctr("tasks", "resume", container.name).code == 0
    assert container.status == "RUNNING"
    eventually(lambda: os.stat(now).st_mtime_ns != before, "it continues")


def test_program_that_does_not_exist_is_a_readable_error(runtime: Runtime) -> None:
    done = runtime.run("no-such-program")
    assert done.code == 1
    assert NO_SUCH_PROGRAM.search(done.stderr)
    assert one_line(done)


def test_name_of_a_failed_container_can_be_used_again(runtime: Runtime) -> None:
    name = new_name()
    assert runtime.run("no-such-program", name=name).code == 1
    assert runtime.run("echo", "hi", name=name).stdout == "hi\n"


def test_read_only_container_runs(runtime: Runtime) -> None:
    done = runtime.run("sh", "-c", "touch /file", flags=["--read-only"])
    assert done.code == 1
    assert "Read-only file system" in done.stderr


def test_container_is_limited_as_asked(runtime: Runtime) -> None:
    container = runtime.start_idle(flags=["--memory-limit", str(64 << 20)])
    assert read_cgroup(container.pid, "memory", v1="memory.limit_in_bytes", v2="memory.max") == (
        f"{64 << 20}\n"
    )


# -- more processes in a running container ----------------------------------------------------


@pytest.fixture
def container(runtime: Runtime) -> Container:
    """Return a container that only sleeps."""
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
        assert process.wait(60) == 128 + 9
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
        assert process.wait(60) == 0
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
    # A detached ctr leaves its fifos without a reader; a file needs none.
    flags = ["--detach", "--log-uri", f"file://{tmp_path}/log"]
    containerd.ctr(*container.exec_words("sleep", "1000", exec_id=exec_id, flags=flags))
    lines = containerd.ctr("tasks", "ps", container.name).stdout
    (pid,) = (int(line.split()[0]) for line in lines.splitlines() if exec_id in line)
    assert is_alive(pid)
    assert container.kill("TERM", flags=["--exec-id", exec_id]).code == 0
    eventually(lambda: not is_alive(pid), "the exec exits")
    assert container.status == "RUNNING"


# -- the events of a task: which, in which order, and what they say ---------------------------


@pytest.fixture
def recorder(containerd: PrivateContainerd) -> Iterator[Recorder]:
    """Record what containerd publishes during the test."""
    with Recorder(containerd) as recorder:
        yield recorder


def _until_deleted(names: list[str]) -> bool:
    return "delete" in names


def test_events_of_a_container_come_in_order(runtime: Runtime, recorder: Recorder) -> None:
    name = new_name()
    runtime.run("sh", "-c", "exit 6", name=name)
    assert recorder.wait_for(name, _until_deleted) == ["create", "start", "exit", "delete"]
    create, start, end, delete = recorder.of(name)
    assert create.fields["bundle"] == runtime.containerd.bundle(name)
    assert create.fields["pid"] == start.fields["pid"] == end.fields["pid"] == delete.fields["pid"]
    assert end.fields["id"] == name
    assert end.fields["exit_status"] == delete.fields["exit_status"] == 6
    assert end.fields["exited_at"] == delete.fields["exited_at"]


def test_events_of_an_exec_come_in_order(runtime: Runtime, recorder: Recorder) -> None:
    container = runtime.start_idle()
    exec_id = new_name("e")
    words = container.exec_words("sh", "-c", "exit 3", exec_id=exec_id)
    assert runtime.containerd.ctr(*words, check=False).code == 3
    container.kill("KILL")
    container.exit_code()
    assert recorder.wait_for(container.name, _until_deleted) == [
        "create",
        "start",
        f"exec-added {exec_id}",
        f"exec-started {exec_id}",
        f"exit {exec_id}",
        "exit",
        "delete",
    ]
    ended = recorder.of(container.name)[4]
    assert ended.fields["exit_status"] == 3


def test_container_that_cannot_be_created_publishes_no_start(
    runtime: Runtime, recorder: Recorder
) -> None:
    name = new_name()
    assert runtime.run("no-such-program", name=name).code == 1
    runtime.run("true", name=(later := new_name()))
    recorder.wait_for(later, _until_deleted)
    names = [event.short for event in recorder.of(name)]
    assert "start" not in names
    assert "exit" not in names
