"""The verb as a client of the fork server: what it sends, and how it chooses the server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim.errors import SocketPathTooLong
from shim.verbs import handover, warmstart
from tests.harness.raising import raises

_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(
    texts=st.lists(_text, min_size=6, max_size=6),
    debug=st.booleans(),
    score=st.none() | st.integers(-1000, 1000),
    environment=st.dictionaries(_text, _text),
)
def test_a_request_and_the_listener_survive_the_handover(
    texts: list[str], debug: bool, score: int | None, environment: dict[str, str]
) -> None:
    bundle, container_id, namespace, address, ttrpc, path = texts
    request = handover.ShimRequest(
        bundle, container_id, namespace, address, ttrpc, path, debug, score, environment
    )
    accepted: list[tuple[int, handover.ShimRequest] | None] = []
    verb, waiting = handover.channel()
    with verb, waiting, socket.socket() as listener:
        thread = threading.Thread(target=lambda: accepted.append(handover.accept(waiting)))
        thread.start()
        assert handover.offer(verb, listener.fileno(), request) == os.getpid()
        assert handover.commit(verb)
        thread.join()
        assert accepted[0] is not None
        fd, back = accepted[0]
        assert back == request
        assert os.path.sameopenfile(fd, listener.fileno())
        os.close(fd)


def test_a_verb_that_gives_up_leaves_no_shim() -> None:
    request = handover.ShimRequest("b", "c", "n", "a", "t", "s", False, None, {})
    verb, waiting = handover.channel()
    with socket.socket() as listener:
        child = os.fork()
        if not child:
            verb.close()
            os._exit(0 if handover.accept(waiting) is None else 1)
        waiting.close()
        with verb:
            assert handover.offer(verb, listener.fileno(), request)
        assert os.waitpid(child, 0) == (child, 0)


def test_no_waiting_process_is_no_shim() -> None:
    request = handover.ShimRequest("b", "c", "n", "a", "t", "s", False, None, {})
    verb, waiting = handover.channel()
    waiting.close()
    with verb, socket.socket() as listener:
        assert handover.offer(verb, listener.fileno(), request) == 0


def test_a_peer_of_our_own_user_is_no_other() -> None:
    one, two = socket.socketpair()
    with one, two:
        assert not warmstart.peer_is_another(one)


PROCESSORS = os.sched_getaffinity(0)
_SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:]
from shim.verbs import warmstart
print(warmstart.server_path("/s", "a"))
"""


def _path_in(*before: str) -> str:
    argv = [*before, sys.executable, "-c", _SCRIPT, os.getcwd()]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "surroundings",
    [
        ["unshare", "--mount"],
        ["unshare", "--uts"],
        ["nice", "-n", "5"],
        ["prlimit", "--nofile=512"],
        ["setpriv", "--no-new-privs"],
        pytest.param(
            ["taskset", "--cpu-list", str(min(PROCESSORS))],
            marks=pytest.mark.skipif(len(PROCESSORS) == 1, reason="has one processor"),
        ),
    ],
    ids=lambda words: words[0] if words[0] == "taskset" else words[-1],
)
def test_in_other_surroundings_another_fork_server_is_looked_for(surroundings: list[str]) -> None:
    assert _path_in(*surroundings) != _path_in()


def test_in_the_same_surroundings_it_is_the_same() -> None:
    assert _path_in() == _path_in()


def test_another_containerd_has_another() -> None:
    assert warmstart.server_path("/s", "a") != warmstart.server_path("/s", "b")


def test_a_directory_too_long_for_a_socket_has_none() -> None:
    with raises(SocketPathTooLong):
        warmstart.server_path("/" + "d" * 90, "a")
