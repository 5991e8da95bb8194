"""Calls to containerd that ``ctr`` does not offer, or that are ten times slower with it.

``ctr`` parses a spec before it passes it on, and has options for containerd's own shim only.
CRI and Docker are less strict, so tests send invalid data to the shim through containerd's API:
any spec, any options, any rootfs. The few messages are encoded field by field.

Source: containerd api/services/containers/v1/containers.proto, api/services/tasks/v1/tasks.proto,
api/services/snapshots/v1/snapshots.proto, api/types/mount.proto; protobuf's encoding.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from signal import SIGKILL
from typing import Any, Final

import grpc  # type: ignore[import-untyped] # it ships no types

from api.proto.task_types_pb2 import Process
from tools.containerd import PrivateContainerd

SPEC: Final = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
_SNAPSHOTTER: Final = b"overlayfs"  # as ctr takes if none is named
_GET_CONTAINER: Final = "containers.v1.Containers/Get"
LINUX_RESOURCES: Final = "types.containerd.io/opencontainers/runtime-spec/1/LinuxResources"


class ApiRefused(Exception):
    """containerd refused; ``str()`` of it is containerd's message."""


def create_container(
    containerd: PrivateContainerd, name: str, *, runtime: str, spec: bytes, sandbox: str = ""
) -> None:
    """Create a container without a task.

    Args:
        containerd: the containerd to call.
        name: the container's id.
        runtime: the runtime's name.
        spec: the exact content of config.json.
        sandbox: the sandbox that the container belongs to; none if empty.
    """
    container = b"".join(
        (
            _field(1, name.encode()),
            _field(4, _field(1, runtime.encode())),
            _field(5, any_message(SPEC, spec)),
            _field(11, sandbox.encode()),
        )
    )
    _call(containerd, "containers.v1.Containers/Create", _field(1, container))


def edit_spec(
    containerd: PrivateContainerd, name: str, edit: Callable[[dict[str, Any]], object]
) -> None:
    """Change the OCI spec of a container without a task, as an engine does before it starts it."""
    ((_, container),) = _fields(_call(containerd, _GET_CONTAINER, _field(1, name.encode())))
    spec = json.loads(dict(_fields(dict(_fields(container))[5]))[2])
    edit(spec)
    changed = _field(5, any_message(SPEC, json.dumps(spec).encode()))
    request = _field(1, _field(1, name.encode()) + changed) + _field(2, _field(1, b"spec"))
    _call(containerd, "containers.v1.Containers/Update", request)


def containers(containerd: PrivateContainerd, namespace: str) -> list[str]:
    """Return the ids of all containers of a namespace.

    Raises:
        ApiRefused: containerd does not answer.
    """
    answer = _call(containerd, "containers.v1.Containers/List", b"", namespace=namespace)
    return [_first(container) for _, container in _fields(answer)]


def tasks(containerd: PrivateContainerd) -> dict[str, Process]:
    """Return the tasks of the namespace, by the ids of their containers.

    Raises:
        ApiRefused: containerd does not answer.
    """
    answer = _call(containerd, "tasks.v1.Tasks/List", b"")
    found = [Process.FromString(task) for _, task in _fields(answer)]
    return {task.id: task for task in found}


def snapshots(containerd: PrivateContainerd, namespace: str) -> list[str]:
    """Return the names of all snapshots of a namespace.

    Raises:
        ApiRefused: containerd does not answer.
    """
    with grpc.insecure_channel(f"unix://{containerd.address}") as channel:
        call = channel.unary_stream("/containerd.services.snapshots.v1.Snapshots/List")
        try:
            answers = list(call(_field(1, _SNAPSHOTTER), timeout=30, metadata=_in(namespace)))
        except grpc.RpcError as error:
            raise ApiRefused(error.details()) from error
    return [_first(snapshot) for answer in answers for _, snapshot in _fields(answer)]


def create_task(
    containerd: PrivateContainerd,
    name: str,
    *,
    mounts: Iterable[tuple[str, str, tuple[str, ...]]] = (),
    options: bytes = b"",
    stdin: str = "",
    stdout: str = "",
    stderr: str = "",
) -> None:
    """Let containerd start a shim and call its Create.

    Args:
        containerd: the containerd to call.
        name: the container's id.
        mounts: the mounts of the rootfs, each as its type, source and options.
        options: the runtime's options, as :func:`any_message` makes them.
        stdin: the path of its stdin; none by default.
        stdout: the path or URI of its stdout; none by default.
        stderr: the path or URI of its stderr; none by default.

    Raises:
        ApiRefused: containerd or the shim refused.
    """
    rootfs = b"".join(
        _field(
            3,
            _field(1, kind.encode())
            + _field(2, source.encode())
            + b"".join(_field(4, option.encode()) for option in mount_options),
        )
        for kind, source, mount_options in mounts
    )
    uris = enumerate((stdin, stdout, stderr), 4)
    stdio = b"".join(_field(number, uri.encode()) for number, uri in uris)
    request = _field(1, name.encode()) + rootfs + stdio
    _call(containerd, "tasks.v1.Tasks/Create", request + (_field(9, options) if options else b""))


def start_task(containerd: PrivateContainerd, name: str) -> None:
    """Start the process of a task that was created.

    Raises:
        ApiRefused: containerd or the shim refused.
    """
    _call(containerd, "tasks.v1.Tasks/Start", _field(1, name.encode()))


def wait_for_task(containerd: PrivateContainerd, name: str) -> None:
    """Wait until the process of a task has exited."""
    _call(containerd, "tasks.v1.Tasks/Wait", _field(1, name.encode()))


