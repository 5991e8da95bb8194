"""Calls of the low-level runtime: their arguments, and the handling of errors."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import Status
from shim import syscalls
from shim.children import Reaper
from shim.errors import ProcessFinished, ProgramNotFound, ProgramTimeout, RuntimeFailed
from shim.runtime import runtime as runtime_module
from shim.runtime.options import RuntimeOptions
from shim.runtime.runtime import POINTLESS, LowLevelRuntime, last_error
from shim.stdio import ChildStdio

pytestmark = pytest.mark.anyio


_DEFAULTS = RuntimeOptions()


def _runtime(
    reaper: Reaper,
    directory: Path,
    script: str,
    options: RuntimeOptions = _DEFAULTS,
    name: str = "runc",
) -> LowLevelRuntime:
    """Make a runtime from a shell script, to fail in ways that are rare with runc."""
    binary = directory / name
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(0o755)
    return LowLevelRuntime(
        reaper,
        replace(options, binary_name=str(binary)),
        container_id="c1",
        root="/run/r",
        bundle=str(directory),
    )


async def test_arguments_are_those_of_runc_and_crun(reaper: Reaper, tmp_path: Path) -> None:
    script = 'shift 4; echo "$@" >> "$(dirname "$0")/calls"'
    runtime = _runtime(
        reaper, tmp_path, script, RuntimeOptions(systemd_cgroup=True, no_pivot_root=True)
    )
    await runtime.create(ChildStdio(console_socket="/c.sock"), pid_file="/b/init.pid")
    await runtime.start()
    await runtime.execute(ChildStdio(), process_file="/b/p.json", pid_file="/b/p.pid")
    await runtime.kill(15)
    await runtime.kill(9, everyone=True)
    await runtime.delete(force=True)
    await runtime.checkpoint(["--image-path", "/i", "--leave-running"], environment={})
    await runtime.restore(
        ChildStdio(console_socket="/c.sock"), ["--image-path", "/i"], pid_file="/p", environment={}
    )
    common = "--log-format json --systemd-cgroup"
    bundle, console = tmp_path, "--console-socket /c.sock"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"{common} create --bundle {bundle} --pid-file /b/init.pid --no-pivot {console} c1",
        f"{common} start c1",
        f"{common} exec --process /b/p.json --pid-file /b/p.pid --detach c1",
        f"{common} kill c1 15",
        f"{common} kill --all c1 9",
        f"{common} delete --force c1",
        f"{common} checkpoint --image-path /i --leave-running c1",
        (
            f"{common} restore --bundle {bundle} --pid-file /p --detach --no-subreaper --no-pivot"
            f" --image-path /i {console} c1"
        ),
    ]


async def test_limits_are_on_the_runtimes_stdin(reaper: Reaper, tmp_path: Path) -> None:
    script = 'shift 6; echo "$@" > "$(dirname "$0")/call"; cat > "$(dirname "$0")/stdin"'
    limits = b'{"memory": {"limit": 5}}' * 10_000
    await _runtime(reaper, tmp_path, script).update(limits)
    assert (tmp_path / "call").read_text() == "update --resources - c1\n"
    assert (tmp_path / "stdin").read_bytes() == limits


async def test_crun_is_not_told_to_restore_with_flags_that_it_lacks(
    reaper: Reaper, tmp_path: Path
) -> None:
    script = 'shift 7; echo "$@" >> "$(dirname "$0")/calls"'
    runtime = _runtime(reaper, tmp_path, script, RuntimeOptions(no_pivot_root=True), name="crun")
    await runtime.restore(ChildStdio(), [], pid_file="/p", environment={})
    assert (tmp_path / "calls").read_text() == f"--bundle {tmp_path} --pid-file /p --detach c1\n"


async def test_what_criu_is_to_find_is_in_the_environment(reaper: Reaper, tmp_path: Path) -> None:
    runtime = _runtime(reaper, tmp_path, 'echo "$CRIU_CONFIG_FILE" > "$(dirname "$0")/variable"')
    await runtime.checkpoint([], environment={"CRIU_CONFIG_FILE": "/w/criu.conf"})
    assert (tmp_path / "variable").read_text() == "/w/criu.conf\n"


@pytest.mark.parametrize("limit", ["2", ""])
async def test_containerds_limit_on_go_programs_is_the_runtimes(
    reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setenv("GOMAXPROCS", limit)
    runtime = _runtime(reaper, tmp_path, 'echo "${GOMAXPROCS-none}" > "$(dirname "$0")/variable"')
    await runtime.pause()
    assert (tmp_path / "variable").read_text() == f"{limit or 'none'}\n"


@pytest.mark.parametrize(("script", "known"), [("exit 0", True), ("exit 1", False)])
async def test_whether_a_runtime_has_a_verb_is_asked_of_its_help(
    reaper: Reaper, tmp_path: Path, script: str, *, known: bool
) -> None:
    script = f'echo "$@" > "$(dirname "$0")/calls"; {script}'
    assert await _runtime(reaper, tmp_path, script).knows("restore") is known
    assert (tmp_path / "calls").read_text() == "restore --help\n"


_LOG = 'echo \'{"level":"error","msg":"%s"}\' > "$4"; exit 1'


@pytest.mark.parametrize(
    ("script", "kind", "status", "found"),
    [
        (_LOG % "cgroup is frozen", RuntimeFailed, Status.UNKNOWN, ": cgroup is frozen"),
        (_LOG % "container not running", ProcessFinished, Status.NOT_FOUND, "not running"),
        (_LOG % "os: process already finished", ProcessFinished, Status.NOT_FOUND, "finished"),
        ("exit 3", RuntimeFailed, Status.UNKNOWN, "exit status 3"),
        ("kill -9 $$", RuntimeFailed, Status.UNKNOWN, "exit status 137"),
        (
            "printf '\\nruntime: out of memory\\n\\ngoroutine 1\\n' >&2; exit 2",
            RuntimeFailed,
            Status.UNKNOWN,
            ": exit status 2, and runtime: out of memory",
        ),
        ("echo 'container does not exist' >&2; exit 1", ProcessFinished, 5, "not exist"),
        ('head -c 100000 /dev/urandom > "$4"; exit 1', RuntimeFailed, Status.UNKNOWN, "status 1"),
    ],
)
async def test_a_failure_is_told_in_the_runtimes_own_words(
    reaper: Reaper, tmp_path: Path, script: str, kind: type[Exception], status: int, found: str
) -> None:
    runtime = _runtime(reaper, tmp_path, script)
    with pytest.raises(kind) as caught:
        await runtime.start()
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "c1" not in str(caught.value), (
        "the same text for each container, as Kubernetes counts it"
    )
    assert getattr(caught.value, "status", None) == status
    assert os.listdir(tmp_path) == ["runc"], "the log of the call is removed"


async def test_what_a_process_of_the_container_would_inherit_is_left_to_it(
    reaper: Reaper, tmp_path: Path
) -> None:
    lost = "libseccomp.so.2: No such file or directory"
    script = f'readlink /proc/$$/fd/2 >> "$(dirname "$0")/stderr"; echo "{lost}" >&2; exit 127'
    runtime = _runtime(reaper, tmp_path, script)
    said = []
    reading, piped = os.pipe()
    container = os.open(tmp_path / "container.log", os.O_WRONLY | os.O_CREAT)
    try:
        for stdio in (
            ChildStdio(stderr=piped),
            ChildStdio(stderr=container),
            ChildStdio(),
            ChildStdio(console_socket="/c.sock"),
        ):
            with pytest.raises(RuntimeFailed) as caught:
                await runtime.create(stdio, pid_file="/p")
            said.append(str(caught.value))
        pipe = os.readlink(f"/proc/self/fd/{piped}")
    finally:
        for fd in (container, reading, piped):
            os.close(fd)
    assert (tmp_path / "container.log").read_text() == f"{lost}\n"
    assert (tmp_path / "stderr").read_text().splitlines() == [
        pipe, str(tmp_path / "container.log"), os.devnull, "/memfd:stderr (deleted)",
    ]  # fmt: skip
    assert said[0].endswith(f"status 127, and {lost}")
    assert "status 127, and no word why. See the container's stderr" in said[1]
    assert said[2].endswith("status 127, and no word why")
    assert said[3].endswith(f"status 127, and {lost}")
    assert all(text.startswith("OCI runtime create failed: NVSHIM-E1203 ") for text in said)
    assert caught.value.status == Status.UNKNOWN, "it is no file of the image"


@pytest.mark.parametrize(
    ("verb", "said", "status"),
    [
        ("create", 'exec: "x": executable file not found in $PATH', Status.UNKNOWN),
        ("create", "executable file `x` not found in $PATH", Status.UNKNOWN),
        ("execute", 'exec: "/x": stat /x: no such file or directory', Status.UNKNOWN),
        ("create", "the source of a mount does not exist", Status.UNKNOWN),
        ("execute", "container does not exist", Status.UNKNOWN),
        ("kill", "kill container: No such process", Status.NOT_FOUND),
        ("kill", "container does not exist", Status.NOT_FOUND),
        ("delete", "container does not exist", Status.NOT_FOUND),
        ("delete", "rmdir of a cgroup: no such file or directory", Status.UNKNOWN),
    ],
)
async def test_not_found_is_what_is_gone_and_not_what_else_is_missing(
    reaper: Reaper, tmp_path: Path, verb: str, said: str, status: int
) -> None:
    log = json.dumps({"level": "error", "msg": said})
    runtime = _runtime(reaper, tmp_path, f"cat > \"$4\" <<'END'\n{log}\nEND\nexit 1")
    calls: dict[str, Callable[[], Awaitable[None]]] = {
        "create": lambda: runtime.create(ChildStdio(), pid_file="/p"),
        "execute": lambda: runtime.execute(ChildStdio(), process_file="/f", pid_file="/p"),
        "kill": lambda: runtime.kill(9),
        "delete": runtime.delete,
    }
    with pytest.raises((RuntimeFailed, ProcessFinished)) as caught:
        await calls[verb]()
    assert caught.value.status == status


async def test_a_missing_runtime_is_named(reaper: Reaper, tmp_path: Path) -> None:
    runtime = LowLevelRuntime(
        reaper,
        RuntimeOptions(binary_name="/no/such/runc"),
        container_id="c1",
        root="/run/r",
        bundle=str(tmp_path),
    )
    with pytest.raises(ProgramNotFound, match="/no/such/runc") as caught:
        await runtime.start()
    # In an answer to Delete, NOT_FOUND would mean that the container is gone.
    assert caught.value.status == Status.FAILED_PRECONDITION


@given(st.binary(max_size=500))
def test_any_log_gives_a_message_or_none(
    tmp_path_factory: pytest.TempPathFactory, log: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.json"
    path.write_bytes(log)
    assert isinstance(last_error(str(path)), str)


def test_the_last_error_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(
        '{"level":"error","msg":"first"}\nnot json\n[1]\n'
        '{"level":"warning","msg":"no error"}\n{"level":"error","msg":"last"}\n'
        '{"level":["error"],"msg":"no level"}\n{"level":{},"msg":[]}\n{"level":"er'
    )
    assert last_error(str(path)) == "last"
    entry = {"msg": "of several\nlines", "level": "error", "more": {"level": "error", "msg": "no"}}
    path.write_text(f"{{ no json\n{json.dumps(entry, indent=2)}{{\n" + '{"a":' * 10_000)
    assert last_error(str(path)) == "of several\nlines"
    assert last_error(str(tmp_path / "missing")) == ""


@pytest.mark.parametrize("verb", ["kill", "pause", "resume", "delete"])
async def test_a_call_that_hangs_is_killed_and_named(
    reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(runtime_module, "_PATIENCE", {verb: 0.2})
    runtime = _runtime(reaper, tmp_path, "echo $$ > ${0%/*}/pid; exec sleep 1000")
    arguments = (9,) if verb == "kill" else ()
    with pytest.raises(ProgramTimeout, match=f"runc {verb} of ") as caught:
        await getattr(runtime, verb)(*arguments)
    assert caught.value.status == Status.DEADLINE_EXCEEDED
    pid = int((tmp_path / "pid").read_text())
    with anyio.fail_after(5):
        while os.path.exists(f"/proc/{pid}"):  # noqa: ASYNC110 - seen from outside
            await anyio.sleep(0.01)
    assert runtime.calls() == []


async def test_only_what_can_do_nothing_any_more_is_ended_with_init(
    reaper: Reaper, tmp_path: Path
) -> None:
    runtime = _runtime(
        reaper, tmp_path, "for v; do [ $v = delete ] && exec sleep 0.5; done; sleep 9"
    )
    outcomes: dict[str, str] = {}

    async def call(verb: str) -> None:
        try:
            await (runtime.start() if verb == "start" else runtime.delete())
        except RuntimeFailed as error:
            outcomes[verb] = error.found
        else:
            outcomes[verb] = ""

    async with anyio.create_task_group() as tasks:
        for verb in ("start", "delete"):
            tasks.start_soon(call, verb)
        await anyio.sleep(0.2)
        assert sorted(verb for _, verb in runtime.calls()) == ["delete", "start"]
        runtime.end_calls(*POINTLESS)
    assert outcomes == {"start": "exit status 137, and no word why", "delete": ""}


async def test_null_devices_are_open_for_reading_or_for_writing(
    reaper: Reaper, tmp_path: Path
) -> None:
    runtime = _runtime(
        reaper, tmp_path, 'grep -h flags /proc/self/fdinfo/[02] >"$(dirname "$0")/seen"'
    )
    for mapped in (False, True):
        runtime._mapped = mapped
        await runtime.create(ChildStdio(), pid_file="/b/init.pid")
        modes = [
            int(line.split()[1], 8) & os.O_ACCMODE
            for line in (tmp_path / "seen").read_text().splitlines()
        ]
        assert modes == [os.O_RDONLY, os.O_WRONLY]


@pytest.mark.parametrize("failure", [errno.EMFILE, errno.EPERM])
async def test_the_hosts_null_device_is_for_who_may_not_mount_and_for_no_shortage(
    reaper: Reaper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    def refuse() -> int:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(syscalls, "null_device", refuse)
    runtime = _runtime(reaper, tmp_path, 'stat -L -c %t:%T /dev/fd/0 >"$(dirname "$0")/seen"')
    runtime._mapped = True
    before = os.listdir("/proc/self/fd")
    if failure == errno.EPERM:
        await runtime.create(ChildStdio(), pid_file="/b/init.pid")
        assert (tmp_path / "seen").read_text() == "1:3\n"
    else:
        with pytest.raises(OSError, match="Too many open files"):
            await runtime.create(ChildStdio(), pid_file="/b/init.pid")
        assert os.listdir(tmp_path) == ["runc"]
    assert os.listdir("/proc/self/fd") == before
