"""State directories that the fast path understands, and init's fifo from its other end."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

from shim.children import Child, Exit
from shim.runtime import fast_path, statedir
from shim.runtime.fast_path import FastPath
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


# The paths of values in each runtime's state.
_KEYS: Final = {
    "runc": {
        "pid": "init_process_pid", "start": "init_process_start", "hooks": "config/Hooks",
        "freezer": "cgroup_paths/freezer",
    },
    "crun": {"pid": "pid", "start": "process-start-time", "hooks": "spec/hooks"},
}  # fmt: skip


def _write(directory: Path, name: str, **changes: Any) -> str:
    """Write a runtime's state with changes, each named by a key of ``_KEYS`` or a path in it.

    ``spec`` is the spec that crun keeps next to the state.
    """
    state: dict[str, Any] = _RUNC if name == "runc" else {**_CRUN, "spec": _SPEC}
    for key, value in changes.items():
        state = _with(state, _KEYS[name].get(key, key), value)
    if name == "crun":
        state = dict(state)
        (directory / "config.json").write_text(json.dumps(state.pop("spec")))
    (directory / {"runc": "state.json", "crun": "status"}[name]).write_text(json.dumps(state))
    return str(directory)


@pytest.mark.parametrize(("name", "kind"), [("runc", Kind.RUNC), ("crun", Kind.CRUN)])
def test_both_runtimes_are_understood(tmp_path: Path, name: str, kind: Kind) -> None:
    directory = tmp_path / name
    directory.mkdir()
    os.mkfifo(directory / statedir.FIFO)
    state = statedir.read(_write(directory, name))
    assert state is not None
    assert (state.kind, state.pid, state.start_time) == (kind, 4_000_000, 7)
    assert (state.hooks, state.plain) == (frozenset(), True)
    hooks = {"poststop": [{"path": "/x"}], "startContainer": [{"path": "/x"}], "prestart": []}
    state = statedir.read(_write(directory, name, hooks=hooks))
    assert state is not None
    assert state.hooks == {"poststop", "startcontainer"}
    # Files that appeared meanwhile are removed with the directory.
    (directory / "state-123456789.json").write_text("")
    (directory / "notify").mkdir()
    statedir.remove(str(directory))
    assert not directory.exists()


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("runc", "rootless", True),
        ("runc", "intel_rdt_path", "/sys/fs/resctrl/c"),
        ("runc", "config/intelRdt", {}),
        ("runc", "config/intel_rdt", {"schema": ""}),
        ("runc", "config/cgroups/Systemd", True),
        ("runc", "config/cgroups/systemd", True),
        ("runc", "config/namespaces", []),
        ("runc", "config/namespaces", [{"type": "NEWPID", "path": "/proc/1/ns/pid"}]),
        ("runc", "cgroup_paths/pids", "/home/somebody"),
        ("runc", "cgroup_paths/pids", "/sys/fs/cgroup/pids/../../../../home"),
        ("crun", "systemd-cgroup", True),
        ("crun", "scope", "c.scope"),
        ("crun", "intelrdt", "c"),
        ("crun", "cgroup-path", "/a/../../b"),
        ("crun", "spec/linux/namespaces", []),
        ("crun", "spec/linux/intelRdt", {"closID": "c"}),
        ("crun", "spec/annotations", {"run.oci.handler": "wasm"}),
    ],
)
def test_what_a_runtime_would_have_more_to_do_for_is_not_plain(
    tmp_path: Path, name: str, path: str, value: Any
) -> None:
    state = statedir.read(_write(tmp_path, name, **{path: value}))
    assert state is not None
    assert not state.plain


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "{", '{"id": 1}', json.dumps(_with(_RUNC, "manager", "yes")),
     json.dumps(_with(_RUNC, "config", None)), json.dumps(_with(_RUNC, "cgroup_paths", [1])),
     json.dumps(_with(_RUNC, "init_process_pid", None)),
     json.dumps(_with(_RUNC, "init_process_pid", float("inf"))),
     json.dumps(_with(_with(_RUNC, "rootless", True), "cgroup_paths/pids", 7))],
)  # fmt: skip
def test_what_is_not_known_to_the_last_key_is_not_known(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    assert statedir.read(str(tmp_path)) is None


def test_a_further_file_or_a_fifo_that_is_none_is_not_known(tmp_path: Path) -> None:
    assert statedir.read(str(tmp_path)) is None
    assert statedir.read(str(tmp_path / "missing")) is None
    _write(tmp_path, "runc")
    (tmp_path / "notify").mkdir()
    assert statedir.read(str(tmp_path)) is None
    (tmp_path / "notify").rmdir()
    (tmp_path / statedir.FIFO).write_text("")
    assert statedir.read(str(tmp_path)) is None


# -- the fifo -------------------------------------------------------------------------------------


Made = Callable[..., tuple[Child, FastPath]]


@pytest.fixture
def fast_path_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return the fast path of a container with a stand-in runtime that its init executes."""

    def made(name: str, *, pid: int = 4_000_000, **changes: Any) -> tuple[Child, FastPath]:
        program = directory.parent / name
        program.write_text("")
        program.chmod(0o755)
        monkeypatch.setattr(fast_path, "_executes", lambda *_: True)
        init = Child(pid)
        _write(directory, name, pid=pid, **changes)
        return init, FastPath(str(program), str(directory), init, systemd_cgroup=False)

    return made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make a state directory with init's fifo."""
    made = tmp_path / "state"
    made.mkdir()
    os.mkfifo(made / statedir.FIFO)
    return made


