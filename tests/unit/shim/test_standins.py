"""What is known of a runtime's state directory, and what is not; init's fifo from its other end."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from shim.children import Child, Exit
from shim.runtime import standins, statedir
from shim.runtime.standins import StandIns
from shim.runtime.statedir import Kind

pytestmark = pytest.mark.anyio

_CGROUP: Final = "/sys/fs/cgroup/pids/no-such-namespace/c"

_RUNC: Final[dict[str, Any]] = {
    "id": "c",
    "init_process_pid": 4_000_000,
    "init_process_start": 7,
    "created": "2026-01-01T00:00:00Z",
    "config": {
        "Hooks": {"poststop": None, "prestart": []},
        "cgroups": {"path": "/no-such-namespace/c", "Systemd": False},
        "namespaces": [{"type": "NEWPID", "path": ""}, {"type": "NEWNS", "path": ""}],
    },
    "rootless": False,
    "cgroup_paths": {"pids": _CGROUP},
    "namespace_paths": {},
    "external_descriptors": [],
    "intel_rdt_path": "",
}
_CRUN: Final[dict[str, Any]] = {
    "pid": 4_000_000,
    "process-start-time": 7,
    "cgroup-path": "/no-such-namespace/c",
    "scope": "",
    "rootfs": "rootfs",
    "systemd-cgroup": False,
    "bundle": "/b",
    "created": "",
    "owner": "root",
    "detached": True,
    "external_descriptors": "",
}
_SPEC: Final[dict[str, Any]] = {"linux": {"namespaces": [{"type": "pid"}]}}


def _with(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(base)
    inner = changed
    *folders, name = path.split("/")
    for folder in folders:
        inner = inner[folder]
    inner[name] = value
    return changed


def _runc(directory: Path, state: dict[str, Any] = _RUNC) -> str:
    (directory / "state.json").write_text(json.dumps(state))
    return str(directory)


def _crun(directory: Path, status: dict[str, Any] = _CRUN, spec: dict[str, Any] = _SPEC) -> str:
    (directory / "status").write_text(json.dumps(status))
    (directory / "config.json").write_text(json.dumps(spec))
    return str(directory)


def test_both_runtimes_are_understood(tmp_path: Path) -> None:
    for name, write, kind in (("r", _runc, Kind.RUNC), ("c", _crun, Kind.CRUN)):
        directory = tmp_path / name
        directory.mkdir()
        os.mkfifo(directory / statedir.FIFO)
        state = statedir.read(write(directory))
        assert state is not None
        assert (state.kind, state.pid, state.start_time) == (kind, 4_000_000, 7)
        assert (state.hooks, state.plain) == (frozenset(), True)
        statedir.remove(str(directory))
        assert not directory.exists()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rootless", True),
        ("intel_rdt_path", "/sys/fs/resctrl/c"),
        ("config/intelRdt", {}),
        ("config/intel_rdt", {"schema": ""}),
        ("config/cgroups/Systemd", True),
        ("config/cgroups/systemd", True),
        ("config/namespaces", []),
        ("config/namespaces", [{"type": "NEWPID", "path": "/proc/1/ns/pid"}]),
        ("cgroup_paths/pids", "/home/somebody"),
        ("cgroup_paths/pids", "/sys/fs/cgroup/pids/../../../../home"),
    ],
)
def test_what_runc_would_have_more_to_do_for_is_not_plain(
    tmp_path: Path, path: str, value: Any
) -> None:
    state = statedir.read(_runc(tmp_path, _with(_RUNC, path, value)))
    assert state is not None
    assert not state.plain


@pytest.mark.parametrize(
    ("status", "spec"),
    [
        (_with(_CRUN, "systemd-cgroup", True), _SPEC),
        (_with(_CRUN, "scope", "c.scope"), _SPEC),
        (_with(_CRUN, "intelrdt", "c"), _SPEC),
        (_with(_CRUN, "cgroup-path", "/a/../../b"), _SPEC),
        (_CRUN, {"linux": {"namespaces": []}}),
        (_CRUN, _with(_SPEC, "linux/intelRdt", {"closID": "c"})),
        (_CRUN, _with(_SPEC, "annotations", {"run.oci.handler": "wasm"})),
    ],
)
def test_what_crun_would_have_more_to_do_for_is_not_plain(
    tmp_path: Path, status: dict[str, Any], spec: dict[str, Any]
) -> None:
    state = statedir.read(_crun(tmp_path, status, spec))
    assert state is not None
    assert not state.plain


def test_hooks_are_known_by_their_kind(tmp_path: Path) -> None:
    hooks = {"poststop": [{"path": "/x"}], "startContainer": [{"path": "/x"}], "prestart": []}
    for name in ("runc", "crun"):
        directory = tmp_path / name
        directory.mkdir()
        if name == "runc":
            _runc(directory, _with(_RUNC, "config/Hooks", hooks))
        else:
            _crun(directory, _CRUN, _with(_SPEC, "hooks", hooks))
        state = statedir.read(str(directory))
        assert state is not None
        assert state.hooks == {"poststop", "startcontainer"}


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "{", '{"id": 1}', json.dumps(_with(_RUNC, "manager", "yes")),
     json.dumps(_with(_RUNC, "config", None)), json.dumps(_with(_RUNC, "cgroup_paths", [1])),
     json.dumps(_with(_RUNC, "init_process_pid", None))],
)  # fmt: skip
def test_what_is_not_known_to_the_last_key_is_not_known(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    assert statedir.read(str(tmp_path)) is None


def test_a_further_file_or_a_fifo_that_is_none_is_not_known(tmp_path: Path) -> None:
    assert statedir.read(str(tmp_path)) is None
    assert statedir.read(str(tmp_path / "missing")) is None
    _runc(tmp_path)
    (tmp_path / "notify").mkdir()
    assert statedir.read(str(tmp_path)) is None
    (tmp_path / "notify").rmdir()
    (tmp_path / statedir.FIFO).write_text("")
    assert statedir.read(str(tmp_path)) is None


def test_what_came_meanwhile_goes_with_the_directory(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    _runc(directory)
    (directory / "state-123456789.json").write_text("")
    (directory / "notify").mkdir()
    statedir.remove(str(directory))
    assert not directory.exists()


# -- the fifo -------------------------------------------------------------------------------------


def _stand_ins(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, pid: int = 4_000_000
) -> tuple[Child, StandIns]:
    """Of a container whose runtime is a file of that name, which its init is taken to execute."""
    program = directory.parent / name
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setattr(standins, "_executes", lambda *_: True)
    init = Child(pid)
    return init, StandIns(str(program), str(directory), init, systemd_cgroup=False)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A state directory with init's fifo."""
    made = tmp_path / "state"
    made.mkdir()
    os.mkfifo(made / statedir.FIFO)
    return made


