"""The native launcher runs a verb in the fork server or in an interpreter, with equal results."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from api.proto import task_pb2
from api.ttrpc.client import connect
from integration.simulated import SimulatedNode
from integration.timeouts import PATIENCE
from tests.harness.node import Node, pids, words_of
from tests.harness.runtime import is_alive
from tests.harness.shim import content_of, shim_by_hand
from tests.harness.waiting import eventually

pytestmark = pytest.mark.anyio

COLD = {"NVSHIM_FORK_SERVER": "0"}


def _argv(node: Node, verb: str, *more: str, container_id: str = "c1") -> list[str]:
    return [
        node.launcher, "-namespace", "nvshim-launched", "-address", node.address,
        "-publish-binary", "/bin/false", "-id", container_id, *more, verb,
    ]  # fmt: skip


def _environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "TTRPC_ADDRESS": "/nowhere", **more}


def _verb(
    argv: list[str], cwd: str, environment: dict[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        argv, cwd=cwd, env=environment or _environment(), input=b"", capture_output=True,
        timeout=30 * PATIENCE, check=False, **more,
    )  # fmt: skip


def _executed(node: Node, verb: str, environment: dict[str, str] | None = None) -> list[str]:
    """Return the programs that a verb executes, starting with the launcher."""
    trace = os.path.join(node.shims.directory, "trace")
    bundle = os.path.join(node.shims.directory, "c1")
    argv = ["strace", "-f", "-qq", "-e", "trace=execve", "-e", "signal=none", "-o", trace]
    _verb([*argv, *_argv(node, verb, "-bundle", bundle)], bundle, environment)
    with open(trace, encoding="utf-8") as file:
        return [line.split('"')[1] for line in file if "execve(" in line and "= 0" in line]


def _interpreter(node: Node) -> str:
    """Return the program that the launcher executes without a fork server."""
    # A self-contained tree has its own loader, which a script cannot name.
    directory, name = os.path.split(node.launcher)
    loader = os.path.join(os.path.dirname(directory), "runtime", "as", name)
    return loader if os.path.exists(loader) else f"{node.launcher}.py"


async def test_with_a_fork_server_a_verb_executes_no_interpreter_and_inherits_nothing(
    node: Node,
) -> None:
    await node.start("c1")
    assert _executed(node, "delete") == [node.launcher]
    cold = _executed(node, "delete", _environment(**COLD))
    assert cold[:2] == [node.launcher, _interpreter(node)]
    (server,) = node.servers()
    for name in set(os.listdir(f"/proc/{server}/fd")) - {"0", "1", "2"}:
        lines = content_of(f"/proc/{server}/fdinfo/{name}").decode().splitlines()
        flags = next(line.split()[1] for line in lines if line.startswith("flags:"))
        assert int(flags, 8) & os.O_CLOEXEC, os.readlink(f"/proc/{server}/fd/{name}")
    # The OOM killer chooses the shim before the caller's parent.
    shim = await node.start("c2")
    score, ours = (int(content_of(f"/proc/{pid}/oom_score_adj")) for pid in (shim, "self"))
    assert score == min(ours + 1, 1000)


@pytest.mark.parametrize("gpus", ["none", "shared", "held"])
async def test_after_an_end_in_good_order_no_interpreter_is_needed_to_say_so(
    node: Node, two_gpus: SimulatedNode, tmp_path: Path, gpus: str
) -> None:
    if gpus != "none":
        config = Path(two_gpus.config_path).read_text(encoding="utf-8")
        held = '\n[sharing]\nholders = "exclusive"\n' if gpus == "held" else ""
        (tmp_path / "config.toml").write_text(config + held, encoding="utf-8")
        node.shims.environment = {"NVSHIM_CONFIG": str(tmp_path / "config.toml")}
    shim = await node.start("c1", wait=False)
    if gpus != "none":
        spec = node.shims.spec("c1")
        spec["process"]["env"] += ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all"]
        node.shims.write_spec("c1", spec)
    async with connect(node.sockets[0]) as node.shims.client:
        await node.shims.run("c1")
        await node.shims.end("c1")
        # Its shim runs, so there is a socket to check.
        assert len(_executed(node, "delete", _environment(**COLD))) > 1
        await node.shims.call("Shutdown", id="c1")
    eventually(lambda: not is_alive(shim), "the shim exits")
    assert _executed(node, "delete", _environment(**COLD)) == [node.launcher]


async def test_warm_and_cold_verbs_fail_with_the_same_words(node: Node, tmp_path: Path) -> None:
    await node.start("c1")
    for container_id, *words in (
        ("../x", "delete"), ("../x", "start"), ("c1", "-debug=maybe", "start"),
    ):  # fmt: skip
        argv = [*_argv(node, "", container_id=container_id)[:-1], *words]
        warm = _verb(argv, str(tmp_path))
        cold = _verb(argv, str(tmp_path), _environment(**COLD))
        assert cold.returncode == 1
        assert cold.stderr.startswith(b"NVSHIM-E")
        assert (warm.returncode, warm.stdout, warm.stderr) == (1, cold.stdout, cold.stderr)


async def _start_elsewhere(node: Node, *before: str) -> int:
    """Start c2 with a caller in another environment; return the shim's pid."""
    bundle = node.shims.bundle("c2", "sleep", "1000")
    done = _verb([*before, *_argv(node, "start", container_id="c2")], bundle)
    assert (done.returncode, done.stderr) == (0, b"")
    shim = await _shim_at(node, done.stdout.decode().removeprefix("unix://"))
    # The process that forked it looks like a shim until it is the fork server there.
    eventually(lambda: _shims_of(node, "c2") == [shim], "there is one shim")
    return shim


