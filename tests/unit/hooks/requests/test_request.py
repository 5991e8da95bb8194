from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.errors import MalformedDevice, MalformedSpec, UnknownCapability
from hooks.requests.request import Request, parse_capabilities, read_more, read_request
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    AllDevices,
    Devices,
    GpuIndex,
    NamedDevices,
    NoDevices,
    Origin,
    Void,
)

REQUIRED = (("CUDA_VERSION", "cuda>=8.0"),)
LEGACY = Request(
    AllDevices(),
    CAPABILITIES,
    requirements=REQUIRED,
    origin=Origin.ENVIRONMENT,
    source="legacy image: CUDA_VERSION is set",
)


def asked(
    devices: Devices, capabilities: Iterable[str] = (), source: str = "", **more: Any
) -> Request:
    origin = Origin.ENVIRONMENT
    return Request(devices, frozenset(capabilities), origin=origin, source=source, **more)


def spec_with(*environment: str) -> dict[str, Any]:
    return {"process": {"env": list(environment)}}


@pytest.mark.parametrize(
    ("value", "legacy", "capabilities"),
    [
        (None, False, DEFAULT_CAPABILITIES),
        (None, True, CAPABILITIES),
        ("", False, DEFAULT_CAPABILITIES),
        ("", True, DEFAULT_CAPABILITIES),
        (" , ", False, DEFAULT_CAPABILITIES),
        ("all", False, CAPABILITIES),
        ("utility,all", False, CAPABILITIES),
        ("video", False, {"video"}),
        ("compat32, ngx ,display", False, {"compat32", "ngx", "display"}),
        ("graphics,graphics", True, {"graphics"}),
    ],
)
def test_list_of_capabilities(value: str | None, legacy: bool, capabilities: set[str]) -> None:
    assert parse_capabilities(value, legacy=legacy) == capabilities


def test_unknown_capability_is_named_beside_the_known_ones() -> None:
    with pytest.raises(UnknownCapability) as caught:
        parse_capabilities("utility,Compute")
    assert '"Compute"' in caught.value.found
    assert all(capability in caught.value.do for capability in CAPABILITIES)


@pytest.mark.parametrize(
    ("environment", "request_"),
    [
        ([], Request(Void())),
        (["PATH=/bin", "NVIDIA_DRIVER_CAPABILITIES=nonsense"], Request(Void())),
        (["NVIDIA_VISIBLE_DEVICES="], asked(Void(), (), "NVIDIA_VISIBLE_DEVICES=")),
        (["NVIDIA_VISIBLE_DEVICES"], asked(Void(), (), "NVIDIA_VISIBLE_DEVICES=")),
        (["CUDA_VERSION=8.0"], LEGACY),
        (["CUDA_VERSION=8.0", "NVIDIA_REQUIRE_CUDA=cuda>=8.0"], Request(Void())),
        (["CUDA_VERSION=8.0", "NVIDIA_REQUIRE_CUDA="], LEGACY),
        (["CUDA_VERSION="], Request(Void())),
        (
            ["CUDA_VERSION=8.0", "NVIDIA_VISIBLE_DEVICES=void"],
            asked(Void(), (), "NVIDIA_VISIBLE_DEVICES=void"),
        ),
        (
            ["CUDA_VERSION=8.0", "NVIDIA_VISIBLE_DEVICES=none"],
            asked(
                NoDevices(), CAPABILITIES, "NVIDIA_VISIBLE_DEVICES=none", requirements=REQUIRED
            ),
        ),
        (
            ["NVIDIA_VISIBLE_DEVICES=none", "NVIDIA_DRIVER_CAPABILITIES=utility"],
            asked(NoDevices(), {"utility"}, "NVIDIA_VISIBLE_DEVICES=none"),
        ),
        (
            ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=1"],
            asked(
                NamedDevices((GpuIndex(1),)), DEFAULT_CAPABILITIES, "NVIDIA_VISIBLE_DEVICES=1"
            ),
        ),
        (
            ["NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_VISIBLE_DEVICES=void"],
            asked(Void(), (), "NVIDIA_VISIBLE_DEVICES=void"),
        ),
    ],
)  # fmt: skip
def test_environment_makes_the_request(environment: list[str], request_: object) -> None:
    assert read_request(spec_with(*environment)) == request_


def test_only_a_request_for_nothing_wants_no_injection() -> None:
    assert not read_request(spec_with()).wants_injection
    for value in ("none", "all", "0"):
        assert read_request(spec_with(f"NVIDIA_VISIBLE_DEVICES={value}")).wants_injection


@pytest.mark.parametrize(
    "spec",
    [
        {},
        [],
        None,
        {"process": None},
        {"process": []},
        {"process": {"env": "A=1"}},
        {"process": {"env": [1]}},
    ],
)
def test_misshapen_spec_is_a_typed_error(spec: Any) -> None:
    with pytest.raises(MalformedSpec):
        read_request(spec)


def test_process_without_environment_asks_for_nothing() -> None:
    assert read_request({"process": {}}) == Request(Void())
    assert read_request({"process": {"env": None}}) == Request(Void())


def test_devices_that_the_spec_has_already_are_a_request_of_these() -> None:
    spec = spec_with("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=video")
    assert read_more(spec, ["0", "2"]) == Request(
        NamedDevices((GpuIndex(0), GpuIndex(2))),
        frozenset({"video"}),
        origin=Origin.SPEC,
        source="nodes that the spec lists, NVIDIA_DRIVER_CAPABILITIES=video",
    )


KEYS = st.sampled_from(["process", "env", "x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_json_for_a_spec_gives_a_request_or_a_typed_error(spec: Any) -> None:
    try:
        read_request(spec)
    except (MalformedSpec, MalformedDevice, UnknownCapability):
        pass
