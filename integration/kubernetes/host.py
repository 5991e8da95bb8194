"""The node's root: access its files and run commands in it.

The root is mounted in the container, and its symbolic links refer to host paths. The kernel
therefore resolves every path with that directory as "/", never with the container's root. A host
command runs with the node's root as its own, so it sees what an operator sees.

Rules
- A file is replaced atomically: written next to its target and renamed. Files written here are
  below /run, which does not survive a crash, so nothing is synced; ``nvshim install`` syncs the
  rest.
- A file of ours is never a link; if there is a link in its place, it is not followed.
- A command gets a fixed environment, no input and a time limit. Its children are killed with it.

Source: openat2(2) RESOLVE_IN_ROOT; chroot(2).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self

from hooks.image.openat2 import open_in_root
from integration.kubernetes.errors import HostCommandFailed, HostUnusable, InstallerRunning
from integration.kubernetes.settings import STATE

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY
ENVIRONMENT: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    # A writable directory that always exists.
    "TMPDIR": STATE,
    # Otherwise systemctl does nothing in a root other than that of process 1.
    "SYSTEMD_IGNORE_CHROOT": "1",
}
_LONGEST_PID: Final = 32


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a host command."""

    code: int  # the exit status; negative for a signal
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line of its output, preferably of stderr."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1] if lines else "it printed nothing"


