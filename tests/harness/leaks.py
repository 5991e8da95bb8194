"""Find what a test left on the machine.

A census runs before and after a test. It covers the traces of the test's containerd (processes,
mounts, cgroups, sockets, fifos, bundles, states of the low-level runtime; see
integration.containers.traces), the objects that containerd still lists, and the shim's own
directory. Cleanup is partly asynchronous, so the second census is repeated until nothing is left,
or until a timeout.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final

from integration.containers import traces
from integration.containers.traces import Trace
from integration.timeouts import PATIENCE
from tests.harness import api
from tools.containerd import PrivateContainerd
from tools.cri.plugin import NAMESPACE as PODS
from tools.cri.plugin import CriContainerd

# What the shim creates outside of bundles, with the default configuration.
STATE: Final = "/run/containerd-shim-nvidia"

_POLL: Final = 0.02


class Census:
    """The state of the machine before a test, to compare with.

    Args:
        containerd: the containerd that the test uses.
    """

    def __init__(self, containerd: PrivateContainerd) -> None:
        self._containerd = containerd
        self._before = self._take()

    def leftovers(self, *, timeout: float = 60.0) -> list[Trace]:
        """Return what exists now and did not before.

        Args:
            timeout: seconds that asynchronous cleanup may take.
        """
        deadline = time.monotonic() + timeout * PATIENCE
        while True:
            left = self._take() - self._before
            if not left or time.monotonic() > deadline:
                return sorted(left)
            time.sleep(_POLL)

    def remove(self, left: list[Trace]) -> None:
        """Remove what was left, so that the next test starts on a clean machine."""
        containerd = self._containerd
        for kind, command in (
            ("container", ("containers", "rm")),
            ("snapshot", ("snapshots", "rm")),
        ):
            names = [trace.name for trace in left if trace.kind == kind]
            for name in names:
                if kind == "container":
                    containerd.ctr("tasks", "rm", "--force", name, check=False)
                containerd.ctr(*command, name, check=False)
        containerd.sweep()
        for trace in left:
            if trace.kind == "state":
                with contextlib.suppress(OSError):
                    os.unlink(trace.name)

    def _take(self) -> set[Trace]:
        return {*traces.find(self._containerd.marks), *self._listed(), *_own_state()}

    def _listed(self) -> set[Trace]:
        """Return the objects that containerd lists."""
        containerd = self._containerd
        pods = [PODS] if isinstance(containerd, CriContainerd) else []
        namespaces = [containerd.namespace, *pods]
        found: set[Trace] = set()
        try:
            for namespace in namespaces:
                for kind, names in (("container", api.containers), ("snapshot", api.snapshots)):
                    found.update(Trace(kind, name) for name in names(containerd, namespace))
        except api.ApiRefused as error:
            return {Trace("containerd", "does not answer", str(error))}
        return found


def describe(left: list[Trace], log: str) -> str:
    """Return a failure message: what was left, and the end of containerd's log."""
    lines = [f"left behind: {len(left)}", *(f"  {trace}" for trace in left)]
    return "\n".join([*lines, "the last lines of containerd's log:", *log.splitlines()[-15:]])


def _own_state() -> set[Trace]:
    return {
        Trace("state", os.path.join(directory, name))
        for directory, _, names in os.walk(STATE)
        for name in names
    }
