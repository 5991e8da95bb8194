"""The files that the fork server has imported, and a check whether they have changed.

A shim must have the installed version. So the fork server checks this before each fork, cheaply:
the kernel reports changes in the directories of our packages, and usually there are none. Each
check also covers what the kernel does not report: whether the packages and the program are still at
their paths (a link in a path can change, or a mount can cover it). If the kernel cannot report
changes, each check covers all files.

Source: inotify(7).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Final

import api
import hooks
import shim
from shim import syscalls

_PACKAGES: Final = ("api", "hooks", "shim")
_LONGEST_READ: Final = 1 << 16
_MISSING: Final = (0, 0, 0)


class Installation:
    """The state of the installed files, taken before importing them."""

    def __init__(self, program: str) -> None:
        """Start to watch the packages.

        Args:
            program: the program's path. It determines the place of the packages, so it is checked,
                too.
        """
        self._program = program
        places = [os.path.dirname(package.__file__ or "") for package in (api, hooks, shim)]
        self._places = [*places, os.path.dirname(program)]
        directories = [d for place in places for d in _directories(place)]
        self._watch = _watch([*directories, os.path.dirname(program)])
        self._before = _stats([program, *_sources(directories)])
        self._imported: Mapping[str, tuple[int, int, int]] = {}
        self._where: list[tuple[int, int]] = []

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable after a change; negative if the kernel reports none."""
        return self._watch

    def is_imported(self) -> bool:
        """Record the imported files.

        Returns:
            Whether none of them has changed since :meth:`__init__`.
        """
        files = [
            file
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in _PACKAGES and (file := getattr(module, "__file__", None))
        ]
        self._imported = _stats([self._program, *files])
        self._where = _identities(self._places)
        return all(self._before.get(file) == status for file, status in self._imported.items())

    def has_changed(self) -> bool:
        """Whether an imported file has changed."""
        if self._watch >= 0:
            told = _read(self._watch)
            if not told and _identities(self._places) == self._where:
                return False
        return _stats(self._imported) != self._imported


def _directories(package: str) -> list[str]:
    return [folder for folder, _, _ in os.walk(package) if not folder.endswith("__pycache__")]


def _sources(directories: Iterable[str]) -> list[str]:
    return [
        os.path.join(directory, name)
        for directory in directories
        for name in os.listdir(directory)
        if name.endswith(".py")
    ]


def _stats(files: Iterable[str]) -> dict[str, tuple[int, int, int]]:
    found = {}
    for file in files:
        try:
            status = os.stat(file)
        except OSError:
            found[file] = _MISSING
        else:
            found[file] = (status.st_dev, status.st_ino, status.st_mtime_ns)
    return found


def _identities(places: Iterable[str]) -> list[tuple[int, int]]:
    found = []
    for place in places:
        try:
            status = os.stat(place)
        except OSError:
            found.append((0, 0))
        else:
            found.append((status.st_dev, status.st_ino))
    return found


def _watch(directories: Iterable[str]) -> int:
    """Watch directories for changes; -1 if the kernel cannot watch all of them."""
    try:
        watch = syscalls.inotify_init()
    except OSError:
        return -1
    try:
        for directory in directories:
            syscalls.inotify_watch_changes(watch, directory)
    except OSError:
        os.close(watch)
        return -1
    return watch


def _read(watch: int) -> bool:
    """Whether the kernel has reported any change; the caller finds out which."""
    told = False
    try:
        while os.read(watch, _LONGEST_READ):
            told = True
    except BlockingIOError:
        return told
    return told
