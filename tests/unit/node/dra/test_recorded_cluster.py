"""Our slices and claims on a real cluster: stored objects, allocations, and calls of the kubelet.

The recordings are in tests/recorded/kubernetes-1.36/dra-2; the tests' stand-ins have to agree.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml
from cel_expr_python import cel  # type: ignore[import-untyped] # it ships no marker for its types
from google.protobuf import text_format

from api.proto import dra_pb2 as pb
from integration.node.options import DRA_DRIVER
from integration.node.services.dra.claims import read_claim
from integration.node.services.dra.devices import Device, Taint
from integration.node.services.dra.mig_layout import Counters, Part
from integration.node.services.dra.rpc import prepared_response
from integration.node.services.dra.sharing import policy_of
from integration.node.services.dra.slices import Counting, Owner, changes, contents, with_times
from integration.node.values.claims import PART, Reference, gpu_of, uuid_of
from tests.harness.cluster import Cluster
from tests.harness.kubectl import MANIFESTS
from tests.harness.recorded import recorded_lines
from tests.harness.slice_rules import faults
from tests.harness.waiting import until
from tests.unit.node.dra.test_publishing import publishing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NODE: Final = "gpu-node"
_CEL: Final = cel.NewEnv(variables={"device": cel.Type.DYN})
SLICES: Final = {
    (each["case"], each["version"]): each["items"] for each in recorded_lines("dra-2/slices.jsonl")
}
CLAIMS: Final = recorded_lines("dra-2/claims.jsonl")
each_case = pytest.mark.parametrize("case", SLICES, ids="-".join)


def devices_in(items: list[Any]) -> tuple[Device, ...]:
    """Return the devices that were published in these slices."""
    sets = {
        one["name"]: {name: has["value"] for name, has in one["counters"].items()}
        for each in items
        for one in each["spec"].get("sharedCounters", ())
    }
    return tuple(
        device_of(each["name"], each.get("basic", each), sets)
        for item in items
        for each in item["spec"].get("devices", ())
    )


def device_of(name: str, what: Mapping[str, Any], sets: Mapping[str, Mapping[str, str]]) -> Device:
    attributes, capacity = what["attributes"], what.get("capacity", {})
    counters = None
    for each in what.get("consumesCounters", ()):
        takes = {key: value["value"] for key, value in each["counters"].items()}
        counters = Counters(each["counterSet"], takes, sets[each["counterSet"]])
    shares = capacity.get("gpu.nvidia.com/shares", {}).get("value", "0")
    memory = capacity.get("gpu.nvidia.com/memory", {}).get("requestPolicy", {}).get("default", "")
    found = PART.fullmatch(name)
    return Device(
        name,
        attributes.get("gpu.nvidia.com/uuid", {"string": uuid_of(name)})["string"],
        gpu_of(name) or attributes.get("gpu.nvidia.com/parentUUID", {}).get("string")
        or uuid_of(name),
        attributes,
        {key: value["value"] for key, value in capacity.items()},
        part=Part(gpu_of(name), int(found[2]), int(found[3]), 1) if found else None,
        counters=counters,
        shares=int(shares),
        share_memory=memory,
        taints=tuple(Taint(one["key"], one["value"], one["effect"])
                     for one in what.get("taints", ())),
    )  # fmt: skip


@each_case
def test_what_a_real_server_stored_is_what_we_want(case: tuple[str, str]) -> None:
    items, (_, version) = SLICES[case], case
    wanted = contents(devices_in(items), version, Counting.APART)
    (uid,) = {each["metadata"]["ownerReferences"][0]["uid"] for each in items}
    owner = Owner(DRA_DRIVER, NODE, uid, version)
    timed = [with_times(content, items) for content in wanted]
    assert changes(items, timed, owner) == [], "nothing would be written"
    assert sum(len(each.get("devices", ())) for each in wanted) == len(devices_in(items)) > 6


@each_case
def test_the_rules_of_the_stand_in_allow_what_a_real_server_stored(case: tuple[str, str]) -> None:
    for each in SLICES[case]:
        devices = [one.get("basic", {}) | one for one in each["spec"].get("devices", ())]
        for one in devices:
            one.pop("basic", None)
        assert faults({**each["spec"], **({"devices": devices} if devices else {})}) == []


@pytest.mark.parametrize(
    "case", [("static-mig", "v1beta1"), ("tainted", "v1"), ("mig-on-demand", "v1")], ids="-".join
)
@pytest.mark.anyio
async def test_the_stand_in_stores_what_a_real_server_stored(
    case: tuple[str, str], tmp_path: Path
) -> None:
    def plain(items: Any) -> list[str]:
        """Return the contents without values that differ between clusters."""
        found = []
        for each in items:
            devices = each["spec"].get("devices", ())
            for one in devices:
                for taint in one.get("basic", one).get("taints", ()):
                    taint.pop("timeAdded")
            contents = [devices, each["spec"].get("sharedCounters", ())]
            found.append(json.dumps(contents, sort_keys=True))
        return sorted(found)

    items, (_, version) = SLICES[case], case
    wanted = devices_in(items)
    with Cluster(str(tmp_path / "account"), node=NODE, versions=(version,)) as cluster:
        async with publishing(cluster, node=NODE) as (publisher, _):
            publisher.want(wanted)
            await until(lambda: len(cluster.published()) == len(wanted))
            assert plain(cluster.slices()) == plain(recorded_items(case))


def recorded_items(case: tuple[str, str]) -> Any:
    (found,) = (
        each["items"] for each in recorded_lines("dra-2/slices.jsonl")
        if (each["case"], each["version"]) == case
    )  # fmt: skip
    return found


@pytest.mark.parametrize("each", CLAIMS, ids=lambda each: each["claim"]["metadata"]["name"])
def test_a_real_kubelet_heard_what_is_answered_for_what_was_allocated(
    each: dict[str, Any],
) -> None:
    document = each["claim"]
    metadata = document["metadata"]
    reference = Reference(metadata["namespace"], metadata["uid"], metadata["name"])
    devices = {one.name: one for one in devices_in(SLICES[each["slices"], "v1"])}
    results = document["status"]["allocation"]["devices"]["results"]
    (driver,) = {one["driver"] for one in results}  # once under the name of NVIDIA's driver
    claim = read_claim(document, reference, driver, NODE, devices)
    answer = text_format.Parse(each["answer"], pb.NodePrepareResourcesResponse())
    assert prepared_response(claim, driver) == answer.claims[reference.uid]
    annotations = metadata.get("annotations", {})
    assert claim.pod_claim == annotations.get("resource.kubernetes.io/pod-claim-name", "")
    assert [one.chosen for one in claim.devices] == [
        one["request"].partition("/")[2] for one in results
    ]


def selects(expression: str, device: Device) -> bool:
    """Return whether a class or a request selects a device, by CEL's own evaluator."""
    attributes: dict[str, dict[str, Any]] = {}
    for name, value in device.attributes.items():
        domain, _, own = name.rpartition("/")
        attributes.setdefault(domain or DRA_DRIVER, {})[own] = next(iter(value.values()))
    known = {"driver": DRA_DRIVER, "attributes": attributes}
    return _CEL.compile(expression).eval(data={"device": known}).plain_value() is True


