"""The native launcher as a client of a fork server; the test is the server."""

from __future__ import annotations

import os
import socket
import subprocess
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


def test_it_can_be_turned_off(compiled: str, short_path: Path) -> None:
    with _listen(compiled, short_path) as listener:
        assert _run(compiled, short_path, NVSHIM_FORK_SERVER="0") == 99
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
