"""Where a shim listens: one path for each group of containers.

A group is a pod: all of its containers share one shim. The path is a digest, so that it is
short and the same for every ``start`` of the group; that is how the second one finds the
shim of the first.

Source: containerd pkg/shim/util_unix.go; cmd/containerd-shim-runc-v2/manager.
"""

from __future__ import annotations

import os

from shim import bundle
from shim.errors import SocketPathTooLong

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Final

SCHEME: Final = "unix://"

# Annotations that name the group, by precedence.
_GROUP_ANNOTATIONS: Final = ("io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id")

# What containerd accepts; the kernel's limit is 107.
_LONGEST_PATH: Final = 106

_DIGITS: Final = 64
_HEXADECIMAL: Final = frozenset("0123456789abcdef")

_SOCKET_DIRECTORY: Final = "/run/containerd/s"


def group_of(bundle_path: str, container_id: str) -> str:
    """The group that a container, or a sandbox, belongs to.

    Args:
        bundle_path: its bundle.
        container_id: its id, the group of a container that names none.

    Returns:
        The group's name. It is the id's own also without config.json: the bundle of a sandbox
        has none. That of a container has to, which its Create will say.

    Raises:
        BundleUnusable: config.json cannot be read, or is malformed.
    """
    path = os.path.join(bundle_path, bundle.CONFIG)
    if not os.path.lexists(path):
        return container_id
    content = bundle.read(path, bundle.LONGEST_SPEC)
    # A spec without either name in it has no group, and need not be parsed to know. Go's
    # encoder, which wrote the file, has no other way to spell these letters.
    if not any(name.encode() in content for name in _GROUP_ANNOTATIONS):
        return container_id
    annotations = bundle.parse_object(content, path).get("annotations")
    if isinstance(annotations, dict):
        for name in _GROUP_ANNOTATIONS:
            group = annotations.get(name)
            if isinstance(group, str) and group:
                return group
    return container_id


def socket_name(address: str, namespace: str, group: str) -> str:
    """The name of a group's socket in its directory.

    Args:
        address: containerd's gRPC address; two containerds on a machine differ in it.
        namespace: containerd's namespace.
        group: the group.

    Returns:
        64 hexadecimal digits.
    """
    return digest(f"{address}/{namespace}/{group}".encode())


def is_socket_name(name: str) -> bool:
    """Whether a name is one that :func:`socket_name` may have made."""
    return len(name) == _DIGITS and _HEXADECIMAL.issuperset(name)


def socket_path(directory: str, name: str) -> str:
    """A socket's path.

    Args:
        directory: the directory of sockets.
        name: what :func:`socket_name` made.

    Returns:
        The path.

    Raises:
        SocketPathTooLong: it exceeds the 106 bytes of a socket's address.
    """
    path = os.path.join(directory, name)
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise SocketPathTooLong(
            f"a socket in {directory}",
            found=f"a path of {len(os.fsencode(path))} bytes, and {_LONGEST_PATH} are allowed",
            do="let containerd's state directory have a shorter path",
        )
    return path


def socket_directories(wanted: str, environment: Mapping[str, str], uid: int) -> list[str]:
    """The directories that may hold the socket, best first.

    Args:
        wanted: what containerd asked for; then there is no other.
        environment: ours.
        uid: our effective user id.

    Returns:
        Absolute paths. All but the first are for a containerd without root's rights.
    """
    if wanted:
        return [wanted]
    directories = [_SOCKET_DIRECTORY]
    runtime_directory = environment.get("XDG_RUNTIME_DIR", "")
    if runtime_directory.startswith("/"):
        directories.append(os.path.join(runtime_directory, "containerd/s"))
    return [*directories, f"/run/user/{uid}/containerd/s", f"/tmp/containerd-s-{uid}"]  # noqa: S108 - checked to be ours alone before use


def digest(data: bytes) -> str:
    """The SHA-256 of ``data``, in hexadecimal digits."""
    # hashlib loads OpenSSL: 3 ms and 2.5 MB. The C module alone costs nothing, but its name
    # changed with Python 3.12, and a build of Python may lack it.
    for module in ("_sha2", "_sha256"):
        try:
            digest: str = __import__(module).sha256(data).hexdigest()
        except ImportError:
            continue
        return digest
    import hashlib  # noqa: PLC0415 - see above

    return hashlib.sha256(data).hexdigest()
