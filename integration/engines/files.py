"""Files that are exchanged: what is to become of each, and doing it so that a crash harms none.

Rules
- A :class:`Change` is a value: what was read, and what is to be there instead. To show it is to
  print it, and to do it is :func:`apply`.
- Each file is replaced whole, by a name that changes its file in one step. Between two files
  everything is valid too: what others refer to is written before the reference, and removed after.
- A link is written through: what it points to is replaced, and the link stays.
- Owner, mode and extended attributes (SELinux) of a file stay as they were.
- Who changes files holds a lock on the directory of the first of them; and what was read for the
  plan must still be there when it is done.

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
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from integration.engines.errors import (
    ChangedMeanwhile,
    ConfigLocked,
    ConfigUnreadable,
    WriteFailed,
)
from integration.files import remove_file, replace_file, sweep

_MODE: Final = 0o644


class Need(StrEnum):
    """What an engine needs before it knows of a change."""

    NOTHING = "nothing"
    RELOAD = "reload"
    RESTART = "restart"


@dataclass(frozen=True, slots=True)
class FileChange:
    """What becomes of a file."""

    path: str  # as the person named it; it may be a link
    old: bytes | None  # its content; None if there is none
    new: bytes | None  # what is to be there instead; None for nothing
    mode: int = _MODE  # of a file that is made; if only root may read it, no difference is shown
    # that are made for the file, or removed with it if they are empty then; each before those below
    # it
    directories: tuple[str, ...] = ()
    # where it is written before it is renamed, if that is on the same file system; None for the
    # directory that it is in. For one that is in a directory of which an engine may read every
    # file.
    staging: str | None = None

    @property
    def action(self) -> str:
        """What happens to it, in one word."""
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
        """What makes a file that which it is to be; None if it is so already.

        Args:
            path: of the file.
            old: what is in it; None for no file.
            new: what is to be in it; likewise.
            made: the directories that were made for it, if it goes.
            mode: see the class.
            staging: likewise.
        """
        if old == new:
            return None
        before, after = (None if text is None else text.encode() for text in (old, new))
        directories = () if old is not None else missing_directories(path)
        directories = tuple(made) if new is None else directories
        return cls(path, before, after, _MODE if mode is None else mode, directories, staging)

    def diff(self) -> str:
        """The change as ``diff -u`` shows it."""
        if not self.mode & 0o044:
            return ""
        old, new = (_lines(content) for content in (self.old, self.new))
        names = ["/dev/null" if c is None else self.path for c in (self.old, self.new)]
        return "".join(difflib.unified_diff(old, new, names[0], names[1]))


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be done to an engine's configuration."""

    engine: str  # whose
    # what becomes of each file that changes, in the order in which it is done
    files: tuple[FileChange, ...]
    need: Need  # what the engine needs to know of it
    why: str  # that in a sentence
    lock: str  # a path in whose directory the lock is
    notes: tuple[str, ...] = ()  # what a person should know besides
    # what a running engine has to say of itself once it knows of all this, as
    # integration.cri.engine.Engine.lacks compares it; empty if that is not known
    in_force: Mapping[str, Any] = field(default_factory=dict)

    def diff(self) -> str:
        """All of it as ``diff -u`` shows it; empty if nothing changes."""
        return "".join(file.diff() for file in self.files)


def read(path: str) -> bytes | None:
    """A file's content.

    Args:
        path: of it; a link is followed.

    Returns:
        None if there is none.

    Raises:
        ConfigUnreadable: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigUnreadable(
            f"to read {path}", found=error.strerror or str(error), do="run this as root"
            if isinstance(error, PermissionError) else "",
        ) from error  # fmt: skip


def read_text(path: str, content: bytes) -> str:
    """Content as text.

    Args:
        path: whose.
        content: bytes.

    Raises:
        ConfigUnreadable: it is no UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigUnreadable(
            f"to read {path}", found=f"it is no text in UTF-8 (byte {error.start})"
        ) from error


def missing_directories(path: str) -> tuple[str, ...]:
    """The directories above a path that do not exist, each before those below it."""
    missing: list[str] = []
    directory = os.path.dirname(os.path.realpath(path))
    while directory and not os.path.isdir(directory) and directory != os.path.dirname(directory):
        missing.insert(0, directory)
        directory = os.path.dirname(directory)
    return tuple(missing)


def apply(change: Change) -> None:
    """Do what a plan says.

    Args:
        change: the plan. Nothing happens if it changes nothing.

    Raises:
        ConfigLocked: another one is at work.
        ChangedMeanwhile: a file is not as the plan found it. Nothing was done.
        WriteFailed: a file could not be written. Those before it in the plan are written, those
            after it are not.
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
        for file in change.files:
            try:
                _replace(file)
            except OSError as error:
                verb = "remove" if file.new is None else "write"
                raise WriteFailed(
                    f"to {verb} {file.path}",
                    found=error.strerror or str(error),
                    do=_REMEDIES.get(error.errno or 0, ""),
                ) from error


_REMEDIES: Final = {
    errno.EACCES: "run this as root",
    errno.EPERM: "run this as root, and see whether the file is immutable (lsattr)",
    errno.EROFS: "choose a place that can be written, or make this one writable",
    errno.EBUSY: "it is mounted by itself: mount its directory instead",
    errno.ENOSPC: "make room on the file system",
}


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock: on the nearest directory above the path, so that nothing is left of it."""
    directory = os.path.dirname(os.path.realpath(path))
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise WriteFailed(
            f"the lock on {directory}",
            found=error.strerror or str(error),
            do=_REMEDIES.get(error.errno or 0, ""),
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigLocked(
            f"the lock on {directory}", found="another nvshim configure holds it",
            do="wait until it has ended",
        ) from error  # fmt: skip
    try:
        yield
    finally:
        os.close(descriptor)


def _replace(change: FileChange) -> None:
    # Only who holds the lock writes these files: what lies there was left by one that was killed.
    sweep(change.path, staging=change.staging)
    if change.new is not None:
        replace_file(change.path, change.new, mode=change.mode, staging=change.staging)
        return
    remove_file(change.path)
    for directory in reversed(change.directories):
        # Somebody else's files, or a mount: it is not only ours any more.
        with contextlib.suppress(OSError):
            os.rmdir(directory)


def _lines(content: bytes | None) -> Sequence[str]:
    if content is None:
        return []
    lines = re.findall(r"[^\n]*\n|[^\n]+", content.decode(errors="replace"))
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n\\ No newline at end of file\n"
    return lines
