"""Faults of a node's GPUs must not prevent the fork server from starting."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from api.errors import NvshimError
from shim.forkserver import serving


@pytest.mark.parametrize("error", [NvshimError("a", found="b"), OSError(), TypeError()])
def test_what_cannot_be_read_of_the_node_is_for_who_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing = Mock(side_effect=error)
    monkeypatch.setattr("shim.forkserver.serving.decode_ahead", failing)
    serving.look_at_node()
    assert failing.call_count == 1
