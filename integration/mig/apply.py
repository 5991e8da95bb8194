"""Apply a layout: a transaction over the GPUs that change.

::

    journal ─▶ marks ─▶ no holder is left ─▶ journal ─▶ instances of each GPU ─▶ marks removed
    (which GPUs)                            (before, after)   │ if one fails     journal removed
                                                              ▼
                                                     instances as before

Rules
- Only GPUs that change are out of service during the transaction: no new container gets them or
  their parts. The other GPUs remain in use. A GPU that a person has already taken out of service
  stays so.
- The transaction waits for the holders of everything that it destroys and, if the MIG mode of a GPU
  changes, for all holders of that GPU. A GPU that the DRA driver partitions for claims is left to
  it until these claims end.
- The state may change during that wait, so the plan is computed again afterwards.
- If a step fails, or Ctrl-C interrupts it, the previous state of all GPUs is restored. If that
  fails for a GPU, or the GPU is lost in the meantime, it stays out of service. The next apply
  undoes its changes once the GPU answers.
- If an apply was killed, the next one undoes its changes, too, unless all of them were made. A GPU
  without its mark stays as it is, as after `nvshim undrain`.
- While the journal of such an apply, or the mark of a GPU in it, cannot be read, it is not known
  what to undo. Then nothing is applied and nothing removed, until the GPUs have no marks.
- One reset or apply runs at a time (:func:`integration.devices.drain_marks.resetting`).
- The node agent closes NVML while a MIG mode is switched, as for a reset (:mod:`.instances`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from api.errors import one_line
from hooks.config import Config
from hooks.node.drained import Drain, path_of, read_drains
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from hooks.sharing import id_of
from integration.devices import drain_marks as marks
from integration.devices.creating import CreateOptions, create
from integration.devices.drain_errors import DrainError
from integration.devices.targets import Target
from integration.drain.holders import Holder, find_holders
from integration.drain.serving import DrainOptions, wait_for_holders
from integration.mig import journal
from integration.mig.claims import claim_holders
from integration.mig.errors import (
    LayoutFailed,
    LayoutHeld,
    LayoutNotUndone,
    MigError,
    MigRecordUnusable,
)
from integration.mig.format import Layout
from integration.mig.instances import Instances
from integration.mig.journal import JournalEntry
from integration.mig.plan import Change, plan
from integration.mig.state import MigGpu, Partition, read_gpus
from integration.nvml.inventory import inventory_of
from integration.nvml.nvidia_smi import SmiFailed

__all__ = ["apply", "holders_of", "undone"]

_WAITING: Final = f"{marks.OF_MIG}waits for the holders of what it removes"
_CHANGING: Final = f"{marks.OF_MIG}MIG devices are changed"
_CHANGED: Final = f"{marks.OF_MIG}MIG devices are changed, and the other GPUs follow"
_UNDOING: Final = f"{marks.OF_MIG}MIG devices are changed back"

Say = Callable[[str], None]


def apply(config: Config, layout: Layout, options: DrainOptions, say: Say) -> tuple[Change, ...]:
    """Change the node's GPUs so that they match a layout.

    Args:
        options: whether and how to wait for holders.
        say: receives a line before each step.

    Returns:
        What was changed; empty if the GPUs already matched.

    Raises:
        LayoutImpossible: a GPU does not support the layout. Nothing was changed.
        LayoutHeld: something that would be destroyed has holders. Nothing was changed.
        LayoutFailed: a step failed; all changes were undone.
        LayoutNotUndone: a step failed, and undoing the changes failed, too.
        MigRecordUnusable: it is not known what an apply that was killed changed.
        ResetRunning: a reset or another apply is running.
        DrainError: a mark cannot be written.
        StateUnreadable: the caller is not root.
    """
    with marks.resetting(config):
        _recover(config, say)
        inventory = inventory_of(config, fresh=True)
        changes = plan(layout, read_gpus(config, inventory))
        if changes:
            lost = _entries(config)
            return _Transaction(config, layout, inventory, options, say, lost).run(changes)
        return ()


def holders_of(
    changes: Sequence[Change], inventory: Inventory, config: Config, options: DrainOptions
) -> tuple[Holder, ...]:
    """Return the holders of what changes would destroy."""
    targets = _targets(changes, inventory)
    found = find_holders(targets, inventory, config, options.states, options.proc)
    return (*found, *claim_holders(config, [each.gpu.gpu for each in changes], targets))


def _targets(changes: Iterable[Change], inventory: Inventory) -> tuple[Target, ...]:
    """Return the GPUs whose mode changes, and of the others the MIG devices to be destroyed."""
    targets = []
    for change in changes:
        gpu = change.gpu.gpu
        if change.switches:
            targets.append(Target(id_of(gpu), f"GPU {gpu.index}", gpu))
            continue
        places = {(cut.start, cut.profile) for cut in change.removed}
        gone = {each.id for each in change.gpu.parts.instances
                if (each.start, each.profile) in places}  # fmt: skip
        targets += (
            Target(mig.uuid, f"MIG device {mig.gpu}:{mig.index}", gpu, mig)
            for mig in inventory.mig_devices
            if mig.gpu == gpu.index and mig.gpu_instance in gone
        )
    return tuple(targets)


@dataclass(frozen=True, slots=True)
class _Transaction:
    """One apply, by the process that has the lock."""

    config: Config
    layout: Layout
    inventory: Inventory
    options: DrainOptions
    say: Say
    lost: tuple[JournalEntry, ...]  # what an earlier apply did to GPUs that are lost

    def run(self, changes: tuple[Change, ...]) -> tuple[Change, ...]:
        """Carry out changes, and return those that were carried out."""
        gpus = [each.gpu.gpu for each in changes]
        reason = self.options.reason or f"MIG layout {self.layout.name}"
        self._write_down([JournalEntry(each.uuid) for each in changes])
        try:
            for gpu in gpus:
                mark = Drain(id_of(gpu), bus_id=gpu.bus_id, reset=_WAITING, reason=reason)
                marks.put(self.config, mark)
            changes = self._wait(changes)
            self._change(changes, gpus)
        except BaseException as error:  # Ctrl-C as well
            left = _recover(self.config, self.say, finishes=False)
            if isinstance(error, LayoutFailed) and not left.isdisjoint(each.uuid for each in gpus):
                asked = f"to apply the layout {self.layout.name}"
                raise LayoutNotUndone(asked, found=error.found, do=error.do) from error
            raise
        _finish(self.config, map(id_of, gpus), self.lost)
        return changes

    def _wait(self, changes: tuple[Change, ...]) -> tuple[Change, ...]:
        """Wait for holders, and return the changes that are needed after that."""
        deadline = time.monotonic() + (self.options.seconds or 0.0)
        inventory, ours = self.inventory, {each.uuid for each in changes}
        while True:
            seconds = max(0.0, deadline - time.monotonic())
            if holders := self._holders(changes, inventory, seconds):
                raise LayoutHeld(
                    f"to apply the layout {self.layout.name}",
                    found=f"{', '.join(each.name for each in holders)} "
                    f"{'holds' if len(holders) == 1 else 'hold'} what it removes",
                    do=f"{'; '.join(dict.fromkeys(each.do for each in holders))}; then apply it "
                    "again, or with --wait",
                )
            inventory = inventory_of(self.config, fresh=True)
            gpus = read_gpus(self.config, inventory)
            now = tuple(each for each in plan(self.layout, gpus) if each.uuid in ours)
            if [_shape(each) for each in now] == [_shape(each) for each in changes]:
                return now
            changes = now
            for uuid in ours:  # the agent may open NVML again
                marks.step(self.config, uuid, _WAITING)

    def _holders(
        self, changes: tuple[Change, ...], inventory: Inventory, seconds: float
    ) -> Sequence[Holder]:
        switching = [each.gpu.gpu for each in changes if each.switches]

        def look() -> tuple[Holder, ...]:
            return holders_of(changes, inventory, self.config, self.options)

        def closing() -> None:
            for gpu in switching:
                marks.step(self.config, id_of(gpu), _CHANGING, closed=True)

        return wait_for_holders(
            look, self.options, self.say, lets_go=bool(switching), seconds=seconds, closing=closing
        )

    def _change(self, changes: Sequence[Change], marked: Iterable[Gpu]) -> None:
        states = {each.uuid: (each.gpu.now, each.after) for each in changes}
        self._write_down([JournalEntry(gpu.uuid, states.get(gpu.uuid)) for gpu in marked])
        instances = Instances(self.config, self.inventory.driver, self.say)
        for each in changes:
            marks.step(self.config, id_of(each.gpu.gpu), _CHANGING, closed=each.switches)
            try:
                instances.reach(each.gpu.gpu, each.after)
            except SmiFailed as error:
                asked = f"to apply the layout {self.layout.name} on {each.gpu.gpu}"
                raise LayoutFailed(asked, found=error.found, do=error.do) from error
            marks.step(self.config, id_of(each.gpu.gpu), _CHANGED)
        _renew(self.config)

    def _write_down(self, entries: Iterable[JournalEntry]) -> None:
        journal.write(self.config, [*self.lost, *entries])


def _shape(change: Change) -> tuple[str, Partition, Partition]:
    return change.uuid, change.gpu.now, change.after


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end, and keep it from nvidia-smi; an error takes precedence."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    except BaseException:
        while signal.sigtimedwait({signal.SIGINT}, 0) is not None:
            pass
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@_uninterrupted()
def _recover(config: Config, say: Say, *, finishes: bool = True) -> frozenset[str]:
    """Undo the changes of an apply that failed or was killed; if all were made, remove its marks.

    Args:
        finishes: whether to keep the changes if all were made, as after a kill. If a step failed,
            they are undone in any case.

    Returns:
        The UUIDs of lost GPUs with changes. They stay out of service and in the journal.

    Raises:
        LayoutNotUndone: undoing failed for a GPU. It stays out of service and in the journal.
        MigRecordUnusable: it is not known what to undo.
    """
    entries = _entries(config)
    if not entries:
        return frozenset()
    begun = _begun(config, entries)
    inventory = inventory_of(config, fresh=True)
    try:
        there = read_gpus(config, inventory) if any(each.states for each in begun) else ()
    except MigError as error:
        raise LayoutNotUndone("to undo a MIG layout", found=error.found, do=error.do) from error
    gpus = {each.gpu.uuid: each for each in there if each.answers}
    changed = [(each, *each.states) for each in begun if each.states and each.uuid in gpus]
    lost = [each for each in begun if each.states and each.uuid not in gpus]
    is_done = (
        finishes and not lost and all(gpus[each.uuid].is_at(after) for each, _, after in changed)
    )
    instances = Instances(config, inventory.driver, _unless_broken(say))
    left = [*lost]
    failed: MigError | None = None
    for entry, before, _ in () if is_done else changed:
        switches = Change(gpus[entry.uuid], before).switches
        _try_step(config, entry.uuid, _UNDOING, closed=switches)
        try:
            instances.reach(gpus[entry.uuid].gpu, before)
        except SmiFailed as error:
            _try_step(config, entry.uuid, f"{_UNDOING}: {one_line(error.found)}")
            asked = f"to undo a MIG layout on {gpus[entry.uuid].gpu}"
            failed = failed or LayoutNotUndone(asked, found=error.found, do=error.do)
            left.append(entry)
    for each in lost:
        _try_step(config, each.uuid, f"{_UNDOING} when the GPU answers again")
    if changed:
        _renew(config)
    _finish(config, (each.uuid for each in begun if each not in left), left)
    if failed is not None:
        raise failed
    return frozenset(each.uuid for each in lost)


def _try_step(config: Config, uuid: str, how_far: str, *, closed: bool = False) -> None:
    """Record the progress of undoing, if that is possible: a full disk must not prevent undoing."""
    with suppress(DrainError):
        marks.step(config, uuid, how_far, closed=closed)


def _entries(config: Config) -> tuple[JournalEntry, ...]:
    """Return the entries of the journal.

    Raises:
        MigRecordUnusable: it cannot be read, and GPUs have marks of an apply.
    """
    try:
        return journal.read(config)
    except MigError as error:
        if not (marked := _marked(config)):
            return ()  # the journal is written before the first mark
        gpus = ", ".join(sorted(marked))
        raise MigRecordUnusable(
            "to undo a MIG layout", found=f"{error.found}; it is the record of {gpus}"
        ) from error


def _marked(config: Config) -> set[str]:
    """Return the UUIDs of the GPUs that an apply has taken out of service."""
    return {mark.device for mark in read_drains(config) if mark.reset.startswith(marks.OF_MIG)}


def _begun(config: Config, entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Return the entries whose GPUs an apply has taken out of service.

    Raises:
        MigRecordUnusable: it cannot be told for a GPU, because its mark cannot be read.
    """
    blank = {mark.device for mark in read_drains(config) if mark == Drain(mark.device)}
    if unknown := next((each.uuid for each in entries if each.states and each.uuid in blank), ""):
        path = path_of(config, unknown)
        raise MigRecordUnusable("to undo a MIG layout", found=f"{path}: it is empty or damaged")
    marked = _marked(config)
    return [each for each in entries if each.uuid in marked]


