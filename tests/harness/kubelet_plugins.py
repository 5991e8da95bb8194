"""A kubelet's device manager as a device plugin sees it, with real gRPC over unix sockets.

    with KubeletPlugins(directory) as kubelet:
        kubelet.wait_for("nvidia.com/gpu", 8)
        answer = kubelet.allocate("nvidia.com/gpu", 2, pod="web-1")

It behaves like a kubelet, also where that is hard on plugins: at its start it removes every socket
of its directory, it calls a plugin before it answers Register, it marks the devices of a plugin
whose ListAndWatch has ended as unhealthy, it allocates no device twice, and it remembers its
allocations across restarts. It serves the allocations by the PodResources API, too.

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
from tests.harness.grpc_server import GrpcServer, Methods, serve
from tests.harness.waiting import eventually

__all__ = ["Assignment", "KubeletPlugins", "NotEnough", "Plugin", "container_fields"]

VERSION: Final = "v1beta1"
_SERVICE: Final = "v1beta1.DevicePlugin"
_DIAL: Final = 10.0
_ENDED: Final = "the kubelet has ended"
_ANSWER: Final = 20.0


class NotEnough(Exception):
    """A pod requests more devices than are available."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The devices of a container."""

    pod: str  # its name
    namespace: str  # of the pod
    container: str  # its name in the pod
    resource: str  # the resource of the devices
    ids: tuple[str, ...]  # the plugin's ids of them
    answer: pb.ContainerAllocateResponse  # what the plugin answered


