"""Replace files so that a crash at any point leaves a valid configuration.

Rules
- A :class:`Change` is a value: the contents that were read, and the contents to write. To preview
  it, print it; to write it, call :func:`apply`.
- Each file is replaced as a whole with a rename. The state between two renames is valid too: a file
  is written before any reference to it, and removed after the last one.
- A symbolic link is kept, and the file that it points to is replaced.
- Owner, mode and extended attributes (SELinux) of a file stay as they were.
- The writer holds a lock on the directory of the first file. The files must still have the contents
  that the plan was based on.

Source: rename(2), flock(2), fsync(2).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from hooks.named_files import read_named
from integration.engines.errors import (
    ChangedMeanwhile,
    ConfigLocked,
    ConfigUnreadable,
    EnginesError,
    WriteFailed,
)
from integration.files import remove_file, replace_file, sweep

_MODE: Final = 0o644
_LARGEST: Final = 16 << 20


class Need(StrEnum):
    """What an engine needs to pick up a change."""

    NOTHING = "nothing"
    RELOAD = "reload"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class FileChange:
    """The change of one file."""

    path: str  # as the user named it; it may be a link
    old: bytes | None  # the content now; None if there is no file
    new: bytes | None  # the content afterwards; None removes the file
    mode: int = _MODE  # of a new file; and who may see the content
    # directories created for the file, or removed with it if they are empty then; parents first
    directories: tuple[str, ...] = ()
    # the directory for the temporary file, if it is on the same mount; None for the directory
    # of the file itself. Used where an engine may read every file of the directory.
    staging: str | None = None

    @property
    def action(self) -> str:
        """Return what happens to it, in one word."""
        if self.old is None:
            return "created"
        return "removed" if self.new is None else "changed"

    @classmethod
    def of(
        cls,
        path: str,
        old: str | None,
        new: str | None,
        *,
        made: Sequence[str] = (),
        mode: int | None = None,
        staging: str | None = None,
    ) -> FileChange | None:
        """Return the change from old to new content; None if they are equal.

        Args:
            path: the file.
            old: its content; None for no file.
            new: the desired content; None for no file.
            made: the directories that were created for it; a removal deletes them.
            mode: see the class.
            staging: see the class.
        """
        if old == new:
            return None
        before, after = (None if text is None else text.encode() for text in (old, new))
        directories = () if old is not None else missing_directories(path)
        directories = tuple(made) if new is None else directories
        mode = _MODE if mode is None else mode
        if old is not None:
            with contextlib.suppress(OSError):
                mode &= os.stat(path).st_mode
        return cls(path, before, after, mode, directories, staging)

    def diff(self) -> str:
        """Return the change in the format of ``diff -u``; "" if not every user may read the file.

        The file may hold passwords of registries and proxies, and output ends up in logs and
        tickets.
        """
        if not self.mode & 0o004:
            return ""
        old, new = (_lines(content) for content in (self.old, self.new))
        names = ["/dev/null" if c is None else self.path for c in (self.old, self.new)]
        return "".join(difflib.unified_diff(old, new, names[0], names[1]))


@dataclass(frozen=True, slots=True)
class Change:
    """A change of an engine's configuration."""

    engine: str
    # the changed files, in the order in which they are written
    files: tuple[FileChange, ...]
    need: Need  # what the engine needs to pick it up
    why: str  # the reason, as a sentence
    lock: str  # a path; the lock is on its directory
    notes: tuple[str, ...] = ()  # further facts for the user
    # what a running engine reports once the change is in effect, in the form that
    # integration.cri.engine.Engine.lacks compares; empty if unknown
    in_force: Mapping[str, Any] = field(default_factory=dict)

    def diff(self) -> str:
        """Return all changes as ``diff -u`` shows them; empty if nothing changes."""
        return "".join(
            file.diff()
            or f"{file.path} changes; its content is not shown, as it may have secrets\n"
            for file in self.files
        )


