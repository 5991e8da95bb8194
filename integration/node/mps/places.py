"""Where MPS has its files: below the host's ``mpsRoot``, and where containers see them.

::

    MPSROOT/shm                    a tmpfs: /dev/shm of daemons and of their clients
    MPSROOT/RESOURCE/pipe          sockets, which containers are given
    MPSROOT/RESOURCE/log           what a daemon writes
    MPSROOT/RESOURCE/.lock         held by a daemon and its servers as long as they live; says whose
    MPSROOT/RESOURCE/.devices      the GPUs whose compute mode was set

RESOURCE is a name with a slash, "nvidia.com/gpu". The first three are where NVIDIA's plugin has
them; the others are ours.

Source: k8s-device-plugin, cmd/mps-control-daemon/mps/root.go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

CONTAINER_ROOT: Final = "/mps"
"""The directory that containers see the pipes below."""
SHM: Final = "/dev/shm"  # noqa: S108 - where glibc's shm_open() looks
"""Where containers and daemons see the shared memory."""

_SHM: Final = "shm"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the files of one resource are."""

    root: str  # the host's directory of MPS
    resource: str  # the resource's name

    @property
    def directory(self) -> str:
        """All that belongs to the resource."""
        return os.path.join(self.root, self.resource)

    @property
    def pipe(self) -> str:
        """CUDA_MPS_PIPE_DIRECTORY of the daemon."""
        return os.path.join(self.directory, "pipe")

    @property
    def container_pipe(self) -> str:
        """CUDA_MPS_PIPE_DIRECTORY of clients in containers."""
        return os.path.join(CONTAINER_ROOT, self.resource, "pipe")

    @property
    def log(self) -> str:
        """CUDA_MPS_LOG_DIRECTORY."""
        return os.path.join(self.directory, "log")

    @property
    def log_file(self) -> str:
        """What the daemon and its servers say."""
        return os.path.join(self.log, "control.log")

    @property
    def lock(self) -> str:
        """Locked by flock(2) as long as a daemon, or a server of one, is alive."""
        return os.path.join(self.directory, ".lock")

    @property
    def devices(self) -> str:
        """Names the GPUs whose compute mode was set."""
        return os.path.join(self.directory, ".devices")


def shm(root: str) -> str:
    """The host's directory of the shared memory."""
    return os.path.join(root, _SHM)


def places_in(root: str) -> Iterator[Places]:
    """The resources that somebody kept a daemon for below a root, who may be dead."""
    for domain in _directories(root):
        if domain == _SHM:  # what is in it is the containers'
            continue
        for name in _directories(os.path.join(root, domain)):
            places = Places(root, f"{domain}/{name}")
            if os.path.lexists(places.lock) or os.path.lexists(places.devices):
                yield places


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
    except OSError:
        return []
