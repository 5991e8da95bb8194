"""The recorded calls and files of a real kubelet, with the plugin and the ledger."""

from __future__ import annotations

import base64
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

import grpc.aio  # type: ignore[import-untyped] # it ships no types
import pytest
from google.protobuf.json_format import ParseDict

from api.proto import deviceplugin_pb2 as pb
from api.proto import podresources_pb2 as podresources
from hooks.config import Config
from hooks.node.gpus import Gpu
from integration.kubelet.pod_resources import PodResources
from integration.node.holders.holders import unheld_of
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.plugin.allocation import VENDOR, AllocationContext, allocate
from integration.node.services.plugin.resources import resources_of
from integration.node.services.plugin.server import Server
from integration.node.values.resources import Device, Resource, Settings
from tests.harness.launcher import REPOSITORY
from tests.unit.node.inventories import node_with

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio

RECORDED: Final = f"{REPOSITORY}/tests/recorded/kubernetes-1.36/device-plugin"
GPUS: Final = (
    "GPU-14b5d60e-717f-5926-8c10-bfa432a3c8f1",
    "GPU-414dcd81-ed67-5847-8bd5-b8812b045111",
)
SERVICE: Final = "/v1beta1.DevicePlugin/"
ANSWERS: Final[dict[str, tuple[Any, Any]]] = {
    "GetDevicePluginOptions": (pb.Empty, pb.DevicePluginOptions),
    "GetPreferredAllocation": (pb.PreferredAllocationRequest, pb.PreferredAllocationResponse),
    "Allocate": (pb.AllocateRequest, pb.AllocateResponse),
    "PreStartContainer": (pb.PreStartContainerRequest, pb.PreStartContainerResponse),
}


def recorded() -> Any:
    with open(f"{RECORDED}/two-pods.json", encoding="utf-8") as file:
        return json.load(file)


def messages() -> list[dict[str, Any]]:
    with open(f"{RECORDED}/messages.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_the_kubelet_kept_just_what_is_answered() -> None:
    checkpoint = json.loads(recorded()["kubelet_internal_checkpoint (its text)"])
    entries = checkpoint["Data"]["PodDeviceEntries"]
    kept = [each for each in entries if each["ResourceName"] == "nvidia.com/gpu"]
    gpus = (Gpu(n, n, uuid, f"0000:0{n}:00.0", "H100") for n, uuid in enumerate(GPUS))
    node = node_with(*gpus)
    (resource,) = resources_of(node, Settings())
    names = frozenset(f"{VENDOR}/gpu={uuid}" for uuid in GPUS)
    ground = AllocationContext(Settings(), node, Config(), cdi_devices=names)
    for each in kept:
        ids = [id_ for of_node in each["DeviceIDs"].values() for id_ in of_node]
        answer = allocate(resource, ids, ground, token="")
        assert answer.SerializeToString() == base64.b64decode(each["AllocResp"])
    assert len(kept) == 3


class Answers:
    """Allocates any requested device."""

    def __init__(self) -> None:
        self.given: list[tuple[str, ...]] = []

    async def allocate(self, _: str, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        self.given.append(tuple(ids))
        return pb.ContainerAllocateResponse(envs={"ids": ",".join(ids)})

    def prefer(
        self, _: str, available: Sequence[str], required: Sequence[str], size: int
    ) -> Sequence[str]:
        return [*required, *(each for each in available if each not in required)][:size]


async def test_each_call_of_a_kubelet_is_answered(tmp_path: Path) -> None:
    answers = Answers()
    context = Context(Config(), Options("", 60), lambda *_, **__: None)
    devices = tuple(Device(f"dev-{n}", f"dev-{n}", f"dev-{n}", str(n), n, 0) for n in range(2))
    path, resource = str(tmp_path / "example.sock"), Resource("example.com/dev", devices)
    server = Server(path, resource, answers, context)
    await server.start()
    asked = 0
    try:
        async with grpc.aio.insecure_channel(f"unix:{server.path}") as channel:
            watching = channel.unary_stream(
                f"{SERVICE}ListAndWatch",
                request_serializer=pb.Empty.SerializeToString,
                response_deserializer=pb.ListAndWatchResponse.FromString,
            )(pb.Empty())
            told = await watching.read()
            first = next(each for each in messages() if each["what"] == "stream message")
            assert told == ParseDict(first["message"], pb.ListAndWatchResponse())
            for each in messages():
                if each["what"] != "request":
                    continue
                name = each["method"].removeprefix(SERVICE)
                request, answer = ANSWERS[name]
                message = ParseDict(each["message"], request())
                call = channel.unary_unary(
                    each["method"],
                    request_serializer=request.SerializeToString,
                    response_deserializer=answer.FromString,
                )
                got = await call(message, timeout=each["deadline_s"] or 10)
                if name == "GetPreferredAllocation":
                    sizes = [len(found.deviceIDs) for found in got.container_responses]
                    assert sizes == [one.allocation_size for one in message.container_requests]
                asked += 1
            watching.cancel()
    finally:
        await server.end()
    assert asked == 35
    assert all(len(ids) == 1 for ids in answers.given)


async def test_what_a_kubelet_tells_of_its_pods_is_understood(tmp_path: Path) -> None:
    answer = ParseDict(recorded()["podresources"]["List"], podresources.ListPodResourcesResponse())

    async def told(_request: bytes, _context: Any) -> bytes:
        return bytes(answer.SerializeToString())

    path, server = str(tmp_path / "kubelet.sock"), grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(told)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler}),)
    )
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    try:
        async with aclosing(PodResources()) as kubelet:
            allocated = await kubelet.allocated(path)
    finally:
        await server.stop(0)
    assert allocated is not None
    third, init = GPUS
    assert allocated["default", "gpu-third"]["main"] == (("nvidia.com/gpu", third),)
    assert allocated["default", "gpu-init"]["main"] == (("nvidia.com/gpu", init),)
    assert allocated["default", "gpu-init"]["cpu"] == ()
    assert ("containerd-shim-nvidia", "installer-v67r9") in allocated
    # Other plugins' devices have no UUIDs as ids, and are ignored.
    missing = {(each.pod, each.device) for each in unheld_of(allocated, ())}
    assert missing == {("gpu-third", third), ("gpu-init", init)}
