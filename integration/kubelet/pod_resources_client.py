"""A connection to the kubelet's pod-resources API."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import anyio
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # the same
from google.protobuf.message import DecodeError

from api.proto import podresources_pb2 as pb
from integration.grpc_anyio import answer_of
from integration.kubelet.values import Allocated, Claimed

_LIST: Final = "/v1.PodResourcesLister/List"
_LONGEST: Final = 64 << 20
# Share no subchannel: a new connection must not wait for the backoff of an earlier one.
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _LONGEST),
    ("grpc.use_local_subchannel_pool", 1),
)
_LOST: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


class Listed(NamedTuple):
    """The kubelet's answer."""

    allocated: Allocated  # devices from device plugins
    claims: tuple[Claimed, ...]  # devices from resource claims


class Lister:
    """One connection; close it after use.

    Args:
        path: the path of the socket.

    Attributes:
        is_lost: whether the connection is broken or closed.
    """

    def __init__(self, path: str) -> None:
        self.is_lost = False
        self._channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS)
        self._list = self._channel.unary_unary(
            _LIST,
            request_serializer=pb.ListPodResourcesRequest.SerializeToString,
        )

    async def ask(self, timeout: float) -> Listed | None:
        """Return the kubelet's answer; None if there is none.

        Args:
            timeout: the time limit in seconds.
        """
        try:
            call = self._list(pb.ListPodResourcesRequest(), timeout=timeout)
            # Decoded here: grpc.aio would log a traceback and return None.
            return _read(pb.ListPodResourcesResponse.FromString(await answer_of(call)))
        except grpc.RpcError as error:
            self.is_lost = self.is_lost or error.code() in _LOST
            return None
        except DecodeError:
            return None

    async def close(self) -> None:
        """Close it; calls in progress fail."""
        self.is_lost = True
        with anyio.CancelScope(shield=True):
            await self._channel.close()


def _read(answer: Any) -> Listed:
    pods = answer.pod_resources
    allocated = {
        (pod.namespace, pod.name): {
            container.name: tuple(
                (each.resource_name, name) for each in container.devices for name in each.device_ids
            )
            for container in pod.containers
        }
        for pod in pods
    }
    claims = tuple(
        Claimed(
            each.claim_namespace,
            each.claim_name,
            resource.driver_name,
            tuple(device.name for device in resource.cdi_devices),
            (pod.namespace, pod.name, container.name),
        )
        for pod in pods
        for container in pod.containers
        for each in container.dynamic_resources
        for resource in each.claim_resources
    )
    return Listed(allocated, claims)
