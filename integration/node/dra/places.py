"""Where a driver's sockets are, of which there may be two instances for a while.

Rules
- An instance that runs in a pod has the pod's UID in the names of its sockets, so that it takes no
  other's away. Where a path would be too long for a socket, a digest stands for the UID.
- Whoever is at work serves a socket without a UID as well, for the instance that is not. An older
  agent, which knows of no other, serves that one only.
- A socket that nobody serves is what a killed instance has left. One that is served is nobody
  else's to remove.

Source: Kubernetes' Go helper for drivers, kubeletplugin (RollingUpdate); unix(7).
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.node.plugin import sockets

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Places", "places_of"]

_DIGEST: Final = 12
_UID: Final = "(-[A-Za-z0-9-]{1,63})?"


@dataclass(frozen=True, slots=True)
class Places:
    """The paths."""

    registry: str  # the directory in which the kubelet looks for instances
    directory: str  # the driver's
    driver: str
    registration: str  # the socket by which the kubelet finds this instance
    endpoint: str  # the socket at which it calls this instance
    common: str  # the socket of whoever is at work

    def sweep(self) -> None:
        """Remove the sockets that instances have left which were killed."""
        for path in self._others():
            seen = sockets.identity_of(path)
            if seen is not None and not sockets.is_served(path):
                sockets.remove(path, seen)

    def _others(self) -> Iterator[str]:
        names = {
            self.registry: re.compile(f"{re.escape(self.driver)}{_UID}-reg[.]sock"),
            self.directory: re.compile(f"dra{_UID}[.]sock"),
        }
        for directory, pattern in names.items():
            with suppress(OSError):  # it is not there
                for name in os.listdir(directory):
                    if pattern.fullmatch(name):
                        yield os.path.join(directory, name)


def places_of(root: str, driver: str, pod: str) -> Places:
    """Where the sockets of an instance are.

    Args:
        root: the kubelet's directory.
        driver: its name.
        pod: the UID of the instance's; "" for the only one.
    """
    registry = os.path.join(root, "plugins_registry")
    directory = os.path.join(root, "plugins", driver)
    for uid in (pod, hashlib.sha256(pod.encode()).hexdigest()[:_DIGEST]):
        part = f"-{uid}" if pod else ""
        paths = (
            os.path.join(registry, f"{driver}{part}-reg.sock"),
            os.path.join(directory, f"dra{part}.sock"),
        )
        if all(len(os.fsencode(path)) <= sockets.LONGEST for path in paths):
            break
    return Places(registry, directory, driver, *paths, os.path.join(directory, "dra.sock"))
