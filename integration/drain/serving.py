"""The commands: take out of service, return to service, reset."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

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

Say = Callable[[str], None]

_TO_LET_GO: Final = 10.0 * PATIENCE


@dataclass(frozen=True, slots=True)
class DrainOptions:
    """The options of the commands."""

    reason: str = ""  # why, for display
    seconds: float | None = None  # the time limit of the wait; None not to wait
    grace: float | None = None  # seconds from SIGTERM to SIGKILL of containers; None to stop none
    lets_go: bool = False  # whether the node agent closes NVML
    states: tuple[str, ...] = ()  # containerd's state directories; empty for the known ones
    proc: str = "/proc"  # the mount point of procfs


@dataclass(frozen=True, slots=True)
class Drained:
    """The devices that were taken out of service, and their holders."""

    targets: tuple[tuple[Target, Drain], ...]  # each with its mark
    holders: tuple[Holder, ...]  # all, also those that are not waited for
    free: bool  # whether there is no holder to wait for


def drain(config: Config, names: Sequence[str], options: DrainOptions, say: Say) -> Drained:
    """Take devices out of service, wait if the options say so, and list the holders.

    Args:
        names: the devices; empty for the driver.
        say: gets a line for each step.

    Raises:
        TargetUnknown: a name matches no device, or several.
        MarkUnwritten: the mark cannot be written.
        StateUnreadable: the caller is not root.
        InventoryError: the driver does not list its devices.
    """
    inventory = _inventory(config, needed=bool(names))
    targets: tuple[Target, ...] = (THE_DRIVER,)
    if inventory is not None and names:
        targets = targets_of(names, inventory)
    lets_go = options.lets_go or not names
    marked = tuple(
        (each, marks.put(config, _mark(each, options.reason, lets_go=lets_go))) for each in targets
    )
    lets_go = any(mark.lets_go for _, mark in marked)

    def look() -> tuple[Holder, ...]:
        return find_holders(targets, inventory, config, options.states, options.proc)

    if options.seconds is not None:
        wait_for_holders(look, options, say, lets_go=lets_go, seconds=options.seconds)
    holders = look()
    return Drained(marked, holders, free=not blocking(holders, lets_go=lets_go))


def wait_for_holders(
    look: Callable[[], tuple[Holder, ...]],
    options: DrainOptions,
    say: Say,
    *,
    lets_go: bool,
    seconds: float,
    closing: Callable[[], None] | None = None,
) -> Sequence[Holder]:
    """Wait until there are no holders, and return the remaining ones.

    Args:
        look: returns the current holders.
        lets_go: whether the node agent must release the device, too.
        seconds: the time limit; the holders are listed at least once.
        closing: called when only the node agent and the processes it started still hold the device,
            so that NVML is closed only for a short wait. None if it is already closed.
    """
    deadline = time.monotonic() + seconds

    def changed(holders: Sequence[Holder]) -> None:
        say(f"waits for {', '.join(each.name for each in holders)}")

    force = None if options.grace is None else Force(options.grace, say)
    if not lets_go:
        first = partial(blocking, lets_go=False)
        return wait_until_free(lambda: first(look()), seconds=seconds, force=force, changed=changed)
    holders = wait_until_free(
        lambda: not_by_themselves(look()), seconds=seconds, force=force, changed=changed
    )
    if holders:
        return holders
    # The agent and its MPS daemons read the mark, and need a moment.
    left = _TO_LET_GO
    if closing is None:
        left = max(left, deadline - time.monotonic())
    else:
        closing()
    return wait_until_free(look, seconds=left, force=force, changed=changed)


def _mark(target: Target, reason: str, *, lets_go: bool) -> Drain:
    bus_id = "" if target.gpu is None else target.gpu.bus_id
    return Drain(target.device, bus_id=bus_id, reason=reason, lets_go=lets_go)


def _inventory(config: Config, *, needed: bool) -> Inventory | None:
    """Return the node's devices; for a drain of the driver, without asking the driver."""
    try:
        return look_at_node(config, nvml=needed)
    except InventoryError:
        if needed:
            raise
        return None


def answer_of(drained: Drained) -> dict[str, Any]:
    """Return the result as plain values; the keys are an interface."""
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
    """Return the devices that are out of service, for shell completion."""
    return [each.device for each in read_drains(config) if each.device != DRIVER]


def undrain(config: Config, names: Sequence[str], *, driver: bool) -> list[dict[str, Any]]:
    """Return devices, or the driver, to service.

    Returns:
        The marks that were removed; the keys are an interface.

    Raises:
        NotDrained: a named device is in service.
        ResetRunning: one is being reset.
        TargetUnknown: a name matches nothing.
        MarkUnwritten: the mark cannot be removed.
    """
    inventory = None
    if names:
        try:
            inventory = look_at_node(config)
        except NvshimError:
            inventory = None  # marks contain names
    named = [each.device for each in drained_of(names, inventory, config)]
    # The driver first: if it is in service, nothing has been returned when that is refused.
    taken = [*[DRIVER] * driver, *named]
    return [_document(marks.take(config, device)) for device in taken]


def reset(config: Config, name: str, options: DrainOptions, say: Say) -> dict[str, Any]:
    """Reset a GPU.

    Returns:
        The GPU, and whether it is in service; the keys are an interface.

    Raises:
        TargetUnknown: the name is not that of a GPU.
        ResetRunning: another GPU is being reset.
        DrainError: the reset failed; the GPU is out of service.
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
        return find_holders(targets, inventory, config, options.states, options.proc)

    deadline = time.monotonic() + (options.seconds or 0.0)

    # Called again if a new holder appears just before the reset.
    def wait(closing: Callable[[], None]) -> Sequence[Holder]:
        left = max(0.0, deadline - time.monotonic())
        return wait_for_holders(look, options, say, lets_go=True, seconds=left, closing=closing)

    with marks.resetting(config):
        work = Reset(target, config, options.reason, say)
        in_service = work.run(wait, look, inventory)
    return {"device": target.device, "name": target.name, "in_service": in_service}
