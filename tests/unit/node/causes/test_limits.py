"""Limits of a container's GPU memory, and containers that exceed them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from hooks.config import parse_config
from hooks.errors import WrongConfigValue
from integration.containers.shares import Share
from integration.node.faults.limits import Limit, excesses, full_memory, parse_limit
from integration.node.holders.values import DeviceUse, Ledger
from integration.nvml.values import DeviceSample, GpuSample, Sample
from shim.causes.record import Whose
from tests.unit.node.causes.holders import holding

GIB: Final = 1 << 30
A, B = holding("a"), holding("b")
PART: Final = holding("part", "MIG-a")
SAMPLE: Final = Sample(
    1.0,
    gpus=(
        GpuSample(
            "GPU-0", memory_total_bytes=80 * GIB, memory_used_bytes=79 * GIB,
            mig=(DeviceSample("MIG-a", 10 * GIB, 5 * GIB),),
        ),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", Limit(8 * GIB)), ("8Gi", Limit(8 * GIB)), (" 512Mi ", Limit(GIB // 2)),
        ("25%", Limit(25, is_percent=True)), ("100%", Limit(100, is_percent=True)),
        *[(text, None) for text in ("", "none", "0Gi", "101%", "8G", "-1Gi", "8 GiB", "1e3Mi")],
    ],
)  # fmt: skip
def test_a_limit_is_an_amount_or_a_part(text: str, expected: Limit | None) -> None:
    assert parse_limit(text) == expected


@pytest.mark.parametrize("text", ["none", "8GiB", "512MiB", "25%", "100%"])
def test_what_the_configuration_accepts_is_a_limit(text: str) -> None:
    config = parse_config(f'[guard]\ngpu-memory = "{text}"\nbeyond = "kill"\n'.encode(), "x")
    assert (parse_limit(config.guard_memory) is None) == (text == "none")


@pytest.mark.parametrize("text", ["", "0GiB", "101%", "8", "8G", "8Gi"])
def test_what_it_does_not_accept_is_said(text: str) -> None:
    with pytest.raises(WrongConfigValue):
        parse_config(f'[guard]\ngpu-memory = "{text}"\n'.encode(), "x")


def over(uses: list[DeviceUse], limit: str, *own: tuple[str, str]) -> list[tuple[str, int]]:
    limits = {bundle: found for bundle, text in own if (found := parse_limit(text))}
    ledger = Ledger(holdings=(A, B))
    over_it = excesses(SAMPLE, uses, ledger, parse_limit(limit), limits)
    return [(each.container.name, each.limit // GIB) for each in over_it]


def use(holding_: object, gibibytes: int | None, device: str = "GPU-0") -> DeviceUse:
    memory = None if gibibytes is None else gibibytes * GIB
    return DeviceUse(holding_, device, (7,), memory_bytes=memory)  # type: ignore[arg-type]


def test_the_operators_limit_counts_where_several_hold_a_device() -> None:
    assert over([use(A, 30), use(B, 10)], "20GiB") == [("a", 20)]
    assert over([use(A, 30), use(B, 10)], "25%") == [("a", 20)]
    assert over([use(A, 20)], "20GiB") == []
    assert over([use(A, None), use(None, 70)], "20GiB") == []
    assert over([use(A, 30)], "none") == []
    alone = Ledger(holdings=(A,))
    assert excesses(SAMPLE, [use(A, 30)], alone, parse_limit("20GiB"), {}) == ()


def test_a_pod_may_limit_itself_and_allow_itself_nothing() -> None:
    assert over([use(A, 30), use(B, 30)], "none", ("/b/a", "10Gi")) == [("a", 10)]
    assert over([use(A, 30)], "20GiB", ("/b/a", "70Gi")) == [("a", 20)]
    alone = Ledger(holdings=(A,))
    own = {"/b/a": Limit(10 * GIB)}
    assert len(excesses(SAMPLE, [use(A, 30)], alone, None, own)) == 1


def test_a_share_of_a_claim_is_a_limit_on_its_gpu() -> None:
    def allowed(shares: dict[str, dict[str, int]], limit: str = "none") -> list[int]:
        # A container's own claims about its shares do not count.
        holder = replace(A, shares=(Share("made-up", "GPU-0", 70 << 10, 1),))
        found = excesses(
            SAMPLE, [use(holder, 30)], Ledger(holdings=(holder, B)), parse_limit(limit), {},
            shares=shares,
        )  # fmt: skip
        return [each.limit // GIB for each in found]

    assert allowed({"/b/a": {"GPU-0": 10 * GIB}}) == [10]
    assert allowed({"/b/a": {"GPU-0": 25 * GIB}}, limit="20GiB") == [20]
    assert allowed({"/b/a": {"GPU-1": 10 * GIB}}) == []
    assert allowed({"/b/b": {"GPU-0": 10 * GIB}}) == []
    assert allowed({}) == []


def test_a_part_of_a_device_that_is_not_known_limits_nobody() -> None:
    unknown = Sample(1.0, gpus=(GpuSample("GPU-0"),))
    assert excesses(unknown, [use(A, 30)], Ledger(holdings=(A, B)), Limit(1, True), {}) == ()


def test_what_is_told_of_it() -> None:
    (found,) = excesses(
        SAMPLE, [use(PART, 9, "MIG-a")], Ledger(), None, {"/b/part": Limit(50, is_percent=True)}
    )
    fault = found.hit(5.0, "ended").fault
    assert fault.name == "9.0 GiB of GPU memory, over its limit of 5.0 GiB, ended"
    assert (fault.gpu, fault.mig, fault.whose, fault.sure) == (
        "GPU-0", "MIG-a", Whose.APPLICATION, True,
    )  # fmt: skip


def test_a_full_memory_is_whose_it_is_and_never_sure() -> None:
    hits = full_memory(SAMPLE, [use(A, 70), use(B, 9), use(PART, 5, "MIG-a"), use(None, 1)], 5.0)
    assert {hit.container.name: (hit.fault.whose, hit.fault.sure) for hit in hits} == {
        "a": (Whose.APPLICATION, False), "b": (Whose.NEIGHBOUR, False),
    }  # fmt: skip
    assert hits[0].fault.name == "GPU memory full: 79.0 GiB of 80.0 GiB"
