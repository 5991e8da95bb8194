"""Deleted claims: what has to confirm the deletion before the agent unprepares one."""

from __future__ import annotations

import json
import tempfile
from contextlib import aclosing, closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from api.proto import podresources_pb2 as podresources
from hooks.config import Config
from integration.agent_errors import MigDeviceNotUndone
from integration.apiserver.client import ApiServer
from integration.node.options import DRA_DRIVER, Options
from integration.node.service import Context
from integration.node.services.dra.claim_reader import ClaimReader
from integration.node.services.dra.stale_claims import StaleClaims
from integration.node.values.claims import Claim, ClaimDevice
from tests.harness.api_server import refusal
from tests.harness.cluster import Cluster
from tests.harness.kubelet_plugins import KubeletPlugins
from tests.harness.node_state import publish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from integration.node.values.claims import Reference
    from tests.harness.http_server import Request

pytestmark = pytest.mark.anyio

DEVICE: Final = ClaimDevice("gpu", "node-1", "gpu-0", "GPU-0", "GPU-0")
# The refusal of a real server to a kubelet: tests/recorded, kubernetes-1.36/dra.
NOBODYS: Final = (
    'resourceclaims.resource.k8s.io "claim" is forbidden: User "system:node:gpu-node" cannot get '
    'resource "resourceclaims" in API group "resource.k8s.io" in the namespace "default": no '
    "relationship found between node 'gpu-node' and this object"
)
CLAIM: Final = Claim("uid-of-old", "default", "claim", (DEVICE,))


class Place:
    """A kubelet, an API server, and an agent that has prepared :data:`CLAIM`."""

    def __init__(self, directory: str, cluster: Cluster, kubelet: KubeletPlugins) -> None:
        self.cluster, self.kubelet, self.root = cluster, kubelet, directory
        self.taken_back: list[str] = []
        self.said: list[str] = []
        config = Config(state=directory, kubelet_root=directory)
        options = Options("", 60, pod_resources=kubelet.pod_resources or "")
        self.context = Context(config, options, lambda _, event, **__: self.said.append(event))
        publish(self.context.state.claims, (CLAIM,))
        self.fails = False
        self.needed = set[str]()

    async def unprepare_stale(self, reference: Reference) -> bool:
        if self.fails:
            raise MigDeviceNotUndone("to undo it", found="it is in use")
        self.taken_back.append(reference.uid)
        publish(self.context.state.claims, ())
        return True

    async def look(self, times: int) -> list[str]:
        """Return the claims that are unprepared after this many checks."""
        where = ("127.0.0.1", self.cluster.port, self.cluster.service_account)

        async def version() -> str:
            return "v1"

        async with aclosing(self.context.kubelet):
            with closing(ApiServer(*where, timeout=0.5)) as api:
                stale = StaleClaims(self.context, ClaimReader(api, version), self)
                for _ in range(times):
                    await stale.look()
        return self.taken_back

    def runs(self, *cdi_names: str, name: str = "claim") -> None:
        """Run a pod that has a claim of that name, with these devices of our driver."""
        devices = [podresources.CDIDevice(name=each) for each in cdi_names]
        resource = podresources.ClaimResource(
            driver_name=DRA_DRIVER, pool_name="node-1", device_name="gpu-0", cdi_devices=devices
        )
        self.kubelet.claimed["pod", "default"] = [
            podresources.DynamicResource(
                claim_name=name, claim_namespace="default", claim_resources=[resource]
            )
        ]

    def damage(self) -> None:
        """Put an entry in the kubelet's record of which nobody knows what claim it is."""
        data = json.dumps({"ClaimInfoStateList": [{"ClaimName": "claim"}]})
        with open(f"{self.root}/dra_manager_state", "w", encoding="utf-8") as file:
            json.dump({"Data": data, "Checksum": 1}, file)

    def record(self) -> None:
        """Put the claim in the kubelet's record."""
        device = {"PoolName": "node-1", "DeviceName": "gpu-0", "RequestNames": ["gpu"]}
        info = {"ClaimUID": CLAIM.uid, "ClaimName": "claim", "Namespace": "default"}
        info |= {"DriverState": {DRA_DRIVER: {"Devices": [device]}}}  # type: ignore[dict-item]
        data = json.dumps({"ClaimInfoStateList": [info]})
        with open(f"{self.root}/dra_manager_state", "w", encoding="utf-8") as file:
            json.dump({"Data": data, "Checksum": 1}, file)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with (
        tempfile.TemporaryDirectory(prefix="kubelet-") as root,
        Cluster(str(tmp_path / "account"), node="node-1") as cluster,
        KubeletPlugins(f"{root}/plugins", pod_resources=f"{root}/pods.sock") as kubelet,
    ):
        yield Place(root, cluster, kubelet)


