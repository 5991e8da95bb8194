"""``start`` as containerd executes it, and the process that it starts."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from api.proto import bootstrap_pb2, runc_options_pb2
from shim.sockets import name_of
from tests.harness.runtime import is_alive
from tests.harness.stopped import stopped_after
from tests.harness.waiting import eventually
from tests.unit.verbs.program import INTERPRETER, NAME, Program

_RUNC_OPTIONS = AnyMessage(
    type_url="containerd.runc.v1.Options",
    value=runc_options_pb2.Options(binary_name="crun", systemd_cgroup=True).SerializeToString(),
).SerializeToString()


@pytest.fixture
def bundle(program: Program) -> Path:
    return program.bundle("web-1")


def _bootstrap(program: Program, bundle: Path, **more: str | int) -> bytes:
    params = bootstrap_pb2.BootstrapParams(
        instance_id=bundle.name,
        namespace="test",
        containerd_version="2.4.0",
        containerd_grpc_address=program.address,
        containerd_ttrpc_address=program.address + ".events",
        socket_dir=str(program.sockets),
    )
    for name, value in more.items():
        setattr(params, name, value)
    return params.SerializeToString()


def _path_in(answer: bytes) -> str:
    found = re.fullmatch(rb"unix://(/.*)", answer)
    assert found, answer
    return os.fsdecode(found[1])


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


# -- the answer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stdin", [b"", _RUNC_OPTIONS, b"\xff\xff not a message"], ids=["empty", "options", "noise"]
)
def test_an_older_containerd_gets_the_bare_address_and_not_a_byte_more(
    program: Program, bundle: Path, stdin: bytes
) -> None:
    done = program.start(bundle, stdin=stdin)
    name = name_of(program.address, "test", "web-1")
    assert (done.returncode, done.stdout) == (0, f"unix:///run/containerd/s/{name}".encode())


def test_a_containerd_that_says_bootstrap_gets_version_3_in_the_directory_it_wants(
    program: Program, bundle: Path
) -> None:
    done = program.start(bundle, stdin=_bootstrap(program, bundle))
    name = name_of(program.address, "test", "web-1")
    expected = bootstrap_pb2.BootstrapResult(
        version=3, address=f"unix://{program.sockets}/{name}", protocol="ttrpc"
    )
    assert (done.returncode, done.stdout) == (0, expected.SerializeToString())


def test_extensions_and_fields_that_a_later_containerd_adds_do_no_harm(
    program: Program, bundle: Path
) -> None:
    known = bootstrap_pb2.BootstrapParams.FromString(_bootstrap(program, bundle))
    known.extensions.add().value.CopyFrom(
        AnyMessage(type_url="containerd.types.MountCapabilities", value=b"\x0a\x05erofs")
    )
    known.extensions.add()
    # Field 15, a string; and the same in a sub-message.
    added = b"\x7a\x05later"
    done = program.start(bundle, stdin=known.SerializeToString() + added)
    answer = bootstrap_pb2.BootstrapResult.FromString(done.stdout)
    assert (answer.version, answer.protocol) == (3, "ttrpc"), done
    # The answer has only the three old fields, because the caller does not know others.
    assert [field.number for field, _ in answer.ListFields()] == [1, 2, 3]


@pytest.mark.parametrize("change", [{"instance_id": "web-2"}, {"namespace": "other"}])
def test_parameters_for_somebody_else_are_not_taken_for_bootstrap(
    program: Program, bundle: Path, change: dict[str, str]
) -> None:
    done = program.start(bundle, stdin=_bootstrap(program, bundle, **change))
    assert done.stdout.startswith(b"unix:///run/containerd/s/")


def test_start_does_not_need_a_stdin(program: Program, bundle: Path) -> None:
    script = 'exec "$@" <&-'
    answer = subprocess.check_output(["sh", "-c", script, "sh", *program.argv(bundle)], cwd=bundle)
    assert _accepts(_path_in(answer))


# -- groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "annotation", ["io.kubernetes.cri.sandbox-id", "io.containerd.runc.v2.group"]
)
def test_the_containers_of_a_pod_share_the_first_ones_shim(
    program: Program, annotation: str
) -> None:
    first = program.bundle("first", {annotation: "pod"})
    second = program.bundle("second", {annotation: "pod"})
    other = program.bundle("other", {annotation: "another-pod"})
    answers = [program.start(bundle).stdout for bundle in (first, second, other)]
    assert answers[0] == answers[1] != answers[2]
    program.facts(first)
    program.facts(other)
    assert not (second / "facts.json").exists()
    assert (second / "address").read_bytes() == answers[0]
    result = bootstrap_pb2.BootstrapResult.FromString(
        program.start(second, stdin=_bootstrap(program, second, socket_dir="")).stdout
    )
    assert (result.version, result.address) == (3, answers[0].decode())


def test_of_a_pods_containers_started_at_once_exactly_one_has_the_shim(program: Program) -> None:
    names = [f"c{index}" for index in range(4)]
    bundles = [program.bundle(name, {"io.kubernetes.cri.sandbox-id": "pod"}) for name in names]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = {done.stdout for done in pool.map(program.start, bundles)}
    assert len(answers) == 1
    assert _accepts(_path_in(answers.pop()))
    deadline = time.monotonic() + 5
    while not any((bundle / "facts.json").exists() for bundle in bundles):
        assert time.monotonic() < deadline
    time.sleep(0.1)  # to detect a second one, which must not start
    assert sum((bundle / "facts.json").exists() for bundle in bundles) == 1


def test_the_socket_of_a_dead_shim_is_taken_over(program: Program, bundle: Path) -> None:
    first = program.start(bundle)
    program.kill(bundle)
    (bundle / "facts.json").unlink()
    assert not _accepts(_path_in(first.stdout))
    second = program.start(bundle)
    assert second.stdout == first.stdout
    assert _accepts(_path_in(second.stdout))


def test_no_start_takes_away_the_socket_of_another_that_came_while_it_was_stopped(
    program: Program,
) -> None:
    pod = {"io.kubernetes.cri.sandbox-id": "pod"}
    first, second = program.bundle("first", pod), program.bundle("second", pod)
    # The program's own directory: elsewhere, another start may remove the dead socket.
    params = {each: _bootstrap(program, each) for each in (first, second)}
    program.start(first, stdin=params[first])
    address = (first / "address").read_bytes()
    dead = _path_in(address)
    program.kill(first)
    (first / "facts.json").unlink()
    # It has found the socket dead, and is about to replace it.
    trace = str(program.directory / "trace")
    argv = program.argv(first)
    with stopped_after("connect", argv, trace=trace, given=params[first], cwd=first) as stopped:
        refused = program.start(second, stdin=params[second])
        assert (refused.returncode, refused.stdout.split()[0]) == (1, b"NVSHIM-E1007")
        assert b"is stopped or frozen" in refused.stdout
        assert b"\n" not in refused.stdout
        # Other containers do not have to wait.
        other = program.bundle("other")
        program.start(other, stdin=_bootstrap(program, other))
        assert _accepts(_path_in((other / "address").read_bytes()))
        assert address in stopped.go_on()
    assert _accepts(dead)
    assert address in program.start(second, stdin=params[second]).stdout
    assert program.facts(first)["arguments"]["socket_path"] == dead
    assert not (second / "facts.json").exists()


# -- what is left on disk ------------------------------------------------------------------------


def test_socket_directory_and_bundle_files_have_their_modes(program: Program, bundle: Path) -> None:
    program.start(bundle, stdin=_bootstrap(program, bundle))
    address = (bundle / "address").read_text()
    path = address.removeprefix("unix://")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(program.sockets.stat().st_mode) == 0o700
    assert stat.S_IMODE((bundle / "address").stat().st_mode) == 0o600
    assert os.readlink(bundle / "s") == str(program.sockets)


# -- the process ---------------------------------------------------------------------------------


def test_the_shim_lives_on_with_what_it_has_to_know_and_nothing_else(
    program: Program, bundle: Path
) -> None:
    with open("/etc/passwd", "rb") as leak:
        os.set_inheritable(leak.fileno(), True)
        # Waits for the end of the pipe, as Go's CombinedOutput does.
        done = program.start(bundle, environment={"TTRPC_ADDRESS": "/run/events.sock"})
    assert _accepts(_path_in(done.stdout))
    facts = program.facts(bundle)
    os.kill(facts["pid"], 0)
    assert facts["arguments"] == {
        "listener_fd": 3,
        "container_id": "web-1",
        "namespace": "test",
        "ttrpc_address": "/run/events.sock",
        "socket_path": _path_in(done.stdout),
        "debug": False,
    }
    descriptors = {fd: name for fd, name in facts["fds"].items() if not name.startswith("/proc/")}
    assert descriptors.pop("3").startswith("socket:")
    assert descriptors == {"0": "/dev/null", "1": "/dev/null", "2": "/dev/null"}
    assert not facts["listener_inheritable"]
    assert facts["pgid"] == facts["pid"]
    assert facts["cwd"] == str(bundle)
    assert facts["umask"] == 0o022


@pytest.mark.parametrize(
    ("flags", "parameters", "expected"),
    [
        (("-debug",), None, (".ttrpc", True)),
        ((), {"log_level": -4}, (".events", True)),
        ((), {"log_level": 0}, (".events", False)),
        ((), {"containerd_ttrpc_address": ""}, (".ttrpc", False)),
    ],
)
def test_events_and_debug_follow_flags_and_parameters(
    program: Program,
    bundle: Path,
    flags: tuple[str, ...],
    parameters: dict[str, str | int] | None,
    expected: tuple[str, bool],
) -> None:
    stdin = b"" if parameters is None else _bootstrap(program, bundle, **parameters)
    program.start(bundle, *flags, stdin=stdin)
    arguments = program.facts(bundle)["arguments"]
    assert (arguments["ttrpc_address"], arguments["debug"]) == (
        program.address + expected[0],
        expected[1],
    )


def test_where_events_go_is_what_the_parameters_say_before_the_environment(
    program: Program,
) -> None:
    for name, named in (("web-1", ""), ("web-2", "/run/named.sock")):
        bundle = program.bundle(name)
        stdin = _bootstrap(program, bundle, containerd_ttrpc_address=named)
        program.start(bundle, stdin=stdin, environment={"TTRPC_ADDRESS": "/run/events.sock"})
        address = program.facts(bundle)["arguments"]["ttrpc_address"]
        assert address == (named or "/run/events.sock")


def test_the_shim_ignores_sigpipe_and_has_no_other_signal_ignored_blocked_or_caught(
    program: Program, bundle: Path
) -> None:
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD])\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    subprocess.run([sys.executable, "-c", script, *program.argv(bundle)], cwd=bundle, check=True)
    status = program.facts(bundle)["status"]
    # libc reserves signals 32 and 33: the shim and its parents cannot reset them.
    ours = sum(1 << number - 1 for number in signal.valid_signals())
    assert int(status["SigIgn"], 16) & ours == 1 << signal.SIGPIPE - 1
    assert int(status["SigBlk"], 16) == 0
    assert int(status["SigCgt"], 16) == 0


def _has_cap_sys_resource() -> bool:
    with open("/proc/self/status", encoding="utf-8") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 24 & 1)


@pytest.mark.parametrize(("containerds", "shims"), [(-999, -998), (500, 501), (1000, 1000)])
def test_the_oom_killer_takes_the_shim_before_containerd(
    program: Program, bundle: Path, containerds: int, shims: int
) -> None:
    if containerds < 0 and not _has_cap_sys_resource():
        pytest.skip("making a process dear to the OOM killer needs CAP_SYS_RESOURCE")
    script = f'echo {containerds} >/proc/self/oom_score_adj; "$@"; exit $?'
    subprocess.run(["sh", "-c", script, "sh", *program.argv(bundle)], cwd=bundle, check=True)
    assert program.facts(bundle)["oom_score_adj"] == shims


def test_ps_shows_what_the_process_is(program: Program, bundle: Path) -> None:
    program.start(bundle)
    facts = program.facts(bundle)
    expected = [NAME, "-namespace", "test", "-id", "web-1", "-address", program.address]
    assert facts["cmdline"] == expected
    assert facts["comm"] == NAME[:15]
    shown = subprocess.check_output(
        ["ps", "-ww", "-o", "args=", "-p", str(facts["pid"])], text=True
    )
    assert shown.split() == expected
    # Nothing behind the arguments was overwritten.
    with open(f"/proc/{facts['pid']}/environ", "rb") as file:
        assert os.fsencode(f"PATH={os.environ['PATH']}") in file.read().split(b"\0")


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "NVSHIM-E1004"),
        ('{"annotations": {"io.kubernetes.cri.sandbox-id": ', "NVSHIM-E1004"),
    ],
)
def test_an_unusable_spec_is_one_line_and_leaves_nothing(
    program: Program, bundle: Path, config: str | None, said: str
) -> None:
    if config is None:
        (bundle / "config.json").unlink()
        (bundle / "config.json").symlink_to("elsewhere")
    else:
        (bundle / "config.json").write_text(config)
    before = sorted(os.listdir(bundle))
    done = program.start(bundle, stdin=_bootstrap(program, bundle))
    assert done.returncode == 1
    assert done.stdout.startswith(said.encode())
    assert b"\n" not in done.stdout
    assert sorted(os.listdir(bundle)) == before
    assert not program.sockets.exists()


def test_a_socket_directory_that_cannot_be_had_is_one_line(program: Program, bundle: Path) -> None:
    program.sockets.parent.mkdir(parents=True)
    program.sockets.touch()
    done = program.start(bundle, stdin=_bootstrap(program, bundle))
    assert (done.returncode, done.stdout.split()[0]) == (1, b"NVSHIM-E1005")


def test_a_bundle_that_cannot_be_written_leaves_no_socket(program: Program, bundle: Path) -> None:
    (bundle / "address").mkdir()
    done = program.start(bundle, stdin=_bootstrap(program, bundle))
    (bundle / "address").rmdir()
    assert (done.returncode, done.stdout.split()[0]) == (1, b"NVSHIM-E1004")
    assert os.listdir(program.sockets) == []


def test_more_stdin_than_any_containerd_writes_is_refused(program: Program, bundle: Path) -> None:
    with pytest.raises(BrokenPipeError):
        _feed(program, bundle)


def _feed(program: Program, bundle: Path) -> None:
    with subprocess.Popen(
        program.argv(bundle),
        cwd=bundle,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for _ in range(12):
                process.stdin.write(b"x" * (1 << 20))
        finally:
            assert process.stdout.read().startswith(b"NVSHIM-E1003")
            assert process.wait() == 1


def test_a_server_that_cannot_start_says_so_in_containerds_log_and_leaves_no_socket(
    short_path: Path,
) -> None:
    program = Program(short_path, broken=True)
    bundle = program.bundle("web-1")
    os.mkfifo(bundle / "log")
    log = os.open(bundle / "log", os.O_RDWR | os.O_NONBLOCK)  # as containerd opens it
    try:
        done = program.start(bundle, stdin=_bootstrap(program, bundle))
        assert done.returncode == 0
        deadline = time.monotonic() + 5
        while os.listdir(program.sockets):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        line = os.read(log, 4096).decode()
    finally:
        os.close(log)
    assert line.startswith('level=error msg="the shim could not start: ImportError: a module is')
    assert line.count("\n") == 1
    assert line.endswith('"\n')


# -- runtime options for the shim itself ---------------------------------------------------------


@pytest.fixture
def cgroup() -> Iterator[str]:
    """Make a cgroup in two v1 hierarchies, or in the v2 hierarchy."""
    root = "/sys/fs/cgroup"
    unified = os.path.exists(f"{root}/cgroup.controllers")
    name = f"nvshim-test-{os.getpid()}"
    directories = [f"{h}/{name}" for h in ([root] if unified else [f"{root}/pids", f"{root}/cpu"])]
    for directory in directories:
        os.mkdir(directory)
    yield name
    deadline = time.monotonic() + 5
    for directory in directories:
        while True:
            try:
                os.rmdir(directory)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_the_shim_runs_in_the_cgroup_that_its_options_name(cgroup: str, short_path: Path) -> None:
    program = Program(short_path)
    try:
        bundle = program.bundle("web-1")
        options = runc_options_pb2.Options(shim_cgroup=f"/{cgroup}").SerializeToString()
        message = AnyMessage(type_url="containerd.runc.v1.Options", value=options)
        done = program.start(bundle, stdin=message.SerializeToString())
        assert done.stdout.startswith(b"unix://")
        with open(f"/proc/{program.facts(bundle)['pid']}/cgroup", encoding="ascii") as file:
            assert f":/{cgroup}\n" in file.read()
    finally:
        program.close()


def test_a_cgroup_that_is_not_there_fails_the_start_and_leaves_no_shim(
    program: Program, bundle: Path
) -> None:
    params = bootstrap_pb2.BootstrapParams.FromString(_bootstrap(program, bundle))
    options = runc_options_pb2.Options(shim_cgroup="/no/such/cgroup").SerializeToString()
    params.extensions.add(value=AnyMessage(type_url="containerd.runc.v1.Options", value=options))
    done = program.start(bundle, stdin=params.SerializeToString())
    assert (done.returncode, done.stdout.split()[0]) == (1, b"NVSHIM-E1009")
    assert os.listdir(program.sockets) == []
    if (bundle / "facts.json").exists():  # it was killed after it had started
        pid = program.facts(bundle)["pid"]
        eventually(lambda: not is_alive(pid), "the shim is dead")


def test_core_scheduling_is_asked_of_the_kernel(program: Program, bundle: Path) -> None:
    done = program.start(bundle, environment={"SCHED_CORE": "1"})
    # A kernel or a machine without it refuses, so start has to refuse, too.
    if done.returncode:
        assert done.stdout.startswith(b"NVSHIM-E1010")
    else:
        assert _accepts(_path_in(done.stdout))


def test_the_interpreter_is_the_one_that_was_named(program: Program) -> None:
    with open(program.path, encoding="utf-8") as file:
        assert file.readline() == f"#!{INTERPRETER} -IS\n"
