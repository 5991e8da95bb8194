"""The ledger as an answer has it: plain values, whose keys are an interface."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from integration.node.ledger.values import Holding, Ledger

__all__ = ["as_document", "holding_row"]


def as_document(ledger: Ledger) -> dict[str, Any]:
    """All of a ledger, but when it was so.

    Args:
        ledger: who holds what.
    """
    return {
        "holdings": [holding_row(each) for each in ledger.holdings],
        "unheld": [asdict(each) for each in ledger.unheld],
        "unknown": list(ledger.unknown),
    }


def holding_row(holding: Holding) -> dict[str, Any]:
    """What one container holds.

    Args:
        holding: which.
    """
    container = holding.container
    return {
        **container.to_json(),
        "bundle": container.bundle,
        "devices": list(holding.devices),
        "gpus": list(holding.gpus),
        "stale": holding.stale or None,
        "orphan": holding.orphan or None,
    }
