"""A connection to the kubelet's pod-resources API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import anyio
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # likewise

from api.proto import podresources_pb2 as pb
from integration.node.calls import answer_of
from integration.node.ledger.values import Claimed

if TYPE_CHECKING:
    from integration.node.ledger.values import Allocated

__all__ = ["Lister", "allocated", "claims"]

_LIST: Final = "/v1.PodResourcesLister/List"
_LONGEST: Final = 64 << 20
# It stands for itself: it waits for nothing that an earlier one has found.
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _LONGEST),
    ("grpc.use_local_subchannel_pool", 1),
)
_LOST: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})


class Lister:
    """One connection. To be closed.

    Args:
        path: of the socket.

    Attributes:
        is_lost: whether it leads nowhere any more.
    """

    def __init__(self, path: str) -> None:
        self.is_lost = False
        self._channel = grpc.aio.insecure_channel(f"unix:{path}", options=_OPTIONS)
        self._list = self._channel.unary_unary(
            _LIST,
            request_serializer=pb.ListPodResourcesRequest.SerializeToString,
            response_deserializer=pb.ListPodResourcesResponse.FromString,
        )

    async def ask(self, timeout: float) -> Any:
        """What the kubelet has given to the containers that it knows.

        Args:
            timeout: seconds that it may take.

        Returns:
            Its message, for :func:`allocated` or :func:`claims`; None if there is no answer.
        """
        try:
            call = self._list(pb.ListPodResourcesRequest(), timeout=timeout)
            return await answer_of(call)
        except grpc.RpcError as error:
            self.is_lost = self.is_lost or error.code() in _LOST
            return None

    async def close(self) -> None:
        """Close it; who still asks by it hears that it is lost."""
        self.is_lost = True
        with anyio.CancelScope(shield=True):
            await self._channel.close()


def allocated(answer: Any) -> Allocated:
    """What device plugins have, by the kubelet's message."""
    return {
        (pod.namespace, pod.name): {
            container.name: tuple(
                (each.resource_name, name) for each in container.devices for name in each.device_ids
            )
            for container in pod.containers
        }
        for pod in answer.pod_resources
    }


def claims(answer: Any) -> tuple[Claimed, ...]:
    """What containers have by claims, by the kubelet's message."""
    return tuple(
        Claimed(
            each.claim_namespace,
            each.claim_name,
            resource.driver_name,
            tuple(device.name for device in resource.cdi_devices),
        )
        for pod in answer.pod_resources
        for container in pod.containers
        for each in container.dynamic_resources
        for resource in each.claim_resources
    )
