"""Query the kubelet: allocatable devices, allocated devices, and a plugin's Allocate answer.

The kubelet is asked rather than the plugin, because a plugin can serve devices that the kubelet
does not know.

Source: kubelet pkg/kubelet/apis/podresources/v1 (GetAllocatableResources, List), device plugin API
v1beta1.
"""

from __future__ import annotations

import os
from typing import Any, Final

import grpc  # type: ignore[import-untyped] # it ships no types
from google.protobuf.message import Message

from api.proto import deviceplugin_pb2, podresources_pb2
from hooks.config import Config
from hooks.node.kubelet import kubelet_root
from integration.kubelet.sockets import socket_name
from integration.timeouts import PATIENCE
from integration.verify.outcomes import CheckFailed, CheckSkipped

_LISTER: Final = "/v1.PodResourcesLister"
_PLUGIN: Final = "/v1beta1.DevicePlugin"
_NVIDIA: Final = "nvidia.com/"
_TIMEOUT: Final = 20.0 * PATIENCE
_LONGEST: Final = 64 << 20


class Kubelet:
    """The kubelet of this node.

    Args:
        config: the shim's configuration, which has the kubelet's directory.
    """

    def __init__(self, config: Config) -> None:
        root = kubelet_root(config)
        self._resources = os.path.join(root, "pod-resources", "kubelet.sock")
        self._plugins = os.path.join(root, "device-plugins")

    @property
    def is_there(self) -> bool:
        """Whether a kubelet runs here."""
        return os.path.exists(self._resources)

    def allocatable(self) -> dict[str, frozenset[str]]:
        """Return the ids of healthy ``nvidia.com/`` devices, by resource.

        Raises:
            CheckSkipped: no kubelet runs here, or it is too old for this call.
            CheckFailed: the kubelet does not answer.
        """
        request = podresources_pb2.AllocatableResourcesRequest()
        answer = self._ask(
            "GetAllocatableResources", request, podresources_pb2.AllocatableResourcesResponse
        )
        return _by_resource(answer.devices)

    def allocated(self) -> frozenset[str]:
        """Return the ids of the devices that pods hold.

        Raises:
            CheckSkipped, CheckFailed: as for :meth:`allocatable`.
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
        """Call a plugin's Allocate for one device, as the kubelet does.

        Args:
            resource: the extended resource, such as ``nvidia.com/gpu``.
            device: the device's id.

        Raises:
            CheckFailed: the plugin does not answer, or refuses.
            CheckSkipped: the plugin's socket has an unknown name.
        """
        path = os.path.join(self._plugins, socket_name(resource))
        if not os.path.exists(path):
            raise CheckSkipped(f"the plugin for {resource} has no socket {path}")
        request = deviceplugin_pb2.AllocateRequest()
        request.container_requests.add(devices_ids=[device])
        try:
            answer = _call(path, f"{_PLUGIN}/Allocate", request, deviceplugin_pb2.AllocateResponse)
        except grpc.RpcError as error:
            raise CheckFailed(
                f"the plugin for {resource} answers an Allocate call",
                seen=str(error.details() or error.code().name),
                do="see the log of the plugin",
            ) from error
        return answer.container_responses[0]  # type: ignore[no-any-return] # of that message

    def _ask(self, method: str, request: Message, answer: type[Any]) -> Any:
        if not self.is_there:
            raise CheckSkipped(f"no kubelet runs here: {self._resources} does not exist")
        try:
            return _call(self._resources, f"{_LISTER}/{method}", request, answer)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise CheckSkipped(f"this kubelet does not support {method}") from error
            raise CheckFailed(
                f"the kubelet answers {method}",
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
