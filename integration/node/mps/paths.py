"""The paths of MPS, below the host's ``mpsRoot`` and in containers.

::

    MPSROOT/shm                    a tmpfs: /dev/shm of daemons and their clients
    MPSROOT/RESOURCE/pipe          sockets, mounted into containers
    MPSROOT/RESOURCE/log           the daemon's logs
    MPSROOT/RESOURCE/.lock         locked by a daemon and its servers; names the daemon
    MPSROOT/RESOURCE/.devices      the GPUs whose compute mode was set

RESOURCE is a name with a slash, "nvidia.com/gpu". NVIDIA's plugin uses the same paths for the first
three; the others are ours.

Source: k8s-device-plugin, cmd/mps-control-daemon/mps/root.go.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from integration.files import directories

CONTAINER_ROOT: Final = "/mps"
"""The directory in containers that contains the pipe directories."""
SHM: Final = "/dev/shm"  # noqa: S108 - where glibc's shm_open() looks
"""The path of the shared memory in containers and for daemons."""

LOCK: Final = ".lock"
"""The lock file, next to the pipe directory."""

_SHM: Final = "shm"


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of one resource."""

    root: str  # the host's directory of MPS
    resource: str
    directory: str = field(init=False, repr=False)  # contains all files of the resource
    pipe: str = field(init=False, repr=False)  # CUDA_MPS_PIPE_DIRECTORY of the daemon
    container_pipe: str = field(init=False, repr=False)  # the same for clients in containers
    log: str = field(init=False, repr=False)  # CUDA_MPS_LOG_DIRECTORY
    log_file: str = field(init=False, repr=False)  # the log of the daemon and its servers
    # locked by flock(2) while the daemon, or a server of it, runs
    lock: str = field(init=False, repr=False)
    devices: str = field(init=False, repr=False)  # lists the GPUs whose compute mode was set

    def __post_init__(self) -> None:
        """Derive the paths."""
        directory = os.path.join(self.root, self.resource)
        paths = {
            "directory": directory,
            "pipe": f"{directory}/pipe",
            "container_pipe": f"{CONTAINER_ROOT}/{self.resource}/pipe",
            "log": f"{directory}/log",
            "log_file": f"{directory}/log/control.log",
            "lock": f"{directory}/{LOCK}",
            "devices": f"{directory}/.devices",
        }
        for name, path in paths.items():
            object.__setattr__(self, name, path)


def shm(root: str) -> str:
    """Return the host's directory of the shared memory."""
    return os.path.join(root, _SHM)


def places_in(root: str) -> Iterator[Places]:
    """Yield the paths of each resource that an agent, running or dead, had a daemon for."""
    for domain in map(os.path.basename, directories(root)):
        if domain == _SHM:  # its content belongs to containers
            continue
        for name in map(os.path.basename, directories(os.path.join(root, domain))):
            places = Places(root, f"{domain}/{name}")
            if os.path.lexists(places.lock) or os.path.lexists(places.devices):
                yield places
