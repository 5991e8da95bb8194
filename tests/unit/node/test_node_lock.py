"""The node's lock ends with its agent's process, even if a thread of it hangs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from hooks.config import Config
from integration.agent_status import pod_path
from integration.containers.procfs import Procfs
from integration.node.lock import NodeLock, holds
from shim import syscalls
from shim.causes.agent import agent_of, agent_runs, is_locked
from tests.harness.fuse import FILE, FuseServer, fuse
from tests.harness.launcher import REPOSITORY
from tests.harness.waiting import eventually

UID: Final = "0f9a-pod"
# Takes the lock, and starts a thread that hangs on a file.
AGENT: Final = """if True:
    import os, sys, threading, time
    from hooks.config import Config
    from integration.node.lock import NodeLock
    with NodeLock(Config(state=sys.argv[1])) as lock:
        assert lock.take()
        lock.show_pod(sys.argv[3])
        print("taken", flush=True)
        sys.stdin.readline()
        threading.Thread(target=os.stat, args=(sys.argv[2],), daemon=True).start()
        sys.stdin.readline()
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


@contextmanager
def agent(state: Path, file: str) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", AGENT, str(state), file, UID]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "taken\n"
            yield process
        finally:
            process.kill()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state=str(tmp_path / "state"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FuseServer]:
    with fuse(str(tmp_path / "served")) as served:
        yield served


def stuck(process: subprocess.Popen[str], server: FuseServer) -> None:
    """Let a thread of the agent hang on a file server that does not answer."""
    server.hang()
    go_on(process)
    assert server.asked.wait(30)


def test_the_next_agent_has_the_node_though_a_thread_of_the_killed_one_hangs(
    config: Config, server: FuseServer
) -> None:
    with agent(Path(config.state), f"{server.mount_point}/{FILE}") as before:
        assert holds(before.pid, config)
        assert not holds(os.getpid(), config)
        stuck(before, server)
        os.kill(before.pid, signal.SIGKILL)
        eventually(lambda: Procfs().status(before.pid).state == "Z", "it is killed")  # type: ignore[union-attr]
        status = Procfs().status(before.pid)
        assert status is not None
        assert status.threads > 1, "a thread of it is there still"
        with NodeLock(config) as lock:
            assert lock.take()
            assert agent_of(config.state) == os.getpid()
            assert holds(os.getpid(), config)
            # The files of its pod are recognized as leftovers, too.
            assert not os.path.exists(pod_path(config, UID))
        assert not agent_runs(config.state)
        server.go_on()


def test_an_agent_that_lives_keeps_the_node_though_a_thread_of_it_hangs(
    config: Config, server: FuseServer
) -> None:
    with agent(Path(config.state), f"{server.mount_point}/{FILE}") as before:
        stuck(before, server)
        with NodeLock(config) as lock:
            assert not lock.take()
            assert lock.holder == str(before.pid)
        assert is_locked(pod_path(config, UID))
        server.go_on()


def test_of_many_agents_that_wait_for_a_killed_one_only_one_has_the_node(
    config: Config, server: FuseServer
) -> None:
    script = """if True:
        import sys
        from hooks.config import Config
        from integration.node.lock import NodeLock
        with NodeLock(Config(state=sys.argv[1])) as lock:
            print("asks", flush=True)
            while not lock.take():
                pass
            print("has it", flush=True)
            sys.stdin.readline()
    """
    with agent(Path(config.state), f"{server.mount_point}/{FILE}") as before:
        stuck(before, server)
        others = [
            subprocess.Popen(
                [sys.executable, "-c", script, config.state],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
            )
            for _ in range(3)
        ]  # fmt: skip
        try:
            outputs = {other.stdout: other for other in others if other.stdout is not None}
            assert [output.readline() for output in outputs] == ["asks\n"] * 3
            os.kill(before.pid, signal.SIGKILL)
            while outputs:
                (first, *more), _, _ = select.select(list(outputs), [], [], 30)
                assert not more
                assert first.readline() == "has it\n"
                # While this process has it, no other has.
                owner = outputs.pop(first)
                assert holds(owner.pid, config)
                assert [other.pid for other in others if holds(other.pid, config)] == [owner.pid]
                go_on(owner)
                assert owner.wait(30) == 0
        finally:
            for other in others:
                other.kill()
                other.communicate()
        server.go_on()


def test_the_lock_is_let_go_at_the_end_and_no_other_descriptor_is_closed(config: Config) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with NodeLock(config) as lock:
            assert lock.take()
            lock.show_pod(UID)
            assert agent_runs(config.state)
            assert is_locked(pod_path(config, UID))
        assert not agent_runs(config.state)
        assert not is_locked(pod_path(config, UID))
    assert sorted(os.listdir("/proc/self/fd")) == before


# Every other thread blocks the signal, so the kernel delivers it to the thread with the lock, if
# that does not block it. A descriptor wakes asyncio.
HEARING: Final = """if True:
    import asyncio, os, signal, sys
    from hooks.config import Config
    from integration.node.lock import NodeLock

    async def main():
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.set)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        await asyncio.wait_for(heard.wait(), 10)

    with NodeLock(Config(state=sys.argv[1])) as lock:
        assert lock.take()
        asyncio.run(main())
"""


def test_no_signal_is_lost_to_the_thread_that_holds_the_lock(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HEARING, str(tmp_path / "state")]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_where_a_thread_may_not_have_descriptors_of_its_own_the_process_has_the_lock(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> None:
        raise PermissionError

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(syscalls, "unshare", refused)
    with NodeLock(config) as lock:
        assert lock.take()
        assert agent_runs(config.state)
    assert not agent_runs(config.state)
    assert sorted(os.listdir("/proc/self/fd")) == before
