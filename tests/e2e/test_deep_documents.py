"""A document that is nested too deeply is refused in one line; everything else still works."""

from __future__ import annotations

import sys
import tempfile
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.node.options import DRA_DRIVER
from tests.harness.dra_node import dra_node
from tests.harness.nvshim import nvshim

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Deeper than Python's JSON parser allows, and less than the API server's limit.
DEPTH: Final = 3000
TEXT: Final = "[" * DEPTH + "]" * DEPTH


@pytest.fixture
def deep() -> Iterator[Any]:
    """Return nested lists that the test can write as JSON."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(4 * DEPTH)
    try:
        value: Any = None
        for _ in range(DEPTH):
            value = [value]
        yield value
        del value
    finally:
        sys.setrecursionlimit(before)


def test_a_claim_whose_parameters_are_too_deep_is_refused(deep: Any) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="node-") as directory,
        tempfile.TemporaryDirectory(prefix="kubelet-") as root,
        dra_node(directory, root, {"gpus": 2}, devices=2) as place,
    ):
        parameters = {"apiVersion": "a/v1", "kind": "B", "deep": deep}
        opaque = {"driver": DRA_DRIVER, "parameters": parameters}
        config = [{"source": "FromClaim", "requests": [], "opaque": opaque}]
        hostile = place.claim("hostile", place.gpus[0], config=config)
        refusal = place.refusal(hostile)
        assert refusal.startswith("NVSHIM-E2772 resource-claim-unusable: ")
        assert "it is nested too deeply" in refusal
        assert "\n" not in refusal
        # The agent does not report the server as unreachable.
        place.have(place.claim("other", place.gpus[1]))
        assert not [line for line in place.agent.said() if "trace" in line]


@pytest.mark.parametrize(
    "words",
    [("configure", "docker", "--config"), ("node", "--check-config", "--config-file")],
    ids=["daemon.json", "device plugin"],
)
def test_a_file_that_is_too_deep_is_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(f'{{"version": "v1", "a": {TEXT}}}', encoding="ascii")
    ended = nvshim(*words, str(path), check=False)
    assert ended.code == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("NVSHIM-E")
