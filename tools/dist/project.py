"""The project's metadata in pyproject.toml, which packages, charts and SBOMs repeat.

An address below :data:`PLACEHOLDER` is one that the project does not have yet. `make lint` lists
these addresses, and a release with them is refused.

Source: PyPA, pyproject.toml; RFC 2606.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from typing import Final, Self

from tools import REPOSITORY

PLACEHOLDER: Final = "containerd-shim-nvidia.invalid"
"""The host name of placeholder addresses."""


@dataclass(frozen=True, slots=True)
class Project:
    """The project's metadata in pyproject.toml."""

    version: str  # the next version, or that of a tagged commit
    summary: str  # in one line
    home: str  # the URL of its page
    maintainer: str  # ``NAME <ADDRESS>``

    @classmethod
    def of(cls, source: str = REPOSITORY) -> Self:
        """Return the metadata of a checkout."""
        with open(os.path.join(source, "pyproject.toml"), "rb") as file:
            project = tomllib.load(file)["project"]
        (author,) = project["authors"]
        return cls(
            version=project["version"],
            summary=project["description"],
            home=project["urls"]["Homepage"],
            maintainer=f"{author['name']} <{author['email']}>",
        )