class Host:
    """A node's root; the context closes it.

    Each ``path`` is a host path, and its links are followed on the host. Failures raise
    HostUnusable unless a method documents otherwise.

    Args:
        root: the directory where the node's root is mounted.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self._fd = os.open(root, _DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise HostUnusable(
                f"to open the node's root at {root}",
                found=error.strerror or str(error),
                do="mount the node's / there, or set HOST_ROOT_MOUNT to its mount point",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def is_own(self) -> bool:
        """Whether it is this process's own root."""
        return os.path.samestat(os.fstat(self._fd), os.stat("/"))

    def read(self, path: str) -> bytes | None:
        """Return a file's content; None if it does not exist."""
        with (
            _host_errors(f"to read {path}"),
            suppress(FileNotFoundError),
            open(open_in_root(self._fd, path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file,
        ):
            return file.read()
        return None

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file atomically, and create its parent directories."""
        name = os.path.basename(path)
        new = f".{name}.new"
        asked = f"to write {path}"
        with _host_errors(asked), self.directory(os.path.dirname(path), make=True) as directory:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=directory)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(new, flags, mode, dir_fd=directory), "wb") as file:
                file.write(content)
            os.rename(new, name, src_dir_fd=directory, dst_dir_fd=directory)

    def remove(self, path: str) -> None:
        """Remove a file if it exists; of a link, not its target."""
        nothing, parent = suppress(FileNotFoundError), self.directory(os.path.dirname(path))
        with _host_errors(f"to remove {path}"), nothing, parent as directory:
            os.unlink(os.path.basename(path), dir_fd=directory)

    def identity(self, path: str) -> tuple[int, ...] | None:
        """Return a value that changes when the file is changed or replaced; None if missing."""
        try:
            fd = open_in_root(self._fd, path, os.O_PATH)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def files(self, path: str) -> list[str]:
        """Return a directory's path and its entries' paths; only its own if it is missing."""
        try:
            fd = open_in_root(self._fd, path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return [path]
        try:
            return [path, *(os.path.join(path, name) for name in sorted(os.listdir(fd)))]
        finally:
            os.close(fd)

    @contextmanager
    def directory(self, path: str, *, make: bool = False) -> Iterator[int]:
        """Open a directory and yield its descriptor.

        Args:
            make: create the directory and its parents.

        Raises:
            OSError: the directory does not exist, or cannot be created.
        """
        fd = self._open_directory(path, make=make)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_directory(self, path: str, *, make: bool) -> int:
        try:
            return open_in_root(self._fd, path, _DIRECTORY)
        except FileNotFoundError:
            if not make:
                raise
        parent = self._open_directory(os.path.dirname(path), make=True)
        try:
            with suppress(FileExistsError):
                os.mkdir(os.path.basename(path), 0o755, dir_fd=parent)
        finally:
            os.close(parent)
        return open_in_root(self._fd, path, _DIRECTORY)

    def lock(self, path: str) -> int:
        """Lock the file that all installers lock, and write our pid into it.

        Returns:
            A descriptor; the lock is held as long as it is open.

        Raises:
            InstallerRunning: another installer holds the lock.
        """
        fd = -1
        try:
            with self.directory(os.path.dirname(path), make=True) as directory:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(os.path.basename(path), flags, 0o644, dir_fd=directory)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            holder = os.pread(fd, _LONGEST_PID, 0).decode(errors="replace") if fd >= 0 else ""
            if fd >= 0:
                os.close(fd)
            if error.errno not in {errno.EAGAIN, errno.EACCES} or fd < 0:
                raise _unusable(f"to lock {path}", error) from error
            raise InstallerRunning(
                f"to lock {path}",
                found=f"another installer holds the lock (process {holder.strip() or 'unknown'})",
                do="run one installer per node: remove the other DaemonSet, or disable the GPU "
                "operator's toolkit",
            ) from None
        return fd

    def copy_tree(self, source: str, path: str) -> None:
        """Copy a directory from the container to the node, and replace an existing one."""
        self.remove_tree(path)
        asked = f"to copy {source} to {path}"
        with _host_errors(asked), self.directory(os.path.dirname(path), make=True) as directory:
            # A path through the descriptor cannot be redirected by a rename.
            target = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
            shutil.copytree(source, target, symlinks=True)

    def make_directory(self, path: str) -> None:
        """Create a directory and its parents, unless it exists."""
        with _host_errors(f"to create {path}"), self.directory(path, make=True):
            pass

    def remove_tree(self, path: str) -> None:
        """Remove a directory tree if it exists."""
        nothing, parent = suppress(FileNotFoundError), self.directory(os.path.dirname(path))
        with _host_errors(f"to remove {path}"), nothing, parent as directory:
            shutil.rmtree(os.path.basename(path), dir_fd=directory)

    def remove_if_empty(self, path: str) -> None:
        """Remove a directory if it exists and is empty."""
        with suppress(OSError), self.directory(os.path.dirname(path)) as directory:
            os.rmdir(os.path.basename(path), dir_fd=directory)

    def run(
        self, argv: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None
    ) -> CommandResult:
        """Run a host command in the node's root and wait for it.

        Args:
            argv: the program's path on the node, and its arguments.
            timeout: the time limit in seconds.
            environment: variables to add to the fixed environment.

        Raises:
            HostUnusable: the root cannot be entered, or the program cannot be executed.
            HostCommandFailed: the time limit passed; the command and its children were killed.
        """
        asked = " ".join(argv)
        is_own = self.is_own
        process = None
        # A stop signal must not arrive between the fork and the assignment of ``process``.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if not is_own:
                self.enter()

        try:
            try:
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env={**ENVIRONMENT, **(environment or {})}, start_new_session=True,
                    cwd="/" if is_own else None,
                    preexec_fn=prepare,  # noqa: PLW1509 - there is only one thread
                )  # fmt: skip
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise HostCommandFailed(asked, found=f"did not finish within {timeout:g} s") from None
        except (OSError, subprocess.SubprocessError) as error:
            raise HostUnusable(
                asked,
                found=f"cannot be run in {self.root}: {error}",
                do="give the installer the capability SYS_CHROOT and mount the node's root",
            ) from error
        finally:
            if process is not None:
                # Also after a stop signal: no child of the command may outlive it.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with process:
                    pass
        return CommandResult(process.returncode, _text(stdout), _text(stderr))

    def enter(self) -> None:
        """Change this single-threaded process's root to the node's root."""
        os.fchdir(self._fd)
        os.chroot(".")


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


@contextmanager
def _host_errors(asked: str) -> Iterator[None]:
    """Turn an OSError into HostUnusable."""
    try:
        yield
    except OSError as error:
        raise _unusable(asked, error) from error


def _unusable(asked: str, error: Exception) -> HostUnusable:
    found = getattr(error, "strerror", None) or str(error)
    return HostUnusable(asked, found=found, do="mount that directory of the node, writable")
