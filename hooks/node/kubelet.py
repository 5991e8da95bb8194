"""Read the kubelet's records on this node, safely.

Two of the kubelet's files decide who has a GPU (:mod:`hooks.requests.kubelet_record`), so they
count only if no user other than root could have written them.

Rules
- The kubelet's root is ``kubelet-root`` of the configuration. With "auto" it is the first of
  :data:`ROOTS`, below ``host-root``, that has a checkpoint.
- The root may be a link, as on some disk layouts. Below it no link is followed.
- Each directory from the root down, and the file, belongs to root or to our own user, and no other
  user may write it. The file is a regular file of at most :data:`LARGEST` bytes.
- The kubelet replaces a file, and never writes into an existing one. It records a grant when it
  admits the pod, before creating any of its containers. If nothing is found, the file is still read
  once more.
- An invalid file is not an error here: the record gives the reason, and policy denies.

Source: kubelet pkg/kubelet/checkpointmanager; the directories of k0s and MicroK8s according to
    their documentation.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from typing import Final

from hooks.config import Config
from hooks.requests.kubelet_record import (
    CHECKPOINT,
    CLAIMS,
    KubeletRecord,
    RecordFile,
    record_of,
)
from hooks.requests.policy import Container

ROOTS: Final = (
    "/var/lib/kubelet",
    "/var/lib/k0s/kubelet",
    "/var/snap/microk8s/common/var/lib/kubelet",
)
"""Default state directories of kubelets: kubeadm's and k3s', k0s', MicroK8s'."""
LARGEST: Final = 16 << 20

_MISSING: Final = "no such file"
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def read_kubelet_record(container: Container, config: Config) -> KubeletRecord:
    """Return what the kubelet granted to a container of a pod.

    Args:
        container: from :func:`hooks.requests.policy.read_container`.
    """
    if not container.pod_uid:
        return KubeletRecord(found="its spec does not say for certain which pod it belongs to")
    record = _read_record(container, config)
    return record if record.gave_anything else _read_record(container, config)


def kubelet_root(config: Config) -> str:
    """Return the kubelet's state directory, which need not exist."""
    if config.kubelet_root is not None:
        return config.kubelet_root
    roots = [os.path.join(config.host_root, root.lstrip("/")) for root in ROOTS]
    known = (root for root in roots if os.path.lexists(f"{root}/{CHECKPOINT}"))
    return next(known, roots[0])


def read_checkpoint(config: Config) -> RecordFile:
    """Return the device manager's checkpoint, or why it does not count."""
    return _file(kubelet_root(config), CHECKPOINT)


def read_claims(config: Config) -> RecordFile:
    """Return the DRA manager's state, or why it does not count."""
    return _file(kubelet_root(config), CLAIMS)


def _read_record(container: Container, config: Config) -> KubeletRecord:
    root = kubelet_root(config)
    checkpoint = _file(root, CHECKPOINT)
    claims = _file(root, CLAIMS)
    seen = None if claims.is_missing else claims
    return record_of(checkpoint, seen, container.pod_uid, container.name, config)


def _file(root: str, name: str) -> RecordFile:
    """Return a file below the kubelet's root, or why it does not count."""
    path = f"{root}/{name}"
    try:
        return RecordFile(path, _read(root, name.split("/")))
    except FileNotFoundError:
        return RecordFile(path, fault=_MISSING, is_missing=True)
    except OSError as error:
        return RecordFile(path, fault=str(error.strerror))


def _read(root: str, names: list[str]) -> bytes:
    with ExitStack() as stack:

        def enter(name: str, flags: int, place: int | None = None) -> int:
            fd = os.open(name, flags | os.O_CLOEXEC, dir_fd=place)
            stack.callback(os.close, fd)
            seen = os.fstat(fd)
            if seen.st_uid not in {0, os.geteuid()} or seen.st_mode & _OTHERS_MAY_WRITE:
                raise PermissionError(errno.EPERM, f"{name} may be written by others than root")
            return fd

        place = enter(root, os.O_PATH | os.O_DIRECTORY)
        *directories, last = names
        for name in directories:
            place = enter(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, place)
        fd = enter(last, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, place)
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        if seen.st_size > LARGEST:
            raise OSError(errno.EFBIG, f"longer than {LARGEST >> 20} MiB")
        with open(fd, "rb", buffering=0, closefd=False) as file:
            return file.read()
