"""Lock files pin exactly one version of everything that pyproject.toml requires."""

from __future__ import annotations

import os
import re
import tomllib
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.harness.launcher import REPOSITORY

# The extras in each lock file, as in `make lock`.
LOCKS: Final = {
    "requirements/runtime.txt": (),
    "requirements/node.txt": ("cli", "node"),
    "requirements/dev.txt": ("cli", "node", "dev"),
}
_DIRECTLY: Final = "(pyproject.toml)"


def asked_for(extras: tuple[str, ...]) -> dict[str, Requirement]:
    with open(os.path.join(REPOSITORY, "pyproject.toml"), "rb") as file:
        project = tomllib.load(file)["project"]
    texts = [*project["dependencies"]]
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    return {canonicalize_name(each.name): each for each in map(Requirement, texts)}


def pinned(name: str) -> dict[str, tuple[str, bool]]:
    """Return each package's version, and whether pyproject.toml requires it directly."""
    with open(os.path.join(REPOSITORY, name), encoding="utf-8") as file:
        entries = re.findall(r"(?m)^([\w.-]+)==(\S+) \\\n((?:[ #].*\n?)*)", file.read())
    assert entries
    return {canonicalize_name(one): (version, _DIRECTLY in why) for one, version, why in entries}


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_file_is_up_to_date(lock: str) -> None:
    """If this fails, run ``make lock``."""
    wanted, found = asked_for(LOCKS[lock]), pinned(lock)
    assert {name for name, (_, directly) in found.items() if directly} == set(wanted)
    for name, requirement in wanted.items():
        version = found[name][0]
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{requirement}: {version}"
        )


@pytest.mark.parametrize("lock", LOCKS)
def test_what_is_shipped_is_what_is_tested(lock: str) -> None:
    tested = pinned("requirements/dev.txt")
    assert {name: tested[name][0] for name in pinned(lock)} == {
        name: version for name, (version, _) in pinned(lock).items()
    }
