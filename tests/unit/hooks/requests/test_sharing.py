"""The rules of how many containers may share a device, without files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from hooks.config import Config
from hooks.node.gpus import Gpu, MigDevice
from hooks.requests.policy import Container, Verdict
from hooks.requests.request import Request
from hooks.sharing import (
    Claim,
    Wanted,
    claim_of,
    held_too_often,
    is_exempt,
    is_exempt_by_record,
    is_limited,
    limit_of,
    refusal,
    without_gpus,
)
from hooks.words import AllDevices

GPU: Final = Gpu(1, 1, "GPU-one", "0000:3b:00.0", "A100")
PART: Final = MigDevice(1, 2, "MIG-two", 3, 0)


@pytest.mark.parametrize(
    ("holders", "of", "whole", "part"),
    [
        ("any", (), 0, 0),
        ("exclusive", (), 1, 1),
        (3, (), 3, 3),
        ("exclusive", ("GPU-one=any",), 0, 0),
        ("any", ("GPU-one=exclusive",), 1, 1),
        ("any", ("0000:3b:00.0=2",), 2, 2),
        ("any", ("1=5",), 5, 5),
        ("any", ("0=5",), 0, 0),
        ("any", ("1:2=4",), 0, 4),
        ("exclusive", ("1=2", "MIG-two=any"), 2, 0),
        ("exclusive", ("1=2", "GPU-one=3"), 3, 3),
    ],
)
def test_what_is_said_of_a_device_comes_before_what_is_said_of_all(
    holders: Any, of: tuple[str, ...], whole: int, part: int
) -> None:
    config = Config(holders=holders, holders_of=of)
    assert limit_of(config, GPU) == whole
    assert limit_of(config, GPU, PART) == part
    assert is_limited(config) == (holders != "any" or bool(of))


def wanted(uuid: str, gpu: str = "", limit: int = 1) -> Wanted:
    return Wanted(uuid, gpu or uuid, limit, uuid)


@pytest.mark.parametrize(
    ("asks", "has", "is_refused"),
    [
        (wanted("GPU-a"), Claim("x", "/b", ("GPU-a",)), True),
        (wanted("GPU-a"), Claim("x", "/b", ("GPU-b",)), False),
        (wanted("GPU-a", limit=2), Claim("x", "/b", ("GPU-a",)), False),
        (wanted("GPU-a", limit=0), Claim("x", "/b", ("GPU-a",)), False),
        (wanted("MIG-1", "GPU-a"), Claim("x", "/b", ("MIG-1",), ("GPU-a",)), True),
        (wanted("MIG-1", "GPU-a"), Claim("x", "/b", ("MIG-2",), ("GPU-a",)), False),
        (wanted("MIG-1", "GPU-a"), Claim("x", "/b", ("GPU-a",)), True),
        (wanted("GPU-a"), Claim("x", "/b", ("MIG-1",), ("GPU-a",)), True),
    ],
)
def test_a_whole_gpu_and_its_parts_are_one_another_s(
    asks: Wanted, has: Claim, *, is_refused: bool
) -> None:
    assert bool(held_too_often([asks], [has])) == is_refused


def test_a_refusal_names_the_holders_and_is_one_line() -> None:
    holders = [Claim(f"ns/pod-{n}\n\x1b[2J", f"/b{n}", ("GPU-a",)) for n in range(9)]
    crowded = held_too_often([wanted("GPU-a", limit=9), wanted("GPU-b")], holders)
    line = str(refusal("ns/late", crowded))
    assert line.startswith("NVSHIM-E0228 device-held: GPU-a for ns/late: ")
    assert "9 containers may have it" in line
    assert "ns/pod-3" in line
    assert "and 5 more have it" in line
    assert line.isprintable()


def test_who_is_exempt() -> None:
    config = Config(holders_exempt=("monitoring",))
    assert is_exempt(config, "monitoring", {"compute"})
    assert not is_exempt(config, "", {"utility"})
    assert not is_exempt(config, "default", {"utility"})
    looks = replace(config, holders_exempt_utility=True)
    assert is_exempt(looks, "default", {"utility"})
    assert not is_exempt(looks, "default", {"utility", "compute"})
    assert not is_exempt(looks, "default", set())


@pytest.mark.parametrize(
    ("record", "exempt"),
    [
        ({}, False),
        ({"grant": {"capabilities": ["utility"]}}, True),
        ({"grant": {"capabilities": ["utility", "compute", 3]}}, False),
        ({"grant": {"capabilities": 3}, "policy": {"namespace": 3}}, False),
        ({"grant": {"capabilities": ["compute"]}, "policy": {"namespace": "monitoring"}}, True),
    ],
)
def test_who_is_exempt_by_its_record(record: dict[str, Any], *, exempt: bool) -> None:
    config = Config(holders_exempt=("monitoring",), holders_exempt_utility=True)
    assert is_exempt_by_record(config, record) == exempt


def test_a_claim_names_the_gpus_of_which_its_devices_are_parts() -> None:
    assert claim_of({}, "/b", "x") is None
    held = {"GPU-a": "GPU-a", "MIG-1": "GPU-b", "MIG-2": "GPU-b", "MIG-old": ""}
    claim = claim_of(held, "/b", "x")
    assert claim == Claim("x", "/b", ("GPU-a", "MIG-1", "MIG-2", "MIG-old"), ("GPU-b",))


def test_without_gpus_nothing_of_the_driver_is_left() -> None:
    asked = Request(
        devices=AllDevices(), capabilities=frozenset({"compute"}), features=frozenset({"gds"}),
        requirements=(("cuda", "12"),), amd_devices="0",
    )  # fmt: skip
    verdict = Verdict(Container(), "default", asked, asked)
    left = without_gpus(verdict, "too late")
    assert not left.allowed.wants_driver
    assert left.allowed.capabilities == frozenset()
    assert left.allowed.amd_devices == "0"
    assert left.reasons == ("too late",)
    assert left.asked == asked
