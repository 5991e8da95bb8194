"""A kubelet's device manager, as a device plugin meets it: the real gRPC API over unix sockets.

    with KubeletPlugins(directory) as kubelet:
        kubelet.wait_for("nvidia.com/gpu", 8)
        answer = kubelet.allocate("nvidia.com/gpu", 2, pod="web-1")

It does as a kubelet does, also where that is hard on plugins: at its start it removes every socket
of its directory, it calls a plugin back before it answers Register, it takes the devices of a
plugin whose ListAndWatch has ended for unhealthy, it hands no device out twice, and it remembers
what it has given over a restart. What it has given it tells by the pod-resources API too.

Source: kubelet pkg/kubelet/cm/devicemanager (manager.go, plugin/v1beta1), apis/podresources.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc  # type: ignore[import-untyped] # it ships no types
from google.protobuf.message import Message

from api.proto import cri_pb2 as cri
from api.proto import deviceplugin_pb2 as pb
from api.proto import podresources_pb2 as podresources
from tests.harness.grpc_server import Methods, serve
from tests.harness.waiting import eventually

__all__ = ["Assignment", "KubeletPlugins", "NotEnough", "Plugin", "container_fields"]

VERSION: Final = "v1beta1"
_SERVICE: Final = "v1beta1.DevicePlugin"
_DIAL: Final = 10.0
_ANSWER: Final = 20.0


class NotEnough(Exception):
    """Fewer devices can be had than a pod asks for."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a container has been given."""

    pod: str  # its name
    namespace: str  # of the pod
    container: str  # its name in the pod
    resource: str  # of which the devices are
    ids: tuple[str, ...]  # what the plugin calls them
    answer: pb.ContainerAllocateResponse  # what the plugin answered


