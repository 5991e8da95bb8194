"""The kubelet's side: which devices it can give, which it has given, what a plugin answers.

The kubelet's word counts, and not the plugin's: a plugin can serve devices that no kubelet knows.

Source: kubelet pkg/kubelet/apis/podresources/v1 (GetAllocatableResources, List), device plugin API
v1beta1.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import grpc  # type: ignore[import-untyped] # it ships no types

from api.proto import deviceplugin_pb2, podresources_pb2
from hooks.config import Config
from hooks.node.kubelet import kubelet_root
from integration.kubelet.sockets import socket_name
from integration.timeouts import PATIENCE
from integration.verify.outcomes import NotAsExpected, NotMade

if TYPE_CHECKING:
    from google.protobuf.message import Message


_LISTER: Final = "/v1.PodResourcesLister"
_PLUGIN: Final = "/v1beta1.DevicePlugin"
_NVIDIA: Final = "nvidia.com/"
_TIMEOUT: Final = 20.0 * PATIENCE
_LONGEST: Final = 64 << 20


class Kubelet:
    """The kubelet of this node.

    Args:
        config: where its directory is.
    """

    def __init__(self, config: Config) -> None:
        root = kubelet_root(config)
        self._resources = os.path.join(root, "pod-resources", "kubelet.sock")
        self._plugins = os.path.join(root, "device-plugins")

    @property
    def is_there(self) -> bool:
        """Whether there is one."""
        return os.path.exists(self._resources)

    def allocatable(self) -> dict[str, frozenset[str]]:
        """The ids of the healthy devices that plugins of NVIDIA's resources have, by resource.

        Raises:
            NotMade: there is no kubelet, or it is too old to say.
            NotAsExpected: it does not answer.
        """
        request = podresources_pb2.AllocatableResourcesRequest()
        answer = self._ask(
            "GetAllocatableResources", request, podresources_pb2.AllocatableResourcesResponse
        )
        return _by_resource(answer.devices)

    def given(self) -> frozenset[str]:
        """The ids of devices that pods have.

        Raises:
            NotMade, NotAsExpected: as :meth:`allocatable`.
        """
        request = podresources_pb2.ListPodResourcesRequest()
        answer = self._ask("List", request, podresources_pb2.ListPodResourcesResponse)
        devices = [
            device
            for pod in answer.pod_resources
            for container in pod.containers
            for device in container.devices
        ]
        return frozenset().union(*_by_resource(devices).values())

    def answer_for(self, resource: str, device: str) -> deviceplugin_pb2.ContainerAllocateResponse:
        """What the plugin of a resource answers the kubelet for a device.

        Args:
            resource: as the kubelet calls it.
            device: its id.

        Raises:
            NotAsExpected: it does not answer, or refuses.
            NotMade: its socket is not where one of that resource is.
        """
        path = os.path.join(self._plugins, socket_name(resource))
        if not os.path.exists(path):
            raise NotMade(f"the plugin of {resource} has no socket {path}")
        request = deviceplugin_pb2.AllocateRequest()
        request.container_requests.add(devices_ids=[device])
        try:
            answer = _call(path, f"{_PLUGIN}/Allocate", request, deviceplugin_pb2.AllocateResponse)
        except grpc.RpcError as error:
            raise NotAsExpected(
                f"the answer of the plugin of {resource} for a device",
                seen=str(error.details() or error.code().name),
                do="see the log of the plugin",
            ) from error
        return answer.container_responses[0]  # type: ignore[no-any-return] # of that message

    def _ask(self, method: str, request: Message, answer: type[Any]) -> Any:
        if not self.is_there:
            raise NotMade(f"no kubelet: there is no {self._resources}")
        try:
            return _call(self._resources, f"{_LISTER}/{method}", request, answer)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise NotMade(f"this kubelet does not know {method}") from error
            raise NotAsExpected(
                "the kubelet's answer to which devices it can give",
                seen=str(error.details() or error.code().name),
                do="see the kubelet's log",
            ) from error


def _call(path: str, method: str, request: Message, answer: type[Any]) -> Any:
    options = [
        ("grpc.default_authority", "localhost"), ("grpc.max_receive_message_length", _LONGEST),
    ]  # fmt: skip
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        call = channel.unary_unary(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return call(request, timeout=_TIMEOUT)


def _by_resource(devices: Any) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for each in devices:
        if each.resource_name.startswith(_NVIDIA):
            found.setdefault(each.resource_name, set()).update(each.device_ids)
    return {name: frozenset(ids) for name, ids in found.items()}