def undone(config: Config, gpus: Iterable[MigGpu]) -> tuple[MigGpu, ...]:
    """Return GPUs as they will be once the next apply has undone the changes of a killed one.

    Raises:
        MigRecordUnusable: it is not known what that changed.
    """
    gpus = tuple(gpus)
    states = {e.uuid: e.states for e in _begun(config, _entries(config)) if e.states}
    there = {each.gpu.uuid: each for each in gpus if each.answers}
    if all(uuid in there and there[uuid].is_at(after) for uuid, (_, after) in states.items()):
        return gpus  # all changes were made
    return tuple(
        each.at(states[each.gpu.uuid][0]) if each.gpu.uuid in states and each.answers else each
        for each in gpus
    )


def _unless_broken(say: Say) -> Say:
    """Return a function that says a line, and ignores that its reader is gone."""

    def do(line: str) -> None:
        with suppress(OSError):
            say(line)

    return do


def _renew(config: Config) -> None:
    """Create the nodes of new devices, and an inventory with them for the next container."""
    create(config, CreateOptions())
    inventory_of(config, fresh=True)


@_uninterrupted()
def _finish(config: Config, uuids: Iterable[str], lost: Sequence[JournalEntry]) -> None:
    """Return GPUs to service, unless a person drained them before, and end the journal.

    Args:
        lost: the entries that stay in the journal.
    """
    for uuid in uuids:
        marks.finish(config, uuid)
    if lost:
        journal.write(config, lost)
    else:
        journal.remove(config)
