"""GetPreferredAllocation: choose the best of the free devices for a container.

Rules
- Whole GPUs: divide the free GPUs into sets of the requested size, with the GPUs of each set as
  close to each other as possible (:mod:`integration.nvml.topology`), and choose the best set. It is
  not enough to find one good set, because that may leave only bad sets for others. Among equal
  sets, choose the one that cuts the fewest links to the other GPUs. So a single GPU comes from a
  group that is already incomplete, and not from a complete one as in NVIDIA's plugin. If sets are
  still equal, the lowest indices win.
- The search starts from several divisions and exchanges GPUs between sets until no exchange helps.
  On eight GPUs (DGX-1, bridged pairs, PCIe switches) that finds the optimum in all but one of 1,500
  cases.
- Shares and MIG devices: ``distributed`` takes from the GPU with the fewest allocated devices,
  ``packed`` from the GPU with the most; within a GPU the same holds for its devices. A device
  counts as allocated if it is not free.
- The required devices are always in the result. A device that is not free never is.
- A free device that is gone or unhealthy is left out if the others suffice: the kubelet may not
  know of it yet, and would fail the pod or start it on a dead GPU.
- If claims may have the same devices, the last names win instead of the lowest indices. The
  scheduler takes the first free device of a slice, and slices list devices by name. So a claim and
  a pod that arrive at the same moment seldom choose the same device.

Source: go-gpuallocator gpuallocator/besteffort_policy.go; k8s-device-plugin
internal/rm/allocate.go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Final

from integration.agent_errors import DeviceUnknown, PreferenceUnsuitable, TooFewAvailable
from integration.node.values.claims import name_of
from integration.node.values.resources import Allocation, Device, Resource
from integration.nvml.topology import Topology

_STARTS: Final = 8
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
    beside_claims: bool = False,
) -> tuple[str, ...]:
    """Return the ids of the best devices for a container.

    Args:
        available: ids of the free devices.
        required: ids that the result must contain.
        topology: the distances between the GPUs; None if they are unknown.
        beside_claims: whether resource claims may have the same devices.

    Returns:
        The required ids first, then the others by index or in the order of preference.

    Raises:
        DeviceUnknown: a required id is not in the resource.
        PreferenceUnsuitable: a required device is not free, or more devices are required than
            requested.
        TooFewAvailable: more devices are requested than are free.
    """
    asked = f"{size} of {resource.name}"
    known = resource.by_id
    free, needed = known.keys() & set(available), tuple(dict.fromkeys(required))
    for id_ in needed:
        if id_ not in known:
            raise DeviceUnknown(
                asked, found=f"{id_!r} is not one of its devices", do="use ids of the latest list"
            )
        if id_ not in free:
            raise PreferenceUnsuitable(
                asked, found=f"the required device {id_} is not free", do="require a free device"
            )
    if len(needed) > size:
        raise PreferenceUnsuitable(
            asked, found=f"{len(needed)} devices are required", do=f"require at most {size}"
        )
    if size > len(free):
        raise TooFewAvailable(asked, found=f"{len(free)} are free", do="request fewer")
    healthy = free - resource.unhealthy.difference(needed)
    if size <= len(healthy):
        free = healthy
    else:
        needed = (*needed, *(id_ for id_ in known if id_ in healthy and id_ not in needed))
    devices: Sequence[Device] = resource.devices
    if beside_claims:
        devices = sorted(devices, key=lambda each: name_of(each.uuid), reverse=True)
    if all(device.id == device.gpu for device in devices):
        available_gpus = [device for device in devices if device.id in free]
        return _nearest(available_gpus, needed, size, topology or Topology())
    return _spread(devices, free, needed, size, policy)


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
        pile = piles.get(device.uuid)
        if pile is None:
            pile = piles[device.uuid] = _Pile(device)
        if device.id in free and device.id not in taken:
            pile.free.append(device.id)
        else:
            pile.used += 1
            of_gpu[device.gpu] = of_gpu.get(device.gpu, 0) + 1
    sign = -1 if policy is Allocation.PACKED else 1
    for pile in piles.values():
        pile.free.reverse()  # the loop below takes from the end
    candidates = [pile for pile in piles.values() if pile.free]
    chosen = list(required)
    while len(chosen) < size:
        # The first of equals, by index.
        best = min(
            candidates, key=lambda pile: (sign * of_gpu.get(pile.device.gpu, 0), sign * pile.used)
        )
        chosen.append(best.free.pop())
        best.used += 1
        of_gpu[best.device.gpu] = of_gpu.get(best.device.gpu, 0) + 1
        if not best.free:
            candidates.remove(best)
    return tuple(chosen)


# -- whole GPUs --------------------------------------------------------------------------------


def _nearest(
    devices: Sequence[Device], required: Sequence[str], size: int, topology: Topology
) -> tuple[str, ...]:
    """Return the ids of the best GPUs. From here on a GPU is its position in ``devices``."""
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
    """Return the total weight between a set and all other GPUs."""
    return sum(
        weight for one in chosen for other, weight in enumerate(weights[one]) if other not in chosen
    )


def _good(weights: Weights, needed: frozenset[int], size: int) -> frozenset[int]:
    """Return the best set of the divisions that the search finds."""
    best: tuple[int, int, int] | None = None
    best_set: frozenset[int] = frozenset()
    for shift in range(_STARTS):
        sets = _first_division(weights, needed, size, shift)
        _exchange(weights, sets, needed)
        total = sum(_inside(weights, each) for each in sets)
        for each in sets:
            if len(each) == size and needed.issubset(each):
                value = (total, _inside(weights, each), -_cut(weights, each))
                if best is None or value > best:
                    best, best_set = value, frozenset(each)
    return best_set


def _first_division(
    weights: Weights, needed: frozenset[int], size: int, shift: int
) -> list[set[int]]:
    """Return a division: each set grows by its nearest GPU; the first has the required ones."""
    count = len(weights)
    order = [(number + shift * count // _STARTS) % count for number in range(count)]
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
    """Exchange members of the sets while that helps; the required GPUs stay in the first set."""
    place = {number: index for index, members in enumerate(sets) for number in members}
    # Total weight between each GPU and the members of each set.
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