async def _shim_at(node: Node, path: str) -> int:
    """Return the pid of the shim that serves c2 there."""
    node.sockets.append(path)
    async with connect(path) as node.shims.client:
        node.pids.append((await node.shims.call("Connect", id="c2")).shim_pid)
    return node.pids[-1]


def _shims_of(node: Node, container_id: str) -> list[int]:
    return [pid for pid in pids() if {container_id, node.address} <= set(words_of(pid))]


@pytest.fixture
def other_cgroup() -> Iterator[str]:
    """Yield the file that moves a process into a cgroup of version 1 or 2."""
    root = "/sys/fs/cgroup"
    parent = root if os.path.exists(f"{root}/cgroup.controllers") else f"{root}/pids"
    path = f"{parent}/nvshim-elsewhere-{os.getpid()}"
    os.mkdir(path)
    try:
        yield f"{path}/cgroup.procs"
    finally:
        eventually(lambda: not content_of(f"{path}/cgroup.procs"), "the cgroup is empty")
        os.rmdir(path)


async def test_a_caller_with_other_limits_gets_a_shim_of_its_own_surroundings(node: Node) -> None:
    await node.start("c1")
    servers = node.servers()
    shim = await _start_elsewhere(node, "prlimit", "--nofile=300:300")
    limits = content_of(f"/proc/{shim}/limits").decode().splitlines()
    assert any(line.split()[3:5] == ["300", "300"] for line in limits)
    eventually(lambda: set(node.servers()) - set(servers), "one of those is left")


async def test_a_caller_in_another_mount_namespace_gets_a_shim_of_that(node: Node) -> None:
    await node.start("c1")
    shim = await _start_elsewhere(node, "unshare", "--mount")
    assert os.readlink(f"/proc/{shim}/ns/mnt") != os.readlink("/proc/self/ns/mnt")


async def test_a_caller_in_another_cgroup_gets_a_shim_in_that(
    node: Node, other_cgroup: str
) -> None:
    await node.start("c1")
    enter = f'echo 0 > {other_cgroup}; exec "$@"'
    shim = await _start_elsewhere(node, "sh", "-c", enter, "sh")
    assert str(shim) in content_of(other_cgroup).decode().split()
    node.close()


async def test_a_fork_server_whose_surroundings_were_changed_forks_nothing_more(
    node: Node,
) -> None:
    await node.start("c1")
    for pid in (*node.servers(), *node.spares()):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (300, 300))
    shim = await _start_elsewhere(node)
    limits = content_of(f"/proc/{shim}/limits").decode().splitlines()
    assert not any(line.split()[3:5] == ["300", "300"] for line in limits)


@contextmanager
def _starting(node: Node, container_id: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a caller, and the process of its start, which waits for the rest of its request."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        _argv(node, "start", container_id=container_id),
        cwd=node.shims.bundle(container_id, "true"), env=_environment(),
        stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT,
    ) as caller:  # fmt: skip
        yield caller, eventually(lambda: _reader_of(caller.stdin), "the verb is being done")


