"""How much processor time a container's life takes, of everybody who works for it.

Rules
- Everything is charged, by the kernel, to one cgroup that outlives it all: the namespace's, below
  which the low-level runtimes put their containers. containerd is put into another child of it,
  and what it starts (the verbs, shims, fork servers, the low-level runtime) begins where
  containerd is, and cannot leave but into a container's cgroup, which is below the same one.
- What a process used before it ended, or a cgroup before it was removed, stays charged.
- The client, ``ctr``, is not in it: it is the same whoever serves it.
- A reading is taken when everything has ended that is going to: nobody is left in containerd's
  cgroup but those who were there before.

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

# For what containerd does after it has answered: it collects its garbage a moment later.
_SETTLE: Final = 0.25


class Meter:
    """The processor time of a containerd, and of all that it starts from now on.

    Args:
        containerd: it runs, has started nothing yet, and ends before the meter's files do.

    Attributes:
        containerd: the same.
    """

    def __init__(self, containerd: PrivateContainerd) -> None:
        self.containerd = containerd
        self._parent = os.path.join(_hierarchy(), containerd.namespace)
        self._daemon = os.path.join(self._parent, "containerd")

    def begin(self) -> Self:
        """Put containerd where it is metered. Its cgroup is removed when containerd is."""
        os.makedirs(self._daemon, exist_ok=True)
        with open(os.path.join(self._daemon, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(self.containerd.pid))
        return self

    def read(self) -> float:
        """Seconds of processor time so far, in user mode and in the kernel."""
        if is_v2():
            with open(os.path.join(self._parent, "cpu.stat"), encoding="ascii") as file:
                usage = next(int(line.split()[1]) for line in file if line.startswith("usage_usec"))
            return usage / 1e6
        with open(os.path.join(self._parent, "cpuacct.usage"), encoding="ascii") as file:
            return int(file.read()) / 1e9

    def settle(self) -> None:
        """Wait until containerd and the fork servers are alone, and for what they still do."""
        eventually(lambda: not self._others(), "all shims and runtimes have ended")
        time.sleep(_SETTLE)

    def _others(self) -> set[int]:
        """Who is in containerd's cgroup and is going to end."""
        with open(os.path.join(self._daemon, "cgroup.procs"), encoding="ascii") as file:
            members = {int(line) for line in file}
        if members == {self.containerd.pid}:
            return set()
        staying = traces.fork_servers(self.containerd.marks)
        return members - staying - {self.containerd.pid}


def _hierarchy() -> str:
    return _ROOT if is_v2() else os.path.join(_ROOT, "cpuacct")
