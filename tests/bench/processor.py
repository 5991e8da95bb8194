"""The processor time of a container's whole life, in all processes that work for it.

Rules
- The kernel charges everything to one cgroup that outlives the containers: the namespace's, below
  which the low-level runtimes create theirs. containerd runs in another child of it. The processes
  that it starts (verbs, shims, fork servers, the low-level runtime) start in the same cgroup, and
  can only move to a container's cgroup, which is below the same one.
- The time of an exited process or a removed cgroup stays charged.
- The client, ``ctr``, is not included: it is the same for every shim.
- A reading waits until all temporary processes have exited: containerd's cgroup contains only the
  processes from before.

Source: Linux Documentation/admin-guide/cgroup-v1/cpuacct.rst, .../cgroup-v2.rst (cpu.stat).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, Self

from integration.containers import traces
from tests.harness.cgroup import is_v2
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from tools.containerd import PrivateContainerd

_ROOT: Final = "/sys/fs/cgroup"

# For containerd's work after its answer: it collects garbage a moment later.
_SETTLE: Final = 0.25


class Meter:
    """The processor time of a containerd, and of everything that it starts from now on.

    Args:
        containerd: runs, has started nothing yet, and is removed before the meter's files are.

    Attributes:
        containerd: the same.
    """

    def __init__(self, containerd: PrivateContainerd) -> None:
        self.containerd = containerd
        self._parent = os.path.join(_hierarchy(), containerd.namespace)
        self._daemon = os.path.join(self._parent, "containerd")

    def begin(self) -> Self:
        """Move containerd into the metered cgroup, which is removed when containerd is."""
        os.makedirs(self._daemon, exist_ok=True)
        with open(os.path.join(self._daemon, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(self.containerd.pid))
        return self

    def read(self) -> float:
        """Return the seconds of processor time so far, in user mode and in the kernel."""
        if is_v2():
            with open(os.path.join(self._parent, "cpu.stat"), encoding="ascii") as file:
                usage = next(int(line.split()[1]) for line in file if line.startswith("usage_usec"))
            return usage / 1e6
        with open(os.path.join(self._parent, "cpuacct.usage"), encoding="ascii") as file:
            return int(file.read()) / 1e9

    def settle(self) -> None:
        """Wait until only containerd and the fork servers are left, and until they are idle."""
        eventually(lambda: not self._others(), "all shims and runtimes have exited")
        time.sleep(_SETTLE)

    def _others(self) -> set[int]:
        """Return the temporary processes in containerd's cgroup."""
        with open(os.path.join(self._daemon, "cgroup.procs"), encoding="ascii") as file:
            members = {int(line) for line in file}
        if members == {self.containerd.pid}:
            return set()
        staying = traces.fork_servers(self.containerd.marks)
        return members - staying - {self.containerd.pid}


def _hierarchy() -> str:
    return _ROOT if is_v2() else os.path.join(_ROOT, "cpuacct")
