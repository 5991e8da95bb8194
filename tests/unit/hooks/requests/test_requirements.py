from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.edits.grant import Grant, decide
from hooks.edits.requirements import Comparison, check_requirements, parse_requirement
from hooks.errors import MalformedRequirement, RequestError, RequirementUnclear, RequirementUnmet
from hooks.node import roots
from hooks.node.inventory import Inventory, load_inventory, take_inventory
from hooks.node.roots import cuda_of_branch
from hooks.requests.request import Request
from hooks.words import AllDevices, Devices, GpuIndex, MigIndex, NamedDevices, NoDevices
from tests.harness.raising import is_error, raises
from tests.unit.hooks.fake_node import VERSION, Node, nvml_gpu, nvml_mig

VARIABLE = "NVIDIA_REQUIRE_CUDA"
# From nvidia/cuda:12.4.1-base, the base of most GPU images, shortened.
CUDA_12_4 = (
    "cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=unknown,driver>=470,driver<471 "
    "brand=nvidia,driver>=470,driver<471 brand=nvidiartx,driver>=470,driver<471 "
    "brand=geforce,driver>=470,driver<471 brand=geforcertx,driver>=470,driver<471 "
    "brand=quadro,driver>=470,driver<471 brand=tesla,driver>=535,driver<536 "
    "brand=unknown,driver>=535,driver<536 brand=nvidia,driver>=535,driver<536"
)


def taken(node: Node, **gpu: Any) -> Inventory:
    """Return an inventory: GPU 0 whole, GPU 1 in MIG mode, both by default of one brand."""
    mig = nvml_gpu(1, mig=True, mig_devices=[nvml_mig(0, 1, 0)], compute_capability="8.0")
    node.add_mig(1, 1, 0, (12, 13))
    return node.take_inventory(nvml_gpu(0, **gpu), mig, cuda=12020)


def check(inventory: Inventory, *expressions: str, devices: Devices | None = None) -> None:
    named = devices or NamedDevices((GpuIndex(0),))
    grant = decide(Request(named), inventory)
    check_requirements([(VARIABLE, each) for each in expressions], grant, inventory)


MET = [
    "", "   ", ",", "cuda>=12.2", "cuda>=12", "cuda>=11.8", "cuda=12.2", "cuda=12.2.0", "cuda!=12",
    "cuda<13", "cuda<=12.2", "CUDA>11.99", "driver>=535", "driver>=535.261", "driver<536",
    "driver=535.261.3", f"driver={VERSION}", "driver!=550", "arch>=9", "arch=9.0", "arch<10",
    "brand=nvidia", "brand=NVIDIA", "brand!=tesla", "cuda>=12.2,brand=nvidia", "cuda>=99 cuda>=1",
    "cuda>=99,brand=nvidia driver>=1", ",,cuda>=12,,", "cuda>=13  arch>=9", CUDA_12_4,
]  # fmt: skip
UNMET = [
    "cuda>=99.0", "cuda>=12.3", "cuda>12.2", "cuda<12.2", "cuda=12", "cuda!=12.2", "driver>=550",
    "driver<=535", "driver=535", "arch>=9.1", "arch=8", "brand=tesla", "brand!=nvidia",
    "cuda>=12,brand=tesla", "cuda>=99 brand=tesla", "cuda>=12,cuda>=99 driver<1",
]  # fmt: skip


@pytest.mark.parametrize("expression", MET)
def test_requirement_is_met(node: Node, expression: str) -> None:
    check(taken(node), expression)


@pytest.mark.parametrize("expression", UNMET)
def test_requirement_is_not_met(node: Node, expression: str) -> None:
    with raises(RequirementUnmet):
        check(taken(node), expression)


def test_unmet_requirement_says_what_there_is_instead(node: Node) -> None:
    with raises(RequirementUnmet) as caught:
        check(taken(node), "cuda>=99.0")
    assert f"driver {VERSION} supports CUDA 12.2" in caught.value.found
    assert "cuda>=99.0" in caught.value.asked
    with raises(RequirementUnmet, match=r"GPU 0 .* has compute capability 9.0"):
        check(taken(node), "arch>=10")
    with raises(RequirementUnmet) as caught:
        check(taken(node, brand=2), CUDA_12_4.replace("535", "550"))
    assert "cuda>=12.4 or another of 11" in caught.value.asked
    assert "brand tesla" in caught.value.found


@pytest.mark.parametrize("requirements", [("cuda>=12", "cuda>=99"), ("cuda>=99", "cuda>=12")])
def test_several_variables_all_have_to_hold(node: Node, requirements: tuple[str, str]) -> None:
    check(taken(node), "cuda>=12", "arch>=9")
    with raises(RequirementUnmet):
        check(taken(node), *requirements)


def test_each_gpu_has_to_be_what_is_needed(node: Node) -> None:
    inventory = taken(node)
    check(inventory, "arch>=8", devices=AllDevices())
    with raises(RequirementUnmet, match=r"capability 8\.0"):
        check(inventory, "arch>=9", devices=AllDevices())
    with raises(RequirementUnmet, match=r"capability 8\.0"):
        check(inventory, "arch>=9", devices=NamedDevices((MigIndex(1, 0),)))


def test_without_a_gpu_what_it_would_have_to_be_does_not_matter(node: Node) -> None:
    inventory = taken(node)
    check(inventory, "arch>=99,brand=nothing", devices=NoDevices())
    with raises(RequirementUnmet):
        check(inventory, "cuda>=99", devices=NoDevices())


