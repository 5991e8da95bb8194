"""Scenario files: valid and invalid content."""

from __future__ import annotations

import os
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.simulated.catalogue import MODELS
from integration.simulated.errors import ScenarioInvalid, SimulatedError
from integration.simulated.scenario import SHIPPED, Scenario
from tests.harness.raising import is_error, raises


def layout(*entries: str, model: str = "a100") -> list[tuple[int, str, int, list[int]]]:
    """Return the id, size and start of the instances of a MIG layout."""
    scenario = Scenario.of(1, model, gpu=[{"index": 0, "mig": list(entries)}])
    return [
        (i.id, i.profile.name, i.start, [c.slices for c in i.compute])
        for i in scenario.gpus[0].mig or ()
    ]


def test_an_empty_scenario_is_one_h100() -> None:
    scenario = Scenario.parse({})
    assert [gpu.model.name for gpu in scenario.gpus] == ["NVIDIA H100 80GB HBM3"]
    assert scenario.drm
    assert scenario.gpus[0].mig is None


def test_each_shipped_scenario_is_loaded_by_its_name() -> None:
    files = [name.partition(".") for name in os.listdir(SHIPPED)]
    names = [name for name, _, kind in files if kind == "toml"]
    assert {name: len(Scenario.load(name).gpus) for name in names} == {
        "one": 1, "two": 2, "eight": 8, "sixteen": 16, "mig": 4, "full": 3,
    }  # fmt: skip


def test_the_same_scenario_gives_the_same_gpus_and_no_two_are_alike() -> None:
    first, again = Scenario.of(32), Scenario.of(32)
    assert first == again
    for name in ("uuid", "serial", "pci"):
        assert len({getattr(gpu, name) for gpu in first.gpus}) == 32
    assert all(len(gpu.serial) == 13 for gpu in first.gpus)


def test_gpus_are_spread_over_two_sockets() -> None:
    assert [gpu.numa_node for gpu in Scenario.of(8).gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [gpu.numa_node for gpu in Scenario.of(1).gpus] == [0]


def test_a_gpu_may_differ_from_the_others() -> None:
    uuid = "GPU-8ef4a8d0-0000-4000-8000-000000000000"
    scenario = Scenario.of(
        2, "t4", gpu=[{"index": 1, "model": "l4", "uuid": uuid, "pci": "0001:3b:00.0"}]
    )
    assert [gpu.key for gpu in scenario.gpus] == ["t4", "l4"]
    assert scenario.gpus[1].uuid == uuid
    assert scenario.gpus[1].pci == "0001:3b:00.0"


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [("535.104.05", (12, 2)), ("550.163.01", (12, 4)), ("470.57", (11, 4)), ("580.65.06", (13, 0))],
)
def test_the_cuda_version_is_that_of_the_drivers_branch(driver: str, cuda: tuple[int, int]) -> None:
    assert Scenario.of().cuda_version(driver) == cuda
    assert Scenario.of(cuda="11.8").cuda_version(driver) == (11, 8)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["7g.40gb"], [(0, "7g.40gb", 0, [7])]),
        (["3g.20gb", "3g.20gb"], [(1, "3g.20gb", 0, [3]), (2, "3g.20gb", 4, [3])]),
        (["4g.20gb", "3g.20gb"], [(1, "4g.20gb", 0, [4]), (2, "3g.20gb", 4, [3])]),
        (
            ["2g.10gb", "1g.10gb", "1g.5gb"],
            [(3, "2g.10gb", 0, [2]), (4, "1g.10gb", 2, [1]), (7, "1g.5gb", 4, [1])],
        ),
        (["3g.20gb/1c+2c"], [(1, "3g.20gb", 0, [1, 2])]),
        (["3g.20gb/1c"], [(1, "3g.20gb", 0, [1])]),
        (["1g.5gb", "1g.5gb+me"], [(7, "1g.5gb", 0, [1]), (8, "1g.5gb+me", 1, [1])]),
        ([], []),
    ],
)
def test_instances_get_the_numbers_and_places_of_the_driver(
    entries: list[str], expected: list[tuple[int, str, int, list[int]]]
) -> None:
    assert layout(*entries) == expected


def test_a_compute_instance_that_does_not_fill_its_gpu_instance_says_so_in_its_name() -> None:
    scenario = Scenario.of(1, "a100", gpu=[{"index": 0, "mig": ["3g.20gb/1c+2c", "3g.20gb"]}])
    names = [i.device_name(c) for i in scenario.gpus[0].mig or () for c in i.compute]
    assert names == ["1c.3g.20gb", "2c.3g.20gb", "3g.20gb"]