async def test_a_caller_or_a_start_that_is_killed_takes_the_other_with_it(node: Node) -> None:
    await node.start("c1")
    (server,) = node.servers()
    with _starting(node, "c2") as (caller, verb):
        caller.kill()
        eventually(lambda: not is_alive(verb), "the verb exits")
    assert is_alive(server)
    assert _shims_of(node, "c2") == []
    with _starting(node, "c3") as (caller, verb):
        os.kill(verb, signal.SIGKILL)
        said = caller.communicate(timeout=30 * PATIENCE)[0].decode()
    assert caller.returncode == 1
    assert "was killed" in said
    assert "\n" not in said


async def test_word_of_a_request_that_comes_late_does_not_end_its_verb(node: Node) -> None:
    """The kernel may send the signal for new data after the process has read the data."""
    await node.start("c1")
    with _starting(node, "c2") as (caller, verb):
        os.kill(verb, signal.SIGIO)
        said = caller.communicate(timeout=30 * PATIENCE)[0].decode()
    assert caller.returncode == 0, said
    await _shim_at(node, said.removeprefix("unix://"))


async def test_a_delete_whose_process_is_killed_is_done_all_the_same(node: Node) -> None:
    shim = await node.start("c1")
    bundle = os.path.join(node.shims.directory, "c1")
    once = f"mkdir {node.shims.directory}/once 2> /dev/null && kill -9 $PPID"
    options = node.shims.options(before=f'case "$*" in *delete*) {once};; esac')
    async with connect(node.sockets[0]) as node.shims.client:
        init = await node.shims.run("c1", options=options)
    os.kill(shim, signal.SIGKILL)
    eventually(lambda: not is_alive(shim), "the shim is gone")
    done = _verb(_argv(node, "delete", "-bundle", bundle), bundle)
    assert os.path.isdir(f"{node.shims.directory}/once")
    assert done.returncode == 0
    answer = task_pb2.DeleteResponse.FromString(done.stdout)
    assert (answer.pid, answer.exit_status) == (init, 137)
    assert not is_alive(init)
    node.shims.socket_path = node.sockets[0]
    assert node.shims.leftovers() == []


async def test_a_malformed_request_for_a_verb_is_not_answered_and_harms_nobody(node: Node) -> None:
    await node.start("c1")
    (server,) = node.servers()
    for content in (b"", b"\0", b"x\0nine\0", b"p\x001\0start\0", b"\xff" * 100):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20 * PATIENCE)
            connection.connect(node.server_socket())
            connection.sendall(len(content).to_bytes(4, "little") + content)
            assert connection.recv(1) == b",", content
            assert connection.recv(1) == b"", content
        assert node.servers() == [server], content
        node.wait_for_spares()


def _request(node: Node, *words: str, **environment: str) -> bytes:
    texts = [f"{node.launcher}.py", str(len(words)), *words]
    texts += [f"{name}={value}" for name, value in environment.items()]
    content = "".join(f"{text}\0" for text in texts).encode()
    return len(content).to_bytes(4, "little") + content


def _go(connection: socket.socket, stdout: int) -> int:
    """Let a verb start; return its status."""
    with open(os.devnull, "rb") as null:
        here = os.open("/", os.O_PATH)
        socket.send_fds(connection, [b"!"], [here, null.fileno(), stdout, stdout])
        os.close(here)
    return connection.recv(1)[0]


async def test_a_caller_that_is_held_up_and_a_request_in_pieces_are_served_all_the_same(
    node: Node, tmp_path: Path
) -> None:
    await node.start("c1")
    with (
        socket.socket(socket.AF_UNIX) as connection,
        open(tmp_path / "out", "wb") as out,  # noqa: ASYNC230 - as below
    ):
        connection.settimeout(20 * PATIENCE)
        connection.connect(node.server_socket())
        connection.sendall(_request(node, "-help", "start"))
        assert connection.recv(1) == b","
        assert connection.recv(1) == b"."
        # As long as on a very busy machine.
        time.sleep(1.5)  # noqa: ASYNC251 - nothing else runs in this loop
        assert _go(connection, out.fileno()) == 0
    assert b"start" in (tmp_path / "out").read_bytes()
    request = _request(node, "-help", "start", LONG="x" * 100_000)
    with (
        socket.socket(socket.AF_UNIX) as connection,
        open(tmp_path / "out", "wb") as out,  # noqa: ASYNC230 - as below
    ):
        connection.settimeout(20 * PATIENCE)
        connection.connect(node.server_socket())
        connection.sendall(request[:300])
        eventually(lambda: not _unread(connection), "the first piece is read")
        connection.sendall(request[300:])
        assert connection.recv(1) == b","
        assert connection.recv(1) == b"."
        assert _go(connection, out.fileno()) == 0
    # An incomplete request is not run.
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20 * PATIENCE)
        connection.connect(node.server_socket())
        connection.sendall(request[:300])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b","
        assert connection.recv(1) == b""


