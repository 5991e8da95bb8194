"""Build the ledger from the bundles now, with or without an agent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from hooks.config import Config
from hooks.errors import InventoryError
from hooks.node.inventory import Inventory
from integration.containers.shims import states_to_watch
from integration.kubelet.pod_resources import PodResources
from integration.node.holders.values import Ledger
from integration.node.services.ledger.service import look_and_ask
from integration.nvml.inventory import look_at_node

# Seconds for the kubelet's answer. There is no retry; without an answer nothing counts as missing.
_TO_ANSWER: Final = 10.0


async def ask(
    config: Config, states: Sequence[str], proc: str, pod_resources: str
) -> tuple[Ledger, Inventory | None]:
    """Return which containers hold which devices now.

    Args:
        states: containerd's state directories; empty for the usual ones.
        pod_resources: the kubelet's socket; it may be missing.

    Returns:
        The ledger, and the inventory it refers to; None if there is no driver.

    Raises:
        StateUnreadable: the caller is not root.
    """
    try:
        inventory = look_at_node(config)
    except InventoryError:
        inventory = None
    async with aclosing(PodResources()) as kubelet:
        allocated = await kubelet.allocated(pod_resources, _TO_ANSWER)
        where, again = states_to_watch(states, proc), partial(kubelet.allocated, pod_resources)
        return await look_and_ask(where, inventory, allocated, again, proc), inventory


async def foreign_rows(
    config: Config, states: Sequence[str], proc: str
) -> list[dict[str, Any]] | None:
    """Return the processes on a GPU that are in no container.

    Args:
        states: containerd's state directories; empty for the usual ones.

    Returns:
        An object with pid, name and devices for each; None if NVML does not answer.
    """
    from integration.inspection.usage_query import observing  # noqa: PLC0415 - starts a child

    async with observing(config, states, proc) as observer:
        snapshot = await observer.snapshot()
    if snapshot.sample.failure:
        return None
    found: dict[int, list[str]] = {}
    for use in snapshot.uses:
        for pid in use.processes if use.holding is None else ():
            found.setdefault(pid, []).append(use.device)
    return [
        {"pid": pid, "name": snapshot.names.get(pid) or None, "devices": devices}
        for pid, devices in sorted(found.items())
    ]
