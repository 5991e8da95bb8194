"""GetPreferredAllocation: which of the free devices a container had best get.

Rules
- Whole GPUs: the free ones are divided into sets of the size that is asked for, so that the GPUs
  of each set are as near to each other as can be (:mod:`.topology`), and the best of these sets is
  given: a set that is good alone may leave only bad ones. Among equals, the one that tears the
  least away from the rest; so a single GPU is taken where a group is incomplete already, and not
  the first of a whole one, as with NVIDIA's plugin. Then those of the lowest indices.
- Sets are improved by exchange until none helps, from several beginnings. On eight GPUs, as of
  DGX-1, bridged pairs or PCIe switches, that is the best there is in all but one of 1,500 cases.
- Shares and MIG devices: ``distributed`` takes from the GPU of which the least is allocated,
  ``packed`` of which the most is; of one GPU likewise from the device. What is allocated is what
  is not free.
- What has to be given is given in any case. Nothing that is not free is ever given.
- What is free and not there any more, or not healthy any more, is left out as long as others do: a
  kubelet that has not heard of that yet would fail a pod, or start one on a dead GPU.

Source: go-gpuallocator gpuallocator/besteffort_policy.go; k8s-device-plugin
internal/rm/allocate.go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Final

from integration.agent_errors import DeviceUnknown, PreferenceUnsuitable, TooFewAvailable
from integration.node.values.resources import Allocation, Device, Resource
from integration.nvml.topology import Topology

_BEGINNINGS: Final = 8
_MOST_EXCHANGES: Final = 200

Weights = list[list[int]]


def preferred(
    resource: Resource,
    available: Collection[str],
    required: Collection[str],
    size: int,
    *,
    topology: Topology | None = None,
    policy: Allocation = Allocation.DISTRIBUTED,
) -> tuple[str, ...]:
    """The devices that a container had best get.

    Args:
        available: the ids of those that are free.
        required: the ids of those that have to be among them.
        topology: how near the GPUs are; None if nothing is known of that.

    Returns:
        Their ids: those required first, the others by index or in the order of preference.

    Raises:
        DeviceUnknown: one that is required is no device of the resource.
        PreferenceUnsuitable: one that is required is not free, or more are required than asked
            for.
        TooFewAvailable: more are asked for than are free.
    """
    asked = f"{size} of {resource.name}"
    known = resource.by_id
    free, needed = known.keys() & set(available), tuple(dict.fromkeys(required))
    for id_ in needed:
        if id_ not in known:
            raise DeviceUnknown(
                asked, found=f"{id_!r}, which is none of them", do="ask of what was listed last"
            )
        if id_ not in free:
            raise PreferenceUnsuitable(
                asked, found=f"{id_}, which has to be given, is not free", do="require a free one"
            )
    if len(needed) > size:
        raise PreferenceUnsuitable(
            asked, found=f"{len(needed)} that have to be given", do="require no more than are asked"
        )
    if size > len(free):
        raise TooFewAvailable(asked, found=f"{len(free)} are free", do="ask for fewer")
    well = {id_ for id_ in free if known[id_].is_healthy}.union(needed)
    if size <= len(well):
        free = well
    else:
        needed = (*needed, *(id_ for id_ in known if id_ in well and id_ not in needed))
    if all(device.id == device.gpu for device in known.values()):
        devices = [device for id_, device in known.items() if id_ in free]
        return _nearest(devices, needed, size, topology or Topology())
    return _spread(resource.devices, free, needed, size, policy)


# -- shares and MIG devices --------------------------------------------------------------------


class _Pile:
    """The free shares of one device."""

    __slots__ = ("device", "free", "used")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.free: list[str] = []
        self.used = 0


def _spread(
    devices: Iterable[Device],
    free: Collection[str],
    required: Sequence[str],
    size: int,
    policy: Allocation,
) -> tuple[str, ...]:
    taken = frozenset(required)
    piles: dict[str, _Pile] = {}
    of_gpu: dict[str, int] = {}
    for device in devices:
        pile = piles.setdefault(device.uuid, _Pile(device))
        if device.id in free and device.id not in taken:
            pile.free.append(device.id)
        else:
            pile.used += 1
            of_gpu[device.gpu] = of_gpu.get(device.gpu, 0) + 1
    sign = -1 if policy is Allocation.PACKED else 1
    for pile in piles.values():
        pile.free.reverse()  # they are taken from the end
    candidates = [pile for pile in piles.values() if pile.free]
    found = list(required)
    while len(found) < size:
        # The first of equals, by index.
        best = min(
            candidates, key=lambda pile: (sign * of_gpu.get(pile.device.gpu, 0), sign * pile.used)
        )
        found.append(best.free.pop())
        best.used += 1
        of_gpu[best.device.gpu] = of_gpu.get(best.device.gpu, 0) + 1
        if not best.free:
            candidates.remove(best)
    return tuple(found)


# -- whole GPUs --------------------------------------------------------------------------------


def _nearest(
    devices: Sequence[Device], required: Sequence[str], size: int, topology: Topology
) -> tuple[str, ...]:
    """Some of the free GPUs; they are numbers from here on, in the order of ``devices``."""
    if size == 0:
        return ()
    names = [device.id for device in devices]
    weights = [
        [topology.score(one, other) if one != other else 0 for other in names] for one in names
    ]
    numbers = {name: number for number, name in enumerate(names)}
    needed = frozenset(numbers[name] for name in required)
    everyone = frozenset(range(len(names)))
    if len(needed) == size:
        chosen = needed
    elif size == len(names):
        chosen = everyone
    elif size == 1:
        chosen = min((frozenset({n}) for n in sorted(everyone)), key=lambda s: _cut(weights, s))
    else:
        chosen = _good(weights, needed, size)
    rest = [names[number] for number in sorted(chosen - needed)]
    return (*required, *rest)


def _inside(weights: Weights, chosen: Iterable[int]) -> int:
    return sum(weights[one][other] for one, other in combinations(chosen, 2))


def _cut(weights: Weights, chosen: Collection[int]) -> int:
    """What is between a set and all others."""
    return sum(
        weight for one in chosen for other, weight in enumerate(weights[one]) if other not in chosen
    )


def _good(weights: Weights, needed: frozenset[int], size: int) -> frozenset[int]:
    """The set of a good division, found by exchange from several beginnings."""
    best: tuple[int, int, int] | None = None
    found: frozenset[int] = frozenset()
    for shift in range(_BEGINNINGS):
        sets = _begin(weights, needed, size, shift)
        _exchange(weights, sets, needed)
        total = sum(_inside(weights, each) for each in sets)
        for each in sets:
            if len(each) == size and needed.issubset(each):
                value = (total, _inside(weights, each), -_cut(weights, each))
                if best is None or value > best:
                    best, found = value, frozenset(each)
    return found


def _begin(weights: Weights, needed: frozenset[int], size: int, shift: int) -> list[set[int]]:
    """A division: each set grows by what is nearest to it; the first has what is required."""
    count = len(weights)
    order = [(number + shift * count // _BEGINNINGS) % count for number in range(count)]
    left = [number for number in order if number not in needed]
    sets: list[set[int]] = []
    growing = set(needed)
    while left or growing:
        if not growing:
            growing.add(left.pop(0))
        while left and len(growing) < size:
            nearest = max(left, key=lambda number: sum(weights[number][n] for n in growing))
            left.remove(nearest)
            growing.add(nearest)
        sets.append(growing)
        growing = set()
    return sets


def _exchange(weights: Weights, sets: list[set[int]], needed: frozenset[int]) -> None:
    """Exchange members of the sets as long as it helps; what is required stays in the first."""
    place = {number: index for index, members in enumerate(sets) for number in members}
    # How near each is to the members of each set.
    near = [[sum(row[n] for n in members) for members in sets] for row in weights]
    movable = [number for number in sorted(place) if number not in needed]
    for _ in range(_MOST_EXCHANGES):
        best, pair = 0, None
        for one, other in combinations(movable, 2):
            ours, theirs = place[one], place[other]
            if ours == theirs:
                continue
            gain = (
                near[one][theirs]
                + near[other][ours]
                - near[one][ours]
                - near[other][theirs]
                - 2 * weights[one][other]
            )
            if gain > best:
                best, pair = gain, (one, other)
        if pair is None:
            return
        one, other = pair
        ours, theirs = place[one], place[other]
        sets[ours].symmetric_difference_update(pair)
        sets[theirs].symmetric_difference_update(pair)
        place[one], place[other] = theirs, ours
        for number, row in enumerate(weights):
            change = row[other] - row[one]
            near[number][ours] += change
            near[number][theirs] -= change
