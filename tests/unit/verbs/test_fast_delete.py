"""``delete`` after a shim's regular exit, which the native launcher answers by itself.

:mod:`shim.verbs.delete` defines the verb. A stub in its place shows when the launcher falls back to
Python. When it does not, Python has to give the same answer and change nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from api.proto import task_pb2
from shim.bundle import FILES_AFTER_DELETE
from shim.verbs.delete import delete
from shim.verbs.invocation import parse
from tools.launcher import compile_native

NAME = "containerd-shim-nvidia-v1"
PYTHON = b"left to Python"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("native") / NAME
    compile_native(str(path), compiler="gcc")
    script = path.with_name(f"{NAME}.py")
    script.write_text(f"#!/bin/sh\nprintf '{PYTHON.decode()}'\n")
    script.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def gone() -> int:
    """Return the pid of a process that has exited."""
    with subprocess.Popen(["true"]) as process:
        return process.pid


@pytest.fixture
def bundle(short_path: Path, gone: int) -> Path:
    """Make the bundle that a shim leaves after it deleted its container and exited."""
    bundle = short_path / "c1"
    (bundle / "rootfs").mkdir(parents=True)
    for name in FILES_AFTER_DELETE:
        (bundle / name).touch()
    (short_path / "s").mkdir()
    for name in ("s", "work", "log"):
        (bundle / name).unlink()
    (bundle / "s").symlink_to(short_path / "s")
    (bundle / "work").symlink_to(short_path)
    os.mkfifo(bundle / "log")
    for name, content in {
        "address": f"unix://{short_path}/s/socket",
        "config.json": "{}",
        "init.pid": str(gone),
        "nvidia.json": "{}",
        "options.json": f'{{"binary": "runc", "root": "{short_path}/r", "systemd_cgroup": false}}',
        "runtime": "runc",
        "shim-binary-path": f"/{NAME}",
    }.items():
        (bundle / name).write_text(content)
    return bundle


def _delete(compiled: str, bundle: Path, *more: str, container_id: str = "c1") -> bytes:
    words = ["-namespace", "test", "-address", "/nowhere", "-publish-binary", "/bin/false"]
    argv = [compiled, *words, "-id", container_id, "-bundle", str(bundle), *more, "delete"]
    done = subprocess.run(argv, cwd=bundle, capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
    return done.stdout


def _state(bundle: Path) -> list[tuple[str, int]]:
    found = [str(path) for path in bundle.parent.rglob("*")]
    return sorted((path, os.lstat(path).st_mtime_ns) for path in found)


@pytest.mark.parametrize("more", [(), ("-debug",)])
def test_it_is_answered_and_nothing_is_changed(
    compiled: str, bundle: Path, gone: int, more: tuple[str, ...]
) -> None:
    before, began = _state(bundle), time.time_ns()
    answer = task_pb2.DeleteResponse.FromString(_delete(compiled, bundle, *more))
    assert (answer.pid, answer.exit_status) == (gone, 137)
    assert began <= answer.exited_at.ToNanoseconds() <= time.time_ns()
    assert _state(bundle) == before


def _strip(bundle: Path) -> None:
    for path in bundle.iterdir():
        if path.name not in {"address", "options.json", "rootfs"}:
            path.unlink()


def _pid(bundle: Path) -> str:
    return (bundle / "init.pid").read_text()


# Variations of a bundle that need no cleanup, either.
SETTLED: dict[str, Callable[[Path], object]] = {
    "all files": lambda _: None,
    **{
        f"no {name}": lambda bundle, name=name: (bundle / name).unlink()  # type: ignore[misc]
        for name in FILES_AFTER_DELETE
        if name not in {"address", "options.json", "rootfs"}
    },
    "no rootfs": lambda bundle: (bundle / "rootfs").rmdir(),
    "a full rootfs": lambda bundle: (bundle / "rootfs" / "file").touch(),
    "only what is looked at": _strip,
    "a pid on a line": lambda bundle: (bundle / "init.pid").write_text(f"{_pid(bundle)} \n"),
    "an address on a line": lambda bundle: (bundle / "address").write_text(
        (bundle / "address").read_text() + "\n"
    ),
    "no socket directory": lambda bundle: (bundle.parent / "s").rmdir(),
    "options of a systemd cgroup": lambda bundle: (bundle / "options.json").write_text(
        (bundle / "options.json").read_text().replace("false", "true")
    ),
    "another bootstrap address": lambda bundle: (bundle / "bootstrap.json").write_text(
        '{"version": 3, "address": "unix:///nowhere/socket", "protocol": "ttrpc"}'
    ),
    "no spec that can be read": lambda bundle: (bundle / "config.json").write_text("{"),
}


def _contents(bundle: Path) -> dict[str, object]:
    """Return all files around a bundle by path: contents, link targets, or types."""
    found: dict[str, object] = {}
    for path in bundle.parent.rglob("*"):
        mode = path.lstat().st_mode
        content: object = stat.S_IFMT(mode)
        if stat.S_ISLNK(mode):
            content = os.readlink(path)
        elif stat.S_ISREG(mode):
            content = path.read_bytes()
        found[str(path)] = content
    return found


@pytest.mark.parametrize("state", SETTLED)
def test_launcher_and_python_answer_the_same_and_change_nothing(
    compiled: str, bundle: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    SETTLED[state](bundle)
    before = _contents(bundle)
    words = ["-namespace", "test", "-id", "c1", "-address", "/nowhere", "-bundle", str(bundle)]
    fast = _delete(compiled, bundle)
    assert fast != PYTHON
    problems: list[str] = []
    monkeypatch.setattr("shim.verbs.delete._warn", problems.append)
    slow = delete(parse([*words, "delete"]))
    assert _contents(bundle) == before
    answers = [task_pb2.DeleteResponse.FromString(answer) for answer in (fast, slow)]
    assert {answer.pid for answer in answers} == {answers[0].pid}
    assert {answer.exit_status for answer in answers} == {137}
    assert abs(answers[1].exited_at.seconds - answers[0].exited_at.seconds) < 10
    assert problems == []


def test_of_a_container_that_never_ran_there_is_no_pid(compiled: str, bundle: Path) -> None:
    (bundle / "init.pid").unlink()
    answer = task_pb2.DeleteResponse.FromString(_delete(compiled, bundle))
    assert (answer.pid, answer.exit_status) == (0, 137)


def _file(name: str, content: str = "") -> Callable[[Path], object]:
    return lambda bundle: (bundle / name).write_text(content)


def _missing(name: str) -> Callable[[Path], object]:
    return lambda bundle: (bundle / name).unlink()


def _announced(bundle: Path) -> None:
    (bundle.parent / "s" / "socket.c1").symlink_to(bundle)


def _socket(bundle: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(bundle.parent / "s" / "socket"))


@pytest.mark.parametrize(
    "left",
    [
        _file("log.create-1.json"),
        _file("logger.1.2"),
        _file("member.c2.json"),
        _file("holder", "1 2\n"),
        _file("something-new"),
        lambda bundle: (bundle / "nvidia").mkdir(),
        lambda bundle: (bundle / "pod").mkdir(),
        _file("init.pid", str(os.getpid())),
        _file("init.pid", "x"),
        _file("init.pid", ""),
        _file("init.pid", "-1"),
        _file("init.pid", "9" * 30),
        lambda bundle: (bundle.parent / "r" / "c1").mkdir(parents=True),
        _missing("options.json"),
        _file("options.json", "{}"),
        _file("options.json", '{"root": "/with\\u0020escape"}'),
        _file("options.json", '{"root": "relative"}'),
        _file("options.json", '{"root": "/' + "x" * 5000 + '"}'),
        _missing("address"),
        _file("address", "vsock://1:2"),
        _announced,
        _socket,
    ],
    ids=[
        "a call", "a logger", "a member", "a holder", "what nobody knows", "staging", "a pod",
        "init lives", "no pid", "an empty pid", "a negative pid", "a giant pid", "runtime's state",
        "no options", "empty options", "an escape", "a relative root", "a giant file",
        "no address", "another address", "an announcement", "a socket",
    ],
)  # fmt: skip
def test_whatever_is_left_or_unclear_is_left_to_python(
    compiled: str, bundle: Path, left: Callable[[Path], object]
) -> None:
    left(bundle)
    assert _delete(compiled, bundle) == PYTHON


@pytest.mark.parametrize(
    "more",
    [("-new-flag", "x"), ("--debug",), ("-debug=true",), ("-id",), ("word",), ("-id", "../c1")],
    ids=" ".join,
)
def test_words_that_containerd_does_not_say_are_left_to_python(
    compiled: str, bundle: Path, more: tuple[str, ...]
) -> None:
    assert _delete(compiled, bundle, *more) == PYTHON


@pytest.mark.parametrize("container_id", ["", ".", "a/b", "-c", "c" * 77])
def test_a_bad_id_is_left_to_python(compiled: str, bundle: Path, container_id: str) -> None:
    assert _delete(compiled, bundle, container_id=container_id) == PYTHON


@pytest.fixture(params=["rootfs", "rootfs/below"])
def mounted(bundle: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    where = bundle / request.param
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", where], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", where], check=True)


@pytest.mark.usefixtures("mounted")
def test_a_mount_is_left_to_python_by_whatever_path_it_is_asked_for(
    compiled: str, bundle: Path, short_path: Path
) -> None:
    assert _delete(compiled, bundle) == PYTHON
    (short_path / "link").symlink_to(bundle)
    assert _delete(compiled, short_path / "link") == PYTHON


def test_a_path_that_the_kernel_writes_otherwise_is_left_to_python(
    compiled: str, bundle: Path, short_path: Path
) -> None:
    spaced = short_path / "a bundle"
    shutil.copytree(bundle, spaced, symlinks=True, ignore=lambda *_: ["log"])
    assert _delete(compiled, spaced) == PYTHON


def test_a_bundle_that_is_gone_is_left_to_python(
    compiled: str, bundle: Path, short_path: Path
) -> None:
    argv = [compiled, "-namespace", "test", "-id", "c1", "-bundle", f"{bundle}-gone", "delete"]
    done = subprocess.run(argv, cwd=short_path, capture_output=True, timeout=60, check=True)
    assert done.stdout == PYTHON
