"""The verb's side of the fork server: what is asked, and in which surroundings it is found."""

from __future__ import annotations

import _socket
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim import warmstart

if TYPE_CHECKING:
    from pathlib import Path

_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
_names = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]))


@given(
    texts=st.lists(_text, min_size=6, max_size=6),
    debug=st.booleans(),
    score=st.none() | st.integers(-1000, 1000),
    environment=st.dictionaries(_names, _text),
)
def test_a_request_survives_the_socket(
    texts: list[str], debug: bool, score: int | None, environment: dict[str, str]
) -> None:
    bundle, container_id, namespace, address, ttrpc, path = texts
    request = warmstart.Request(
        bundle_path=bundle,
        container_id=container_id,
        namespace=namespace,
        address=address,
        ttrpc_address=ttrpc,
        socket_path=path,
        debug=debug,
        oom_score_adj=score,
        environment=environment,
    )
    back = warmstart.Request.decode(request.encode())
    for name in warmstart.Request.__slots__:
        assert getattr(back, name) == getattr(request, name)


@given(st.binary())
def test_any_other_bytes_are_no_request_or_one(content: bytes) -> None:
    try:
        warmstart.Request.decode(content)
    except ValueError:
        return
    assert content.count(b"\0") >= 7


def test_a_peer_of_our_own_user_is_no_other() -> None:
    one, two = socket.socketpair()
    with one, two:
        raw = _socket.socket(fileno=os.dup(one.fileno()))
        assert not warmstart.peer_is_another(raw)
        raw.close()


def test_nobody_there_is_no_shim(tmp_path: Path) -> None:
    request = warmstart.Request(
        bundle_path="/b", container_id="c", namespace="n", address="a", ttrpc_address="t",
        socket_path="s", debug=False, oom_score_adj=None, environment={},
    )  # fmt: skip
    with socket.socket() as listener:
        assert warmstart.ask(str(tmp_path / "f"), listener.fileno(), request) == 0


_SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:]
from shim import warmstart
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
        ["taskset", "1"],
    ],
    ids=lambda words: words[-1],
)
def test_in_other_surroundings_another_fork_server_is_looked_for(surroundings: list[str]) -> None:
    assert _path_in(*surroundings) != _path_in()


def test_in_the_same_surroundings_it_is_the_same() -> None:
    assert _path_in() == _path_in()


def test_another_containerd_has_another() -> None:
    assert warmstart.server_path("/s", "a") != warmstart.server_path("/s", "b")


def test_a_directory_too_long_for_a_socket_has_none() -> None:
    assert warmstart.server_path("/" + "d" * 90, "a") == ""
