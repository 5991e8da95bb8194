"""A real container without a shim, created with runc or crun and inspected from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shim import syscalls

_CGROUPS = "/sys/fs/cgroup"
_FOREVER = ("/bin/busybox", "sh", "-c", "busybox sleep 1000 & busybox sleep 1000 & wait")


class Container:
    """One container in a bundle, with a mounted rootfs.

    Args:
        bundle: its directory, named after the container's id as by containerd.
        root: the directory of the runtime's state.
        runtime: runc or crun.
        own_pid_namespace: whether its processes die with init.
    """

    def __init__(
        self, bundle: Path, root: Path, *, runtime: str = "runc", own_pid_namespace: bool = True
    ) -> None:
        self.bundle = bundle
        self.id = bundle.name
        self.root = root
        self.state = root / self.id
        self.rootfs = bundle / "rootfs"
        self.runtime = runtime
        self.rootfs.mkdir()
        syscalls.mount("tmpfs", str(self.rootfs), "tmpfs", 0)
        for name in ("bin", "proc", "sys", "dev"):
            (self.rootfs / name).mkdir()
        shutil.copy("/bin/busybox", self.rootfs / "bin")
        (self.rootfs / "bin" / "sh").symlink_to("busybox")
        self._write_spec(own_pid_namespace=own_pid_namespace)
        self.write_options(runtime)

    def write_options(self, binary: str) -> None:
        """Write the files that the server leaves for the cleanup."""
        record = {"binary": binary, "root": str(self.root), "systemd_cgroup": False}
        (self.bundle / "options.json").write_text(json.dumps(record))

    def call(self, *words: str) -> None:
        """Call the runtime as the server does."""
        subprocess.run(
            [self.runtime, "--root", self.root, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )

    def create(self) -> int:
        """Create it, and return the pid of its init process."""
        pid_file = self.bundle / "init.pid"
        self.call("create", "--bundle", str(self.bundle), "--pid-file", str(pid_file), self.id)
        return int(pid_file.read_text())

    def run(self) -> int:
        """Start it and wait for its three processes; return the pid of init."""
        pid = self.create()
        self.call("start", self.id)
        deadline = time.monotonic() + 10
        while len(self.processes()) < 3:
            assert time.monotonic() < deadline, "the container did not come up"
            time.sleep(0.01)
        return pid

    def cgroups(self) -> list[str]:
        """Return the existing directories of its cgroup."""
        hierarchies = [_CGROUPS, *(entry.path for entry in os.scandir(_CGROUPS) if entry.is_dir())]
        return [d for d in (os.path.join(h, self.id) for h in hierarchies) if os.path.isdir(d)]

    def processes(self) -> set[int]:
        """Return the processes in its cgroup."""
        return {
            int(pid)
            for directory in self.cgroups()
            for pid in Path(directory, "cgroup.procs").read_text().split()
        }

    def close(self) -> None:
        """Remove everything that is left."""
        deadline = time.monotonic() + 5
        while self.cgroups():
            assert time.monotonic() < deadline, "a container could not be removed"
            for directory in self.cgroups():
                with contextlib.suppress(OSError):
                    Path(directory, "freezer.state").write_text("THAWED")
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for directory in self.cgroups():
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
            time.sleep(0.01)

    def _write_spec(self, *, own_pid_namespace: bool) -> None:
        path = self.bundle / "config.json"
        path.unlink(missing_ok=True)  # runc refuses to overwrite one
        subprocess.run(["runc", "spec"], cwd=self.bundle, check=True)
        spec: dict[str, Any] = json.loads(path.read_text())
        spec["process"].update(terminal=False, args=list(_FOREVER), env=["PATH=/bin"])
        spec["linux"]["cgroupsPath"] = f"/{self.id}"
        if not own_pid_namespace:
            namespaces: Sequence[dict[str, str]] = spec["linux"]["namespaces"]
            spec["linux"]["namespaces"] = [n for n in namespaces if n["type"] != "pid"]
        # The cleanup does not depend on sysfs and its masked paths.
        spec["mounts"] = [m for m in spec["mounts"] if m["destination"] in ("/proc", "/dev")]
        path.write_text(json.dumps(spec))


@contextlib.contextmanager
def container(
    bundle: Path, root: Path, *, runtime: str = "runc", own_pid_namespace: bool = True
) -> Iterator[Container]:
    """Make a container, and remove it after the block."""
    made = Container(bundle, root, runtime=runtime, own_pid_namespace=own_pid_namespace)
    try:
        yield made
    finally:
        made.close()


def has_ended(pid: int) -> bool:
    """Return whether a process has exited; it may still be a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
