"""Whether a checkout may be released.

``python -m tools.release.readiness`` lists the addresses that the project does not have yet.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING, Final

from tools import REPOSITORY
from tools.dist.project import PLACEHOLDER
from tools.errors import ReleaseNotReady

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.dist.inputs import Inputs

__all__ = ["placeholders", "problems", "require_ready"]

_CHANGES: Final = "CHANGELOG.md"
_UNRELEASED: Final = "[Unreleased]"
# This file defines the placeholder.
_ITSELF: Final = "tools/dist/project.py"


def placeholders(source: str = REPOSITORY) -> list[str]:
    """Return the placeholder addresses in the project, as ``FILE:LINE: TEXT``."""
    found = []
    for name in _files(source):
        with open(os.path.join(source, name), encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                if PLACEHOLDER in line:
                    found.append(f"{name}:{number}: {line.strip()}")
    return found


def _files(source: str) -> Iterator[str]:
    argv = ["git", "-C", source, "grep", "-lIF", "--untracked", PLACEHOLDER]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    yield from (name for name in done.stdout.splitlines() if name != _ITSELF)


def problems(inputs: Inputs, *, key: str) -> list[str]:
    """Return what is missing before a checkout can be released.

    Args:
        inputs: the inputs of the release.
        key: the file of the signing key; empty if there is none.
    """
    found = []
    if not inputs.released:
        found.append(f"{inputs.revision or 'the checkout'} is not tagged v{inputs.version}")
    found += _changelog_problems(inputs)
    if to_fill_in := placeholders(inputs.source):
        found.append(f"{len(to_fill_in)} addresses are placeholders (make lint lists them)")
    if not key:
        found.append("there is no key to sign it by (KEY=FILE)")
    return found


def _changelog_problems(inputs: Inputs) -> list[str]:
    """Return what the changelog lacks, in the format of https://keepachangelog.com/en/1.1.0/.

    A release has no entries under Unreleased, and its own section is the first one with a version.
    """
    with open(os.path.join(inputs.source, _CHANGES), encoding="utf-8") as file:
        sections = re.split(r"^## ", file.read(), flags=re.MULTILINE)[1:]
    found = []
    upcoming = sections.pop(0) if sections and sections[0].startswith(_UNRELEASED) else ""
    if upcoming.removeprefix(_UNRELEASED).strip():
        found.append(f"{_CHANGES} has entries below {_UNRELEASED}")
    heading = sections[0].partition("\n")[0] if sections else "nothing"
    if not re.fullmatch(rf"\[{re.escape(inputs.version)}\] - \d{{4}}-\d\d-\d\d", heading):
        found.append(f"{_CHANGES} begins with “{heading}”, not with “[{inputs.version}] - DATE”")
    return found


def require_ready(inputs: Inputs, *, key: str) -> list[str]:
    """Refuse to make a tagged release that is not ready.

    Args:
        inputs: the inputs of the release.
        key: the file of the signing key; empty if there is none.

    Returns:
        What makes it a preview; empty if it is a release.

    Raises:
        ReleaseNotReady: the commit is tagged, and something is missing.
    """
    found = problems(inputs, key=key)
    if inputs.released and found:
        raise ReleaseNotReady(
            f"the release {inputs.version}", found="; ".join(found), do="fix that, and tag again"
        )
    return found


def main() -> None:
    """List the placeholder addresses."""
    lines = placeholders()
    if lines:
        print("Placeholder addresses (make release refuses to build a tagged release with them):")
    for line in lines:
        print(f"  {line}")


if __name__ == "__main__":
    main()
