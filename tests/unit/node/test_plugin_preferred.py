from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.errors import NvshimError
from integration.agent_errors import DeviceUnknown, PreferenceUnsuitable, TooFewAvailable
from integration.node.services.dra.devices import Device as SliceDevice
from integration.node.services.dra.slices import contents
from integration.node.services.plugin.preferred import preferred
from integration.node.values.claims import name_of
from integration.node.values.health import HealthState
from integration.node.values.resources import TIME_SLICING, Allocation, Device, Resource
from integration.nvml.topology import Between, Topology
from tests.harness.raising import Kind, raises

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def gpus(count: int) -> Resource:
    names = [f"GPU-{index:02}" for index in range(count)]
    return Resource(
        "nvidia.com/gpu",
        tuple(Device(name, name, name, str(index), index) for index, name in enumerate(names)),
    )


def shares(count: int, replicas: int) -> Resource:
    return Resource(
        "nvidia.com/gpu",
        tuple(
            Device(f"{device.uuid}::{number}", device.uuid, device.gpu, device.index, device.minor)
            for device in gpus(count).devices
            for number in range(replicas)
        ),
        sharing=TIME_SLICING,
        replicas=replicas,
    )


def migs(*counts: int) -> Resource:
    return Resource(
        "nvidia.com/mig-1g.10gb",
        tuple(
            Device(f"MIG-{gpu}-{n}", f"MIG-{gpu}-{n}", f"GPU-{gpu}", f"{gpu}:{n}", gpu)
            for gpu, count in enumerate(counts)
            for n in range(count)
        ),
    )


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"GPU-{number:02}" for number in numbers)


def topology(count: int, links: Callable[[int, int], int]) -> Topology:
    pairs = list(combinations(range(count), 2))
    return Topology(
        nearness={(names(a)[0], names(b)[0]): Between.SYSTEM for a, b in pairs},
        nvlinks={(names(a)[0], names(b)[0]): links(a, b) for a, b in pairs},
    )


