"""Find places for the MIG devices that a GPU should have. A pure function.

Rules
- Partial compute instances of one profile share GPU instances, the largest first.
- As many wanted GPU instances as possible stay, so that the programs on them keep running.
- The search is exhaustive: it fails only if no arrangement fits into the places that NVML allows.
  It is short, since a GPU has eight memory slices and at most seven instances.

Source: NVIDIA's MIG user guide (placements).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from integration.mig.profiles import ProfileName
from integration.mig.state import Cut
from integration.nvml.mig_parts import Profile

__all__ = ["Unplaceable", "place"]

_MOST: Final = 256


class Unplaceable(Exception):
    """The devices do not fit; ``str()`` says which one, and why."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A GPU instance to place."""

    name: ProfileName
    profile: Profile
    computes: tuple[int, ...]


def place(
    wanted: Mapping[ProfileName, int],
    profiles: Mapping[ProfileName, Profile],
    existing: Collection[Cut],
) -> frozenset[Cut]:
    """Return GPU instances with the wanted MIG devices.

    Args:
        wanted: the number of MIG devices of each profile.
        profiles: the GPU's profiles, with their possible places.
        existing: the present GPU instances.

    Raises:
        Unplaceable: the GPU does not have a profile, or not enough room for all devices.
    """
    slots = _slots(wanted, profiles)
    count = Counter((slot.profile.id, slot.computes) for slot in slots)
    sizes = {slot.profile.id: dict(slot.profile.places) for slot in slots}
    useful = sorted(
        each
        for each in existing
        if count[each.profile, each.computes] and each.start in sizes[each.profile]
    )
    blocked = slots[0].name if slots else None
    for number in range(len(useful), -1, -1):
        for kept in combinations(useful, number):
            left = count - Counter((each.profile, each.computes) for each in kept)
            if left.total() != len(slots) - number:
                continue  # more of a kind than wanted
            rest = [slot for slot in slots if _take(left, (slot.profile.id, slot.computes))]
            taken = sum(_bits(each.start, sizes[each.profile][each.start]) for each in kept)
            found = _Search(rest).fill(taken)
            if isinstance(found, list):
                return frozenset((*kept, *found))
            blocked = found
    beside = ", ".join(f"{n} x {name}" for name, n in sorted(wanted.items(), reverse=True))
    raise Unplaceable(f"there is no room for {blocked} ({beside})")


def _slots(
    wanted: Mapping[ProfileName, int], profiles: Mapping[ProfileName, Profile]
) -> list[_Slot]:
    """Return the GPU instances that the wanted devices need, the largest first."""
    made: list[_Slot] = []
    for name in dict.fromkeys(each.whole for each in wanted):
        profile = profiles.get(name)
        if profile is None:
            raise Unplaceable(f"it has no profile {name}, only {', '.join(map(str, profiles))}")
        bins: list[list[int]] = []
        for size in sorted((each.computes for each in _devices(wanted, name)), reverse=True):
            room = next((each for each in bins if sum(each) + size <= name.slices), None)
            if room is None:
                bins.append([size])
            else:
                room.append(size)
        if len(bins) > profile.most:
            raise Unplaceable(f"it can have {profile.most} x {name}, not {len(bins)}")
        made += (_Slot(name, profile, tuple(each)) for each in bins)
    return sorted(made, key=lambda slot: (-_size(slot), slot.profile.id, slot.computes))


def _devices(wanted: Mapping[ProfileName, int], name: ProfileName) -> Iterator[ProfileName]:
    for each, count in wanted.items():
        if each.whole == name:
            # A count may be in the millions; this many are refused as well.
            yield from [each] * min(count, _MOST)


def _size(slot: _Slot) -> int:
    return max((size for _, size in slot.profile.places), default=0)


def _bits(start: int, size: int) -> int:
    return ((1 << size) - 1) << start


def _take(left: Counter[tuple[int, tuple[int, ...]]], key: tuple[int, tuple[int, ...]]) -> bool:
    left[key] -= 1
    return left[key] >= 0


class _Search:
    """Place slots one after the other, and go back where one does not fit."""

    def __init__(self, slots: Sequence[_Slot]) -> None:
        self._slots = slots
        self._deepest = 0

    def fill(self, taken: int) -> list[Cut] | ProfileName:
        """Return the places of all slots, or the name of the first slot that never fits.

        Args:
            taken: a bit for each memory slice that is occupied.
        """
        found = self._from(0, taken, -1)
        return self._slots[self._deepest].name if found is None else found

    def _from(self, index: int, taken: int, after: int) -> list[Cut] | None:
        """Place the slots from an index on.

        Args:
            after: place a slot that equals the previous one behind this slice: other orders of
                equal slots need not be tried.
        """
        if index == len(self._slots):
            return []
        self._deepest = max(self._deepest, index)
        slot = self._slots[index]
        is_next_alike = self._slots[index + 1 : index + 2] and (
            self._slots[index + 1].profile.id == slot.profile.id
        )
        for start, size in slot.profile.places:
            bits = _bits(start, size)
            if start <= after or taken & bits:
                continue
            rest = self._from(index + 1, taken | bits, start if is_next_alike else -1)
            if rest is not None:
                return [Cut(start, slot.profile.id, slot.computes), *rest]
        return None
