"""Explain a file of NVIDIA's driver, or a package that opens some of them, by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

from hooks.config import Config
from integration.inspection.driver_files import (
    OnNode,
    capabilities_of,
    find_on_node,
    find_other,
    rows_named,
)
from integration.inspection.driver_packages import (
    PAGE,
    Package,
    package_named,
    packages_that_open,
    variable,
)
from integration.inspection.errors import NameUnknown

FILE: Final = "file"
PACKAGE: Final = "package"
ALL: Final = "all"

_EVERY: Final = "none: every container with the driver gets it"
_MENTIONED: Final = "in its binaries, or tried if another is missing"


@dataclass(frozen=True, slots=True)
class FileMeaning:
    """A file of the driver."""

    kind: ClassVar = "DriverFile"  # of its document
    name: str  # as it was asked for
    # any of them grants it; "all" if no known one does; empty if every container gets it
    capabilities: tuple[str, ...]
    here: OnNode
    packages: tuple[Package, ...]  # those that are known to ask for it

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the keys are a public interface."""
        return {
            "name": self.name,
            "capabilities": list(self.capabilities),
            "driver": self.here.driver or None,
            "paths": list(self.here.paths),
            "error": self.here.error or None,
            "packages": [each.name for each in self.packages],
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield titled lines."""
        yield "file", f"{self.name}, of NVIDIA's driver"
        yield "capability", " or ".join(self.capabilities) or _EVERY
        here = self.here
        missing = here.error or f"not in driver {here.driver} of this node"
        yield "this node", ", ".join(here.paths) or missing
        if self.packages:
            yield "asked by", ", ".join(each.name for each in self.packages)
        if self.capabilities:
            yield "do", f"request it with {variable(self.capabilities[:1])}"
        yield "see", PAGE


@dataclass(frozen=True, slots=True)
class PackageMeaning:
    """A package of the table."""

    kind: ClassVar = "DriverPackage"  # of its document
    package: Package

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the keys are a public interface."""
        return self.package.to_json()

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield titled lines."""
        found = self.package
        yield "package", f"{found.name} {found.version} of {found.index}, seen in {found.seen}"
        yield "needs", ", ".join(found.needs)
        yield from (("also", f"{each}: {why}") for each, why in found.also.items())
        if found.opens:
            yield "opens", ", ".join(found.opens)
        if found.mentions:
            yield "mentions", f"{', '.join(found.mentions)}: {_MENTIONED}"
        if found.other:
            yield "other", found.other
        if found.without:
            yield "without", found.without
        yield "do", f"request it with {variable(found.needs)}"
        yield "see", PAGE


Meaning: TypeAlias = FileMeaning | PackageMeaning


def kind_of(text: str) -> str:
    """Return "file" for ``file:NAME``, "package" for ``package:NAME``, "" for any other text."""
    kind, colon, _ = text.partition(":")
    return kind if colon and kind in {FILE, PACKAGE} else ""


def explain_kind(text: str, config: Config) -> Meaning:
    """Explain ``file:NAME`` or ``package:NAME``.

    Raises:
        NameUnknown: the tables have no such file or package.
    """
    kind, _, name = text.partition(":")
    found = explain_name(name, config, kind)
    if found is None:
        raise NameUnknown(
            f"the {kind} {name}",
            found="it is not in the tables of this version",
            do=f"see {PAGE} for packages, and docs/requests.md for the driver's files",
        )
    return found


def explain_name(name: str, config: Config, kind: str = "") -> Meaning | None:
    """Explain a file of the driver or a package; None if a name is neither.

    Args:
        name: the name.
        config: where the node's driver is.
        kind: "file" or "package" to look for only that.
    """
    if kind != PACKAGE and (rows := rows_named(name)):
        packages = tuple(packages_that_open(rows))
        return FileMeaning(name, capabilities_of(rows), find_on_node(rows, config), packages)
    if kind != PACKAGE and (here := find_other(name, config)):
        return FileMeaning(name, (ALL,), here, ())
    package = package_named(name) if kind != FILE else None
    return PackageMeaning(package) if package else None