@pytest.mark.parametrize(
    ("expression", "clear"),
    [
        ("cuda>=12.2", True),  # from the table of branches
        ("cuda>=12.4", False),
        ("driver>=535", True),
        ("arch>=9", None),
        ("brand=nvidia", None),
        ("brand!=nvidia", None),
        ("brand=nvidia cuda>=12", True),
        ("cuda>=99 brand=nvidia", None),
        ("cuda>=99,brand=nvidia", False),
        ("brand=tesla,driver<470 cuda>=99", False),
    ],
)
def test_without_nvml_it_is_true_false_or_said_to_be_unclear(
    node: Node, expression: str, clear: bool | None
) -> None:
    inventory = take_inventory(node.config, b'{"error": "GPU is lost"}')
    assert inventory.cuda_version == "12.2"
    if clear:
        check(inventory, expression)
        return
    error = RequirementUnclear if clear is None else RequirementUnmet
    with raises(error) as caught:
        check(inventory, expression)
    if clear is None:
        assert "GPU is lost" in caught.value.found


@pytest.mark.parametrize(
    ("expression", "met"),
    [("cuda>=13.0", True), ("cuda>=13.4", True), ("cuda>13.1", True), ("cuda=13.3", True),
     ("cuda!=13.1", True), ("cuda<14", True), ("cuda<=13.1", True), ("cuda<13.1", False),
     ("cuda<=13.0", False), ("cuda=13.0", False), ("cuda>=13.4,driver<600", False)],
)  # fmt: skip
def test_a_driver_newer_than_the_table_has_at_least_the_newest_cuda_in_it(
    node: Node, expression: str, met: bool
) -> None:
    inventory = take_inventory(node.config, b'{"error": "GPU is lost"}')
    newer = replace(inventory.driver, version="610.43.02")
    inventory = replace(inventory, driver=newer, cuda_version=cuda_of_branch(newer.version))
    if met:
        check(inventory, expression)
        return
    with raises(RequirementUnmet, match=r"driver 610\.43\.02 supports CUDA 13\.1 or newer"):
        check(inventory, expression)


def test_the_inventory_says_that_a_drivers_cuda_is_not_known(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = f"the CUDA of driver {VERSION} is not known: at least 12.1"
    failed = b'{"error": "GPU is lost"}'
    assert note not in take_inventory(node.config, failed).notes
    monkeypatch.setattr(roots, "_CUDA_OF_BRANCH", ((530, "12.1"),))
    assert note in take_inventory(node.config, failed).notes


def test_what_nvml_has_no_answer_to_is_unclear_by_its_name(node: Node) -> None:
    inventory = taken(node, brand=None)
    with raises(RequirementUnclear, match="brand"):
        check(inventory, "brand=tesla")
    check(inventory, "arch>=9")


def test_what_is_known_is_kept_with_the_inventory(node: Node) -> None:
    kept = (taken(node), load_inventory(node.config))
    for inventory in kept:
        assert inventory is not None
        assert inventory.cuda_version == "12.2"
        assert [(g.compute_capability, g.brand) for g in inventory.gpus] == [
            ("9.0", "nvidia"), ("8.0", "nvidia"),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("cuda", "cuda"), ("cuda>=", "cuda>="), (">=12", ">=12"), ("cuda>=12.x", "12.x"),
        ("cuda=>12", "cuda=>12"), ("cuda==12", "cuda==12"), ("cuda>12>11", "cuda>12>11"),
        ("memory>=80", "memory"), ("brand>=tesla", "brand"), ("cuda>=1234567890", "1234567890"),
        ("cuda>=1.2.3.4.5.6.7.8.9", "1.2.3.4"), ("cuda>=12. driver>1", "12."), ("cuda>=-1", "-1"),
        ("cuda>=12 oops", "oops"), ("cuda>=१२", "१२"),
    ],
)  # fmt: skip
def test_expression_of_another_form_is_named(node: Node, expression: str, named: str) -> None:
    with raises(MalformedRequirement) as caught:
        check(taken(node), expression)
    assert named in caught.value.found
    assert f"{VARIABLE}={expression}" in caught.value.asked


def test_expression_without_end_is_refused(node: Node) -> None:
    with raises(MalformedRequirement, match="characters"):
        check(taken(node), "cuda>=12 " * 9999)


PARTS = st.text(st.sampled_from("cudaribn.,<>=!0129 \n\0é"), max_size=30)


@given(PARTS)
def test_any_text_is_a_condition_or_a_typed_error(text: str) -> None:
    try:
        alternatives = parse_requirement(VARIABLE, text)
    except RequestError as error:
        assert is_error(error, MalformedRequirement)  # noqa: PT017 - either outcome is right
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
        return
    assert all(alternatives)


COMPARISONS = st.builds(
    Comparison,
    st.sampled_from(["cuda", "driver", "arch"]),
    st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
    st.lists(st.integers(0, 999), min_size=1, max_size=4).map(lambda n: ".".join(map(str, n))),
)


@given(st.lists(st.lists(COMPARISONS, min_size=1, max_size=3), max_size=3))
def test_what_is_written_is_what_is_read(alternatives: list[list[Comparison]]) -> None:
    text = " ".join(",".join(map(str, parts)) for parts in alternatives)
    assert parse_requirement(VARIABLE, text) == tuple(map(tuple, alternatives))


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [("535.261.03", "12.2"), ("550.54.14", "12.4"), ("470.256.02", "11.4"), ("999.1", "13.1"),
     ("560.35.03", "12.6"), ("340.108", ""), ("", ""), ("x.1", "")],
)  # fmt: skip
def test_cuda_of_a_branch(driver: str, cuda: str) -> None:
    assert cuda_of_branch(driver) == cuda


def test_nothing_needed_asks_nothing_of_the_inventory() -> None:
    nowhere: Any = None
    check_requirements([(VARIABLE, "  ")], Grant(frozenset()), nowhere)