def delete_task(containerd: PrivateContainerd, name: str) -> int:
    """Delete a task whose process has exited, and the fifos of its client, as ctr does.

    Returns:
        Its exit code.

    Raises:
        ApiRefused: the task still runs, or does not exist.
    """
    task = _task(containerd, name)
    answer = _call(containerd, "tasks.v1.Tasks/Delete", _field(1, name.encode()))
    for path in {task.stdin, task.stdout, task.stderr}:
        with suppress(OSError):  # it has none, or others removed it
            if stat.S_ISFIFO(os.stat(path).st_mode):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))
    return _number(answer, 3)


def remove_task(containerd: PrivateContainerd, name: str) -> None:
    """Kill a task, and delete it.

    Raises:
        ApiRefused: the task does not exit, or does not exist.
    """
    every = _varint(3 << 3) + _varint(SIGKILL) + _varint(4 << 3) + _varint(1)
    with suppress(ApiRefused):  # it has ended
        _call(containerd, "tasks.v1.Tasks/Kill", _field(1, name.encode()) + every)
    wait_for_task(containerd, name)
    delete_task(containerd, name)


def remove_container(containerd: PrivateContainerd, name: str) -> None:
    """Kill a container's task, and delete the task, the container and its snapshot.

    What does not exist is skipped, and what cannot be removed stays; neither is an error.
    """
    only = _field(1, name.encode())
    with suppress(ApiRefused):
        if name in tasks(containerd):
            remove_task(containerd, name)
        (container,) = (each for _, each in _fields(_call(containerd, _GET_CONTAINER, only)))
        told = dict(_fields(container))
        if key := told.get(7):
            with suppress(ApiRefused):  # it was already removed
                snapshot = _field(1, told[6]) + _field(2, key)
                _call(containerd, "snapshots.v1.Snapshots/Remove", snapshot)
        delete_container(containerd, name)


def delete_container(containerd: PrivateContainerd, name: str) -> None:
    """Delete a container that has no task."""
    _call(containerd, "containers.v1.Containers/Delete", _field(1, name.encode()))


def metrics(containerd: PrivateContainerd, name: str) -> tuple[str, bytes] | None:
    """Return containerd's metrics of a container.

    Returns:
        The type's URL and the message; None if there are none because the shim refused.

    Raises:
        ApiRefused: containerd refused.
    """
    answer = _call(containerd, "tasks.v1.Tasks/Metrics", _field(1, f"id=={name}".encode()))
    for _, metric in _fields(answer):
        data = dict(_fields(dict(_fields(metric)).get(3, b"")))
        return data.get(1, b"").decode(), data.get(2, b"")
    return None


def update_task(
    containerd: PrivateContainerd,
    name: str,
    resources: bytes,
    *,
    annotations: Mapping[str, str] | None = None,
) -> None:
    """Change a container's limits.

    Args:
        containerd: the containerd to call.
        name: the container's id.
        resources: the limits as JSON, or other bytes to send in their place.
        annotations: the annotations of the request.

    Raises:
        ApiRefused: containerd or the shim refused.
    """
    request = _field(1, name.encode()) + _field(2, any_message(LINUX_RESOURCES, resources))
    for key, value in (annotations or {}).items():
        request += _field(3, _field(1, key.encode()) + _field(2, value.encode()))
    _call(containerd, "tasks.v1.Tasks/Update", request)


def any_message(type_url: str, value: bytes) -> bytes:
    """Encode a ``google.protobuf.Any`` with this type URL."""
    return _field(1, type_url.encode()) + _field(2, value)


def runc_options(*, binary: str = "", root: str = "") -> bytes:
    """Encode the options that Docker sends to every runtime."""
    value = _field(6, binary.encode()) + _field(7, root.encode())
    return any_message("containerd.runc.v1.Options", value)


def _task(containerd: PrivateContainerd, name: str) -> Process:
    answer = _call(containerd, "tasks.v1.Tasks/Get", _field(1, name.encode()))
    return Process.FromString(dict(_fields(answer))[1])


def _call(
    containerd: PrivateContainerd, method: str, request: bytes, *, namespace: str = ""
) -> bytes:
    with grpc.insecure_channel(f"unix://{containerd.address}") as channel:
        call = channel.unary_unary(f"/containerd.services.{method}")
        try:
            answer: bytes = call(
                request, timeout=30, metadata=_in(namespace or containerd.namespace)
            )
        except grpc.RpcError as error:
            raise ApiRefused(error.details()) from error
    return answer


def _in(namespace: str) -> tuple[tuple[str, str], ...]:
    return (("containerd-namespace", namespace),)


def _first(message: bytes) -> str:
    """Return the first field of a message, which is the name of a container or snapshot."""
    number, value = next(_fields(message))
    assert number == 1
    return value.decode()


def _field(number: int, value: bytes) -> bytes:
    """Encode a length-delimited field; protobuf omits an empty one."""
    return _varint(number << 3 | 2) + _varint(len(value)) + value if value else b""


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(message: bytes, wanted: int) -> int:
    """Return a numeric field; a missing one is 0."""
    rest = message
    while rest:
        tag, rest = _read_varint(rest)
        value, rest = _read_varint(rest)
        if tag & 7:
            rest = rest[value:]
        elif tag >> 3 == wanted:
            return value
    return 0


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a message that has only length-delimited ones."""
    rest = message
    while rest:
        tag, rest = _read_varint(rest)
        assert tag & 7 == 2, f"field {tag >> 3} is not length-delimited"
        length, rest = _read_varint(rest)
        yield tag >> 3, rest[:length]
        rest = rest[length:]


def _read_varint(encoded: bytes) -> tuple[int, bytes]:
    value = 0
    for position, byte in enumerate(encoded):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value, encoded[position + 1 :]
    raise AssertionError("a number that does not end")
