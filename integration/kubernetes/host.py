"""The node's root: its files, and programs that are run in it.

The root is mounted in the container, and its links mean places in it. So every path is resolved
by the kernel with that directory as "/", and nothing of it is looked up from the container's own
root. A program of the node runs with that root as its own: it sees what a person would see.

Rules
- A file is replaced whole: written beside its place, and renamed. What is written here is below
  /run, which is gone after a crash anyway; what has to be on the disk is ``nvshim install``'s.
- A file of ours is never a link: whoever put one there is not followed.
- A program gets a fixed environment, no input, and a limit of time; what it has started is ended
  with it.

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
    # Of all that is not read-only, what is surely there.
    "TMPDIR": STATE,
    # Else systemctl does nothing in a root that is not the one of process 1.
    "SYSTEMD_IGNORE_CHROOT": "1",
}
_LONGEST_PID: Final = 32


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program of the node ended."""

    code: int  # its exit status; negative for a signal
    stdout: str  # what it wrote there
    stderr: str  # likewise

    @property
    def last_words(self) -> str:
        """The last line that it wrote."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1] if lines else "it said nothing"


class Host:
    """A node's root. As a context it is closed at the end.

    A ``path`` is one on the node, whose links are followed on it. What the node does not let us do
    is a HostUnusable, unless a method says otherwise.

    Args:
        root: where it is; a directory.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self._fd = os.open(root, _DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise HostUnusable(
                f"the node's root at {root}",
                found=error.strerror or str(error),
                do="mount the node's / there, or name another place in HOST_ROOT_MOUNT",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def is_own(self) -> bool:
        """Whether it is the root that this process has."""
        return os.path.samestat(os.fstat(self._fd), os.stat("/"))

    def read(self, path: str) -> bytes | None:
        """A file's content; None if there is none."""
        with (
            _usable(f"to read {path}"),
            suppress(FileNotFoundError),
            open(open_in_root(self._fd, path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file,
        ):
            return file.read()
        return None

    def write(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file, whole or not at all. Directories on the way are made."""
        name = os.path.basename(path)
        new = f".{name}.new"
        asked = f"to write {path}"
        with _usable(asked), self.directory(os.path.dirname(path), make=True) as directory:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=directory)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(new, flags, mode, dir_fd=directory), "wb") as file:
                file.write(content)
            os.rename(new, name, src_dir_fd=directory, dst_dir_fd=directory)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there; of a link, not what it leads to."""
        nothing, parent = suppress(FileNotFoundError), self.directory(os.path.dirname(path))
        with _usable(f"to remove {path}"), nothing, parent as directory:
            os.unlink(os.path.basename(path), dir_fd=directory)

    def identity(self, path: str) -> tuple[int, ...] | None:
        """What differs once a file or directory was changed or replaced; None if there is none."""
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
        """The paths of a directory and of what is in it; its own if it is not there."""
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
        """A directory, as a descriptor that is closed at the end.

        Args:
            make: whether it is made, with those on the way.

        Raises:
            OSError: there is none, or it cannot be made.
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
        """Take a lock that another installer would take too, and say in the file who has it.

        Returns:
            A descriptor; the lock is held as long as it is open.

        Raises:
            InstallerRunning: somebody else has it.
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
                raise _unusable(f"the lock {path}", error) from error
            raise InstallerRunning(
                f"the lock {path}",
                found=f"another installer has it, process {holder.strip() or 'unknown'}",
                do="let one installer work on a node: remove the other DaemonSet, or turn the GPU "
                "operator's toolkit off",
            ) from None
        return fd

    def copy_tree(self, source: str, path: str) -> None:
        """Copy a directory of the container to the node; what is there is removed first."""
        self.remove_tree(path)
        asked = f"to copy {source} to {path}"
        with _usable(asked), self.directory(os.path.dirname(path), make=True) as directory:
            # The way through the descriptor leads nowhere else, whatever is renamed meanwhile.
            place = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
            shutil.copytree(source, place, symlinks=True)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all that is in it, if it is there."""
        nothing, parent = suppress(FileNotFoundError), self.directory(os.path.dirname(path))
        with _usable(f"to remove {path}"), nothing, parent as directory:
            shutil.rmtree(os.path.basename(path), dir_fd=directory)

    def remove_if_empty(self, path: str) -> None:
        """Remove a directory if it is there and nothing is in it."""
        with suppress(OSError), self.directory(os.path.dirname(path)) as directory:
            os.rmdir(os.path.basename(path), dir_fd=directory)

    def run(
        self, argv: Sequence[str], *, timeout: float, environment: Mapping[str, str] | None = None
    ) -> Ended:
        """Run a program of the node in the node's root, to its end.

        Args:
            argv: the program by its path on the node, and its arguments.
            timeout: seconds it may take.
            environment: more variables than the usual ones.

        Raises:
            HostUnusable: the root cannot be entered, or the program is not there.
            HostCommandFailed: it took too long. It is ended, with what it has started.
        """
        asked = " ".join(argv)
        is_own = self.is_own
        process = None
        # Who is told to end just now has to know by then what ends with it.
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
                    preexec_fn=prepare,  # noqa: PLW1509 - there is one thread
                )  # fmt: skip
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise HostCommandFailed(asked, found=f"no end within {timeout:g} s") from None
        except (OSError, subprocess.SubprocessError) as error:
            raise HostUnusable(
                asked,
                found=f"it cannot be run in {self.root}: {error}",
                do="the installer needs the capability SYS_CHROOT, and the node's root",
            ) from error
        finally:
            if process is not None:
                # Also if we are told to end meanwhile. Nothing of it is to go on by itself.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with process:
                    pass
        return Ended(process.returncode, _text(stdout), _text(stderr))

    def enter(self) -> None:
        """Make the node's root that of this process, which has one thread."""
        os.fchdir(self._fd)
        os.chroot(".")


def _text(output: bytes) -> str:
    return output.decode(errors="replace")


@contextmanager
def _usable(asked: str) -> Iterator[None]:
    """What fails meanwhile is what the node does not let us do."""
    try:
        yield
    except OSError as error:
        raise _unusable(asked, error) from error


def _unusable(asked: str, error: Exception) -> HostUnusable:
    found = getattr(error, "strerror", None) or str(error)
    return HostUnusable(
        asked, found=found, do="mount that directory of the node, and not read-only"
    )