class Plugin:
    """The kubelet's client of a registered plugin."""

    def __init__(self, request: pb.RegisterRequest, path: str) -> None:
        self.request = request
        self.devices: dict[str, pb.Device] = {}
        self.lists: list[dict[str, pb.Device]] = []
        """All lists from ListAndWatch, in order."""
        self.ended = ""
        """Why ListAndWatch ended; "" while it is open."""
        # As a kubelet dials: gRPC's default limit of 4 MiB applies to messages that it receives.
        self._channel = grpc.insecure_channel(
            f"unix:{path}", options=[("grpc.default_authority", "localhost")]
        )
        self._stream: Any = None
        self._thread = threading.Thread(target=self._watch, name=path, daemon=True)

    def connect(self) -> None:
        """Wait until the plugin answers.

        Without a future of gRPC's for that: its thread fails if the channel is closed meanwhile.

        Raises:
            grpc.RpcError: it does not answer, or was closed meanwhile.
            ValueError: it was closed before.
        """
        self.options(timeout=_DIAL, wait_for_ready=True)

    def watch(self) -> None:
        """Start to follow the plugin's device list."""
        empty = pb.Empty()
        method = self._channel.unary_stream(
            f"/{_SERVICE}/ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        self._stream = method(empty)
        self._thread.start()

    def call(
        self,
        name: str,
        request: Message,
        answer: type[Any],
        *,
        timeout: float = _ANSWER,
        wait_for_ready: bool = False,
    ) -> Any:
        """Call a method of the plugin.

        Args:
            wait_for_ready: whether to connect again and again until the time is up.

        Raises:
            grpc.RpcError: it refused, or did not answer.
        """
        method = self._channel.unary_unary(
            f"/{_SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return method(request, timeout=timeout, wait_for_ready=wait_for_ready)

    def options(self, **how: Any) -> pb.DevicePluginOptions:
        answer: pb.DevicePluginOptions = self.call(
            "GetDevicePluginOptions", pb.Empty(), pb.DevicePluginOptions, **how
        )
        return answer

    def allocate(self, *ids: str) -> pb.ContainerAllocateResponse:
        """Allocate devices for one container, without checks of their state."""
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
    """A kubelet as device plugins see it. It runs while the context is open.

    Args:
        directory: holds its socket and those of the plugins; created if missing.
        pod_resources: the socket of its PodResources API; None for none.

    Attributes:
        versions: the versions of the API that it supports.
        late: seconds by which PodResources answers are delayed.
    """

    def __init__(self, directory: str, *, pod_resources: str | None = None) -> None:
        self.directory = directory
        self.socket = os.path.join(directory, "kubelet.sock")
        self.pod_resources = pod_resources
        self.versions: tuple[str, ...] = (VERSION,)
        self.late = 0.0
        self.registrations: list[pb.RegisterRequest] = []
        """All Register requests, refused ones included."""
        self.plugins: dict[str, Plugin] = {}
        self.assignments: list[Assignment] = []
        """The current allocations, as in a kubelet's checkpoint: they survive a restart."""
        self.claimed: dict[tuple[str, str], list[podresources.DynamicResource]] = {}
        """The claimed devices of pods, by the pod's name and namespace."""
        self._servers: list[GrpcServer] = []
        self._lock = threading.Lock()
        self._registering = threading.Lock()
        self._arriving: set[Plugin] = set()
        self._life = 0
        self._runs = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Start and stop

    def start(self) -> None:
        """Start as a kubelet does: remove all sockets of the directory, then create its own."""
        os.makedirs(self.directory, mode=0o750, exist_ok=True)
        with os.scandir(self.directory) as entries:
            for entry in entries:
                # Plugins create and remove their sockets meanwhile.
                with suppress(FileNotFoundError):
                    if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                        os.unlink(entry.path)
        self._runs = True
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
        """Stop; its allocations survive until it is started again."""
        for server in self._servers:
            server.stop()
        self._servers.clear()
        with self._registering:
            self._runs = False
            self._life += 1  # a registration that is in progress must not succeed
            plugins = [*self.plugins.values(), *self._arriving]
            self.plugins.clear()
        for plugin in plugins:
            plugin.close()

    def die(self) -> None:
        """Stop as if killed: its socket file stays, but nothing listens on it."""
        self.stop()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(self.socket)

    def restart(self) -> None:
        self.stop()
        self.start()

    # Devices of plugins

    def devices(self, resource: str) -> Mapping[str, pb.Device]:
        """Return the devices that the plugin sent last; none if the resource is not registered."""
        plugin = self.plugins.get(resource)
        return plugin.devices if plugin is not None else {}

    def healthy(self, resource: str) -> set[str]:
        """Return the healthy devices, allocated or not."""
        plugin = self.plugins.get(resource)
        if plugin is None or plugin.ended:
            return set()
        return {name for name, device in plugin.devices.items() if device.health == "Healthy"}

    def wait_for(self, resource: str, count: int, *, timeout: float = 60) -> set[str]:
        """Wait until a resource has this many healthy devices."""
        what = f"{count} healthy devices of {resource}"

        def has_so_many() -> bool:
            return resource in self.plugins and len(self.healthy(resource)) == count

        eventually(has_so_many, what, timeout=timeout)
        return self.healthy(resource)

    # Allocations of pods

    def allocate(
        self,
        resource: str,
        count: int,
        *,
        pod: str,
        container: str = "main",
        namespace: str = "tests",
    ) -> pb.ContainerAllocateResponse:
        """Allocate devices to a container, as a pod's admission does.

        Raises:
            NotEnough: fewer devices are available.
            grpc.RpcError: the plugin refused.
        """
        with self._lock:
            plugin = self.plugins.get(resource)
            free = self.healthy(resource) - self.given(resource)
            if plugin is None or len(free) < count:
                raise NotEnough(f"{count} of {resource}: {len(free)} are available")
            ids = self._chosen(plugin, sorted(free), count)
            answer = plugin.allocate(*ids)
            given = Assignment(pod, namespace, container, resource, tuple(ids), answer)
            self.assignments.append(given)
        return answer

    def given(self, resource: str) -> set[str]:
        """Return the devices that pods have."""
        return {i for each in self.assignments if each.resource == resource for i in each.ids}

    def release(self, pod: str) -> None:
        """End a pod: its devices are free again."""
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
        with self._registering:
            life = self._life
            if not self._runs:
                context.abort(grpc.StatusCode.UNAVAILABLE, _ENDED)
            plugin = Plugin(request, path)
            self._arriving.add(plugin)
        try:
            plugin.connect()
        except ValueError:  # closed
            context.abort(grpc.StatusCode.UNAVAILABLE, _ENDED)
        except grpc.RpcError as error:
            plugin.close()
            why = f"failed to get device plugin options: {error.details()}"
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                why = f"failed to dial device plugin at {path}"
            if life == self._life:
                context.abort(grpc.StatusCode.UNKNOWN, why)
            context.abort(grpc.StatusCode.UNAVAILABLE, _ENDED)
        finally:
            with self._registering:
                self._arriving.discard(plugin)
        with self._registering:
            if life != self._life:
                plugin.close()
                context.abort(grpc.StatusCode.UNAVAILABLE, _ENDED)
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
    """Translate an answer to the fields of a CRI call, for ``Pod.create``."""
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