class Plugin:
    """A plugin that has registered: the kubelet's client of it."""

    def __init__(self, request: pb.RegisterRequest, path: str) -> None:
        self.request = request
        self.devices: dict[str, pb.Device] = {}
        self.lists: list[dict[str, pb.Device]] = []
        """Everything that ListAndWatch has told, in order."""
        self.ended = ""
        """Why ListAndWatch ended; "" as long as it goes on."""
        # As a kubelet dials: no limit of its own on what it receives, which leaves gRPC's 4 MiB.
        self._channel = grpc.insecure_channel(
            f"unix:{path}", options=[("grpc.default_authority", "localhost")]
        )
        try:
            grpc.channel_ready_future(self._channel).result(timeout=_DIAL)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise
        self._stream: Any = None
        self._thread = threading.Thread(target=self._watch, name=path, daemon=True)

    def watch(self) -> None:
        """Begin to listen to its list."""
        empty = pb.Empty()
        method = self._channel.unary_stream(
            f"/{_SERVICE}/ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        self._stream = method(empty)
        self._thread.start()

    def call(self, name: str, request: Message, answer: type[Any]) -> Any:
        """Call a method of the plugin's.

        Raises:
            grpc.RpcError: it refused, or did not answer.
        """
        method = self._channel.unary_unary(
            f"/{_SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return method(request, timeout=_ANSWER)

    def options(self) -> pb.DevicePluginOptions:
        answer: pb.DevicePluginOptions = self.call(
            "GetDevicePluginOptions", pb.Empty(), pb.DevicePluginOptions
        )
        return answer

    def allocate(self, *ids: str) -> pb.ContainerAllocateResponse:
        """Ask for devices for one container, whatever is known of them."""
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=ids)
        answers: pb.AllocateResponse = self.call("Allocate", request, pb.AllocateResponse)
        return answers.container_responses[0]

    def preferred(
        self, available: Iterable[str], size: int, *, required: Iterable[str] = ()
    ) -> list[str]:
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(
            available_deviceIDs=available, must_include_deviceIDs=required, allocation_size=size
        )
        answer = self.call("GetPreferredAllocation", request, pb.PreferredAllocationResponse)
        return list(answer.container_responses[0].deviceIDs)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        self._channel.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _watch(self) -> None:
        try:
            for response in self._stream:
                told = {device.ID: device for device in response.devices}
                self.lists.append(told)
                self.devices = told
        except grpc.RpcError as error:
            code = error.code()
            self.ended = f"{code.name}: {error.details()}"
        else:
            self.ended = "OK"


class KubeletPlugins:
    """A kubelet, as far as device plugins see it. As a context it runs.

    Args:
        directory: of its sockets and the plugins'; made if missing.
        pod_resources: the socket on which it tells what it has given; None for none.

    Attributes:
        versions: of the API that it knows.
        late: seconds that it takes to tell what it has given.
    """

    def __init__(self, directory: str, *, pod_resources: str | None = None) -> None:
        self.directory = directory
        self.socket = os.path.join(directory, "kubelet.sock")
        self.pod_resources = pod_resources
        self.versions: tuple[str, ...] = (VERSION,)
        self.late = 0.0
        self.registrations: list[pb.RegisterRequest] = []
        """Everything that has called Register, also what was refused."""
        self.plugins: dict[str, Plugin] = {}
        self.assignments: list[Assignment] = []
        """What has been given and not been taken back: its checkpoint, which outlives it."""
        self.claimed: dict[tuple[str, str], list[podresources.DynamicResource]] = {}
        """What pods have by claims, by the pod's name and namespace."""
        self._servers: list[Any] = []
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        self._life = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Its life

    def start(self) -> None:
        """Begin as a kubelet does: all sockets of the directory go, then its own is made."""
        os.makedirs(self.directory, mode=0o750, exist_ok=True)
        with os.scandir(self.directory) as entries:
            for entry in entries:
                # A plugin makes and removes its own meanwhile.
                with suppress(FileNotFoundError):
                    if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                        os.unlink(entry.path)
        registration = {"Register": (self._register, pb.RegisterRequest)}
        self._servers.append(serve(self.socket, "v1beta1.Registration", registration))
        if self.pod_resources is not None:
            os.makedirs(os.path.dirname(self.pod_resources), mode=0o750, exist_ok=True)
            lister: Methods = {
                "List": (self._list, podresources.ListPodResourcesRequest),
                "Get": (self._get, podresources.GetPodResourcesRequest),
                "GetAllocatableResources": (
                    self._allocatable, podresources.AllocatableResourcesRequest,
                ),
            }  # fmt: skip
            self._servers.append(serve(self.pod_resources, "v1.PodResourcesLister", lister))

    def stop(self) -> None:
        """End; what it has given it knows again when it is started."""
        for server in self._servers:
            server.stop(None).wait()
        self._servers.clear()
        with self._registering:
            self._life += 1  # whoever is registered this moment comes too late
            plugins = list(self.plugins.values())
            self.plugins.clear()
        for plugin in plugins:
            plugin.close()

    def die(self) -> None:
        """End as by a signal: its socket stays, and nobody listens there."""
        self.stop()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(self.socket)

    def restart(self) -> None:
        self.stop()
        self.start()

    # What plugins have told

    def devices(self, resource: str) -> Mapping[str, pb.Device]:
        """The devices of a resource as they were told last; none if nobody has registered it."""
        plugin = self.plugins.get(resource)
        return plugin.devices if plugin is not None else {}

    def healthy(self, resource: str) -> set[str]:
        """Those that a pod could get now, if nobody else had them."""
        plugin = self.plugins.get(resource)
        if plugin is None or plugin.ended:
            return set()
        return {name for name, device in plugin.devices.items() if device.health == "Healthy"}

    def wait_for(self, resource: str, count: int, *, timeout: float = 20) -> set[str]:
        """Wait until a resource has so many healthy devices."""
        what = f"{count} healthy devices of {resource}"

        def has_so_many() -> bool:
            return resource in self.plugins and len(self.healthy(resource)) == count

        eventually(has_so_many, what, timeout=timeout)
        return self.healthy(resource)

    # What pods get

    def allocate(
        self,
        resource: str,
        count: int,
        *,
        pod: str,
        container: str = "main",
        namespace: str = "tests",
    ) -> pb.ContainerAllocateResponse:
        """Give devices to a container, as they are chosen at a pod's admission.

        Raises:
            NotEnough: so many cannot be had.
            grpc.RpcError: the plugin refused.
        """
        with self._lock:
            plugin = self.plugins.get(resource)
            free = self.healthy(resource) - self.given(resource)
            if plugin is None or len(free) < count:
                raise NotEnough(f"{count} of {resource}: {len(free)} can be had")
            ids = self._chosen(plugin, sorted(free), count)
            answer = plugin.allocate(*ids)
            given = Assignment(pod, namespace, container, resource, tuple(ids), answer)
            self.assignments.append(given)
        return answer

    def given(self, resource: str) -> set[str]:
        """The devices that pods have."""
        return {i for each in self.assignments if each.resource == resource for i in each.ids}

    def release(self, pod: str) -> None:
        """A pod has ended: what it had can be given again."""
        with self._lock:
            self.assignments = [each for each in self.assignments if each.pod != pod]

    @staticmethod
    def _chosen(plugin: Plugin, free: list[str], count: int) -> list[str]:
        if plugin.request.options.get_preferred_allocation_available and len(free) > count:
            preferred = [name for name in plugin.preferred(free, count) if name in free]
            free = [*preferred, *(name for name in free if name not in preferred)]
        return free[:count]

    # Its services

    def _register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        self.registrations.append(request)
        if request.version not in self.versions:
            known = " ".join(self.versions)
            context.abort(
                grpc.StatusCode.UNKNOWN,
                f"requested API version {request.version!r} is not supported by kubelet. "
                f"Supported versions are [{known}]",
            )
        domain, _, name = request.resource_name.partition("/")
        if not name or "kubernetes.io" in domain:
            context.abort(
                grpc.StatusCode.UNKNOWN, f"the ResourceName {request.resource_name!r} is invalid"
            )
        path = os.path.join(self.directory, request.endpoint)
        life = self._life
        try:
            plugin = Plugin(request, path)
        except grpc.FutureTimeoutError:
            context.abort(grpc.StatusCode.UNKNOWN, f"failed to dial device plugin at {path}")
        try:
            plugin.options()
        except grpc.RpcError as error:  # it has ended meanwhile
            plugin.close()
            context.abort(
                grpc.StatusCode.UNKNOWN, f"failed to get device plugin options: {error.details()}"
            )
        with self._registering:
            if life != self._life:
                plugin.close()
                context.abort(grpc.StatusCode.UNAVAILABLE, "the kubelet has ended")
            before = self.plugins.get(request.resource_name)
            self.plugins[request.resource_name] = plugin
            plugin.watch()
        if before is not None:
            before.close()
        return pb.Empty()

    def _list(
        self, _: podresources.ListPodResourcesRequest, __: Any
    ) -> podresources.ListPodResourcesResponse:
        time.sleep(self.late)
        pods = dict.fromkeys((each.pod, each.namespace) for each in self.assignments)
        pods |= dict.fromkeys(self.claimed)
        return podresources.ListPodResourcesResponse(
            pod_resources=[self._resources_of(*each) for each in pods]
        )

    def _get(
        self, request: podresources.GetPodResourcesRequest, context: Any
    ) -> podresources.GetPodResourcesResponse:
        pods = {(each.pod, each.namespace) for each in self.assignments}
        if (request.pod_name, request.pod_namespace) not in pods:
            context.abort(grpc.StatusCode.UNKNOWN, f"pod {request.pod_name} not found")
        found = self._resources_of(request.pod_name, request.pod_namespace)
        return podresources.GetPodResourcesResponse(pod_resources=found)

    def _allocatable(
        self, _: podresources.AllocatableResourcesRequest, __: Any
    ) -> podresources.AllocatableResourcesResponse:
        return podresources.AllocatableResourcesResponse(
            devices=[
                podresources.ContainerDevices(resource_name=name, device_ids=[each])
                for name in list(self.plugins)
                for each in sorted(self.healthy(name))
            ]
        )

    def _resources_of(self, pod: str, namespace: str) -> podresources.PodResources:
        containers: dict[str, list[Assignment]] = {}
        for each in self.assignments:
            if (each.pod, each.namespace) == (pod, namespace):
                containers.setdefault(each.container, []).append(each)
        return podresources.PodResources(
            name=pod,
            namespace=namespace,
            containers=[
                podresources.ContainerResources(
                    name=name,
                    devices=[
                        podresources.ContainerDevices(
                            resource_name=each.resource, device_ids=each.ids
                        )
                        for each in had
                    ],
                )
                for name, had in containers.items()
            ]
            + [
                podresources.ContainerResources(name="claims", dynamic_resources=[each])
                for each in self.claimed.get((pod, namespace), ())
            ],
        )


def container_fields(answer: pb.ContainerAllocateResponse) -> dict[str, Any]:
    """What a kubelet makes of an answer in its call of the CRI: for ``Pod.create``."""
    return {
        "env": dict(answer.envs),
        "mounts": [
            cri.Mount(
                host_path=each.host_path,
                container_path=each.container_path,
                readonly=each.read_only,
            )
            for each in answer.mounts
        ],
        "devices": [
            cri.Device(
                host_path=each.host_path,
                container_path=each.container_path,
                permissions=each.permissions,
            )
            for each in answer.devices
        ],
        "annotations": dict(answer.annotations),
        "CDI_devices": [cri.CDIDevice(name=each.name) for each in answer.cdi_devices],
    }