def read(path: str) -> bytes | None:
    """Return a file's content.

    Args:
        path: the file; a link is followed.

    Returns:
        None if there is no file.

    Raises:
        ConfigUnreadable: it cannot be read.
    """
    try:
        return read_named(path, _LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigUnreadable(
            f"to read {path}", found=error.strerror or str(error), do="run this as root"
            if isinstance(error, PermissionError) else "",
        ) from error  # fmt: skip


def read_text(path: str, content: bytes) -> str:
    """Return content as text.

    Args:
        path: the file that the content came from.
        content: the bytes.

    Raises:
        ConfigUnreadable: the content is not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigUnreadable(
            f"to read {path}", found=f"it is not UTF-8 text (byte {error.start})"
        ) from error


def missing_directories(path: str) -> tuple[str, ...]:
    """Return the directories above a path that do not exist, parents first."""
    missing: list[str] = []
    directory = os.path.dirname(os.path.realpath(path))
    while directory and not os.path.isdir(directory) and directory != os.path.dirname(directory):
        missing.insert(0, directory)
        directory = os.path.dirname(directory)
    return tuple(missing)


def apply(change: Change) -> None:
    """Write the files of a change.

    Args:
        change: the plan. An empty one does nothing.

    Raises:
        ConfigLocked: another process is applying a change.
        ChangedMeanwhile: a file differs from what the plan read. Nothing was written.
        WriteFailed: a file could not be written. The files before it in the plan were restored.
    """
    if not change.files:
        return
    with _locked(change.lock):
        for file in change.files:
            if read(file.path) != file.old:
                raise ChangedMeanwhile(
                    f"to write {file.path}", found="it has changed since it was read",
                    do="try again",
                )  # fmt: skip
        for done, file in enumerate(change.files):
            try:
                _replace(file)
            except OSError as error:
                _undo(change.files[: done + 1])
                verb = "remove" if file.new is None else "write"
                raise WriteFailed(
                    f"to {verb} {file.path}",
                    found=error.strerror or str(error),
                    do=_REMEDIES.get(error.errno or 0, ""),
                ) from error


_REMEDIES: Final = {
    errno.EACCES: "run this as root",
    errno.EPERM: "run this as root, and check whether the file is immutable (lsattr)",
    errno.EROFS: "choose a writable path, or make this file system writable",
    errno.EBUSY: "the file is a mount point of its own: mount its directory instead",
    errno.ENOSPC: "make room on the file system",
}


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock. It is on the file's directory, so that no lock file is left behind.

    If the directory is missing, it is created while its nearest existing parent is locked: a
    process that arrives earlier waits for that lock, and one that arrives later waits for the
    directory's own.
    """
    missing = missing_directories(path)
    with contextlib.ExitStack() as held:
        if missing:
            held.callback(os.close, _lock(os.path.dirname(missing[0])))
            held.callback(_remove_empty, missing)
        held.callback(os.close, _lock(os.path.dirname(os.path.realpath(path))))
        yield


def _lock(directory: str) -> int:
    """Lock a directory, and create it if it is missing; return its descriptor."""
    what, descriptor = f"the lock on {directory}", -1
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(directory)):
            return descriptor
        raise BlockingIOError  # the holder has removed it, and made another
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(error, BlockingIOError | FileNotFoundError):
            raise ConfigLocked(
                what, found="another nvshim configure holds it", do="wait until it has finished"
            ) from error
        raise WriteFailed(
            what, found=error.strerror or str(error), do=_REMEDIES.get(error.errno or 0, "")
        ) from error


def _remove_empty(directories: Sequence[str]) -> None:
    for directory in reversed(directories):
        # Not empty, or a mount: then the directory is not only ours.
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _replace(change: FileChange) -> None:
    if change.new is not None:
        replace_file(change.path, change.new, mode=change.mode, staging=change.staging)
        return
    sweep(change.path, staging=change.staging)
    remove_file(change.path)
    _remove_empty(change.directories)


def _undo(files: Sequence[FileChange]) -> None:
    """Restore files of a change where that is possible, the last one first.

    What cannot be restored stays in the record, with which the next run continues.
    """
    for file in reversed(files):
        with contextlib.suppress(OSError, EnginesError):
            if read(file.path) == file.new:  # the last one may not have been written
                _replace(replace(file, old=file.new, new=file.old))
        if file.old is None:
            _remove_empty(file.directories)


def _lines(content: bytes | None) -> Sequence[str]:
    if content is None:
        return []
    lines = re.findall(r"[^\n]*\n|[^\n]+", content.decode(errors="replace"))
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n\\ No newline at end of file\n"
    return lines