def _unread(connection: socket.socket) -> int:
    """Return how many sent bytes the other end has not read."""
    return int.from_bytes(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


@pytest.mark.serial
async def test_a_stopped_fork_server_is_not_waited_for(node: Node) -> None:
    await node.start("c1")
    (server,) = node.servers()
    os.kill(server, signal.SIGSTOP)
    began = time.monotonic()
    assert _executed(node, "delete")[:2] == [node.launcher, _interpreter(node)]
    assert time.monotonic() - began < 3
    os.kill(server, signal.SIGCONT)


@pytest.mark.serial
async def test_a_frozen_fork_server_is_not_waited_for(node: Node) -> None:
    """The cgroup freezer sends no signal, and a frozen process looks like a sleeping one."""
    hierarchy = "/sys/fs/cgroup/freezer"
    if not os.path.isdir(hierarchy):
        pytest.skip("needs a freezer of cgroup version 1")
    await node.start("c1")
    path = f"{hierarchy}/nvshim-frozen-{os.getpid()}"
    os.mkdir(path)
    try:
        for pid in node.servers():
            _write(f"{path}/cgroup.procs", str(pid))
        _write(f"{path}/freezer.state", "FROZEN")
        eventually(lambda: content_of(f"{path}/freezer.state") == b"FROZEN\n", "it is frozen")
        began = time.monotonic()
        await node.start("c2", wait=False)
        assert time.monotonic() - began < 3
    finally:
        _write(f"{path}/freezer.state", "THAWED")
        node.close()
        eventually(lambda: not content_of(f"{path}/cgroup.procs"), "the cgroup is empty")
        os.rmdir(path)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def test_a_launcher_without_its_program_says_so_in_one_line(
    shim_directory: str, tmp_path: Path
) -> None:
    path = tmp_path / "containerd-shim-nvidia-v1"
    shutil.copy(os.path.join(shim_directory, path.name), path)
    done = subprocess.run(
        [path, "-v"],
        capture_output=True,
        check=False,
        env={"PATH": f"{tmp_path}:relative:/nowhere"},
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == (
        f"containerd-shim-nvidia-v1: {path}.py: No such file or directory, "
        "and no other is in PATH; install it again"
    )


async def test_a_copy_of_the_launcher_alone_does_what_the_installed_one_does(
    shim_directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "containerd-shim-another-v1"
    shutil.copy(os.path.join(shim_directory, "containerd-shim-nvidia-v1"), copy)
    monkeypatch.setenv("PATH", f"{tmp_path}:{shim_directory}:{os.environ['PATH']}")
    async with shim_by_hand(str(copy), "c1", "sleep", "1000") as shim:
        await shim.run("c1")
        os.kill(shim.pid, signal.SIGKILL)
        await shim.until_gone()
        shim.delete_verb("c1")
        assert shim.leftovers() == []


def test_a_launcher_that_is_replaced_while_it_starts_finds_its_program(
    shim_directory: str, tmp_path: Path
) -> None:
    name = "containerd-shim-nvidia-v1"
    own = tmp_path / "bin"
    own.mkdir()
    for file in (name, f"{name}.py"):
        shutil.copy(os.path.join(shim_directory, file), own / file)
    tree = os.path.dirname(shim_directory)
    if os.path.exists(f"{tree}/tree.json"):  # then bin's sibling directories have the rest
        for beside in {*os.listdir(tree)} - {"bin"}:
            os.symlink(f"{tree}/{beside}", tmp_path / beside)
    launcher = os.open(own / name, os.O_PATH)
    os.unlink(own / name)
    done = subprocess.run(
        [f"/proc/self/fd/{launcher}", "-v"], pass_fds=[launcher], capture_output=True, check=False
    )
    os.close(launcher)
    assert (done.returncode, done.stderr) == (0, b"")
    assert name in done.stdout.decode()


def _reader_of(pipe: IO[bytes] | None) -> int:
    """Return the fork server's process whose standard input is a pipe; 0 if none."""
    assert pipe is not None
    inode = os.fstat(pipe.fileno()).st_ino
    for pid in pids():
        with suppress(OSError):
            if os.stat(f"/proc/{pid}/fd/0").st_ino == inode and "-spare" in words_of(pid):
                return pid
    return 0
