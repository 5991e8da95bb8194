"""What the kubelet says that it has given to whom: its pod-resources API, on a unix socket.

It is asked, and not believed to be there: a node need not have one. Without an answer in time
nothing is concluded from it.

Source: Kubernetes, staging/src/k8s.io/kubelet/pkg/apis/podresources/v1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from integration.node.ledger.holdings import Allocated

_LIST: Final = "/v1.PodResourcesLister/List"
_TIMEOUT: Final = 2.0  # seconds, for the agent, which asks again
_LONGEST: Final = 64 << 20


def _is_there(path: str) -> bool:
    return os.path.exists(path)


async def allocated_by(path: str, timeout: float = _TIMEOUT) -> Allocated | None:
    """What the kubelet has given to the containers that it knows.

    Args:
        path: of its socket; "" for none.
        timeout: seconds that it may take.

    Returns:
        It; None if there is no kubelet that answers in time.
    """
    if not path or not _is_there(path):
        return None
    # A node without a kubelet does not pay for it; and it ships no types.
    import grpc.aio  # type: ignore[import-untyped] # noqa: PLC0415

    from api.proto import podresources_pb2 as pb  # noqa: PLC0415 - likewise
    from integration.node.calls import answer_of  # noqa: PLC0415 - likewise

    limits = [("grpc.max_receive_message_length", _LONGEST)]
    async with grpc.aio.insecure_channel(f"unix:{path}", options=limits) as channel:
        ask = channel.unary_unary(
            _LIST,
            request_serializer=pb.ListPodResourcesRequest.SerializeToString,
            response_deserializer=pb.ListPodResourcesResponse.FromString,
        )
        try:
            answer: Any = await answer_of(ask(pb.ListPodResourcesRequest(), timeout=timeout))
        except grpc.RpcError:
            return None
    return {
        (pod.namespace, pod.name): {
            container.name: tuple(
                (each.resource_name, name) for each in container.devices for name in each.device_ids
            )
            for container in pod.containers
        }
        for pod in answer.pod_resources
    }
