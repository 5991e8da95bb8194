"""Detect a Podman on this node that refuses CDI specs with groups.

Podman before 5.1 supports the CDI specification only up to version 0.6.0. It refuses a file with
``additionalGids``, which was added in 0.7.0, and with it every device of the file.

Source: NVIDIA/nvidia-container-toolkit issue 1860; containers/common pull request 1944.
"""

from __future__ import annotations

import re
from typing import Final

from integration.engines.errors import EngineNotInstalled
from integration.engines.programs import programs_named, run
from integration.timeouts import PATIENCE

_PODMAN: Final = "podman"
_KNOWS_GROUPS: Final = (5, 1)
_TIMEOUT: Final = 5 * PATIENCE
# podman version 4.9.3
_VERSION: Final = re.compile(r"\bversion ((\d+)\.(\d+)\S*)")


def too_old() -> str:
    """Return the version of a Podman on this node that refuses groups; "" if there is none."""
    for program in programs_named(_PODMAN):
        try:
            output = run([program, "--version"], timeout=_TIMEOUT).stdout
        except EngineNotInstalled:
            continue  # a Podman that does not run reads no specs
        found = _VERSION.search(output)
        if found is not None and (int(found[2]), int(found[3])) < _KNOWS_GROUPS:
            return found[1]
    return ""


def note_on(version: str) -> str:
    """Return the note that explains why a spec has no groups."""
    return (
        f"the spec has no groups, because Podman {version} on this node rejects specs with groups; "
        "a non-root process may lack the groups of DRM nodes"
    )
