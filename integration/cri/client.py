"""A client of the CRI: one typed method for each call with one answer.

    with Cri("/run/containerd/containerd.sock") as cri:
        cri.version(cri_pb2.VersionRequest()).runtime_name

A method takes the request's message and returns the response's. A refusal is one error with the
server's message and code.

Source: k8s.io/cri-api pkg/apis/runtime/v1/api.proto.
"""

from __future__ import annotations

from typing import Final, Generic, Protocol, Self, TypeVar

import grpc  # type: ignore[import-untyped] # it ships no types
from google.protobuf.message import Message

from api.proto import cri_pb2 as pb
from integration.cri.engine import Engine, engine_of
from integration.cri.errors import CriError, CriRefused, CriUnreachable

Q = TypeVar("Q", bound=Message)
Q_contra = TypeVar("Q_contra", bound=Message, contravariant=True)
R = TypeVar("R", bound=Message)
R_co = TypeVar("R_co", bound=Message, covariant=True)

_TIMEOUT: Final = 30.0
_RUNTIME: Final = "RuntimeService"
_IMAGES: Final = "ImageService"

# Codes for "no answer".
_NO_ANSWER: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})


class Call(Protocol[Q_contra, R_co]):
    """A call with one answer."""

    def __call__(self, request: Q_contra, *, timeout: float = _TIMEOUT) -> R_co:
        """Make the call.

        Args:
            request: its message.
            timeout: seconds that the answer may take.

        Raises:
            CriRefused: the server answered with an error.
            CriUnreachable: there is no answer.
        """


class _Method(Generic[Q, R]):
    """A method of a service, found by its request's name."""

    def __init__(self, request: type[Q], response: type[R], service: str = _RUNTIME) -> None:
        self._name = request.DESCRIPTOR.name.removesuffix("Request")
        self._path = f"/{pb.DESCRIPTOR.package}.{service}/{self._name}"
        self._response = response

    def __get__(self, client: Cri, _: type[Cri]) -> Call[Q, R]:
        method = client.channel.unary_unary(
            self._path,
            request_serializer=_serialize,
            response_deserializer=self._response.FromString,
        )

        def call(request: Q, *, timeout: float = _TIMEOUT) -> R:
            try:
                response: R = method(request, timeout=timeout)
            except grpc.RpcError as error:
                raise _translated(f"{self._name} at {client.address}", error) from error
            return response

        return call


class Cri:
    """A connection to a CRI server; a context manager closes it.

    Attributes:
        address: the path of its socket.
        channel: the connection, which the first call opens.
    """

    version = _Method(pb.VersionRequest, pb.VersionResponse)
    status = _Method(pb.StatusRequest, pb.StatusResponse)
    runtime_config = _Method(pb.RuntimeConfigRequest, pb.RuntimeConfigResponse)

    run_pod_sandbox = _Method(pb.RunPodSandboxRequest, pb.RunPodSandboxResponse)
    stop_pod_sandbox = _Method(pb.StopPodSandboxRequest, pb.StopPodSandboxResponse)
    remove_pod_sandbox = _Method(pb.RemovePodSandboxRequest, pb.RemovePodSandboxResponse)
    pod_sandbox_status = _Method(pb.PodSandboxStatusRequest, pb.PodSandboxStatusResponse)
    list_pod_sandbox = _Method(pb.ListPodSandboxRequest, pb.ListPodSandboxResponse)
    pod_sandbox_stats = _Method(pb.PodSandboxStatsRequest, pb.PodSandboxStatsResponse)
    list_pod_sandbox_stats = _Method(pb.ListPodSandboxStatsRequest, pb.ListPodSandboxStatsResponse)
    update_pod_sandbox_resources = _Method(
        pb.UpdatePodSandboxResourcesRequest, pb.UpdatePodSandboxResourcesResponse
    )

    create_container = _Method(pb.CreateContainerRequest, pb.CreateContainerResponse)
    start_container = _Method(pb.StartContainerRequest, pb.StartContainerResponse)
    stop_container = _Method(pb.StopContainerRequest, pb.StopContainerResponse)
    remove_container = _Method(pb.RemoveContainerRequest, pb.RemoveContainerResponse)
    container_status = _Method(pb.ContainerStatusRequest, pb.ContainerStatusResponse)
    list_containers = _Method(pb.ListContainersRequest, pb.ListContainersResponse)
    container_stats = _Method(pb.ContainerStatsRequest, pb.ContainerStatsResponse)
    list_container_stats = _Method(pb.ListContainerStatsRequest, pb.ListContainerStatsResponse)
    update_container_resources = _Method(
        pb.UpdateContainerResourcesRequest, pb.UpdateContainerResourcesResponse
    )
    checkpoint_container = _Method(pb.CheckpointContainerRequest, pb.CheckpointContainerResponse)
    reopen_container_log = _Method(pb.ReopenContainerLogRequest, pb.ReopenContainerLogResponse)

    exec_sync = _Method(pb.ExecSyncRequest, pb.ExecSyncResponse)
    exec = _Method(pb.ExecRequest, pb.ExecResponse)
    attach = _Method(pb.AttachRequest, pb.AttachResponse)
    port_forward = _Method(pb.PortForwardRequest, pb.PortForwardResponse)

    list_images = _Method(pb.ListImagesRequest, pb.ListImagesResponse, _IMAGES)
    image_status = _Method(pb.ImageStatusRequest, pb.ImageStatusResponse, _IMAGES)
    pull_image = _Method(pb.PullImageRequest, pb.PullImageResponse, _IMAGES)
    remove_image = _Method(pb.RemoveImageRequest, pb.RemoveImageResponse, _IMAGES)

    def __init__(self, address: str) -> None:
        self.address = address
        # Connect to a restarted server at once, not after a growing pause.
        backoff = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50)]
        self.channel = grpc.insecure_channel(f"unix://{address}", options=backoff)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()

    def engine(self, *, timeout: float = _TIMEOUT) -> Engine:
        """Return the engine that serves the CRI, by two calls.

        Raises:
            CriRefused: the server answered with an error.
            CriUnreachable: there is no answer.
        """
        version = self.version(pb.VersionRequest(), timeout=timeout)
        return engine_of(version, self.status(pb.StatusRequest(verbose=True), timeout=timeout))


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _translated(asked: str, error: grpc.RpcError) -> CriError:
    status = error.code()
    said = error.details() or status.name
    # containerd uses the same code for its own deadlines; the outcome is unknown either way.
    if status in _NO_ANSWER:
        return CriUnreachable(asked, found=said)
    return CriRefused(asked, said=said, status=status.value[0])
