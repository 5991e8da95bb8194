"""The ledger for a person who asks: made of the bundles now, with or without an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hooks.errors import InventoryError
from integration.inventory import look_at_node
from integration.node.ledger.kubelet import allocated_by
from integration.node.ledger.part import known_states, look

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hooks.config import Config
    from hooks.node.inventory import Inventory
    from integration.node.ledger.values import Ledger

__all__ = ["ask"]


async def ask(
    config: Config, states: Sequence[str], proc: str, pod_resources: str
) -> tuple[Ledger, Inventory | None]:
    """Who holds what now.

    Args:
        config: where the node is.
        states: containerd's state directories; none for those that are known.
        proc: where processes are shown.
        pod_resources: the kubelet's socket; one that is not there is not asked.

    Returns:
        The ledger, and the inventory that it was held against; None if there is no driver.

    Raises:
        StateUnreadable: the caller is not root.
    """
    try:
        inventory = look_at_node(config)
    except InventoryError:
        inventory = None
    allocated = await allocated_by(pod_resources)
    return look(known_states(states, proc), inventory, allocated, proc), inventory
