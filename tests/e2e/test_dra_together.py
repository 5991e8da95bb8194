"""Claims that combine features: shares, MIG devices, prioritized lists, and admin access.

The tests rewrite a real scheduler's allocations (tests/recorded/kubernetes-1.36) for the devices of
a node whose GPUs are shared, already partitioned, or can be partitioned.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.node.options import DRA_DRIVER
from integration.node.services.dra.sharing import OURS
from tests.e2e.test_dra_mig import SCENARIO, THERE, Cut
from tests.harness.dra_node import dra_node_of
from tests.harness.kept import Kept
from tests.harness.mps_agent import end_daemons
from tests.harness.recorded import recorded_lines
from tests.harness.waiting import at_once, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from api.proto import dra_pb2 as pb
    from tests.harness.kubelet_dra import Reference

NVIDIA: Final = "resource.nvidia.com/v1beta1"
# GPU 0 is shared, GPU 1 has a MIG device, GPU 2 is in MIG mode.
DEVICES: Final = 1 + 1 + (6 + 6 + 3 + 2 + 1) + 25


class Together(Cut):
    """A node whose agent shares the GPUs that it does not partition."""

    mps: str

    def allocated(self, name: str, devices: dict[str, str], **change: Any) -> list[dict[str, Any]]:
        """Return a real scheduler's allocation for a claim, with our devices.

        Args:
            name: prefix of the claim's name.
            devices: our devices, by the recorded driver's names for them.
            change: fields to change in each result.
        """
        (found,) = (
            each["allocation"]["devices"]["results"]
            for each in recorded_lines("dra/claims.jsonl")
            if each["claim"].startswith(name)
        )
        results = []
        for each in copy.deepcopy(found):
            if each["device"] in devices:
                if "consumedCapacity" in each:
                    took = each["consumedCapacity"]
                    each["consumedCapacity"] = {
                        f"gpu.nvidia.com/{key}": value for key, value in took.items()
                    }
                results.append({**each, **self.result(devices[each["device"]]), **change})
        assert results
        return results

    def put(self, name: str, *results: dict[str, Any], config: Any = ()) -> Reference:
        return "default", self.cluster.claim(name, list(results), config=list(config)), name

    def answer(self, claim: Reference) -> pb.NodePrepareResourceResponse:
        said = self.driver.prepare(claim)[claim[1]]
        assert said.error == ""
        return said

    def variables(self, claim: Reference) -> dict[str, set[str]]:
        """Return the variables that a claim's devices set, by their names in its CDI spec."""
        with open(self.spec(claim), encoding="utf-8") as file:
            devices = json.load(file)["devices"]
        return {each["name"]: set(each["containerEdits"].get("env", ())) for each in devices}

    @property
    def whole(self) -> str:
        return self.node.scenario.gpus[0].uuid.lower()


def config_of(requests: list[str], api: str, kind: str, **parameters: Any) -> dict[str, Any]:
    parameters = {"apiVersion": api, "kind": kind, **parameters}
    opaque = {"driver": DRA_DRIVER, "parameters": parameters}
    return {"source": "FromClaim", "requests": requests, "opaque": opaque}


@contextmanager
def node_of_all_kinds() -> Iterator[Together]:
    with (
        tempfile.TemporaryDirectory(prefix="node-") as directory,
        tempfile.TemporaryDirectory(prefix="kubelet-") as root,
        tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as mps,
    ):
        flags = ("--dra-mig", "--dra-shares", "4", "--mps-root", mps)
        with dra_node_of(
            Together, directory, root, SCENARIO, devices=DEVICES, flags=flags
        ) as place:
            place.mps = mps
            try:
                yield place
            finally:
                end_daemons(Path(mps), place.node)


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept[Together]]:
    kept = Kept(node_of_all_kinds, lambda place: place.tidy(DEVICES))
    yield kept
    kept.close()


@pytest.fixture
def place(kept: Kept[Together]) -> Iterator[Together]:
    """Return a node that several tests use, one after another."""
    with kept.lent() as place:
        yield place


def test_a_choice_of_shares_is_configured_by_what_was_chosen(place: Together) -> None:
    (share,) = place.allocated("d-consume-a", {"gpu-0": place.whole}, request="gpu/any")
    claim = place.put(
        "one", share,
        config=[
            config_of(["gpu/big"], NVIDIA, "GpuConfig", sharing={"strategy": "TimeSlicing"}),
            config_of(["gpu/any"], OURS, "DeviceSharing", mps={"memoryLimit": "4Gi"}),
        ],
    )  # fmt: skip
    (device,) = place.answer(claim).devices
    assert (list(device.request_names), device.share_id) == (["gpu"], share["shareID"])
    (said,) = place.variables(claim).values()
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M" in said
    # Another alternative, and another share, of the whole request.
    (other,) = place.allocated("d-consume-b", {"gpu-0": place.whole}, request="gpu/small")
    plain = place.put("two", other)
    assert "NVSHIM-E2789" in place.refusal(plain)
    mps = config_of(["gpu"], OURS, "DeviceSharing", mps={})
    claims = [claim, place.put("three", {**other, "shareID": "a-share"}, config=[mps])]
    assert place.answer(claims[1]).devices[0].share_id == "a-share"
    place.give_back(*claims)


