"""The low-level runtime that tests run containers with, and how crun is shown a host it knows."""

from __future__ import annotations

import os
from typing import Final

from tests.harness.cgroup import is_v2

_UNIFIED: Final = "/sys/fs/cgroup/unified"

# crun refuses a host where version 2 of cgroups is mounted beside version 1. It runs if it does
# not see that mount; a mount namespace of its own is enough, as mounts still reach it.
_WITHOUT_UNIFIED: Final = f"""\
#!/bin/sh
exec unshare --mount --propagation slave sh -c \\
  'umount -l {_UNIFIED} && exec {{program}} "$@"' {{name}} "$@"
"""


def crun_for_this_host(directory: str, crun: str) -> str:
    """A program that is crun, and runs on this host.

    Args:
        directory: where it is written, if it has to be.
        crun: crun's own path.

    Returns:
        Its path; its name is "crun".
    """
    return without_second_cgroups(directory, crun)


def without_second_cgroups(directory: str, program: str) -> str:
    """A program that does not see version 2 of cgroups beside version 1, nor do its children.

    Args:
        directory: where it is written, if it has to be.
        program: the program's own path.

    Returns:
        Its path, of the same name; the program's own if there is nothing to hide.
    """
    if is_v2() or not os.path.ismount(_UNIFIED):
        return program
    name = os.path.basename(program)
    path = os.path.join(directory, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(_WITHOUT_UNIFIED.format(program=program, name=name))
    os.chmod(path, 0o755)
    return path