def test_seven_of_the_smallest_fill_a_gpu() -> None:
    assert [number for number, *_ in layout(*["1g.5gb"] * 7)] == list(range(7, 14))
    with raises(ScenarioInvalid, match=r"no room for 1g\.5gb"):
        layout(*["1g.5gb"] * 8)


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"gpus": 33}, "supports 0 to 32"),
        ({"gpus": -1}, "supports 0 to 32"),
        ({"gpus": "2"}, "wrong type"),
        ({"gpus": True}, "wrong type"),
        ({"model": "voodoo"}, "no such model"),
        ({"gpu": {"index": 0}}, "wrong type"),
        ({"gpu": [1]}, "is not a table"),
        ({"gpu": [{}]}, "index"),
        ({"gpu": [{"index": 1}]}, "gpus = 1"),
        ({"gpu": [{"index": 0}, {"index": 0}]}, "used twice"),
        ({"gpu": [{"index": 0, "colour": "green"}]}, "no such key"),
        ({"colour": "green"}, "no such key"),
        ({"driver": "535"}, "wrong format"),
        ({"driver": "../../etc"}, "wrong format"),
        ({"model": "b200", "driver": "550.163.01"}, "needs a newer driver"),
        ({"cuda": "twelve"}, "wrong format"),
        ({"gpu": [{"index": 0, "uuid": "GPU-1"}]}, "wrong format"),
        ({"gpu": [{"index": 0, "pci": "0000:3B:00.0"}]}, "wrong format"),
        ({"gpus": 2, "gpu": [{"index": 1, "pci": "0000:18:00.0"}]}, "two are equal"),
        ({"gpus": 2, "gpu": [{"index": 1, "minor": 0}]}, "two are equal"),
        ({"gpu": [{"index": 0, "minor": 32}]}, "not 0 to 31"),
        ({"gpu": [{"index": 0, "minor": -1}]}, "not 0 to 31"),
        ({"gpu": [{"index": 0, "minor": "0"}]}, "wrong type"),
        ({"nvml-lacks": [1]}, "not a function's name"),
        ({"nvml-lacks": ["nvmlInit; }"]}, "not a function's name"),
        ({"model": "t4", "gpu": [{"index": 0, "mig": []}]}, "has no MIG"),
        ({"gpu": [{"index": 0, "mig": ["9g.90gb"]}]}, "no profile 9g.90gb"),
        ({"gpu": [{"index": 0, "mig": ["4g.40gb", "4g.40gb"]}]}, "no room"),
        ({"gpu": [{"index": 0, "mig": ["1g.10gb+me", "1g.10gb+me"]}]}, "no room"),
        ({"gpu": [{"index": 0, "mig": ["3g.40gb/2c+2c"]}]}, "compute instances"),
        ({"gpu": [{"index": 0, "mig": ["3g.40gb/x"]}]}, "compute instances"),
        ({"imex-channels": [-1]}, "not channel numbers"),
        ({"beside": ["gds", "gds"]}, "no such key"),
        ({"beside": ["x"]}, "no such key"),
        ({"beside": ["gds"], "nvidia": False, "gpus": 0}, "nvidia = false"),
        ({"imex-channels": [1, 1]}, "not channel numbers"),
        ({"imex-channels": ["1"]}, "not channel numbers"),
        ({"nvidia": False, "gpus": 1}, "nvidia = false"),
        ({"platform": "amiga"}, "unknown"),
        ({"platform": "wsl", "nvidia": True}, "nvidia = true"),
        ({"platform": "tegra", "gpus": 1}, "nvidia = false"),
        ({"amd": ["voodoo"]}, "no model voodoo"),
        ({"amd": ["mi210/8"]}, "not possible"),
        ({"amd": [1]}, "no model 1"),
        ({"amd": ["mi210"] * 9}, "more than 8"),
        ({"intel": ["flex170/2"]}, "not possible"),
        ({"intel": ["mi210"]}, "no model mi210"),
        ({"intel": ["b580"], "gpu": [{"index": 0, "pci": "0000:40:00.0"}]}, "equal"),
    ],
)
def test_what_no_node_can_be_made_of_is_refused_in_one_line(
    table: dict[str, Any], found: str
) -> None:
    with raises(ScenarioInvalid, match=found) as caught:
        Scenario.parse(table)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("NVSHIM-E2101 scenario-invalid: ")


@pytest.mark.parametrize("content", [b"gpus = ", b"\xff\xfe", None])
def test_a_file_that_is_no_scenario_is_refused(tmp_path: Any, content: bytes | None) -> None:
    path = tmp_path / "scenario.toml"
    if content is not None:
        path.write_bytes(content)
    with raises(ScenarioInvalid, match="one of eight, full, mig, one, sixteen, two"):
        Scenario.load(str(path))


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(0, 6))
    table: dict[str, Any] = {
        "gpus": count,
        "model": draw(st.sampled_from(sorted(MODELS))),
        "drm": draw(st.booleans()),
        "imex-channels": draw(st.lists(st.integers(0, 2**20 - 1), unique=True, max_size=3)),
    }
    if not count:
        table["nvidia"] = draw(st.booleans())
        if not table["nvidia"]:
            table["platform"] = draw(st.sampled_from(["", "tegra", "wsl"]))
    table["amd"] = draw(st.lists(st.sampled_from(["mi300x", "mi300x/8", "mi210"]), max_size=8))
    table["intel"] = draw(st.lists(st.sampled_from(["flex170", "b580"]), max_size=8))
    if draw(st.booleans()):
        table |= {"driver": "580.95.05", "cuda": "12.4"}
    profiles = MODELS[table["model"]].profiles
    if profiles and count:
        entry = st.sampled_from([profile.name for profile in profiles if profile.slices < 3])
        chosen = draw(st.sets(st.integers(0, count - 1)))
        table["gpu"] = [
            {"index": n, "mig": draw(st.lists(entry, max_size=3, unique=True))} for n in chosen
        ]
    return table


@given(tables())
def test_a_scenario_written_out_is_read_back_the_same(table: dict[str, Any]) -> None:
    scenario = Scenario.parse(table)
    assert Scenario.parse(tomllib.loads(scenario.to_toml())) == scenario


@given(
    st.dictionaries(
        st.sampled_from(["gpus", "model", "driver", "cuda", "drm", "imex-channels", "gpu", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["index", "mig", "uuid", "pci"]), inner, max_size=3
                )
            ),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_any_table_is_a_scenario_or_one_typed_error(table: dict[str, Any]) -> None:
    try:
        assert Scenario.parse(table)
    except SimulatedError as error:
        assert is_error(error, ScenarioInvalid)  # noqa: PT017 - either outcome is right