async def test_runc_s_init_is_heard_to_its_end_be_it_late(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stand_ins = _stand_ins(directory, monkeypatch, "runc")
    _runc(directory)
    closed = []

    def init() -> None:
        with open(directory / statedir.FIFO, "wb", buffering=0) as fifo:
            fifo.write(b"0")
            closed.append(threading.Event().wait(0.2))

    late = threading.Timer(0.2, init)
    late.start()
    assert await stand_ins.start()
    assert closed  # it had executed its program by then
    late.join()
    assert not (directory / statedir.FIFO).exists()


async def test_an_init_that_dies_or_that_somebody_else_has_heard_is_left_to_the_runtime(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, stand_ins = _stand_ins(directory, monkeypatch, "runc")
    _runc(directory)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_open_and_close, directory / statedir.FIFO)
            assert not await stand_ins.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_die, init)
            assert not await stand_ins.start()
        assert not await stand_ins.start()
    assert (directory / statedir.FIFO).exists()


async def test_crun_s_init_gets_its_byte_if_it_is_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stand_ins = _stand_ins(directory, monkeypatch, "crun")
    _crun(directory)
    assert not await stand_ins.start()
    assert (directory / statedir.FIFO).exists()
    fd = os.open(directory / statedir.FIFO, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert await stand_ins.start()
        assert os.read(fd, 2) == b"\0"
    finally:
        os.close(fd)
    assert not (directory / statedir.FIFO).exists()


@pytest.mark.parametrize("name", ["runc", "crun"])
async def test_nothing_stands_in_where_hooks_belong_to_the_call(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    init, stand_ins = _stand_ins(directory, monkeypatch, name)
    hooks = {kind: [{"path": "/x"}] for kind in ("poststart", "poststop")}
    if name == "runc":
        _runc(directory, _with(_RUNC, "config/Hooks", hooks))
    else:
        _crun(directory, _CRUN, _with(_SPEC, "hooks", hooks))
    assert not await stand_ins.start()
    init._finish(Exit(init.pid, 0, 1))
    assert not await stand_ins.delete()
    assert directory.exists()


@pytest.mark.parametrize("name", ["runc", "crun"])
async def test_an_init_that_somebody_has_frozen_is_the_runtime_s(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _, stand_ins = _stand_ins(directory, monkeypatch, name)
    cgroup = _frozen(directory, "1" if name == "crun" else "FROZEN")
    monkeypatch.setattr(statedir, "_below_each_hierarchy", lambda _: [cgroup])
    if name == "runc":
        _runc(directory, _with(_RUNC, "cgroup_paths/freezer", cgroup))
    else:
        _crun(directory)
    fd = os.open(directory / statedir.FIFO, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with anyio.fail_after(5):
            assert not await stand_ins.start()
        assert not os.read(fd, 1)
    finally:
        os.close(fd)
    assert (directory / statedir.FIFO).exists()


@pytest.mark.parametrize("name", ["runc", "crun"])
async def test_one_of_the_same_name_that_was_made_since_is_left_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    init, stand_ins = _stand_ins(directory, monkeypatch, name)
    write, base = (_runc, _RUNC) if name == "runc" else (_crun, _CRUN)
    key = "init_process_start" if name == "runc" else "process-start-time"
    write(directory, base)
    assert not await stand_ins.delete()
    init._finish(Exit(init.pid, 0, 1))
    write(directory, _with(base, key, 8))
    assert not await stand_ins.delete()
    assert directory.exists()
    write(directory, base)
    assert await stand_ins.delete()


async def test_a_cgroup_with_others_below_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standins, "_BUSY", (1000,))
    roots = [f"/sys/fs/cgroup/{name}" for name in ("pids", "")]
    root = next(r for r in roots if os.path.exists(os.path.join(r, "cgroup.procs")))
    group = os.path.join(root, f"nvshim-unit-{os.getpid()}")
    inner = os.path.join(group, "inner")
    os.makedirs(inner)
    try:
        with anyio.fail_after(5):
            with pytest.raises(OSError, match=r"busy|not empty"):
                await standins._remove_cgroup(group)
            await standins._remove_cgroup(inner)
            await standins._remove_cgroup(group)
            assert not os.path.exists(group)
            await standins._remove_cgroup(group)
    finally:
        for path in (inner, group):
            if os.path.exists(path):
                os.rmdir(path)


@pytest.mark.parametrize("name", ["runc", "crun"])
async def test_only_what_has_ended_is_deleted_and_only_if_it_is_ours(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    init, stand_ins = _stand_ins(directory, monkeypatch, name)
    (_runc if name == "runc" else _crun)(directory)
    assert not await stand_ins.delete()
    init._finish(Exit(init.pid, 0, 1))
    key, base = ("init_process_pid", _RUNC) if name == "runc" else ("pid", _CRUN)
    (_runc if name == "runc" else _crun)(directory, _with(base, key, 4_000_001))
    assert not await stand_ins.delete()
    (_runc if name == "runc" else _crun)(directory)
    assert await stand_ins.delete()
    assert not directory.exists()


@pytest.mark.parametrize(
    ("name", "change", "freezer", "is_done"),
    [
        ("runc", {}, "THAWED", True),
        ("runc", {}, "0", True),
        ("crun", {}, "THAWED", True),
        ("runc", {}, "FROZEN", False),
        ("runc", {}, "FREEZING", False),
        ("runc", {}, "1", False),
        ("runc", {"config/namespaces": []}, "THAWED", False),
        ("runc", {"init_process_pid": 4_000_000}, "THAWED", False),
    ],
)
def test_init_is_signalled_where_a_runtime_would_do_no_more(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    change: dict[str, Any],
    freezer: str,
    is_done: bool,
) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        init, stand_ins = _stand_ins(directory, monkeypatch, name, pid=process.pid)
        state = _with(_RUNC, "init_process_pid", init.pid)
        state["cgroup_paths"] = {"freezer": _frozen(directory, freezer)}
        for path, value in change.items():
            state = _with(state, path, value)
        if name == "runc":
            _runc(directory, state)
        else:
            _crun(directory, _with(_CRUN, "pid", init.pid))
        assert stand_ins.kill(signal.SIGCONT) == is_done
        assert stand_ins.kill(signal.SIGKILL) == is_done
        if is_done:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            # It has ended, and nobody has collected it yet.
            assert not stand_ins.kill(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        else:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


async def test_a_setting_has_every_call_made(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(standins.VARIABLE, "0")
    init, stand_ins = _stand_ins(directory, monkeypatch, "runc")
    _runc(directory)
    init._finish(Exit(init.pid, 0, 1))
    assert not await stand_ins.delete()


def test_a_program_is_told_from_its_wrapper_by_what_init_executes(tmp_path: Path) -> None:
    own = os.path.realpath("/proc/self/exe")
    assert standins._executes(os.getpid(), own)
    assert not standins._executes(os.getpid(), "/bin/true")
    assert not standins._executes(4_000_000, own)
    assert not standins._executes(os.getpid(), str(tmp_path / "missing"))


def _frozen(directory: Path, state: str) -> str:
    """A cgroup that says whether it is frozen as version 2 does, in a digit, or as version 1."""
    cgroup = directory.parent / "cgroup"
    cgroup.mkdir()
    name = "cgroup.freeze" if state.isdigit() else "freezer.state"
    (cgroup / name).write_text(f"{state}\n")
    return str(cgroup)


async def _open_and_close(path: Path) -> None:
    await anyio.sleep(0.05)
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


async def _die(init: Child) -> None:
    await anyio.sleep(0.05)
    init._finish(Exit(init.pid, 137, 1))
