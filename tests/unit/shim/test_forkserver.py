"""The fork server survives faults of a node's GPUs, and verbs that hang."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from api.errors import NvshimError
from shim.forkserver import serving
from shim.forkserver.prefork_pool import Lent


@pytest.mark.parametrize("error", [NvshimError("a", found="b"), OSError(), TypeError()])
def test_what_cannot_be_read_of_the_node_is_for_who_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing = Mock(side_effect=error)
    monkeypatch.setattr("shim.forkserver.serving.decode_ahead", failing)
    serving.look_at_node()
    assert failing.call_count == 1


def test_verbs_that_hang_do_not_use_up_the_descriptors(tmp_path: Path) -> None:
    verbs: list[socket.socket] = []
    shims: list[socket.socket] = []

    def lend(*_: object) -> Lent:
        (ours, verb), (waiting, shim) = socket.socketpair(), socket.socketpair()
        verbs.append(verb)
        shims.append(shim)
        return Lent(ours, waiting)

    installation = Mock(descriptor=-1, **{"has_changed.return_value": False})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        server = serving.Server(listener, "address", installation)
        for _ in range(100):
            server._pool = Mock(serve=lend)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "s"))
                assert server.serve_waiting()
        for each in (*verbs, *shims):
            each.setblocking(False)
        for oldest in (*verbs[:36], *shims[:36]):
            assert oldest.recv(1) == b"", "the server has closed its end"
        for newest in (*verbs[36:], *shims[36:]):
            with pytest.raises(BlockingIOError):
                newest.recv(1)
        for each in verbs:
            each.close()
        assert server.serve_waiting()
    for each in shims:
        assert each.recv(1) == b"", "its verb has ended, and so it is to end"
        each.close()
