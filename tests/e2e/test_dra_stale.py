"""A claim that went while nobody was there to hear of it, and that no kubelet takes back."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from api.proto import podresources_pb2 as podresources
from integration.node.options import DRA_DRIVER
from tests.e2e.test_dra import fresh as place
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from tests.harness.dra_node import Place
    from tests.harness.kubelet_dra import Reference

__all__ = ["place"]


def look(place: Place, claim: Reference) -> None:
    """Have the agent look for claims that are no more, and wait until it has asked for one."""
    path = f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{claim[2]}"
    before = place.cluster.asked.count(("GET", path))
    os.kill(place.agent.pid, signal.SIGHUP)
    eventually(lambda: place.cluster.asked.count(("GET", path)) > before, "it has looked")


def test_what_nobody_has_any_more_is_free_again(place: Place) -> None:
    gone, runs, stays = (
        place.claim(name, device)
        for name, device in zip(
            ("gone", "runs", "stays"), (*place.gpus, place.parts[0]), strict=True
        )
    )
    place.driver.prepare(gone, runs, stays)
    place.agent.kill()
    place.cluster.remove_claim("gone")
    place.cluster.remove_claim("runs")
    device = podresources.CDIDevice(name=f"k8s.{DRA_DRIVER}/claim={runs[1]}-{place.gpus[1]}")
    place.plugins.claimed["pod", "default"] = [
        podresources.DynamicResource(
            claim_name="runs",
            claim_namespace="default",
            claim_resources=[
                podresources.ClaimResource(driver_name=DRA_DRIVER, cdi_devices=[device])
            ],
        )
    ]
    place.start_again()
    other = place.claim("other", place.gpus[0])
    assert "NVSHIM-E2774" in place.refusal(other)
    look(place, stays)
    look(place, stays)
    eventually(lambda: not os.path.exists(place.spec(gone)), "it is taken back")
    place.have(other)
    assert os.path.exists(place.spec(runs))
    assert os.path.exists(place.spec(stays))
    (line,) = place.agent.said("took back a claim that is no more")
    assert (line["claim"], line["devices"]) == ("default/gone", [place.gpus[0]])
