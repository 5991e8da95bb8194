"""Packages of any Debian release, with their dependencies, in addition to the simulated node's.

    debs = fetch(["containerd"], "/somewhere/trixie", release="trixie", dependencies=True)

They come from the machine's own archive (:mod:`integration.simulated.archive`), with another
release. A cache directory contains packages of one release. Caches next to each other share the
lists of their release.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final

from integration.simulated import packages
from integration.simulated.archive import (
    Archive,
    machine_release,
    machine_sources,
    read,
    read_deb822,
    write_deb822,
)
from integration.simulated.packages import Apt, default_cache, in_cache, locked, unpack

__all__ = ["fetch", "in_release", "sources_of"]

_KEYRING_PACKAGE: Final = "debian-archive-keyring"
_KEYRING: Final = "usr/share/keyrings/debian-archive-keyring.gpg"

# Debian unstable has no separate suites for updates and security fixes.
_UNRELEASED: Final = frozenset({"sid", "unstable"})
# Our dpkg status file has no installed packages.
_INSTALL: Final = ("install", "--yes", "--no-install-recommends")


def fetch(
    names: Iterable[str],
    into: str | None = None,
    *,
    release: str | None = None,
    dependencies: bool | Callable[[str], bool] = False,
    sources: str | None = None,
    say: Callable[[str], None] | None = None,
) -> list[str]:
    """Return packages as files, and download the missing ones.

    Args:
        into: the cache directory; by default one that is named after the release.
        release: the release to download from ("trixie"); the machine's own by default.
        dependencies: whether to include all dependencies, as for a machine without packages; or
            which of them to include, by name.
        sources: deb822 text of the archive to use instead of the machine's own.
        say: called with one line about each download.

    Returns:
        The path of one .deb for each name, in the order of the names; then those of the
        dependencies.

    Raises:
        PackagesError: something is missing and cannot be downloaded.
    """
    wanted = list(dict.fromkeys(names))
    into = os.path.abspath(into or os.path.join(default_cache(), release or ""))
    # The archive's answer about dependencies, after the packages that it is for.
    note, question = os.path.join(into, "dependencies"), " ".join(wanted)
    os.makedirs(os.path.join(into, "apt"), exist_ok=True)
    lists = os.path.join(into, "apt")
    if release and not sources:
        own = release == machine_release()
        lists = os.path.join(os.path.dirname(into), "apt" if own else f"apt-{release}")
    with locked(os.path.join(into, "apt")):
        asked, _, answer = read(note).partition("\n") if dependencies else (question, "", question)
        known = answer.split() if asked == question else []
        if not known or not all(in_cache(name, into) for name in known):
            sources = sources or sources_of(release, say)
            if dependencies:
                apt = Apt.prepare(lists, sources, wanted)
                needed = sorted(apt.resolve(wanted, *_INSTALL))
                if not isinstance(dependencies, bool):
                    needed = list(filter(dependencies, needed))
                known = list(dict.fromkeys((*wanted, *needed)))
        found = packages.fetch(known, into, sources=sources, lists=lists, say=say)
        said = "\n".join((question, *known)) + "\n"
        # A complete cache may be read-only, as in a virtual machine.
        if dependencies and read(note) != said:
            with open(note, "w", encoding="utf-8") as file:
                file.write(said)
    return found


def sources_of(release: str | None, say: Callable[[str], None] | None = None) -> str:
    """Return the machine's archive, for its own or for another release.

    Args:
        release: the release ("trixie"); None for the machine's own, with all components.
        say: called with one line about each download.

    Returns:
        deb822 text for a ``.sources`` file.

    Raises:
        PackagesError: there is no archive, or the keys of that release cannot be downloaded.
    """
    if release in {None, machine_release()}:
        return machine_sources()
    # A machine that is older than that release does not have its keys. The newest keyring package
    # of the machine's own release does, signed with keys that the machine has.
    cache, lists = (os.path.join(default_cache(), name) for name in ("keyring", "apt"))
    keyring = os.path.join(cache, "unpacked")
    unpack(packages.fetch([_KEYRING_PACKAGE], cache, lists=lists, say=say), keyring)
    own = read_deb822(machine_sources(()))
    exchanged = in_release(own, machine_release(), release, os.path.join(keyring, _KEYRING))
    return write_deb822(exchanged, ())


def in_release(
    archives: Iterable[Archive], codename: str, release: str, keyring: str = ""
) -> list[Archive]:
    """Return the same archives for another release.

    Args:
        archives: those of one release, from
            :func:`~integration.simulated.archive.own_release`.
        codename: that release; empty if the machine does not name it.
        release: the new release. Its updates and security fixes come from the same places as the
            machine's own.
        keyring: replaces Debian's keyring on the machine, for archives that Debian signs; empty to
            keep it.

    Returns:
        Values whose suites are only those of the other release.
    """
    exchanged = []
    for archive in archives:
        # A machine that does not name its release has one entry for all suites.
        suites = archive["suites"].split()
        parts = [suite.removeprefix(codename) if codename else "" for suite in suites]
        if release in _UNRELEASED:
            parts = [part for part in parts if not part]
        if parts:
            changed = {**archive, "suites": " ".join(dict.fromkeys(release + p for p in parts))}
            if keyring and _is_debians(archive.get("signed-by", "")):
                changed["signed-by"] = keyring
            exchanged.append(changed)
    return exchanged


def _is_debians(signed_by: str) -> bool:
    return os.path.basename(signed_by).startswith("debian-archive-") and "\n" not in signed_by