@pytest.fixture
def fifo(directory: Path) -> Iterator[int]:
    """Open the end of the fifo that crun's init holds."""
    fd = os.open(directory / statedir.FIFO, os.O_RDONLY | os.O_NONBLOCK)
    yield fd
    os.close(fd)


both = pytest.mark.parametrize("name", ["runc", "crun"])


async def test_runc_s_init_is_heard_to_its_end_be_it_late(
    directory: Path, fast_path_of: Made
) -> None:
    _, fast = fast_path_of("runc")
    closed = []

    def init() -> None:
        with open(directory / statedir.FIFO, "wb", buffering=0) as fifo:
            fifo.write(b"0")
            closed.append(threading.Event().wait(0.2))

    late = threading.Timer(0.2, init)
    late.start()
    assert await fast.start()
    assert closed  # it had executed its program before that
    late.join()
    assert not (directory / statedir.FIFO).exists()


async def test_an_init_that_dies_or_that_somebody_else_has_heard_is_left_to_the_runtime(
    directory: Path, fast_path_of: Made
) -> None:
    init, fast = fast_path_of("runc")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_open_and_close, directory / statedir.FIFO)
            assert not await fast.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_die, init)
            assert not await fast.start()
        assert not await fast.start()
    assert (directory / statedir.FIFO).exists()


async def test_crun_s_init_gets_its_byte_if_it_is_there(
    directory: Path, fast_path_of: Made, request: pytest.FixtureRequest
) -> None:
    _, fast = fast_path_of("crun")
    assert not await fast.start()
    assert (directory / statedir.FIFO).exists()
    fifo = request.getfixturevalue("fifo")
    assert await fast.start()
    assert os.read(fifo, 2) == b"\0"
    assert not (directory / statedir.FIFO).exists()


@both
async def test_nothing_stands_in_where_hooks_belong_to_the_call(
    directory: Path, fast_path_of: Made, name: str
) -> None:
    hooks = {kind: [{"path": "/x"}] for kind in ("poststart", "poststop")}
    init, fast = fast_path_of(name, hooks=hooks)
    assert not await fast.start()
    init._finish(Exit(init.pid, 0, 1))
    assert not await fast.delete()
    assert directory.exists()


