"""Find runtimes and engines, their versions and the packages they come from.

Source: dpkg(1), /var/lib/dpkg; rpm(8); deb-changelog(5).
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator, Sequence
from typing import Final

from integration.doctor.facts import CouldNotLook, Program
from integration.doctor.observing.containerd import look_at_containerd
from integration.doctor.observing.running import SYSTEM_PATH, find_program, read_file, run
from integration.doctor.places import Places

_RUNTIMES: Final = ("runc", "crun")
_TOOLKIT: Final = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli")
_TOOLKIT_NAME: Final = "nvidia-container-toolkit"
_TOOLKIT_DIRECTORIES: Final = (*SYSTEM_PATH, "/usr/local/nvidia/toolkit")
_VERSION: Final = re.compile(r"\bv?(\d+\.\d+(?:\.\d+)?\S*)")
_CVE: Final = re.compile(r"CVE-\d{4}-\d{4,}")
_MOST_PROGRAMS: Final = 16


def look_at_programs(places: Places) -> tuple[Program, ...]:
    """Return the low-level runtimes, the engine, and NVIDIA's toolkit if it is installed."""
    programs: dict[str, Program] = {}
    for name, path in _candidates(places):
        real = os.path.realpath(places.at(path))
        if real not in programs and len(programs) < _MOST_PROGRAMS:
            programs[real] = _program(places, name, path)
    return tuple(programs.values())


def _candidates(places: Places) -> Iterator[tuple[str, str]]:
    directories: Sequence[str] = SYSTEM_PATH
    try:
        containerd = look_at_containerd(places)
    except (OSError, CouldNotLook):
        containerd = None
    if containerd is not None:
        directories = containerd.search_path
        for handler in containerd.handlers:
            name = os.path.basename(handler.binary)
            if name in _RUNTIMES:
                yield name, handler.binary
    for name in _RUNTIMES:
        if found := find_program(places, name, directories):
            yield name, found
    if found := find_program(places, "containerd"):
        yield "containerd", found
    for name in _TOOLKIT:
        if found := find_program(places, name, _TOOLKIT_DIRECTORIES):
            yield _TOOLKIT_NAME, found
            return  # all programs of the toolkit have one version


def _program(places: Places, name: str, path: str) -> Program:
    version = fault = ""
    try:
        found = _VERSION.search(run(places, [path, "--version"]))
        version, fault = (found[1], "") if found else ("", "it prints no version")
    except CouldNotLook as error:
        fault = str(error)
    return Program(name, path, version, fault, *_package(places, path))


def _package(places: Places, path: str) -> tuple[str, str, tuple[str, ...]]:
    """Return a program's package, the package's version, and the CVEs in its changelog."""
    if os.path.isdir(places.at("/var/lib/dpkg/info")):
        return _of_dpkg(places, path)
    if rpm := find_program(places, "rpm"):
        return _of_rpm(places, rpm, path)
    return "", "", ()


def _of_dpkg(places: Places, path: str) -> tuple[str, str, tuple[str, ...]]:
    info = places.at("/var/lib/dpkg/info")
    # The list may have /sbin/runc for /usr/sbin/runc, from before the directories were merged.
    wanted = {path, path.removeprefix("/usr"), f"/usr{path}"}
    for name in sorted(os.listdir(info)):
        if not name.endswith(".list"):
            continue
        if wanted.isdisjoint(read_file(os.path.join(info, name)).splitlines()):
            continue
        package = name.removesuffix(".list").partition(":")[0]
        return package, _dpkg_version(places, package), _changelog(places, package)
    return "", "", ()


def _dpkg_version(places: Places, package: str) -> str:
    status = read_file(places.at("/var/lib/dpkg/status"), most=64 << 20)
    for stanza in status.split("\n\n"):
        if stanza.startswith(f"Package: {package}\n"):
            for line in stanza.splitlines():
                if line.startswith("Version: "):
                    return line.removeprefix("Version: ")
    return ""


def _changelog(places: Places, package: str) -> tuple[str, ...]:
    for name in ("changelog.Debian.gz", "changelog.gz"):
        path = places.at(f"/usr/share/doc/{package}/{name}")
        try:
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                return tuple(sorted(set(_CVE.findall(file.read(8 << 20)))))
        except (OSError, EOFError):
            continue
    return ()


def _of_rpm(places: Places, rpm: str, path: str) -> tuple[str, str, tuple[str, ...]]:
    try:
        said = run(places, [rpm, "-qf", "--qf", "%{NAME} %{VERSION}-%{RELEASE}\\n", path])
        package, _, version = said.splitlines()[0].partition(" ")
        changelog = run(places, [rpm, "-q", "--changelog", package])
    except (CouldNotLook, IndexError):
        return "", "", ()
    return package, version, tuple(sorted(set(_CVE.findall(changelog))))
