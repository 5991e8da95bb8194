"""The root of a machine that has busybox, but no Python or glibc.

It is a tmpfs in its own mount namespace, with this machine's /proc and /dev mounted in it. It
disappears with the process that holds the namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_DIRECTORIES: Final = ("bin", "dev", "proc", "tmp", "usr/bin", "opt", "etc")
_APPLETS: Final = ("sh", "cat", "sleep", "test")
_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
# A new mount namespace has the mounts of all tests that run now: a file system stays, and its loop
# device, until this copy goes, too.
FORGET_OTHERS: Final = (
    r"sed -n 's|^[^ ]* \(/tmp/nvshim-[^ ]*\) .*|\1|p' /proc/self/mounts | xargs -r umount -lq || :"
)
_HOLD: Final = f'{FORGET_OTHERS}; mount -t tmpfs -o mode=755 tmpfs "$0" && echo ready && exec cat'
_MOUNT: Final = 'mount --bind /dev "$0/dev" && mount --bind /proc "$0/proc"'


class BareRoot:
    """Such a root.

    Attributes:
        inside: its path in its mount namespace.
        path: its path outside of that.
    """

    def __init__(self, inside: str, holder: int) -> None:
        self.inside = inside
        self.path = f"/proc/{holder}/root{inside}"
        self._enter = ("nsenter", f"--mount=/proc/{holder}/ns/mnt", "--")

    def run(self, *argv: str, host: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a program in it until it exits.

        Args:
            host: whether to run a program of this machine, which works on :attr:`inside`.
        """
        return subprocess.run(
            self._words(argv, host=host), env=_ENVIRONMENT, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, check=False, timeout=50,
        )  # fmt: skip

    @contextmanager
    def spawn(self, *argv: str) -> Iterator[subprocess.Popen[str]]:
        """Start a program in it, which runs while the context is open."""
        with subprocess.Popen(
            self._words(argv), env=_ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def _words(self, argv: tuple[str, ...], *, host: bool = False) -> list[str]:
        return [*self._enter, *(() if host else ("chroot", self.inside)), *argv]


@contextmanager
def bare_root(directory: str) -> Iterator[BareRoot]:
    """Make a bare root at an empty directory; needs root."""
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    argv = ["unshare", "--mount", "sh", "-c", _HOLD, directory]
    with subprocess.Popen(argv, **options) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            root = BareRoot(directory, holder.pid)
            for name in _DIRECTORIES:
                os.makedirs(os.path.join(root.path, name))
            shutil.copy("/bin/busybox", os.path.join(root.path, "bin"))
            for name in _APPLETS:
                os.symlink("busybox", os.path.join(root.path, "bin", name))
            done = root.run("sh", "-c", _MOUNT, directory, host=True)
            assert done.returncode == 0, done.stderr
            yield root
        finally:
            holder.kill()