def dgx1(a: int, b: int) -> int:
    """Return the NVLinks of eight GPUs in a cube mesh, as in a DGX-1."""
    table = {
        (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
        (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
    }  # fmt: skip
    return table.get((a, b), 0)


CUBE = topology(8, dgx1)
# Groups of four fully connected GPUs.
QUADS = topology(16, lambda a, b: 4 if a // 4 == b // 4 else 0)


def all_ids(resource: Resource) -> list[str]:
    return [device.id for device in resource.devices]


def choose(
    resource: Resource,
    size: int,
    *,
    free: Iterable[str] | None = None,
    required: Iterable[str] = (),
    topology: Topology | None = None,
    policy: Allocation = Allocation.DISTRIBUTED,
    beside_claims: bool = False,
) -> tuple[str, ...]:
    available = list(free) if free is not None else all_ids(resource)
    return preferred(
        resource, available, list(required), size, topology=topology, policy=policy,
        beside_claims=beside_claims,
    )  # fmt: skip


# -- whole GPUs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"),
    [(2, {(0, 3), (0, 4), (1, 2), (1, 5), (4, 7), (5, 6), (2, 3), (6, 7)}),
     (4, {(0, 1, 2, 3), (4, 5, 6, 7)}), (8, {tuple(range(8))})],
)  # fmt: skip
def test_gpus_that_are_given_together_are_linked(size: int, expected: set[tuple[int, ...]]) -> None:
    assert choose(gpus(8), size, topology=CUBE) in {names(*each) for each in expected}


def test_a_pair_is_taken_so_that_the_others_can_be_pairs_too() -> None:
    # 0 and 1 have the most links; but then 2 and 3 would have none.
    line = topology(4, lambda a, b: {(0, 1): 3, (0, 2): 2, (1, 3): 2}.get((a, b), 0))
    assert choose(gpus(4), 2, topology=line) in {names(0, 2), names(1, 3)}
    assert choose(gpus(4), 2, topology=line, required=names(1)) == names(1, 3)


def test_one_gpu_is_taken_of_the_group_that_is_incomplete() -> None:
    assert choose(gpus(8), 1, topology=CUBE) == names(0)
    free = names(0, 1, 2, 3, 5, 6, 7)
    assert choose(gpus(8), 1, free=free, topology=topology(8, lambda a, b: a // 4 == b // 4)) == (
        names(5)
    )


def test_without_a_topology_the_first_ones_are_given() -> None:
    assert choose(gpus(4), 2) == names(0, 1)
    assert choose(gpus(4), 2, free=names(3, 1, 2)) == names(1, 2)
    assert choose(gpus(4), 0) == ()


@pytest.mark.parametrize("uuids", [("GPU-A", "GPU-b", "GPU-c"), ("GPU-b", "GPU-c", "GPU-A")])
def test_beside_claims_the_last_of_the_slices_are_given_first(uuids: tuple[str, ...]) -> None:
    devices = tuple(Device(uuid, uuid, uuid, str(n), n) for n, uuid in enumerate(uuids))
    gpu = Resource("nvidia.com/gpu", devices)
    published = [SliceDevice(name_of(uuid), uuid, uuid, {}, {}) for uuid in uuids]
    ((slice_,), free) = contents(published, "v1"), [each.uuid for each in devices]
    for each in slice_["devices"]:  # the scheduler takes the first free one
        (chosen,) = choose(gpu, 1, free=free, beside_claims=True)
        is_last = len(free) == 1
        assert (name_of(chosen) == each["name"]) is is_last
        free = [uuid for uuid in free if name_of(uuid) != each["name"]]
    assert choose(gpu, 2, beside_claims=True) == ("GPU-c", "GPU-b")


def test_beside_claims_gpus_that_are_given_together_are_linked_all_the_same() -> None:
    assert choose(gpus(8), 4, topology=CUBE, beside_claims=True) == names(7, 6, 5, 4)
    free = names(0, 1, 3, 4, 5, 6, 7)
    groups = topology(8, lambda a, b: a // 4 == b // 4)
    assert choose(gpus(8), 1, free=free, topology=groups, beside_claims=True) == names(3)


def test_beside_claims_shares_are_of_the_last_gpu_first() -> None:
    assert choose(shares(3, 2), 2, beside_claims=True) == ("GPU-02::0", "GPU-01::0")
    packed = choose(shares(3, 2), 2, policy=Allocation.PACKED, beside_claims=True)
    assert packed == ("GPU-02::0", "GPU-02::1")


@pytest.mark.parametrize("size", [2, 3, 4, 8, 12])
def test_many_gpus_are_given_by_groups(size: int) -> None:
    found = choose(gpus(16), size, topology=QUADS)
    groups = {int(name.removeprefix("GPU-")) // 4 for name in found}
    assert len(groups) == -(-size // 4)


def test_what_is_required_of_many_is_given_with_its_neighbours() -> None:
    assert choose(gpus(16), 4, topology=QUADS, required=names(9)) == (
        *names(9), *names(8, 10, 11),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("links", "of_best"),
    [(dgx1, 0.94), (lambda a, b: 4 * (a // 2 == b // 2), 1.0), (lambda *_: 0, 1.0)],
)
def test_no_division_of_what_is_free_of_eight_is_much_better(
    links: Callable[[int, int], int], of_best: float
) -> None:
    nodes = topology(8, links)

    def inside(members: Iterable[int]) -> int:
        return sum(nodes.score(*names(*pair)) for pair in combinations(sorted(members), 2))

    @functools.cache
    def best(left: frozenset[int], size: int) -> int:
        """Return the best result of all orders of taking sets; the last set may be smaller."""
        if len(left) <= size:
            return inside(left)
        sets = map(frozenset, combinations(sorted(left), size))
        return max(inside(each) + best(left - each, size) for each in sets)

    for count in range(3, 9):
        for free in map(frozenset, combinations(range(8), count)):
            for size in range(2, count):
                found = choose(gpus(8), size, free=names(*free), topology=nodes)
                chosen = frozenset(int(name.removeprefix("GPU-")) for name in found)
                worth = inside(chosen) + best(free - chosen, size)
                assert worth >= of_best * best(free, size), (free, size)


@given(st.data(), st.integers(2, 16))
def test_the_answer_is_whole_and_has_what_is_required(data: st.DataObject, count: int) -> None:
    size = data.draw(st.integers(1, count))
    seed = data.draw(st.integers(0, 1 << 16))
    nodes = topology(count, lambda a, b: (a * 7919 + b * 104729 + seed) % 19)
    free = data.draw(st.sets(st.integers(0, count - 1), min_size=size))
    required = data.draw(st.sets(st.sampled_from(sorted(free)), max_size=size))
    found = choose(gpus(count), size, free=names(*free), required=names(*required), topology=nodes)
    assert len(found) == len(set(found)) == size
    assert set(names(*required)) <= set(found) <= set(names(*free))


# -- shares and MIG devices --------------------------------------------------------------------


def test_shares_are_of_as_many_gpus_as_can_be() -> None:
    assert choose(shares(2, 3), 2) == ("GPU-00::0", "GPU-01::0")
    assert choose(shares(2, 3), 3) == ("GPU-00::0", "GPU-01::0", "GPU-00::1")


def test_the_gpu_with_the_least_allocated_comes_first() -> None:
    free = [id_ for id_ in all_ids(shares(3, 3)) if id_ not in {"GPU-00::0", "GPU-01::2"}]
    assert choose(shares(3, 3), 1, free=free) == ("GPU-02::0",)
    packed = choose(shares(3, 3), 3, free=free, policy=Allocation.PACKED)
    assert packed == ("GPU-00::1", "GPU-00::2", "GPU-01::0")


def test_what_is_required_counts_as_allocated() -> None:
    found = choose(shares(2, 3), 2, required=["GPU-00::2"])
    assert found == ("GPU-00::2", "GPU-01::0")
    found = choose(shares(2, 3), 2, required=["GPU-01::2"], policy=Allocation.PACKED)
    assert found == ("GPU-01::2", "GPU-01::0")


def test_mig_devices_are_spread_over_gpus_or_packed_into_one() -> None:
    assert choose(migs(3, 3), 2) == ("MIG-0-0", "MIG-1-0")
    assert choose(migs(3, 3), 2, policy=Allocation.PACKED) == ("MIG-0-0", "MIG-0-1")
    free = ["MIG-0-0", "MIG-0-1", "MIG-0-2", "MIG-1-1", "MIG-1-2"]
    assert choose(migs(3, 3), 1, free=free, policy=Allocation.PACKED) == ("MIG-1-1",)


@given(st.data(), st.sampled_from(Allocation))
def test_any_choice_is_of_what_is_free_and_as_even_or_uneven_as_can_be(
    data: st.DataObject, policy: Allocation
) -> None:
    resource = shares(data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4)))
    everything = all_ids(resource)
    free = data.draw(st.sets(st.sampled_from(everything)))
    size = data.draw(st.integers(0, len(free)))
    required = data.draw(st.sets(st.sampled_from(sorted(free)), max_size=size)) if free else set()
    found = choose(resource, size, free=sorted(free), required=required, policy=policy)
    assert len(found) == len(set(found)) == size
    assert required <= set(found) <= free
    if policy is Allocation.DISTRIBUTED and not required:
        left: dict[str, list[bool]] = {}
        for device in resource.devices:
            used = device.id not in free or device.id in found
            left.setdefault(device.gpu, []).append(used)
        given_to = {id_.partition("::")[0] for id_ in found}
        fullest = max((sum(left[gpu]) for gpu in given_to), default=0)
        # Every GPU is full, or has at most one used share less than the fullest chosen GPU.
        for allocated in left.values():
            assert all(allocated) or sum(allocated) >= fullest - 1


# -- impossible requests -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "required", "size", "kind"),
    [
        (names(0, 1), (), 3, TooFewAvailable),
        (names(0, 7), (), 2, TooFewAvailable),
        (names(0, 1), names(9), 1, DeviceUnknown),
        (names(0, 1), names(2), 1, PreferenceUnsuitable),
        (names(0, 1), names(0, 1), 1, PreferenceUnsuitable),
        (names(0, 1), (), -1, PreferenceUnsuitable),
    ],
)
def test_what_cannot_be_is_an_error(
    free: tuple[str, ...], required: tuple[str, ...], size: int, kind: Kind[NvshimError]
) -> None:
    with raises(kind):
        choose(gpus(4), size, free=free, required=required)


def test_what_is_not_there_any_more_is_left_out() -> None:
    assert choose(gpus(4), 1, free=(*names(7), *names(2), "x")) == names(2)


def test_what_is_not_healthy_any_more_is_left_out_as_long_as_others_do() -> None:
    whole = gpus(4)
    dead = tuple(
        device._replace(state=HealthState.UNHEALTHY) if device.index in {"0", "2"} else device
        for device in whole.devices
    )
    resource = replace(whole, devices=dead)
    assert choose(resource, 1) == names(1)
    assert choose(resource, 2) == names(1, 3)
    assert set(choose(resource, 3)) > set(names(1, 3))
    assert choose(resource, 2, required=names(2)) == names(2, 1)
    assert choose(resource, 1, free=names(0, 2)) == names(0)


def test_what_is_named_twice_counts_once() -> None:
    assert choose(gpus(4), 2, free=(*names(2, 2), *names(3)), required=names(3, 3)) == names(3, 2)
    with raises(TooFewAvailable):
        choose(gpus(4), 2, free=names(2, 2))
