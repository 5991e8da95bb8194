"""Decide which containerd handlers call our shim.

A handler has a type, from which containerd derives a program (``io.containerd.nvidia.v1``:
``containerd-shim-nvidia-v1``), and may have a path, which overrides it. So a handler with runc's
type and our program's path is ours, too; containerd treats it as one of runc's.

Source: containerd docs/cri/config.md; core/runtime/v2/shim_manager.go resolveRuntimePath.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from shim import PROGRAM, RUNTIME_NAME

__all__ = [
    "RUNC_TYPE",
    "RUNTIME_TYPE",
    "SURVIVES_SANDBOXER",
    "Release",
    "calls_our_shim",
    "parse_release",
]

RUNTIME_TYPE: Final = RUNTIME_NAME
RUNC_TYPE: Final = "io.containerd.runc.v2"


_RELEASE: Final = re.compile(r"v?(\d+)\.(\d+)\.(\d+)([-~](?:alpha|beta|rc)\b)?", re.ASCII)


class Release(NamedTuple):
    """A release of containerd; releases compare by age."""

    major: int
    minor: int
    patch: int
    is_final: bool = True  # not an alpha, a beta or a release candidate


SURVIVES_SANDBOXER: Final = Release(2, 3, 0)
"""The first release that survives a pod with the node's network under ``sandboxer = "shim"``.

Source: containerd issue 12983, pull request 13131.
"""


def parse_release(version: str) -> Release | None:
    """Return the release for a version that containerd prints; None if it has no number.

    Args:
        version: "1.7.24~ds1", "v2.3.0-rc.1", "2.3.0+unknown", "2.1.3-0ubuntu3".
    """
    found = _RELEASE.match(version)
    if found is None:
        return None
    major, minor, patch, stage = found.groups()
    return Release(int(major), int(minor), int(patch), stage is None)


def calls_our_shim(runtime_type: object, runtime_path: object = "") -> bool:
    """Return whether a handler calls our shim, wherever the shim is installed.

    Args:
        runtime_type: its type, which may be a path itself.
        runtime_path: its path; "" or None for none.
    """
    program = runtime_path or runtime_type
    return runtime_type == RUNTIME_TYPE or (
        isinstance(program, str) and os.path.basename(program) == PROGRAM
    )