def anew(place: Place) -> None:
    place.cluster.claim("claim", [], uid="uid-of-new")


def anew_and_runs(place: Place) -> None:
    anew(place)
    place.runs(f"k8s.{DRA_DRIVER}/claim=uid-of-new-gpu-1")


def nobodys(place: Place) -> None:
    """Let the server refuse as its node authorizer does, for a kubelet's own credentials."""
    answer = place.cluster.answer

    def forbidden(request: Request) -> tuple[int, Any]:
        return refusal(403, NOBODYS) if "resourceclaims" in request.path else answer(request)

    place.cluster.answer = forbidden  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "trouble",
    [
        lambda _: None,
        anew,
        anew_and_runs,
        lambda place: place.runs("k8s.x/claim=uid-of-other", name="other"),
        nobodys,
    ],
    ids=["gone", "another of its name", "which runs", "another claim runs", "nobody's here"],
)
async def test_what_nobody_has_is_taken_back_at_the_second_look(
    place: Place, trouble: Callable[[Place], Any]
) -> None:
    trouble(place)
    assert await place.look(1) == []
    assert await place.look(2) == [CLAIM.uid]
    assert [each for each in place.said if "unprepared a stale claim" in each]


@contextmanager
def no_kubelet(place: Place) -> Iterator[None]:
    place.kubelet.stop()
    try:
        yield
    finally:
        place.kubelet.start()


def refuse(code: int) -> Callable[[Place], None]:
    def trouble(place: Place) -> None:
        place.cluster.refuse = lambda *_: code

    return trouble


@pytest.mark.parametrize(
    "trouble",
    [
        lambda place: place.cluster.claim("claim", [], uid=CLAIM.uid),
        lambda place: place.runs(f"k8s.{DRA_DRIVER}/claim={CLAIM.uid}-gpu-0"),
        lambda place: place.runs(),
        lambda place: place.record(),
        lambda place: place.damage(),
        refuse(503),
        refuse(403),
        refuse(404),
    ],
    ids=[
        *(
            "it is there",
            "it runs",
            "one of its name runs",
            "the kubelet knows it",
            "the kubelet's record is damaged",
        ),
        *("busy", "forbidden", "the page of a proxy"),
    ],
)
async def test_what_somebody_may_have_stays(place: Place, trouble: Callable[[Place], Any]) -> None:
    trouble(place)
    assert await place.look(3) == []
    assert not place.said


async def test_a_kubelets_credentials_alone_take_nothing_back(place: Place) -> None:
    nobodys(place)
    place.record()
    assert await place.look(3) == []


async def test_without_the_kubelets_word_everything_stays(place: Place) -> None:
    with no_kubelet(place):
        assert await place.look(3) == []
    assert await place.look(2) == [CLAIM.uid]


async def test_what_cannot_be_taken_back_now_is_tried_again(place: Place) -> None:
    place.fails = True
    assert await place.look(3) == []
    assert len([each for each in place.said if "NVSHIM-E2781" in each]) == 2
    place.fails = False
    assert await place.look(2) == [CLAIM.uid]
