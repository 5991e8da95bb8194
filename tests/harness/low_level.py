"""The low-level runtime of tests, and a wrapper that lets crun run on a hybrid cgroup host."""

from __future__ import annotations

import os
from typing import Final

from tests.harness.cgroup import is_v2

_UNIFIED: Final = "/sys/fs/cgroup/unified"

# crun refuses a host where cgroup v2 is mounted in addition to v1. It runs if it does not see that
# mount. A mount namespace of its own hides it, and mounts of the host still propagate to it.
_WITHOUT_UNIFIED: Final = f"""\
#!/bin/sh
exec unshare --mount --propagation slave sh -c \\
  'umount -l {_UNIFIED} && exec {{program}} "$@"' {{name}} "$@"
"""


def crun_for_this_host(directory: str, crun: str) -> str:
    """Return a crun that runs on this host.

    Args:
        directory: where a wrapper is written, if one is needed.
        crun: the path of the real crun.

    Returns:
        A path whose last part is "crun".
    """
    return without_second_cgroups(directory, crun)


def without_second_cgroups(directory: str, program: str) -> str:
    """Return a program that hides cgroup v2 from itself and its children on a host with both.

    Args:
        directory: where a wrapper is written, if one is needed.
        program: the path of the real program.

    Returns:
        The path of a wrapper of the same name; ``program`` if there is nothing to hide.
    """
    if is_v2() or not os.path.ismount(_UNIFIED):
        return program
    name = os.path.basename(program)
    path = os.path.join(directory, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(_WITHOUT_UNIFIED.format(program=program, name=name))
    os.chmod(path, 0o755)
    return path
