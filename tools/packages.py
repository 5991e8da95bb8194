"""Packages of any release of Debian, with what they depend on, beside those of the simulated node.

    debs = fetch(["containerd"], "/somewhere/trixie", release="trixie", dependencies=True)

They come from where the machine takes its own (:mod:`integration.simulated.archive`), with the
release exchanged. A cache directory holds packages of one release.
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

# The release that is never released has neither updates nor security fixes of its own.
_UNRELEASED: Final = frozenset({"sid", "unstable"})
# Nothing is installed, says our status file.
_INSTALL: Final = ("install", "--yes", "--no-install-recommends")


def fetch(
    names: Iterable[str],
    into: str | None = None,
    *,
    release: str | None = None,
    dependencies: bool = False,
    sources: str | None = None,
    say: Callable[[str], None] | None = None,
) -> list[str]:
    """Have packages as files, downloading those that are not there yet.

    Args:
        into: the cache directory; by default one that is named after the release.
        release: the release to take them from ("trixie"); the machine's own if not given.
        dependencies: whether to have what they depend on too, as on a machine that has nothing.
        sources: deb822 text of the archive to use in place of the machine's own.
        say: told in one line what is being downloaded, when something is.

    Returns:
        The path of one .deb for each name, in the order of the names; then those of what they
        depend on.

    Raises:
        PackagesError: something is missing and cannot be had.
    """
    wanted = list(dict.fromkeys(names))
    into = os.path.abspath(into or os.path.join(default_cache(), release or ""))
    # What the archive said that they depend on: the question first, then the answer.
    note, question = os.path.join(into, "dependencies"), " ".join(wanted)
    os.makedirs(os.path.join(into, "apt"), exist_ok=True)
    with locked(os.path.join(into, "apt")):
        asked, _, answer = read(note).partition("\n") if dependencies else (question, "", question)
        known = answer.split() if asked == question else []
        if not known or not all(in_cache(name, into) for name in known):
            sources = sources or sources_of(release, say)
            if dependencies:
                apt = Apt.prepare(into, sources, wanted)
                known = list(dict.fromkeys((*wanted, *sorted(apt.resolve(wanted, *_INSTALL)))))
        found = packages.fetch(known, into, sources=sources, say=say)
        said = "\n".join((question, *known)) + "\n"
        # A cache that has everything may be read-only, as in a virtual machine.
        if dependencies and read(note) != said:
            with open(note, "w", encoding="utf-8") as file:
                file.write(said)
    return found


def sources_of(release: str | None, say: Callable[[str], None] | None = None) -> str:
    """The machine's archive, for its own or for another release.

    Args:
        release: the release ("trixie"); None for the machine's own, with all components.
        say: told in one line what is being downloaded, when something is.

    Returns:
        deb822 text for a ``.sources`` file.

    Raises:
        PackagesError: there is no archive, or the keys of that release cannot be had.
    """
    if release is None:
        return machine_sources()
    # A machine that was installed before that release does not know its keys; the newest
    # keyring of the machine's own release does, and comes signed with keys that it knows.
    cache = os.path.join(default_cache(), "keyring")
    keyring = os.path.join(cache, "unpacked")
    unpack(packages.fetch([_KEYRING_PACKAGE], cache, say=say), keyring)
    own = read_deb822(machine_sources(()))
    exchanged = in_release(own, machine_release(), release, os.path.join(keyring, _KEYRING))
    return write_deb822(exchanged, ())


def in_release(
    archives: Iterable[Archive], codename: str, release: str, keyring: str = ""
) -> list[Archive]:
    """The same archives for another release.

    Args:
        archives: those of one release, as :func:`~integration.simulated.archive.own_release` gives
            them.
        codename: that release; empty where the machine does not say.
        release: the one to have instead. Its updates and security fixes are taken from where
            the machine takes its own.
        keyring: what an archive that Debian signs is to be checked with, in place of a keyring
            of Debian's that the machine has; empty to keep that.

    Returns:
        Values whose suites are only those of the other release.
    """
    exchanged = []
    for archive in archives:
        # A machine that does not say what it is has one entry for all: the release's.
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
