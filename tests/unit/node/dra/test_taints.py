"""Taints of devices: which, for how long, and how a server stores them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.node.device_health.device_state import Condition
from integration.node.options import DRA_DRIVER
from integration.node.services.dra.devices import Device, Taint, publishable
from integration.node.services.dra.slices import VERSIONS, Owner, changes, contents, with_times
from integration.node.values.health import HealthState
from tests.harness.api_server import invalid
from tests.harness.cluster import Cluster
from tests.harness.slice_rules import faults
from tests.harness.waiting import until
from tests.unit.node.dra.test_publishing import cluster, publishing
from tests.unit.node.dra.test_publishing_refused import NoDryRun
from tests.unit.node.dra.test_slices import DEVICES, many

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["cluster"]

ONE: Final = DEVICES[0]
XID: Final = ("gpu.nvidia.com/xid", "79", "NoSchedule")
SICK: Final = Condition(HealthState.UNHEALTHY, reason="GPU has fallen off the bus: 1 of 8!", xid=79)


def told(health: Mapping[str, Condition], device: Device = ONE, effect: str = "NoSchedule") -> Any:
    """Return a device's taints, without our prefix, and its health; None if it is omitted."""
    found = publishable([device], health, (), DRA_DRIVER, effect)
    if not found:
        return None
    taints = [(key.removeprefix(f"{DRA_DRIVER}/"), *rest) for key, *rest in found[0].taints]
    return taints, found[0].attributes["health"]["string"]


@pytest.mark.parametrize(
    ("device", "condition", "expected"),
    [
        (ONE, None, ([], "healthy")),
        (
            ONE, replace(SICK, state=HealthState.SUSPECT),
            ([("suspect", "xid-79", "None")], "suspect"),
        ),
        (
            ONE, Condition(HealthState.SUSPECT, reason="not heard", unwatched="Not Supported"),
            ([("unwatched", "Not-Supported", "None")], "suspect"),
        ),
        (
            ONE, replace(SICK, unwatched="Not Supported"),
            ([("unhealthy", "xid-79", "NoSchedule"), XID, ("unwatched", "Not-Supported", "None")],
             "unhealthy"),
        ),
        (ONE, SICK, ([("unhealthy", "xid-79", "NoSchedule"), XID], "unhealthy")),
        (
            ONE, replace(SICK, state=HealthState.RECOVERING, xid=0),
            ([("unhealthy", "GPU-has-fallen-off-the-bus-1-of-8", "NoSchedule")], "recovering"),
        ),
        (replace(ONE, lost=True), None, ([("lost", "no-answer", "NoSchedule")], "healthy")),
        (
            replace(ONE, lost=True, drained=f"since today: {'fan ' * 30}"), SICK,
            ([("unhealthy", "xid-79", "NoSchedule"), XID, ("lost", "no-answer", "NoSchedule"),
              ("out-of-service", f"since-today-{'fan-' * 13}"[:63].rstrip("-"), "NoSchedule")],
             "unhealthy"),
        ),
    ],
    ids=["well", "suspect", "unwatched", "both", "xid", "recovering", "lost", "all of it"],
)  # fmt: skip
def test_a_device_has_a_taint_for_each_reason_until_it_is_well(
    device: Device, condition: Condition | None, expected: Any
) -> None:
    health = {} if condition is None else {ONE.gpu: condition}
    assert told(health, device) == expected
    is_usable = all(effect == "None" for *_, effect in expected[0])
    without: Any = ([], expected[1]) if is_usable else None
    assert told(health, device, "") == without, "a setting leaves out what no pod should get"
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
        assert "said the API server stored only a part of the devices" not in faults
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
        assert "said the API server keeps none: devices with taints are left out" in faults
        publisher.want(tuple(many(2)))
        await until(lambda: len(cluster.published()) == 2)


class Older(Cluster):
    """A server of Kubernetes 1.34, which lacks the effect None."""

    asks_each_time = True

    def _kept(self, code: int, kind: str, body: Any) -> tuple[int, Any]:
        effects = [
            taint["effect"]
            for device in body["spec"].get("devices", ())
            for taint in device.get("taints", ())
        ]
        if "None" in effects and (self.asks_each_time or not self._is_trial):
            where = f"spec.devices[0].taints[{effects.index('None')}].effect"
            return invalid((where, 'Unsupported value: "None"'))
        return super()._kept(code, kind, body)


INFORMED: Final = Taint(f"{DRA_DRIVER}/suspect", "xid-13", "None")


@pytest.mark.anyio
async def test_a_suspect_device_says_so_where_the_server_knows_the_effect(cluster: Cluster) -> None:
    (bad,), (suspect, well) = tainted(1), many(2)
    async with publishing(cluster) as (publisher, faults):
        publisher.want((bad, replace(suspect, taints=(INFORMED,)), well))
        await until(lambda: len(cluster.published()) == 3)
        assert {name: taint["effect"] for name, (taint,) in cluster.taints().items()} == {
            bad.name: "NoSchedule", suspect.name: "None",
        }  # fmt: skip
        assert not [each for each in faults if "left out" in each]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["refuses", "refuses later", "drops", "webhook"])
async def test_a_server_without_the_effect_refuses_no_slice_for_it(
    tmp_path: Path, how: str
) -> None:
    (bad,), (suspect,) = tainted(1), many(1)
    kind = NoDryRun if how == "webhook" else Older
    with kind(str(tmp_path / "older"), node="node-1") as cluster:
        if how == "drops":
            cluster.drops = frozenset({"taints"})
        if isinstance(cluster, Older):
            cluster.asks_each_time = how == "refuses"
        async with publishing(cluster) as (publisher, faults):
            keeps = how.startswith("refuses")
            publisher.want(
                (replace(bad, taints=(*bad.taints, INFORMED)), replace(suspect, taints=(INFORMED,)))
            )
            expected = {suspect.name, *([bad.name] if keeps else [])}
            await until(lambda: cluster.published() == expected)
            await until(lambda: cluster.watches == 1)
            assert not faults.get("slices")
            effects = [each["effect"] for taints in cluster.taints().values() for each in taints]
            assert effects == (["NoSchedule"] if keeps else [])