def test_our_classes_and_the_claims_select_what_a_real_scheduler_allocated() -> None:
    with open(f"{MANIFESTS}/components/dra/device-classes.yaml", encoding="utf-8") as file:
        classes = {
            each["metadata"]["name"]: each["spec"]["selectors"][0]["cel"]["expression"]
            for each in yaml.safe_load_all(file)
        }
    checked = set()
    for each in CLAIMS:
        devices = {one.name: one for one in devices_in(SLICES[each["slices"], "v1"])}
        allocated = each["claim"]["status"]["allocation"]["devices"]
        asked = {
            "/".join(filter(None, (request["name"], one.get("name")))): one
            for request in each["claim"]["spec"]["devices"]["requests"]
            for one in request.get("firstAvailable", [{**request.get("exactly", {}), "name": ""}])
        }
        for result in allocated["results"]:
            request = asked[result["request"]]
            selectors = [one["cel"]["expression"] for one in request.get("selectors", ())]
            # Only Kubernetes' own evaluator has the types quantity and semver.
            plain = [one for one in selectors if "(quantity" not in one and "(semver" not in one]
            if request["deviceClassName"] in classes:
                plain.append(classes[request["deviceClassName"]])
            for expression in plain:
                assert selects(expression, devices[result["device"]])
            others = [one for one in classes.values() if one not in plain]
            if len(others) == 1:
                assert not selects(others[0], devices[result["device"]])
            checked |= {*plain}
    assert checked >= {*classes.values()}
    assert len(checked) > 4


def test_a_real_scheduler_takes_the_devices_of_a_slice_in_their_order() -> None:
    """The device plugin relies on that: it prefers the last devices."""
    taken = [
        result["device"]
        for each in CLAIMS
        if "extended-resources" in each["claim"]["metadata"]["name"]
        for result in each["claim"]["status"]["allocation"]["devices"]["results"]
    ]
    names = [each.name for each in devices_in(SLICES["static-mig", "v1"])]
    assert taken == [each for each in names if each.startswith("gpu-")]
    assert names == sorted(names)


def test_every_kind_of_claim_was_recorded() -> None:
    results = [
        one
        for each in CLAIMS
        for one in each["claim"]["status"]["allocation"]["devices"]["results"]
    ]
    assert {"gpu", "gpu/s1", "container-0-request-0", "big"} <= {one["request"] for one in results}
    assert any(one.get("adminAccess") for one in results)
    assert {*(one.get("consumedCapacity", {}).get("gpu.nvidia.com/memory") for one in results)} == {
        None, "10Gi", "20389Mi",
    }  # fmt: skip


def test_a_claim_without_a_request_got_the_share_that_our_policy_names() -> None:
    (shared,) = {
        policy_of(each, "gpu.nvidia.com/memory")["requestPolicy"]["default"]
        for each in devices_in(SLICES["shares", "v1"])
        if each.attributes["gpu.nvidia.com/type"]["string"] == "gpu"
    }
    (claim,) = (each["claim"] for each in CLAIMS if "pdef" in each["claim"]["metadata"]["name"])
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert "capacity" not in claim["spec"]["devices"]["requests"][0]["exactly"]
    assert result["consumedCapacity"]["gpu.nvidia.com/memory"] == shared
