"""Taints of devices: which, for how long, and what a server makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.node.device_health.device_state import Condition
from integration.node.options import DRA_DRIVER
from integration.node.services.dra.devices import Device, Taint, publishable
from integration.node.services.dra.slices import VERSIONS, Owner, changes, contents, with_times
from integration.node.values.health import HealthState
from tests.harness.cluster import Cluster
from tests.harness.slice_rules import faults
from tests.harness.waiting import until
from tests.unit.node.dra.test_publishing import cluster, publishing
from tests.unit.node.dra.test_slices import DEVICES, many

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["cluster"]

ONE: Final = DEVICES[0]
SICK: Final = Condition(HealthState.UNHEALTHY, reason="GPU has fallen off the bus: 1 of 8!", xid=79)


def told(health: Mapping[str, Condition], device: Device = ONE, effect: str = "NoSchedule") -> Any:
    """The taints of a device, without our name, and its health; None if it is left out."""
    found = publishable([device], health, (), DRA_DRIVER, effect)
    if not found:
        return None
    taints = [(key.removeprefix(f"{DRA_DRIVER}/"), *rest) for key, *rest in found[0].taints]
    return taints, found[0].attributes["health"]["string"]


@pytest.mark.parametrize(
    ("device", "condition", "expected"),
    [
        (ONE, None, ([], "healthy")),
        (ONE, replace(SICK, state=HealthState.SUSPECT), ([], "suspect")),
        (ONE, SICK, ([("unhealthy", "xid-79", "NoSchedule")], "unhealthy")),
        (
            ONE, replace(SICK, state=HealthState.RECOVERING, xid=0),
            ([("unhealthy", "GPU-has-fallen-off-the-bus-1-of-8", "NoSchedule")], "recovering"),
        ),
        (replace(ONE, lost=True), None, ([("lost", "no-answer", "NoSchedule")], "healthy")),
        (
            replace(ONE, lost=True, drained=f"since today: {'fan ' * 30}"), SICK,
            ([("unhealthy", "xid-79", "NoSchedule"), ("lost", "no-answer", "NoSchedule"),
              ("out-of-service", f"since-today-{'fan-' * 13}"[:63].rstrip("-"), "NoSchedule")],
             "unhealthy"),
        ),
    ],
    ids=["well", "suspect", "xid", "recovering", "lost", "all of it"],
)  # fmt: skip
def test_a_device_has_a_taint_for_each_reason_until_it_is_well(
    device: Device, condition: Condition | None, expected: Any
) -> None:
    health = {} if condition is None else {ONE.gpu: condition}
    assert told(health, device) == expected
    is_well = not expected[0]
    assert (told(health, device, "") is not None) is is_well, "without taints it is left out"
    assert publishable([device], health, {ONE.uuid}, DRA_DRIVER, "NoSchedule") == ()


def tainted(count: int, value: str = "xid-79") -> list[Device]:
    taint = Taint(f"{DRA_DRIVER}/unhealthy", value, "NoSchedule")
    return [replace(each, name=f"bad-{each.name}", taints=(taint,)) for each in many(count)]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_takes_slices_with_taints(version: str) -> None:
    owner = Owner(DRA_DRIVER, "node-1", "uid", version)
    lists = contents([*tainted(70), *many(130)], version)
    assert sorted(len(content["devices"]) for content in lists) == [2, 6, 64, 128]
    for change in changes((), lists, owner):
        spec = change.body["spec"]
        plain = {**spec, "devices": [each.get("basic", {}) | each for each in spec["devices"]]}
        assert not [
            fault for fault in faults(plain) if version != "v1beta1" or "basic" not in fault
        ]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_taint_keeps_its_time_for_as_long_as_it_is_the_same(version: str) -> None:
    (there,) = contents(tainted(2), version)
    for each in there["devices"]:
        for taint in each.get("basic", each)["taints"]:
            taint["timeAdded"] = "then"
    (new,) = contents([*tainted(1), *tainted(3, "xid-48")[1:]], version)
    timed = with_times(new, [{"spec": there}, {"spec": {}}])["devices"]
    times = [each.get("basic", each)["taints"][0].get("timeAdded") for each in timed]
    assert times == ["then", None, None]
    assert with_times(there, ()) == there


@pytest.mark.anyio
async def test_taints_are_written_once_and_go(cluster: Cluster) -> None:
    async with publishing(cluster) as (publisher, faults):
        publisher.want((*tainted(1), *many(1)))
        await until(lambda: len(cluster.published()) == 2)
        (taint,) = cluster.taints()["bad-gpu-0000"]
        publisher.want((*tainted(1), *many(2)))
        await until(lambda: len(cluster.published()) == 3)
        assert cluster.taints()["bad-gpu-0000"] == [taint], "the time is that of the first write"
        assert "said the API server keeps less of the devices than it was sent" not in faults
        publisher.want(tuple(replace(each, taints=()) for each in tainted(1)))
        await until(lambda: cluster.published() == {"bad-gpu-0000"} and not cluster.taints())
        tried, *written = (method for method, _ in cluster.writes)
        assert tried == "POST"
        assert written == ["POST", "POST", "PUT", "PUT", *written[4:]]
        assert len(written) <= 6


@pytest.mark.anyio
async def test_a_server_without_taints_is_never_told_of_a_tainted_device(cluster: Cluster) -> None:
    cluster.drops = frozenset({"taints"})
    async with publishing(cluster) as (publisher, faults):
        publisher.want((*tainted(1), *many(1)))
        await until(lambda: len(cluster.published()) == 1)
        await until(lambda: cluster.watches == 1)
        assert cluster.ever_published() == {"gpu-0000"}
        assert "said the API server keeps no taints: such devices are left out" in faults
        publisher.want(tuple(many(2)))
        await until(lambda: len(cluster.published()) == 2)
