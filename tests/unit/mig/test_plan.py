"""Which GPUs change, and where their MIG devices go, compared with all possible arrangements."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.node.gpus import Gpu
from integration.mig.errors import LayoutImpossible
from integration.mig.format import DeviceFilter, Entry, Layout
from integration.mig.placing import Unplaceable, place
from integration.mig.plan import differences, plan
from integration.mig.profiles import ProfileName
from integration.mig.state import Cut, MigGpu, Partition, exported
from integration.nvml.mig_parts import GpuParts, Profile
from integration.simulated.catalogue import MODELS
from tests.harness.raising import raises

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

A100: Final = "a100"
KINDS: Final = ("a100", "h100", "h200", "b200")


def profiles_of(model: str) -> tuple[Profile, ...]:
    return tuple(
        Profile(each.id, each.name, each.instances,
                tuple((start, each.memory_slices) for start in each.starts), ())
        for each in MODELS[model].profiles
    )  # fmt: skip


@cache
def names_of(model: str) -> Mapping[ProfileName, Profile]:
    return {name(each.name): each for each in profiles_of(model)}


def name(text: str) -> ProfileName:
    found = ProfileName.parse(text)
    assert found is not None
    return found


@cache
def arrangements(model: str) -> frozenset[frozenset[tuple[int, int]]]:
    """Find all sets of profiles and starts that do not overlap, by brute force."""
    found: set[frozenset[tuple[int, int]]] = {frozenset()}
    rows = [(p.id, start, size) for p in profiles_of(model) for start, size in p.places]
    most = {p.id: p.most for p in profiles_of(model)}
    sizes = {(number, start): size for number, start, size in rows}
    for number, start, size in rows:
        for before in [*found]:
            count = sum(1 for other, _ in before if other == number)
            free = all(
                start + size <= there or there + sizes[other, there] <= start
                for other, there in before
            )
            if free and count < most[number]:
                found.add(before | {(number, start)})
    return frozenset(found)


@cache
def achievable(model: str) -> frozenset[tuple[tuple[int, int], ...]]:
    """Return how many of each profile every arrangement has."""
    return frozenset(
        tuple(sorted(Counter(number for number, _ in each).items()))
        for each in arrangements(model)
    )  # fmt: skip


def cuts_of(arrangement: Iterable[tuple[int, int]], model: str = A100) -> frozenset[Cut]:
    slices = {each.id: each.slices for each in MODELS[model].profiles}
    return frozenset(Cut(start, number, (slices[number],)) for number, start in arrangement)


COUNTS: Final = st.fixed_dictionaries(
    {each: st.integers(0, 3 if each.slices > 1 else 7) for each in names_of(A100)}
)
EXISTING: Final = st.sampled_from(sorted(map(sorted, arrangements(A100))))


@given(COUNTS, EXISTING)
def test_what_an_a100_can_have_is_reached_and_nothing_else(
    counts: dict[ProfileName, int], existing: list[tuple[int, int]]
) -> None:
    profiles = names_of(A100)
    kinds = tuple(sorted((profiles[each].id, n) for each, n in counts.items() if n))
    some = Counter({each: n for each, n in counts.items() if n})
    try:
        found = place(some, profiles, cuts_of(existing))
    except Unplaceable:
        assert kinds not in achievable(A100)
        return
    assert frozenset((cut.profile, cut.start) for cut in found) in arrangements(A100)
    assert kinds == tuple(sorted(Counter(cut.profile for cut in found).items()))


@pytest.mark.parametrize("model", KINDS)
def test_every_combination_of_each_model_is_placed(model: str) -> None:
    by_id = {profile.id: each for each, profile in names_of(model).items()}
    assert len(achievable(model)) > 50
    for kinds in achievable(model):
        counts = Counter({by_id[number]: n for number, n in kinds})
        assert len(place(counts, names_of(model), ())) == counts.total()


@given(EXISTING, EXISTING)
def test_no_arrangement_would_keep_more(
    existing: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    by_id = {profile.id: each for each, profile in names_of(A100).items()}
    counts = Counter(by_id[number] for number, _ in other)
    kinds = Counter(number for number, _ in other)
    kept = place(counts, names_of(A100), cuts_of(existing)) & cuts_of(existing)
    best = max(
        len(each & frozenset(existing))
        for each in arrangements(A100)
        if Counter(number for number, _ in each) == kinds
    )
    assert len(kept) == best


def test_what_fits_only_elsewhere_moves() -> None:
    at_four = frozenset({Cut(4, 19, (1,))})
    found = place(Counter({name("4g.20gb"): 1, name("3g.20gb"): 1}), names_of(A100), at_four)
    assert found == {Cut(0, 5, (4,)), Cut(4, 9, (3,))}
    small = Counter({name("3g.20gb"): 2, name("1g.5gb"): 1})
    with pytest.raises(Unplaceable, match="no room for 1g"):
        place(small, names_of(A100), at_four)


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ({"5g.30gb": 1}, "it has no profile 5g.30gb, only 1g.5gb, 1g.5gb"),
        ({"1g.5gb+me": 2}, r"it can have 1 x 1g.5gb\+me, not 2"),
        ({"1g.5gb": 10**9}, "it can have 7 x 1g.5gb, not 256"),
        ({"7g.40gb": 1, "1g.5gb": 1}, r"no room for 1g.5gb \(1 x 7g.40gb, 1 x 1g.5gb\)"),
        ({"3g.20gb": 2, "4g.20gb": 1}, "no room for (3|4)g.20gb"),
    ],
)
def test_what_does_not_fit_is_named(counts: dict[str, int], why: str) -> None:
    some = Counter({name(each): n for each, n in counts.items()})
    with pytest.raises(Unplaceable, match=why):
        place(some, names_of(A100), ())


def test_an_instance_where_nvml_lists_no_place_for_it_is_made_anew() -> None:
    nowhere = Cut(5, names_of(A100)[name("3g.20gb")].id, (3,))
    (cut,) = place({name("3g.20gb"): 1}, names_of(A100), [nowhere])
    assert cut.start in {0, 4}


def test_partial_compute_instances_share_gpu_instances() -> None:
    some = Counter({name("1c.3g.20gb"): 1, name("2c.3g.20gb"): 1, name("3g.20gb"): 1})
    found = place(some, names_of(A100), ())
    assert sorted(cut.computes for cut in found) == [(2, 1), (3,)]
    some[name("1c.3g.20gb")] = 2
    with pytest.raises(Unplaceable, match="it can have 2 x 3g"):
        place(some, names_of(A100), ())


# -- which GPUs change -------------------------------------------------------------------------


def gpu(index: int, *cuts: Cut, mode: bool = True, model: str = A100, **more: Any) -> MigGpu:
    gpu = Gpu(index, index, f"GPU-{index}", f"0000:0{index}:00.0", model)
    profiles = profiles_of(model)
    parts = GpuParts(profiles, (), mode, more.pop("pending", mode))
    return MigGpu(gpu, parts, Partition(mode, frozenset(cuts)), more.get("device", 1), 0)


def entry(text: str = "", *, indices: Iterable[int] | None = None, enabled: bool = True) -> Entry:
    counts = Counter(map(name, text.split()))
    return Entry((), None if indices is None else frozenset(indices), enabled, counts)


ONE: Final = Cut(3, 19, (1,))
BIG: Final = Cut(4, 9, (3,))


@pytest.mark.parametrize(
    ("now", "entries", "changes"),
    [
        (gpu(0, ONE), [entry("1g.5gb")], False),
        (gpu(0, ONE), [entry("1g.5gb 1g.5gb")], True),
        (gpu(0, ONE), [entry("1g.5gb 1g.5gb"), entry("1g.5gb")], False),  # the last counts
        (gpu(0, ONE), [entry("7g.40gb", indices=[1])], False),  # no entry includes it
        (gpu(0, ONE), [entry(enabled=False)], True),
        (gpu(0), [entry()], False),
        (gpu(0, Cut(3, 19, ())), [entry()], True),  # an instance without a compute instance
        (gpu(0, mode=False), [entry(enabled=False)], False),
        (gpu(0, mode=False), [entry()], True),
        (gpu(0, mode=False, pending=True), [entry(enabled=False)], True),
        (gpu(0, model="l4"), [entry("1g.5gb")], False),  # skipped without MIG support
        (gpu(0, model="l4"), [entry(enabled=False, indices=[0])], False),
    ],
)
def test_a_gpu_changes_only_if_it_has_to(now: MigGpu, entries: list[Entry], changes: bool) -> None:
    layout = Layout("one", tuple(entries))
    assert bool(plan(layout, [now])) is changes
    in_none = [each for each in [0] if any(e.matches(each, 1, 0) for e in entries)] != [0]
    assert bool(list(differences(layout, [now]))) is (changes or in_none)


def test_only_what_differs_is_removed_and_made() -> None:
    layout = Layout("one", (entry("1g.5gb 2g.10gb"),))
    (change,) = plan(layout, [gpu(0, ONE, BIG), gpu(1, ONE, Cut(4, 14, (2,)))])
    assert change.uuid == "GPU-0"
    assert change.removed == (BIG,)
    assert [cut.profile for cut in change.made] == [14]
    assert not change.switches


def test_a_gpu_without_mig_that_is_named_is_an_error() -> None:
    with raises(LayoutImpossible, match=r"one on GPU 2 \(GPU-2\): it does not support MIG"):
        plan(Layout("one", (entry("1g.5gb", indices=[2]),)), [gpu(2, model="l4")])


def test_what_does_not_fit_names_the_gpu_and_the_profile() -> None:
    with raises(LayoutImpossible, match=r"the layout one on GPU 1 .*: there is no room for 1g.5gb"):
        plan(Layout("one", (entry("7g.40gb 1g.5gb"),)), [gpu(1)])


def test_a_lost_gpu_is_not_as_a_layout_says() -> None:
    layout = Layout("one", (entry(enabled=False),))
    lost = replace(gpu(1, mode=False), answers=False)
    assert list(differences(layout, [lost])) == ["GPU 1 differs"]
    with raises(LayoutImpossible, match=r"one on GPU 1 .*: NVML does not list it"):
        plan(layout, [lost])
    assert exported([lost], "x")["mig-configs"] == {"x": []}


def test_models_are_told_apart_by_their_filter() -> None:
    only = replace(entry("1g.5gb"), filters=(DeviceFilter(7),))
    layout = Layout("one", (only,))
    changes = plan(layout, [gpu(0), gpu(1, device=7)])
    assert [change.uuid for change in changes] == ["GPU-1"]
    assert list(differences(layout, [gpu(0)])) == ["GPU 0 is in no entry"]


def test_what_is_exported_is_what_there_is() -> None:
    gpus = [gpu(0, ONE, BIG), gpu(1, mode=False), gpu(2, Cut(0, 19, (1,)), BIG)]
    assert exported(gpus, "current") == {
        "version": "v1",
        "mig-configs": {
            "current": [
                {
                    "device-filter": ["0x00000001"], "devices": [0, 2], "mig-enabled": True,
                    "mig-devices": {"3g.20gb": 1, "1g.5gb": 1},
                },
                {"device-filter": ["0x00000001"], "devices": [1], "mig-enabled": False},
            ]
        },
    }  # fmt: skip
