"""What the commands do: out of service, back, and reset."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError
from hooks.config import Config
from hooks.errors import InventoryError
from hooks.node.drained import DRIVER, Drain, read_drains
from hooks.node.inventory import Inventory
from integration.devices import drain_marks as marks
from integration.devices.drain_errors import TargetUnknown
from integration.devices.targets import THE_DRIVER, Target, drained_of, targets_of
from integration.drain.holders import Holder, find_holders
from integration.drain.resetting import Reset
from integration.drain.waiting import Force, blocking, not_by_themselves, wait_until_free
from integration.nvml.inventory import look_at_node
from integration.timeouts import PATIENCE

if TYPE_CHECKING:
    Say = Callable[[str], None]

_TO_LET_GO: Final = 10.0 * PATIENCE


@dataclass(frozen=True, slots=True)
class Wish:
    """What the commands are told."""

    reason: str = ""  # why, for people; "" if nobody said
    seconds: float | None = None  # to wait at most; None not to wait
    grace: float | None = None  # seconds that containers have to end; None to end none
    lets_go: bool = False  # whether the node agent is to close NVML
    states: tuple[str, ...] = ()  # containerd's state directories; none for those that are known
    proc: str = "/proc"  # where the node's processes are shown


@dataclass(frozen=True, slots=True)
class Drained:
    """What is out of service, and who holds it still."""

    targets: tuple[tuple[Target, Drain], ...]  # what was taken out of service, each with its mark
    holders: tuple[Holder, ...]  # of any of them, whether they are waited for or not
    free: bool  # whether none of them has to be waited for


def drain(config: Config, names: Sequence[str], wish: Wish, say: Say) -> Drained:
    """Take devices out of service, list who holds them, and wait as far as that is wished.

    Args:
        names: of devices; none for the driver.
        say: told in one line what is done.

    Raises:
        TargetUnknown: a name is that of no device, or of several.
        MarkUnwritten: it cannot be written down.
        StateUnreadable: the caller is not root.
        InventoryError: the driver does not tell which devices there are.
    """
    inventory = _inventory(config, needed=bool(names))
    targets: tuple[Target, ...] = (THE_DRIVER,)
    if inventory is not None and names:
        targets = targets_of(names, inventory)
    lets_go = wish.lets_go or not names
    marked = tuple(
        (each, marks.put(config, _mark(each, wish.reason, lets_go=lets_go))) for each in targets
    )
    lets_go = any(mark.lets_go for _, mark in marked)

    def look() -> tuple[Holder, ...]:
        return find_holders(targets, inventory, config, wish.states, wish.proc)

    if wish.seconds is not None:
        _wait(look, wish, say, lets_go=lets_go, seconds=wish.seconds)
    holders = look()
    return Drained(marked, holders, free=not blocking(holders, lets_go=lets_go))


def _wait(
    look: Callable[[], tuple[Holder, ...]],
    wish: Wish,
    say: Say,
    *,
    lets_go: bool,
    seconds: float,
    closing: Callable[[], None] = lambda: None,
) -> Sequence[Holder]:
    """Wait until nobody holds it; who still does.

    Args:
        lets_go: whether the node agent is waited for.
        closing: called once nobody holds it but those who let go by themselves.
    """

    def changed(holders: Sequence[Holder]) -> None:
        say(f"waits for {', '.join(each.name for each in holders)}")

    force = None if wish.grace is None else Force(wish.grace, say)
    if not lets_go:
        first = partial(blocking, lets_go=False)
        return wait_until_free(lambda: first(look()), seconds=seconds, force=force, changed=changed)
    holders = wait_until_free(
        lambda: not_by_themselves(look()), seconds=seconds, force=force, changed=changed
    )
    if holders:
        return holders
    closing()
    # The agent, and its daemons of MPS, have been told, and need a moment.
    return wait_until_free(look, seconds=_TO_LET_GO, force=force, changed=changed)


def _mark(target: Target, reason: str, *, lets_go: bool) -> Drain:
    bus_id = "" if target.gpu is None else target.gpu.bus_id
    return Drain(target.device, bus_id=bus_id, reason=reason, lets_go=lets_go)


def _inventory(config: Config, *, needed: bool) -> Inventory | None:
    """What the node has; for the driver, as far as it can be told without asking it."""
    try:
        return look_at_node(config, nvml=needed)
    except InventoryError:
        if needed:
            raise
        return None


def answer_of(drained: Drained) -> dict[str, Any]:
    """What was done, as plain values; the keys are an interface."""
    return {
        "devices": [_document(mark, target.name) for target, mark in drained.targets],
        "holders": [each.to_json() for each in drained.holders],
        "free": drained.free,
    }


def _document(mark: Drain, name: str = "") -> dict[str, Any]:
    return {
        "device": mark.device,
        "name": name or mark.name,
        "since": mark.since or None,
        "reason": mark.reason or None,
        "reset": mark.reset or None,
        "lets_go": mark.lets_go,
        "why": mark.why,
    }


def drained_names(config: Config) -> list[str]:
    """What is out of service, for a shell that completes."""
    return [each.device for each in read_drains(config) if each.device != DRIVER]


def undrain(config: Config, names: Sequence[str], *, driver: bool) -> list[dict[str, Any]]:
    """Return devices, or the driver, to service.

    Returns:
        What was out of service; the keys are an interface.

    Raises:
        NotDrained: what is named is in service.
        ResetRunning: one is being reset this moment.
        TargetUnknown: a name is that of nothing.
        MarkUnwritten: it cannot be taken back.
    """
    inventory = None
    if names:
        try:
            inventory = look_at_node(config)
        except NvshimError:
            inventory = None  # marks have names of their own
    taken = [each.device for each in drained_of(names, inventory, config)]
    taken += [DRIVER] * driver
    return [_document(marks.take(config, device)) for device in taken]


def reset(config: Config, name: str, wish: Wish, say: Say) -> dict[str, Any]:
    """Reset a GPU.

    Returns:
        What was reset, and whether it is in service; the keys are an interface.

    Raises:
        TargetUnknown: it is no GPU.
        ResetRunning: another GPU is being reset.
        DrainError: it could not be done; the GPU is out of service.
        StateUnreadable: the caller is not root.
    """
    inventory = look_at_node(config)
    targets = targets_of([name], inventory)
    if len(targets) != 1 or targets[0].mig is not None:
        raise TargetUnknown(
            f"to reset {name}",
            found="is not one GPU",
            do="name a whole GPU; its MIG devices go with it",
        )
    target = targets[0]

    def look() -> tuple[Holder, ...]:
        return find_holders(targets, inventory, config, wish.states, wish.proc)

    deadline = time.monotonic() + (wish.seconds or 0.0)

    # Again and again, if somebody comes between it and the reset.
    def wait(closing: Callable[[], None]) -> Sequence[Holder]:
        left = max(0.0, deadline - time.monotonic())
        return _wait(look, wish, say, lets_go=True, seconds=left, closing=closing)

    with marks.resetting(config):
        work = Reset(target, config, wish.reason, say)
        in_service = work.run(wait, look, inventory)
    return {"device": target.device, "name": target.name, "in_service": in_service}
