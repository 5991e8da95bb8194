"""When the agent generates its CDI spec again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hooks.config import Config
from integration.node import refresh
from integration.node.refresh import SpecText

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True)
class Node:
    gpus: int


def test_it_is_made_for_another_node_or_a_change_and_now_and_then_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def text(inventory: Any, config: Config) -> bytes:
        del config
        calls.append(inventory)
        return b"%d" % inventory.gpus

    monkeypatch.setattr(refresh, "_text", text)
    made, config = SpecText(), Config()

    def look(gpus: int, *, heard: bool = False) -> bytes:
        node: Any = Node(gpus)
        return made.get(node, config, changed=heard)

    assert [look(2), look(2), look(2)] == [b"2"] * 3
    assert len(calls) == 1
    assert look(3) == b"3"
    assert look(3, heard=True) == b"3"
    assert len(calls) == 3
    for _ in range(20):
        assert look(3) == b"3"
    assert len(calls) == 5
