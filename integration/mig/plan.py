"""Decide what has to change so that the GPUs of a node match a layout. Pure.

Rules
- The last entry that matches a GPU applies. A GPU without a matching entry stays as it is.
- MIG devices are compared by the number of each profile, not by their places. So a GPU that has the
  wanted devices does not change.
- A GPU that does not support MIG matches if MIG should be off. An entry for `all` devices skips it;
  an entry that names it by its index and enables MIG is an error.

Source: NVIDIA/mig-parted (comparison; GPUs without MIG).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from integration.mig.errors import LayoutImpossible
from integration.mig.format import Entry, Layout
from integration.mig.placing import Unplaceable, place
from integration.mig.state import Cut, MigGpu, Partition

__all__ = ["Change", "concerns", "differences", "plan"]


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one GPU."""

    gpu: MigGpu
    after: Partition

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return self.gpu.gpu.uuid

    @property
    def switches(self) -> bool:
        """Whether its MIG mode changes, also a mode that the next reset would set."""
        return not _has_mode(self.gpu, on=self.after.mode)

    @property
    def removed(self) -> tuple[Cut, ...]:
        """The GPU instances to destroy, in order."""
        return tuple(sorted(self.gpu.now.cuts - self.after.cuts))

    @property
    def made(self) -> tuple[Cut, ...]:
        """The GPU instances to create, in order."""
        return tuple(sorted(self.after.cuts - self.gpu.now.cuts))


def plan(layout: Layout, gpus: Iterable[MigGpu]) -> tuple[Change, ...]:
    """Return the changes that a layout needs.

    Raises:
        LayoutImpossible: a GPU does not support what the layout says.
    """
    changes = []
    for gpu in gpus:
        entry = _entry_for(layout, gpu)
        if entry is None or _is_as(gpu, entry):
            continue
        asked = f"the layout {layout.name} on {gpu.gpu}"
        if not gpu.answers:
            raise LayoutImpossible(asked, found="NVML does not list it", do="see `nvshim doctor`")
        if not gpu.parts.profiles:
            raise LayoutImpossible(
                asked, found="it does not support MIG", do="leave its index out of `devices`"
            )
        try:
            cuts = place(entry.counts, gpu.profiles, gpu.now.cuts)
        except Unplaceable as error:
            raise LayoutImpossible(asked, found=str(error), do="change the layout") from error
        changes.append(Change(gpu, Partition(entry.enabled, cuts)))
    return tuple(changes)


def concerns(layout: Layout, gpus: Iterable[MigGpu]) -> bool:
    """Return whether a layout has an entry for any of these GPUs."""
    return any(_entry_for(layout, gpu) is not None for gpu in gpus)


def differences(layout: Layout, gpus: Iterable[MigGpu]) -> Iterator[str]:
    """Yield a line for each GPU that does not match a layout, or for which it has no entry."""
    for gpu in gpus:
        entry = _entry_for(layout, gpu)
        if entry is None:
            yield f"GPU {gpu.gpu.index} is in no entry"
        elif not _is_as(gpu, entry):
            yield f"GPU {gpu.gpu.index} differs"


def _entry_for(layout: Layout, gpu: MigGpu) -> Entry | None:
    return layout.entry_for(gpu.gpu.index, gpu.device, gpu.subsystem)


def _is_as(gpu: MigGpu, entry: Entry) -> bool:
    if not gpu.answers:
        return False
    if not gpu.parts.profiles:
        return not entry.enabled or entry.indices is None
    is_complete = all(cut.computes for cut in gpu.now.cuts)
    return (
        _has_mode(gpu, on=entry.enabled)
        and is_complete
        and gpu.names(gpu.now.cuts) == dict(entry.counts)
    )


def _has_mode(gpu: MigGpu, *, on: bool) -> bool:
    return gpu.now.mode is on and gpu.parts.pending is on
