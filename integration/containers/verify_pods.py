"""The pods of ``nvshim verify``: how they are named, and which of them a run has left.

A run that is killed leaves its pod, and a kubelet may not be able to remove it either. The next run
finds such pods by their label, which the engine does not write into their specs. So other programs
find them by their name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

from integration.containers.bundles import Container
from shim.causes.agent import is_locked

NAME: Final = "nvshim-verify-"
"""The start of a pod's name; eight hexadecimal digits follow."""

DIRECTORY: Final = "verify"
"""The subdirectory of our state that a run holds locked."""

_NAME: Final = re.compile(rf"{NAME}[0-9a-f]{{8}}")


def left_pods(containers: Iterable[Container], state: str) -> tuple[str, ...]:
    """Return the pods that no run will remove, as NAMESPACE/NAME; none while one is running.

    Args:
        containers: those of the node.
        state: the directory ``state`` of the configuration.
    """
    pods = {each.pod for each in containers if each.pod and _NAME.fullmatch(each.pod.name)}
    if not pods or is_locked(os.path.join(state, DIRECTORY)):
        return ()
    return tuple(sorted(f"{pod.namespace}/{pod.name}" for pod in pods))
