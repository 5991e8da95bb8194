"""Each path has one listener, in any order of callers, and a dead one is replaced."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shim import sockets
from shim.errors import SocketDirectoryUnusable, SocketUnavailable
from tests.harness.launcher import REPOSITORY
from tests.harness.own_process import restored
from tests.harness.raising import raises


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s" / "0123")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)


@contextlib.contextmanager
def _listening(path: str) -> Iterator[socket.socket]:
    fd = sockets.listen(path)
    assert fd is not None
    with socket.socket(fileno=fd) as listener:
        yield listener


def test_the_socket_is_0600_whatever_the_umask_and_the_umask_stays(path: str) -> None:
    with restored():
        os.umask(0)
        with _listening(path):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert os.umask(0) == 0


def test_a_listener_takes_connections_at_once_and_is_not_inherited(path: str) -> None:
    with _listening(path) as listener:
        assert not os.get_inheritable(listener.fileno())
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            server, _ = listener.accept()
            server.close()


def test_a_living_listener_is_found_and_left_alone(path: str) -> None:
    with _listening(path):
        own = sockets.identity(path)
        assert sockets.listen(path) is None
        assert sockets.identity(path) == own


def test_a_listener_with_a_full_backlog_lives(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as clients:
        listener.bind(path)
        listener.listen(0)
        for _ in range(3):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(path)
        assert sockets.is_alive(path)
        assert sockets.listen(path) is None


def test_as_many_wait_for_a_listener_as_the_system_allows(path: str) -> None:
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    with _listening(path):
        for _ in range(min(most, 1000)):
            with socket.socket(socket.AF_UNIX) as client:  # which counts until it is accepted
                client.setblocking(False)
                client.connect(path)


def test_a_dead_socket_is_replaced(path: str) -> None:
    with _listening(path):
        pass
    assert os.path.exists(path)
    assert not sockets.is_alive(path)
    with _listening(path):
        assert sockets.is_alive(path)


_RACER = """
import sys
from shim import sockets
print("ready", flush=True)
sys.stdin.readline()
print(sockets.listen(sys.argv[1]) is not None, flush=True)
sys.stdin.readline()  # the winner listens until all have tried
"""


def test_of_many_that_start_at_once_exactly_one_listens(path: str) -> None:
    racers = 4
    with _listening(path):
        pass  # leaves a dead socket, which all of them try to replace
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _RACER, path], cwd=REPOSITORY, text=True, bufsize=1,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )
            for _ in range(racers)
        ]  # fmt: skip

        def read() -> list[str]:
            return [process.stdout.readline() for process in processes if process.stdout]

        def say() -> None:
            for process in processes:
                assert process.stdin
                process.stdin.write("\n")

        assert read() == ["ready\n"] * racers
        say()
        assert sorted(read()) == ["False\n"] * (racers - 1) + ["True\n"]
        say()


def test_what_is_no_socket_is_not_replaced(path: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write("precious")
    assert not sockets.remove_dead(path)
    with open(path, encoding="ascii") as file:
        assert file.read() == "precious"


def test_a_missing_directory_is_a_typed_error(tmp_path: Path) -> None:
    with raises(SocketUnavailable, match="no such file"):
        sockets.listen(str(tmp_path / "missing" / "x"))


def test_only_a_dead_socket_is_removed_for_being_dead(path: str) -> None:
    assert not sockets.remove_dead(path)
    assert not sockets.remove_dead("/missing/directory/x")
    with _listening(path):
        assert not sockets.remove_dead(path)
        assert os.path.exists(path)
    assert sockets.remove_dead(path)
    assert not os.path.exists(path)


def test_a_socket_that_another_shim_took_over_is_not_removed_as_ones_own(path: str) -> None:
    with _listening(path) as first:
        own = sockets.identity(path)
        # Kept open, so that its inode number is not reused.
        held = os.open(path, os.O_PATH)
        first.close()
        with _listening(path):
            sockets.remove_own(path, own)
            assert sockets.is_alive(path)
            sockets.remove_own(path, sockets.identity(path))
            assert not os.path.exists(path)
        os.close(held)
    sockets.remove_own(path, own)


def test_the_directory_is_made_for_us_alone(tmp_path: Path) -> None:
    wanted = str(tmp_path / "state" / "s")
    assert sockets.first_usable([wanted]) == wanted
    assert stat.S_IMODE(os.stat(wanted).st_mode) == 0o700
    assert sockets.first_usable([wanted]) == wanted


def test_a_directory_that_others_control_is_passed_over(tmp_path: Path) -> None:
    for name, mode in (("open", 0o777), ("group", 0o770), ("foreign", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    os.chown(tmp_path / "foreign", 12345, 12345)
    (tmp_path / "good").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "good")
    bad = [str(tmp_path / name) for name in ("open", "group", "foreign", "link")]
    good = str(tmp_path / "good")
    assert sockets.first_usable([*bad, good]) == good
    with raises(SocketDirectoryUnusable) as caught:
        sockets.first_usable(bad)
    for word in ("others may write", "belongs to user 12345", "not a directory"):
        assert word in str(caught.value)


def test_a_socket_at_which_a_container_is_announced_is_not_retired(
    path: str, tmp_path: Path
) -> None:
    fd = sockets.listen(path, container_id="c1", bundle_path=str(tmp_path))
    assert fd is not None
    with socket.socket(fileno=fd):
        own = sockets.identity(path)
        assert sockets.listen(path, container_id="c2", bundle_path=str(tmp_path)) is None
        for name in ("c1", "c2"):
            assert not sockets.retire(path, own)
            sockets.forget(path, name)
        assert sockets.retire(path, own)
    assert os.listdir(os.path.dirname(path)) == []


@pytest.mark.parametrize("why", ["bundle gone", "old", "regardless"])
def test_an_announcement_counts_while_its_container_may_come(
    path: str, tmp_path: Path, why: str
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    fd = sockets.listen(path, container_id="c1", bundle_path=str(bundle))
    assert fd is not None
    with socket.socket(fileno=fd):
        own = sockets.identity(path)
        assert not sockets.retire(path, own)
        if why == "bundle gone":
            bundle.rmdir()
        elif why == "old":
            old = time.time() - sockets.LATEST_CREATE
            os.utime(f"{path}.c1", (old, old), follow_symlinks=False)
        assert sockets.retire(path, own, regardless=why == "regardless")
    assert os.listdir(os.path.dirname(path)) == []
