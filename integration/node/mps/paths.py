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
from dataclasses import dataclass, field
from typing import Final

from integration.files import directories

CONTAINER_ROOT: Final = "/mps"
"""The directory that containers see the pipes below."""
SHM: Final = "/dev/shm"  # noqa: S108 - where glibc's shm_open() looks
"""Where containers and daemons see the shared memory."""

LOCK: Final = ".lock"
"""The file that is locked, beside the pipes."""

_SHM: Final = "shm"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the files of one resource are."""

    root: str  # the host's directory of MPS
    resource: str  # the resource's name
    directory: str = field(init=False, repr=False)  # all that belongs to the resource
    pipe: str = field(init=False, repr=False)  # CUDA_MPS_PIPE_DIRECTORY of the daemon
    container_pipe: str = field(init=False, repr=False)  # likewise, of clients in containers
    log: str = field(init=False, repr=False)  # CUDA_MPS_LOG_DIRECTORY
    log_file: str = field(init=False, repr=False)  # what the daemon and its servers say
    # locked by flock(2) as long as a daemon, or a server of one, is alive
    lock: str = field(init=False, repr=False)
    devices: str = field(init=False, repr=False)  # names the GPUs whose compute mode was set

    def __post_init__(self) -> None:
        """Find the places."""
        directory = os.path.join(self.root, self.resource)
        found = {
            "directory": directory,
            "pipe": f"{directory}/pipe",
            "container_pipe": f"{CONTAINER_ROOT}/{self.resource}/pipe",
            "log": f"{directory}/log",
            "log_file": f"{directory}/log/control.log",
            "lock": f"{directory}/{LOCK}",
            "devices": f"{directory}/.devices",
        }
        for name, path in found.items():
            object.__setattr__(self, name, path)


def shm(root: str) -> str:
    """The host's directory of the shared memory."""
    return os.path.join(root, _SHM)


def places_in(root: str) -> Iterator[Places]:
    """The resources that somebody kept a daemon for below a root, who may be dead."""
    for domain in map(os.path.basename, directories(root)):
        if domain == _SHM:  # what is in it is the containers'
            continue
        for name in map(os.path.basename, directories(os.path.join(root, domain))):
            places = Places(root, f"{domain}/{name}")
            if os.path.lexists(places.lock) or os.path.lexists(places.devices):
                yield places
