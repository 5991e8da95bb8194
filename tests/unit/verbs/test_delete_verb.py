"""``delete`` after the shim was killed: it removes everything of the container, and nothing else.

The containers are real ones. The tests check the cgroups, the mount table, /proc and the file
system, and do not rely on the verb's answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from api.proto import task_pb2
from shim import sockets, syscalls
from shim.bundle import RuntimeRecord
from shim.mountinfo import mount_points_below
from shim.processes import start_time_of
from shim.runtime import orphans
from shim.sandbox import members
from shim.verbs import unfinished
from tests.harness.waiting import eventually
from tests.unit.mounts.private_mounts import in_private_mount_namespace
from tests.unit.verbs.container import Container, container, has_ended
from tests.unit.verbs.program import Program


def _delete(program: Program, bundle: Path) -> tuple[task_pb2.DeleteResponse, str]:
    """Run the verb as containerd does; return its answer and its messages."""
    words = ["-namespace", "test", "-address", program.address, "-id", bundle.name]
    started = time.monotonic()
    done = program.run(
        *words,
        *("-bundle", str(bundle), "delete"),
        cwd=bundle if bundle.exists() else None,
    )
    assert time.monotonic() - started < 4.5, "containerd gives it five seconds"
    assert done.returncode == 0, done.stderr
    response = task_pb2.DeleteResponse.FromString(done.stdout)
    assert response.exit_status == 137
    assert abs(response.exited_at.ToNanoseconds() / 1e9 - time.time()) < 10
    return response, done.stderr.decode()


def _assert_nothing_left(left: Container, processes: set[int]) -> None:
    deadline = time.monotonic() + 20
    while not all(map(has_ended, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [pid for pid in processes if not has_ended(pid)] == []
    assert left.cgroups() == []
    assert not left.state.exists()
    assert mount_points_below(str(left.bundle)) == []


@pytest.fixture
def bundle(program: Program) -> Path:
    """Make a bundle with a unique id."""
    return program.bundle(f"nvshim-test-{os.getpid()}-{time.monotonic_ns()}")


@pytest.fixture
def root(short_path: Path) -> Path:
    return short_path / "state"


def _script(directory: Path, text: str) -> str:
    path = directory / "runtime"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@contextlib.contextmanager
def _innocent_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


# -- what is removed -----------------------------------------------------------------------------


def _lost_state(left: Container, _: Path) -> None:
    for file in left.state.iterdir():
        file.unlink()
    left.state.rmdir()


def _cut_off(left: Container, _: Path) -> None:
    left.state.mkdir(parents=True)  # runc's first step, before state.json is written


def _without_its_runtime(left: Container, _: Path) -> None:
    left.write_options("no-such-runtime")


def _frozen(left: Container, _: Path) -> None:
    left.call("pause", left.id)
    left.write_options("no-such-runtime")


def _malformed_state(left: Container, _: Path) -> None:
    (left.state / "state.json").write_text("{")
    left.write_options("no-such-runtime")


def _hanging(left: Container, directory: Path) -> None:
    left.write_options(_script(directory, f"sleep 1000 & echo $$ $! >{directory}/pids; wait"))


def _failing(left: Container, directory: Path) -> None:
    left.write_options(_script(directory, "echo one; echo two >&2; exit 3"))


@dataclass(frozen=True)
class Case:
    """A container, what happens to it, and the lines of the messages."""

    change: Callable[[Container, Path], object] = lambda *_: None
    said: tuple[str, ...] = ()
    more: bool = False  # further messages are allowed: slow steps may be busy
    runtime: str = "runc"
    own_pid_namespace: bool = True
    begin: Callable[[Container], int] = Container.run
    times: int = 1


UNKNOWN = "no-such-runtime delete {id}: no such program in {path}"
CASES = {
    "running": Case(),
    "running, by crun": Case(runtime="crun"),
    "never started": Case(begin=Container.create),
    "twice": Case(times=2),
    "create that was cut off": Case(_cut_off, begin=lambda _: 0),
    "without its runtime, in the host's pid namespace": Case(
        _without_its_runtime, (UNKNOWN,), own_pid_namespace=False
    ),
    "without its runtime, by crun": Case(_without_its_runtime, (UNKNOWN,), runtime="crun"),
    "runtime that hangs": Case(
        _hanging, (f"had not ended after {orphans.RUNTIME_TIMEOUT} s",), more=True
    ),
    "runtime that fails": Case(_failing, ("/runtime delete {id}: exit status 3: one two",)),
    "frozen, without its runtime": Case(_frozen, (UNKNOWN,), more=True),
    # It is identified by its cgroup.
    "state that was lost": Case(_lost_state),
    "malformed state": Case(_malformed_state, ("state.json: no JSON", UNKNOWN), more=True),
}


@pytest.mark.parametrize("name", CASES)
@in_private_mount_namespace
def test_container_is_ended(program: Program, bundle: Path, root: Path, name: str) -> None:
    case = CASES[name]
    if case.runtime == "crun":
        _show_crun_a_host_that_it_knows()
    made = container(bundle, root, runtime=case.runtime, own_pid_namespace=case.own_pid_namespace)
    with made as left:
        pid = case.begin(left)
        processes = left.processes() | ({pid} if pid else set())
        case.change(left, program.directory)
        for _ in range(case.times):
            response, complaints = _delete(program, bundle)
            assert response.pid == pid
            for said in case.said:
                assert said.format(id=left.id, path=os.environ["PATH"]) in complaints
            assert case.more or len(complaints.splitlines()) == len(case.said), complaints
        _assert_nothing_left(left, processes)
    if case.change is _hanging:
        started = (program.directory / "pids").read_text().split()
        assert [pid for pid in map(int, started) if not has_ended(pid)] == []


@in_private_mount_namespace
def test_containers_of_a_sandbox_are_ended_also_if_the_record_of_its_holder_is_malformed(
    program: Program, bundle: Path, root: Path
) -> None:
    sandbox = program.bundle(f"{bundle.name}-pod")
    (sandbox / members.HOLDER).write_text("soon\n")
    with container(bundle, root) as left:
        left.run()
        processes = left.processes()
        record = RuntimeRecord("runc", str(root), systemd_cgroup=False)
        members.write_member(str(sandbox), left.id, str(bundle), record)
        _, complaints = _delete(program, sandbox)
        assert complaints.startswith("NVSHIM-E1004")
        assert complaints.count("\n") == 1
        _assert_nothing_left(left, processes)


def _have_own_sockets() -> None:
    """Mount a private directory of sockets, hidden from `start` of other tests."""
    directory = sockets.prepare_directory()
    syscalls.mount("tmpfs", directory, "tmpfs", 0, f"mode={os.stat(directory).st_mode & 0o777:o}")


@pytest.mark.parametrize("whose", ["its own", "another's"])
@in_private_mount_namespace
def test_a_delete_that_was_killed_is_finished_by_the_next_start(
    program: Program, bundle: Path, root: Path, whose: str
) -> None:
    _have_own_sockets()
    with container(bundle, root) as left:
        left.run()
        processes = left.processes()
        _hanging(left, program.directory)
        flags = ["-namespace", "test", "-address", program.address, "-id", bundle.name]
        words = [str(program.path), *flags, "-bundle", str(bundle), "delete"]
        with subprocess.Popen(words, cwd=bundle, stderr=subprocess.DEVNULL) as verb:
            pids = program.directory / "pids"
            eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2, "it has begun")
            verb.kill()
        for pid in map(int, pids.read_text().split()):
            os.kill(pid, signal.SIGKILL)
        assert not any(map(has_ended, processes))
        # containerd removes the bundle anyway, and does not call delete again.
        syscalls.umount(str(left.rootfs))
        shutil.rmtree(bundle)
        following = program.bundle(bundle.name if whose == "its own" else f"{bundle.name}-next")
        assert program.start(following).returncode == 0
        if whose == "its own":
            assert not left.state.exists(), "or its Create would find the id taken"
            assert left.cgroups() == []
        eventually(lambda: all(map(has_ended, processes)), "its processes have ended")
        eventually(lambda: left.cgroups() == [] and not left.state.exists(), "nothing is left")
        program.kill(following)
    eventually(lambda: _notes(program, bundle) == [], "the note is gone")


@in_private_mount_namespace
def test_a_container_that_got_the_id_of_a_killed_delete_is_left_alone(
    program: Program, bundle: Path, root: Path
) -> None:
    """The start of the new container has already removed what was left."""
    _have_own_sockets()
    with container(bundle, root) as left:
        left.run()
        directory = sockets.prepare_directory()
        name = sockets.name_of(program.address, "test", bundle.name)
        record = RuntimeRecord("runc", str(root), systemd_cgroup=False)
        gone = unfinished.Left(bundle.name, str(bundle), (1, 1), record, 0, f"/{bundle.name}")
        unfinished.write(directory, name, (0, 0), [gone]).leave()
        following = program.bundle(f"{bundle.name}-next")
        assert program.start(following).returncode == 0
        program.kill(following)
        note = unfinished.take(directory, name, wait=True)
        assert note is not None
        note.remove()
        assert not any(map(has_ended, left.processes()))
        assert len(left.processes()) == 3


_OF_ANOTHER_SHAPE = (
    {"holder": [0, 0], "left": [{}]},
    {"holder": [0, 0], "left": [{"identity": [1], "id": "c", "bundle": "/"}]},
    {"holder": [0, 0], "left": [{"identity": None, "id": "../c"}]},
    {"holder": [0, 0], "left": [{"identity": None, "id": "c", "bundle": "/", "record": []}]},
    {"holder": [0, float("inf")], "left": []},
)


@pytest.mark.parametrize("content", ["", "{", "[]", *map(json.dumps, _OF_ANOTHER_SHAPE)])
def test_a_note_that_cannot_be_understood_is_removed(
    program: Program, bundle: Path, content: str
) -> None:
    directory = sockets.prepare_directory()
    name = sockets.name_of(program.address, "test", bundle.name)
    unfinished.write(directory, name, (0, 0), []).leave()
    Path(directory, "nvidia-v1-deletes", name).write_text(content)
    assert program.start(bundle).stdout.startswith(b"unix://")
    assert _notes(program, bundle) == []


def test_a_note_that_stays_locked_is_waited_for_some_seconds_and_not_for_ever(
    program: Program, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "_PATIENCE", 0.05)
    directory = sockets.prepare_directory()
    name = sockets.name_of(program.address, "test", bundle.name)
    held = unfinished.write(directory, name, (0, 0), [])
    assert unfinished.take(directory, name, wait=True) is None
    with pytest.raises(BlockingIOError):
        unfinished.write(directory, name, (0, 0), [])
    held.remove()
    assert _notes(program, bundle) == []


def _notes(program: Program, bundle: Path) -> list[str]:
    name = sockets.name_of(program.address, "test", bundle.name)
    return [n for n in unfinished.names(sockets.prepare_directory()) if n == name]


# -- what must not change ------------------------------------------------------------------------


@pytest.mark.parametrize("with_state", [True, False])
def test_a_process_that_got_inits_pid_later_is_left_alone(
    program: Program,
    bundle: Path,
    root: Path,
    with_state: bool,
) -> None:
    record = {"binary": "no-such-runtime", "root": str(root)}
    (bundle / "options.json").write_text(json.dumps(record))
    state = root / bundle.name
    with _innocent_process() as innocent:
        (bundle / "init.pid").write_text(str(innocent.pid))
        if with_state:
            state.mkdir(parents=True)
            started = start_time_of(innocent.pid)
            (state / "state.json").write_text(
                json.dumps({"init_process_pid": innocent.pid, "init_process_start": started - 1})
            )
        _, complaints = _delete(program, bundle)
        assert (
            f"process {innocent.pid} no longer belongs to {bundle.name}; it was left alone"
            in complaints
        )
        assert innocent.poll() is None
        assert not has_ended(innocent.pid)
    assert not state.exists()


def test_a_cgroup_that_containerd_is_in_is_not_killed(
    program: Program, bundle: Path, root: Path
) -> None:
    cgroup = Path("/sys/fs/cgroup")
    if not (cgroup / "cgroup.controllers").exists():
        cgroup /= "pids"
    cgroup /= f"{bundle.name}-service"
    cgroup.mkdir()
    state = root / bundle.name
    state.mkdir(parents=True)
    (state / "state.json").write_text(json.dumps({"cgroup_paths": {"pids": str(cgroup)}}))
    record = {"binary": "no-such-runtime", "root": str(root)}
    (bundle / "options.json").write_text(json.dumps(record))
    words = ["-namespace", "test", "-id", bundle.name, "-bundle", str(bundle), "delete"]
    script = f'echo $$ >{cgroup}/cgroup.procs; "$@" >/dev/null; echo alive'
    try:
        done = subprocess.run(
            ["sh", "-c", script, "sh", program.path, *words], capture_output=True, check=False
        )
        assert done.stdout == b"alive\n"
        assert cgroup.is_dir()
    finally:
        deadline = time.monotonic() + 5
        while cgroup.exists():
            with contextlib.suppress(OSError):
                cgroup.rmdir()
            assert time.monotonic() < deadline


def test_a_cgroup_outside_the_tree_of_cgroups_is_not_touched(
    program: Program, bundle: Path, root: Path
) -> None:
    outside = program.directory / "precious"
    outside.mkdir()
    state = root / bundle.name
    state.mkdir(parents=True)
    paths = {"pids": str(outside), "cpu": f"/sys/fs/cgroup/../../..{outside}"}
    (state / "state.json").write_text(json.dumps({"cgroup_paths": paths}))
    (bundle / "options.json").write_text(json.dumps({"binary": "none", "root": str(root)}))
    with _innocent_process() as innocent:
        (outside / "cgroup.procs").write_text(f"{innocent.pid}\n")
        _delete(program, bundle)
        assert not has_ended(innocent.pid)
    assert outside.is_dir()


# -- mounts, staging, socket ---------------------------------------------------------------------


@in_private_mount_namespace
def test_everything_mounted_in_the_bundle_goes_and_what_was_mounted_stays_whole(
    program: Program, bundle: Path, root: Path
) -> None:
    driver = program.directory / "driver"
    driver.mkdir()
    (driver / "libcuda.so.1").write_text("precious")
    staged = bundle / "nvidia" / "lib"
    staged.mkdir(parents=True)
    (bundle / "nvidia" / "ld.so.cache").write_text("ours")
    with container(bundle, root) as left:
        inside = left.rootfs / "usr" / "lib"
        inside.mkdir(parents=True)
        for point in (inside, staged):
            syscalls.mount(str(driver), str(point), "", syscalls.MS_BIND)
        _, complaints = _delete(program, bundle)
        assert complaints == ""
        _assert_nothing_left(left, set())
    assert not (bundle / "nvidia").exists()
    assert (driver / "libcuda.so.1").read_text() == "precious"


def test_a_dead_shims_socket_is_removed(program: Program, bundle: Path) -> None:
    answer = program.start(bundle).stdout
    path = answer.removeprefix(b"unix://")
    _, complaints = _delete(program, bundle)
    assert complaints == ""
    assert os.path.exists(path), "the shim of a pod serves others too"
    program.kill(bundle)
    _delete(program, bundle)
    assert not os.path.exists(path)


def test_only_a_socket_is_removed_whatever_the_address_names(
    program: Program, bundle: Path
) -> None:
    precious = program.directory / "precious"
    precious.write_text("x")
    for address in (f"unix://{precious}", str(precious), "vsock://2:1024", "unix://", "\xff"):
        (bundle / "address").write_text(address)
        _, complaints = _delete(program, bundle)
        assert complaints == ""
    assert precious.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(program.directory / "dead"))
    (bundle / "address").write_text(f"unix://{program.directory}/dead\n")
    _delete(program, bundle)
    assert not (program.directory / "dead").exists()


def test_socket_that_only_containerd_noted_is_removed(program: Program, bundle: Path) -> None:
    # The bundle of a pod's later container, in which containerd 2.x did not call start.
    path = program.directory / "dead"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    noted = {"version": 3, "address": f"unix://{path}", "protocol": "ttrpc"}
    (bundle / "bootstrap.json").write_text(json.dumps(noted))
    _, complaints = _delete(program, bundle)
    assert complaints == ""
    assert not path.exists()


@pytest.mark.parametrize("content", ['{"address": 7}', '{"address": "vsock://2:1024"}'])
def test_note_of_containerd_without_a_socket_is_no_error(
    program: Program, bundle: Path, content: str
) -> None:
    (bundle / "bootstrap.json").write_text(content)
    assert _delete(program, bundle)[1] == ""


def test_malformed_note_of_containerd_is_told_and_stops_nothing(
    program: Program, bundle: Path
) -> None:
    (bundle / "bootstrap.json").write_text("no json")
    (bundle / "nvidia").mkdir()
    _, complaints = _delete(program, bundle)
    assert complaints.startswith("NVSHIM-E")
    assert complaints.count("\n") == 1
    assert "bootstrap.json" in complaints
    assert not (bundle / "nvidia").exists()


# -- incomplete bundles --------------------------------------------------------------------------


def _no_config(bundle: Path) -> None:
    (bundle / "config.json").unlink()


def _no_bundle(bundle: Path) -> None:
    _no_config(bundle)
    bundle.rmdir()


def _empty_rootfs(bundle: Path) -> None:
    (bundle / "rootfs").mkdir()


@pytest.mark.parametrize("unmake", [_no_config, _no_bundle, _empty_rootfs])
def test_a_half_made_bundle_is_no_reason_to_complain(
    program: Program, bundle: Path, unmake: Callable[[Path], None]
) -> None:
    unmake(bundle)
    response, complaints = _delete(program, bundle)
    assert (response.pid, complaints) == (0, "")


@pytest.mark.parametrize(
    ("name", "content"),
    [("options.json", "{"), ("options.json", "{}"), ("init.pid", "soon"), ("runtime", "x" * 9000)],
)
def test_a_malformed_file_is_told_in_one_line_and_the_rest_is_done(
    program: Program, bundle: Path, name: str, content: str
) -> None:
    (bundle / name).write_text(content)
    (bundle / "nvidia").mkdir()
    _, complaints = _delete(program, bundle)
    assert complaints.startswith("NVSHIM-E1004")
    assert complaints.count("\n") == 1
    assert not (bundle / "nvidia").exists()


def test_the_bundle_is_the_current_directory_if_no_flag_names_it(
    program: Program, bundle: Path
) -> None:
    (bundle / "init.pid").write_text("0")
    (bundle / "nvidia").mkdir()
    done = program.run("-namespace", "test", "-id", bundle.name, "delete", cwd=bundle)
    assert done.returncode == 0
    assert not (bundle / "nvidia").exists()


def _show_crun_a_host_that_it_knows() -> None:
    """Hide the v2 hierarchy, because crun refuses a host with both versions of cgroups."""
    root = Path("/sys/fs/cgroup")
    if not (root / "unified" / "cgroup.controllers").exists():
        return
    with contextlib.ExitStack() as opened:
        descriptors = {}
        for entry in root.iterdir():
            if entry.is_mount() and entry.name != "unified":
                descriptors[entry] = os.open(entry, os.O_PATH)
                opened.callback(os.close, descriptors[entry])
        syscalls.mount("tmpfs", str(root), "tmpfs", 0)
        for entry, fd in descriptors.items():
            entry.mkdir()
            syscalls.mount(f"/proc/thread-self/fd/{fd}", str(entry), "", syscalls.MS_BIND)
