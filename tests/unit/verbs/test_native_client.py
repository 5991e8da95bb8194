"""The native launcher as a client of a fork server; the test is the server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shim.forkserver.prefork_pool import VerbRequest
from shim.verbs.handover import GO
from shim.verbs.warmstart import (
    ACCEPTED,
    LENGTH,
    READY,
    READY_LINK,
    STARTING_LINK,
    link_name,
)
from tools.launcher import compile_native

WORDS = ["-namespace", "test", "-address", "/c.sock", "-id", "web-1", "start"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("native") / "containerd-shim-nvidia-v1"
    compile_native(str(path), compiler="gcc")
    script = path.with_name(f"{path.name}.py")
    script.write_text("#!/bin/sh\nexit 99\n")
    script.chmod(0o755)
    return str(path)


def _listen(compiled: str, directory: Path, kind: str = READY_LINK) -> socket.socket:
    (directory / "containerd" / "s").mkdir(parents=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(60)
    name = link_name("/c.sock", f"{compiled}.py", kind)
    listener.bind(str(directory / "containerd" / "s" / name))
    listener.listen()
    return listener


def _run(compiled: str, directory: Path, **environment: str) -> int:
    variables = {"XDG_RUNTIME_DIR": str(directory), "LEFT": "1", **environment}
    return subprocess.run(
        [compiled, *WORDS], cwd=directory, env=variables, timeout=60, check=False
    ).returncode


@pytest.mark.parametrize("kind", [READY_LINK, STARTING_LINK])
def test_a_verb_is_done_by_the_fork_server_of_a_containerd_without_roots_rights(
    compiled: str, short_path: Path, kind: str
) -> None:
    seen: list[object] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as file:
            connection.send(ACCEPTED)
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            request = VerbRequest.decode(file.read(length))
            connection.send(READY)
            go, descriptors, _, _ = socket.recv_fds(connection, len(GO), 4)
            seen.extend((go, request, os.readlink(f"/proc/self/fd/{descriptors[0]}")))
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(bytes([7]))

    with _listen(compiled, short_path, kind) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        assert _run(compiled, short_path) == 7
        thread.join()
    environment = {"XDG_RUNTIME_DIR": str(short_path), "LEFT": "1"}
    assert seen == [GO, VerbRequest(f"{compiled}.py", WORDS, environment), str(short_path)]


@pytest.mark.parametrize("answers", [b"", ACCEPTED, b"?", ACCEPTED + b"?"])
def test_one_that_does_not_serve_leaves_the_verb_to_python(
    compiled: str, short_path: Path, answers: bytes
) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answers)
            # Everything is read, so that closing the connection does not send a reset.
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    with _listen(compiled, short_path) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        assert _run(compiled, short_path) == 99
        thread.join()


def test_a_start_whose_process_was_killed_is_not_done_twice(
    compiled: str, short_path: Path
) -> None:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(ACCEPTED + READY)
            while (got := socket.recv_fds(connection, 1 << 16, 4)[:2])[0] and not got[1]:
                pass
            for descriptor in got[1]:
                os.close(descriptor)

    with _listen(compiled, short_path) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        assert _run(compiled, short_path) == 1
        thread.join()


# Steps of 100 milliseconds until the launcher becomes the Python program.
STEPS = {READY_LINK: 40, STARTING_LINK: 5}


def _failing(compiled: str, directory: Path, call: str, when: str = "1+") -> list[str]:
    """Run the launcher, with a call that fails at once as it would after a step.

    Returns:
        Its calls of that name, one a line.
    """
    trace = directory / "trace"
    inject = f"inject={call}:error=EAGAIN:when={when}"
    strace = ["strace", "-qq", "-s", "200", "-e", f"trace={call}", "-e", inject, "-o", str(trace)]
    done = subprocess.run(
        [*strace, compiled, *WORDS], cwd=directory, timeout=60, check=False,
        env={"XDG_RUNTIME_DIR": str(directory)},
    )  # fmt: skip
    assert done.returncode == 99
    return [line for line in trace.read_text().splitlines() if line.startswith(f"{call}(")]


@pytest.mark.parametrize("kind", STEPS)
def test_one_whose_backlog_is_full_is_waited_for_no_longer_than_one_that_does_not_accept(
    compiled: str, short_path: Path, kind: str
) -> None:
    # Of one that still imports, the first link is in none of four directories.
    calls = _failing(compiled, short_path, "connect", "1+" if kind == READY_LINK else "5+")
    full = [line for line in calls if "EAGAIN" in line]
    assert len(full) == STEPS[kind]
    name = link_name("/c.sock", f"{compiled}.py", kind)
    assert all(f"/{name}" in line for line in full)


@pytest.mark.parametrize("kind", STEPS)
def test_one_that_works_and_does_not_accept_is_given_up(
    compiled: str, short_path: Path, kind: str
) -> None:
    program = (
        "import socket; listener = socket.socket(socket.AF_UNIX, fileno=0); listener.listen()\n"
        "print(flush=True)\nwhile True: pass"
    )
    with (
        _listen(compiled, short_path, kind) as listener,
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=listener.fileno(), stdout=subprocess.PIPE
        ) as busy,
    ):
        try:
            assert busy.stdout is not None
            assert busy.stdout.readline() == b"\n"  # it has become the peer of who connects
            assert len(_failing(compiled, short_path, "recvfrom")) == STEPS[kind]
        finally:
            busy.kill()


def test_it_can_be_turned_off(compiled: str, short_path: Path) -> None:
    with _listen(compiled, short_path) as listener:
        assert _run(compiled, short_path, NVSHIM_FORK_SERVER="0") == 99
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
