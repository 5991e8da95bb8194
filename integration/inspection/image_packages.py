"""Find the packages in a container's image that need a driver capability it was not granted.

Only names are read: those of the directories that installers of Python packages leave in
site-packages. The image is untrusted, so every list is bounded, and a file system that does not
answer cannot block the caller.

Source: PEP 376, PEP 427 (NAME-VERSION.dist-info); site (directories of Python).
"""

from __future__ import annotations

import posixpath
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from api.errors import NvshimError
from hooks.image.rootfs import Rootfs
from integration.containers.records import strings
from integration.inspection.driver_packages import (
    Package,
    known_packages,
    normalized,
    not_granted,
    variable,
)
from integration.timeouts import PATIENCE

_TO_LOOK: Final = 2.0 * PATIENCE
_MOST_PREFIXES: Final = 16
_MOST_PYTHONS: Final = 8
_MOST_NAMES: Final = 5000
_USUAL: Final = ("/usr/local/bin", "/usr/bin")
_PYTHON: Final = re.compile(r"python3(\.\d{1,2})?", re.ASCII)
_SITES: Final = ("site-packages", "dist-packages")
_DISTRIBUTION: Final = re.compile(r"([\w.]+)-[^-]+\.dist-info", re.ASCII)


@dataclass(frozen=True, slots=True)
class Lack:
    """A package, with the capabilities that it needs and the container lacks."""

    package: Package
    lacks: tuple[str, ...]  # capabilities

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the keys are a public interface."""
        return {"name": self.package.name, "lacks": list(self.lacks)}


def lacks_of(rootfs: str | None, spec: Mapping[str, Any], record: Mapping[str, Any]) -> list[Lack]:
    """Return the packages in an image that need more than the container was granted.

    Args:
        rootfs: the container's root, a directory that the engine made; None if unknown.
        spec: its config.json; its PATH tells where Python installations are.
        record: what the container got. Without NVIDIA's driver there is nothing to compare.
    """
    if rootfs is None or not record.get("grant"):
        return []
    granted = strings(record, "grant", "capabilities")
    wanting = [
        Lack(package, tuple(lacks))
        for package in known_packages()
        if (lacks := not_granted(package, granted))
    ]
    wanted = frozenset(name for each in wanting for name in each.package.names)
    names = _installed_in_time(rootfs, _prefixes(spec), wanted) if wanted else frozenset()
    return [each for each in wanting if not names.isdisjoint(each.package.names)]


def advice(lacks: Iterable[Lack], record: Mapping[str, Any]) -> str:
    """Return one line about packages that lack capabilities; "" without any."""
    known = list(lacks)
    if not known:
        return ""
    told = ", ".join(f"{each.package.name} uses {' and '.join(each.lacks)}" for each in known)
    granted = strings(record, "grant", "capabilities")
    wanted = {*granted, *(capability for each in known for capability in each.lacks)}
    return f"{told}, which was not granted: request {variable(wanted)}"


def _prefixes(spec: Mapping[str, Any]) -> list[str]:
    """Return the directories above the ``bin`` of the container's PATH and program."""
    process = spec.get("process")
    # The last entry of a name is the one that the process sees.
    path = dict(entry.partition("=")[::2] for entry in strings(process, "env")).get("PATH", "")
    program = [posixpath.dirname(word) for word in strings(process, "args")[:1]]
    places = [*program, *path.split(":"), *_USUAL]
    above = [posixpath.dirname(each) for each in places if posixpath.basename(each) == "bin"]
    return list(dict.fromkeys(each for each in above if each.startswith("/")))[:_MOST_PREFIXES]


def _installed_in_time(
    rootfs: str, prefixes: Iterable[str], wanted: Collection[str]
) -> frozenset[str]:
    """Return which names are installed, or those found so far if a file system does not answer."""
    found: set[str] = set()

    def look() -> None:
        try:
            with Rootfs.open(rootfs) as root:
                for prefix in prefixes:
                    found.update(name for name in _installed(root, prefix) if name in wanted)
        except (NvshimError, ValueError):
            return  # the container has ended, or its root is not a path

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_TO_LOOK)
    return frozenset(found.copy())


def _installed(root: Rootfs, prefix: str) -> Iterator[str]:
    """Yield the normalized names of the packages below a prefix."""
    for library in (f"{prefix}/lib", f"{prefix}/lib64"):
        pythons = filter(_PYTHON.fullmatch, _names(root, library))
        for python in islice(pythons, _MOST_PYTHONS):
            for site in _SITES:
                found = map(_DISTRIBUTION.fullmatch, _names(root, f"{library}/{python}/{site}"))
                yield from (normalized(match[1]) for match in found if match)


def _names(root: Rootfs, path: str) -> tuple[str, ...]:
    try:
        return root.names(path, _MOST_NAMES) or ()
    except NvshimError:
        return ()