@both
async def test_an_init_that_somebody_has_frozen_is_the_runtime_s(
    directory: Path, fast_path_of: Made, fifo: int, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cgroup = _frozen(directory, "1" if name == "crun" else "FROZEN")
    monkeypatch.setattr(statedir, "_below_each_hierarchy", lambda _: [cgroup])
    _, fast = fast_path_of(name, **({"freezer": cgroup} if name == "runc" else {}))
    with anyio.fail_after(5):
        assert not await fast.start()
    assert not os.read(fifo, 1)
    assert (directory / statedir.FIFO).exists()


@both
async def test_only_what_has_ended_is_deleted_and_not_another_of_its_name_or_number(
    directory: Path, fast_path_of: Made, name: str
) -> None:
    init, fast = fast_path_of(name)
    assert not await fast.delete()
    init._finish(Exit(init.pid, 0, 1))
    for change in ({"pid": 4_000_001}, {"start": 8}):
        _write(directory, name, **change)
        assert not await fast.delete()
    assert directory.exists()
    _write(directory, name)
    assert await fast.delete()
    assert not directory.exists()


async def test_a_cgroup_with_others_below_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast_path, "_BUSY", (1000,))
    roots = [f"/sys/fs/cgroup/{name}" for name in ("pids", "")]
    root = next(r for r in roots if os.path.exists(os.path.join(r, "cgroup.procs")))
    group = os.path.join(root, f"nvshim-unit-{os.getpid()}")
    inner = os.path.join(group, "inner")
    os.makedirs(inner)
    try:
        with anyio.fail_after(5):
            with pytest.raises(OSError, match=r"busy|not empty"):
                await fast_path._remove_cgroup(group)
            await fast_path._remove_cgroup(inner)
            await fast_path._remove_cgroup(group)
            assert not os.path.exists(group)
            await fast_path._remove_cgroup(group)
    finally:
        for path in (inner, group):
            if os.path.exists(path):
                os.rmdir(path)


@pytest.mark.parametrize(
    ("name", "change", "freezer", "is_done"),
    [
        ("runc", {}, "THAWED", True),
        ("runc", {}, "0", True),
        ("crun", {}, "", True),
        ("runc", {}, "FROZEN", False),
        ("runc", {}, "FREEZING", False),
        ("runc", {}, "1", False),
        ("runc", {"config/namespaces": []}, "THAWED", False),
        ("runc", {"init_process_pid": 4_000_000}, "THAWED", False),
    ],
)
def test_init_is_signalled_where_a_runtime_would_do_no_more(
    directory: Path,
    fast_path_of: Made,
    name: str,
    change: dict[str, Any],
    freezer: str,
    is_done: bool,
) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        frozen = {"cgroup_paths": {"freezer": _frozen(directory, freezer)}} if freezer else {}
        _, fast = fast_path_of(name, pid=process.pid, **frozen, **change)
        assert fast.kill(signal.SIGCONT) == is_done
        assert fast.kill(signal.SIGKILL) == is_done
        if is_done:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            # It has exited, but is not reaped yet.
            assert not fast.kill(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        else:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


async def test_a_setting_has_every_call_made(
    fast_path_of: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fast_path.VARIABLE, "0")
    init, fast = fast_path_of("runc")
    init._finish(Exit(init.pid, 0, 1))
    assert not await fast.delete()


def test_a_program_is_told_from_its_wrapper_by_what_init_executes(tmp_path: Path) -> None:
    own = os.path.realpath("/proc/self/exe")
    assert fast_path._executes(os.getpid(), own)
    assert not fast_path._executes(os.getpid(), "/bin/true")
    assert not fast_path._executes(4_000_000, own)
    assert not fast_path._executes(os.getpid(), str(tmp_path / "missing"))


def _frozen(directory: Path, state: str) -> str:
    """Make a cgroup with a freezer state in the format of v2 (a digit) or v1."""
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