def test_a_choice_may_be_a_mig_device_that_is_made(place: Together) -> None:
    part = place.part("2g20gb", 2)
    (chosen,) = place.allocated("d-prio", {"gpu-0": part})
    assert chosen["request"] == "gpu/any"
    mps = {"strategy": "MPS", "mpsConfig": {"defaultPinnedDeviceMemoryLimit": "2Gi"}}
    claim = place.put(
        "one", chosen,
        config=[
            config_of(["gpu/whole"], NVIDIA, "GpuConfig"),
            config_of(["gpu/any"], NVIDIA, "MigDeviceConfig", sharing=mps),
        ],
    )  # fmt: skip
    (device,) = place.answer(claim).devices
    assert (list(device.request_names), device.device_name) == (["gpu"], part)
    assert place.there() == [THERE, "2g.20gb"]
    (said,) = place.variables(claim).values()
    assert any(each.startswith(f"CUDA_MPS_PIPE_DIRECTORY=/mps/claims/{claim[1]}") for each in said)
    (log,) = Path(place.mps).glob("claims/*/log/control.log")
    assert "set_default_device_pinned_mem_limit 0 2048M" in log.read_text("utf-8")
    place.give_back(claim)
    assert place.is_clean()
    wrong = [config_of(["gpu/any"], NVIDIA, "GpuConfig")]
    assert "NVSHIM-E2775" in place.refusal(place.put("two", chosen, config=wrong))


def test_who_looks_after_devices_keeps_nobody_from_them(place: Together) -> None:
    part = place.part("2g20gb", 2)
    devices = {"gpu-0": place.whole, "gpu-1": part}
    admin = place.put("admin", *place.allocated("admin", devices))
    error = place.refusal(admin)
    assert "NVSHIM-E2773" in error
    assert "admin access needs an existing MIG device; none exists" in error
    owner = place.claim("owner", part)
    place.have(owner)
    answer = place.answer(admin)
    assert [each.device_name for each in answer.devices] == [place.whole, part]
    (own,) = place.answer(owner).devices
    assert {each.device_name for each in answer.devices} >= {own.device_name}
    # Admin access takes no share, and the MIG device is removed with its owner.
    (share,) = place.allocated("d-consume-a", {"gpu-0": place.whole})
    four = {**share["consumedCapacity"], "gpu.nvidia.com/shares": "4"}
    place.have(place.put("shares", {**share, "consumedCapacity": four}))
    place.give_back(owner)
    assert place.is_clean()
    place.give_back(admin)


def test_pods_that_share_a_claim_have_the_same_of_it(place: Together) -> None:
    (recorded,) = (e for e in recorded_lines("dra/claims.jsonl") if e["claim"] == "shared")
    assert len(recorded["reservedFor"]) == 2
    part = place.part("3g40gb", 4)
    (share,) = place.allocated("d-consume-a", {"gpu-0": place.whole}, request="share")
    (cut,) = place.allocated("shared", {"gpu-1": part})
    claim = place.put("shared", share, cut)
    one, other = at_once(place.answer, [claim] * 2)
    assert one == other
    assert [list(each.request_names) for each in one.devices] == [["share"], ["gpu"]]
    assert place.there() == [THERE, "3g.40gb"], "it is created once"
    place.give_back(claim)
    assert place.is_clean()
    place.give_back(claim)


def test_a_claim_has_all_kinds_at_once_and_whoever_ends_gives_all_back(place: Together) -> None:
    (fixed,) = (each for each in place.cluster.published() if each.startswith("mig-"))
    part = place.part("1g10gb", 6)
    (share,) = place.allocated("d-consume-a", {"gpu-0": place.whole}, request="share/any")
    small = {"gpu.nvidia.com/memory": "1Gi", "gpu.nvidia.com/shares": "1"}
    (of_part,) = place.allocated(
        "d-consume-b", {"gpu-0": fixed}, request="fixed", consumedCapacity=small
    )
    (made,) = place.allocated("d-mig-b", {"gpu-0-mig-3g20gb-9-4": part})
    (seen,) = place.allocated("admin", {"gpu-0": place.whole})
    everything = (share, of_part, made, seen)
    claim = place.put("all", *everything)
    first = place.answer(claim)
    assert [list(each.request_names) for each in first.devices] == [
        ["share"], ["fixed"], ["mig"], ["all"],
    ]  # fmt: skip
    assert [each.share_id for each in first.devices] == [
        share["shareID"], of_part["shareID"], "", "",
    ]  # fmt: skip
    names = [each for device in first.devices for each in device.cdi_device_ids]
    assert len(set(names)) == 4, "also of the GPU that it has a share of and looks after"
    place.agent.kill()
    place.start_again()
    assert place.answer(claim) == first
    for device, words in ((place.whole, "all has it"), (fixed, "all has it"), (part, "all has")):
        error = place.refusal(place.claim(f"of-{device}", device))
        assert "NVSHIM-E2774" in error
        assert f"claim default/{words}" in error
    place.give_back(claim)
    assert place.is_clean()
    assert not os.path.exists(place.spec(claim))
    whole = place.claim("whole", place.whole, fixed)
    eventually(lambda: place.refusal(whole) == "", "all of it is free")
