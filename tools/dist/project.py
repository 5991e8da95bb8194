"""What the project says of itself, in pyproject.toml: packages, charts and lists say the same.

An address below :data:`PLACEHOLDER` is one that the project does not have yet. `make lint` lists
where they are, and a release with them is refused.

Source: PyPA, pyproject.toml; RFC 2606.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from typing import Final, Self

from tools import REPOSITORY

PLACEHOLDER: Final = "containerd-shim-nvidia.invalid"
"""The host name of addresses that are to be filled in."""


@dataclass(frozen=True, slots=True)
class Project:
    """The project, as pyproject.toml has it."""

    version: str  # the next one, or that of a tagged commit
    summary: str  # in one line
    home: str  # the URL of its page
    maintainer: str  # ``NAME <ADDRESS>``

    @classmethod
    def of(cls, source: str = REPOSITORY) -> Self:
        """That of a checkout."""
        with open(os.path.join(source, "pyproject.toml"), "rb") as file:
            project = tomllib.load(file)["project"]
        (author,) = project["authors"]
        return cls(
            version=project["version"],
            summary=project["description"],
            home=project["urls"]["Homepage"],
            maintainer=f"{author['name']} <{author['email']}>",
        )
