"""Files of a container's procfs, covered between create and start, by the runtimes there are.

/proc/version stands in for a file of the driver: every kernel has it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from integration.images import busybox, unpack
from shim.proc_cover import COVERED, UNCOVERED, cover, uncover
from shim.reaper import Reaper
from tests.harness.low_level import crun_for_this_host
from tests.harness.runtime import new_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

FILE: Final = "/proc/version"
LOOK: Final = """
cat /proc/version
echo changed >/proc/version && echo written
grep ' /proc/version ' /proc/self/mountinfo
"""


class Container:
    """A container that is created and not started; what it prints goes to a file."""

    def __init__(self, runtime: str, directory: str, **changes: Any) -> None:
        self._runtime = runtime
        self.directory = directory
        self.rootfs = os.path.join(directory, "rootfs")
        unpack(busybox().tree, self.rootfs)
        subprocess.run(["runc", "spec", "--bundle", directory], check=True)
        path = os.path.join(directory, "config.json")
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
        spec["process"].update(terminal=False, args=["sh", "-c", LOOK])
        spec["linux"].update(changes.pop("linux", {}))
        spec["linux"]["namespaces"] += changes.pop("namespaces", [])
        spec["process"]["user"].update(changes.pop("user", {}))
        spec["root"]["readonly"] = True
        with open(path, "w", encoding="utf-8") as file:
            json.dump(spec, file)
        self.name = new_name()
        with open(os.path.join(directory, "said"), "wb") as said:
            self._call("create", "--bundle", directory, "--pid-file", f"{directory}/pid", out=said)
        with open(f"{directory}/pid", encoding="ascii") as file:
            self.pid = int(file.read())

    def _call(self, *words: str, out: Any = subprocess.DEVNULL, check: bool = True) -> None:
        argv = [self._runtime, "--root", f"{self.directory}/state", *words, self.name]
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=check)

    def start(self) -> str:
        """Start it; returns what it said."""
        with open(f"/proc/{self.pid}/ns/mnt", "rb"), anyio.fail_after(0) as _:
            pass
        pidfd = os.pidfd_open(self.pid)
        try:
            self._call("start")
            import select  # noqa: PLC0415

            assert select.select([pidfd], [], [], 10)[0]
        finally:
            os.close(pidfd)
        with open(os.path.join(self.directory, "said"), encoding="utf-8") as file:
            return file.read()

    def inside(self, *words: str) -> None:
        """Run a program in its mount namespace."""
        subprocess.run(["nsenter", f"--mount=/proc/{self.pid}/ns/mnt", *words], check=True)

    def remove(self) -> None:
        self._call("delete", "--force", check=False)
