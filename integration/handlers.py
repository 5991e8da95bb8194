"""Which handlers of containerd call our shim.

A handler has a type, by which containerd finds a program (``io.containerd.nvidia.v1``:
``containerd-shim-nvidia-v1``), and may have a path, which wins over it. So a handler of runc's type
whose path is our program is ours too: containerd then treats it as it treats runc's.

Source: containerd docs/cri/config.md; core/runtime/v2/shim_manager.go resolveRuntimePath.
"""

from __future__ import annotations

import os
from typing import Final

from shim import PROGRAM, RUNTIME_NAME

__all__ = ["RUNC_TYPE", "RUNTIME_TYPE", "calls_our_shim"]

RUNTIME_TYPE: Final = RUNTIME_NAME
RUNC_TYPE: Final = "io.containerd.runc.v2"


def calls_our_shim(runtime_type: object, runtime_path: object = "") -> bool:
    """Whether a handler calls our shim, wherever that is installed.

    Args:
        runtime_type: its type, which may be a path itself.
        runtime_path: its path; empty or None if it has none.
    """
    program = runtime_path or runtime_type
    return runtime_type == RUNTIME_TYPE or (
        isinstance(program, str) and os.path.basename(program) == PROGRAM
    )
