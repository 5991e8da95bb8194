"""The files of NVIDIA's driver that known packages open, and the capabilities these need.

``driver_packages.toml`` has the data, and says how it was collected. It is read only by commands
that a person runs and by the generator of the documentation.

Source: PEP 503 (names of packages); the recording database of installed projects, PyPA.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from hooks.node.capabilities import FILES, NODES, nodes_of, rows_of
from integration.inspection.driver_files import ORDER, DriverRow, rows_named

PAGE: Final = "docs/packages.md"
"""The page that shows the table."""

_TABLE: Final = os.path.join(os.path.dirname(__file__), "driver_packages.toml")


@dataclass(frozen=True, slots=True)
class Package:
    """A row of the table; the file's head explains the fields."""

    name: str
    version: str
    seen: str  # year and month
    how: tuple[str, ...]
    needs: tuple[str, ...]
    index: str = "PyPI"
    aliases: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    other: str = ""
    without: str = ""

    @property
    def names(self) -> frozenset[str]:
        """Its name and aliases, normalized."""
        return frozenset(map(normalized, (self.name, *self.aliases)))

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the keys are a public interface."""
        return {
            "name": self.name,
            "version": self.version,
            "index": self.index,
            "seen": self.seen,
            "how": list(self.how),
            "opens": list(self.opens),
            "mentions": list(self.mentions),
            "needs": list(self.needs),
            "also": dict(self.also),
            "other": self.other or None,
            "without": self.without or None,
        }


def normalized(name: str) -> str:
    """Return a package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def known_packages() -> tuple[Package, ...]:
    """Return the rows of the table, by name."""
    with open(_TABLE, "rb") as file:
        rows = tomllib.load(file)["package"]
    found = [Package(**{key: _frozen(value) for key, value in row.items()}) for row in rows]
    return tuple(sorted(found, key=lambda package: package.name))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def package_named(name: str) -> Package | None:
    """Return the package that a name or an alias stands for; None if the table does not have it."""
    wanted = normalized(name)
    exact = (each for each in known_packages() if normalized(each.name) == wanted)
    others = (each for each in known_packages() if wanted in each.names)
    return next(exact, None) or next(others, None)


def packages_that_open(rows: Iterable[DriverRow]) -> list[Package]:
    """Return the packages that open a file of some rows, or whose binaries have its name."""
    wanted = set(rows)
    return [each for each in known_packages() if not wanted.isdisjoint(_rows_of(each))]


def not_granted(package: Package, granted: Collection[str]) -> list[str]:
    """Return the capabilities that a package needs and a container lacks.

    Args:
        package: the package. Even without the capability, it may find the file that it opens:
            ``video`` includes the libraries of ``compute``.
        granted: the capabilities of the container.
    """
    there: set[DriverRow] = {*rows_of(granted), *nodes_of(granted)}
    opened = set(_rows_of(package))
    return [
        capability
        for capability in package.needs
        if not there.issuperset((opened & set(FILES[capability])) | set(NODES[capability]))
    ]


def _rows_of(package: Package) -> list[DriverRow]:
    return [row for name in (*package.opens, *package.mentions) for row in rows_named(name)]


def variable(capabilities: Collection[str]) -> str:
    """Return the setting of NVIDIA_DRIVER_CAPABILITIES that asks for capabilities."""
    words = [each for each in ORDER if each in capabilities] or capabilities
    return f"NVIDIA_DRIVER_CAPABILITIES={','.join(words)}"
