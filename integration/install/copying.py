"""Copy a directory or an archive to a complete, verified tree.

From a directory we copy only the files in the tree's own list. In an archive, every member has to
be a file, a directory or a link below one top directory, with a name that does not lead outside of
it; anything else is refused. Owners, and modes other than "executable", are ignored. Then the copy
is compared with the list: a file that is not listed, or that differs, stops the installation.

Source: tar(5), and the advice in the documentation of Python's tarfile.
"""

from __future__ import annotations

import errno
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Final

from integration.errors import TreeError
from integration.install.errors import (
    ArchiveRefused,
    InstallError,
    NoSpace,
    SourceBroken,
    SourceMissing,
    StepFailed,
)
from integration.tree import MANIFEST, Tree, read_tree, verify

LARGEST: Final = 2 << 30
"""The largest unpacked size of an archive, in bytes."""

MOST: Final = 100_000
"""The highest number of members of an archive."""

_DIRECTORY_MODE: Final = 0o755
_FILE_MODE: Final = 0o644
_PROGRAM_MODE: Final = 0o755
_CHUNK: Final = 1 << 20
_MARGIN: Final = 16 << 20
_BLOCK: Final = 4096
_REPORT_EVERY: Final = 500
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def is_archive(source: str) -> bool:
    """Whether a source is an archive rather than a directory."""
    return os.path.isfile(source)


def inspect_source(source: str) -> tuple[Tree, int]:
    """Read a source's tree description and compute the space it needs.

    Args:
        source: a tree's directory, or an archive of one.

    Returns:
        The tree, and the space in bytes, including file system overhead.

    Raises:
        SourceMissing: the source does not exist or is not a tree.
        SourceBroken: its description is not valid.
        ArchiveRefused: it is not an archive of a tree.
        StepFailed: the archive cannot be read, or no temporary file can be written.
    """
    if is_archive(source):
        try:
            return _inspect_archive(source)
        except OSError as error:
            where = f"{error.filename}: " if error.filename not in {None, source} else ""
            raise StepFailed(
                f"to read {source}",
                found=f"{where}{os.strerror(error.errno or 0).lower()}",
                do="check that root may read it, and that /tmp has room",
            ) from error
    tree = source_tree(source)
    sizes = [_size(os.path.join(source, name)) for name in tree.files]
    return tree, sum(sizes) + len(sizes) * _BLOCK + _MARGIN


def source_tree(source: str) -> Tree:
    """Read the tree.json of a directory that will be installed.

    Raises:
        SourceMissing: the directory does not exist or is not a tree.
        SourceBroken: its tree.json is not valid.
    """
    if not os.path.exists(os.path.join(source, MANIFEST)):
        raise SourceMissing(
            f"to install {source}",
            found=_source_problem(source),
            do="name a tree or an archive built by make dist",
        )
    return _read(source)


def copy_tree(
    tree: Tree, source: str, target: str, say: Callable[[str], None] = lambda _: None
) -> None:
    """Copy the files in a tree's list, and nothing else.

    Args:
        tree: the tree's description.
        source: its directory.
        target: an empty directory.
        say: receives progress messages.

    Raises:
        SourceBroken: a file is missing or is not a regular file.
        NoSpace: the file system is full.
    """
    links = {name for name, what in tree.files.items() if what.startswith("link:")}
    with _writing(target):
        os.chmod(target, _DIRECTORY_MODE)
        names = (MANIFEST, *tree.files)
        for count, name in enumerate(names):
            if count and not count % _REPORT_EVERY:
                say(f"copied {count} of {len(names)} files")
            if not links.isdisjoint(_parents(name)):
                raise SourceBroken(f"to copy {source}", found=f"{name!r} is below a link")
            path = os.path.join(target, name)
            os.makedirs(os.path.dirname(path), mode=_DIRECTORY_MODE, exist_ok=True)
            _copy(os.path.join(source, name), path)


def unpack(archive: str, target: str) -> Tree:
    """Unpack an archive of a tree.

    Args:
        archive: the archive's path.
        target: an empty directory.

    Returns:
        The tree's description.

    Raises:
        ArchiveRefused: it is not an archive of a tree.
        NoSpace: the file system is full.
    """
    with _writing(target), _opened(archive) as members:
        os.chmod(target, _DIRECTORY_MODE)
        _unpack(members, archive, target)
    if not os.path.exists(os.path.join(target, MANIFEST)):
        raise _refused(archive, f"its top directory has no {MANIFEST}")
    return _read(target, archive)


def verify_copy(tree: Tree, target: str, name: str) -> None:
    """Check that a copy is identical to the source tree.

    Args:
        tree: the source's description.
        target: the copy.
        name: the name of the installed tree.

    Raises:
        SourceBroken: the copy differs.
    """
    try:
        copied = verify(target)
    except TreeError as error:
        raise SourceBroken(
            f"to install {name}", found=error.found, do="build or fetch it again"
        ) from error
    if copied.digest != tree.digest or not name.startswith(tree.name):
        raise SourceBroken(
            f"to install {name}",
            found=f"the source has changed meanwhile to {copied.name}",
            do="run it again",
        )


def _source_problem(source: str) -> str:
    """Return why a source is not a tree."""
    if os.path.isdir(source):
        return f"it has no {MANIFEST}"
    return "not a directory or file" if os.path.lexists(source) else "no such file or directory"


def _read(path: str, archive: str = "") -> Tree:
    """Read a tree's list; errors name the archive, not the temporary directory."""
    try:
        return read_tree(path)
    except TreeError as error:
        found = error.found.replace(f"{path}/", "") if archive else error.found
        raise SourceBroken(
            f"to install {archive or path}", found=found, do="build or fetch it again"
        ) from error


class _Corrupt(Exception):
    """A compressed stream that is truncated or damaged."""


def _inspect_archive(archive: str) -> tuple[Tree, int]:
    size, top, found = _MARGIN, "", False
    with tempfile.TemporaryDirectory(prefix="nvshim-") as folder, _opened(archive) as members:
        for member in _members(members):
            name, top = _name(archive, member, top)
            size += member.size + _BLOCK
            if name == MANIFEST and member.isreg() and not found:
                content = members.extractfile(member)
                if content is not None:
                    _write(content, os.path.join(folder, MANIFEST), program=False)
                    found = True
        if not found:
            raise _refused(archive, f"its top directory has no {MANIFEST}")
        return _read(folder, archive), size


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0  # the copy will report it


@contextmanager
def _opened(archive: str) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive) as members:
            yield members
    except (tarfile.TarError, EOFError, _Corrupt) as error:
        raise ArchiveRefused(
            f"to unpack {archive}", found=f"it is damaged: {error}", do="fetch it again"
        ) from error


def _unpack(members: tarfile.TarFile, archive: str, target: str) -> None:
    links: set[str] = set()
    total = count = 0
    top = ""
    for member in _members(members):
        count += 1
        total += member.size
        if count > MOST or total > LARGEST:
            raise _refused(archive, f"it has more than {MOST} members or {LARGEST >> 20} MiB")
        name, first = _name(archive, member, top)
        top = first
        if not name:
            continue
        path = os.path.join(target, name)
        if not links.isdisjoint(_parents(name)):
            raise _refused(archive, f"{member.name!r} is below a link")
        os.makedirs(os.path.dirname(path), mode=_DIRECTORY_MODE, exist_ok=True)
        if member.isdir():
            os.makedirs(path, mode=_DIRECTORY_MODE, exist_ok=True)
        elif member.issym():
            _check_link(archive, name, member.linkname)
            links.add(name)
            os.symlink(member.linkname, path)
        elif member.isreg():
            content = members.extractfile(member)
            if content is None:  # tarfile returns None for a member that is not a file
                raise _refused(archive, f"{member.name!r} has no content")
            _write(content, path, program=bool(member.mode & stat.S_IXUSR))
        else:
            raise _refused(archive, f"{member.name!r} is not a file, directory or link")


def _members(members: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    with _decompressing():
        yield from members


@contextmanager
def _decompressing() -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise _Corrupt(str(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _Corrupt(str(error)) from error  # raised by gzip and bz2, without a number


def _name(archive: str, member: tarfile.TarInfo, top: str) -> tuple[str, str]:
    """Return a member's path inside the top directory, and the top directory's name."""
    parts = [part for part in member.name.split("/") if part not in {"", "."}]
    if member.name.startswith("/") or ".." in parts or "\0" in member.name:
        raise _refused(archive, f"{member.name!r} leads out of it")
    if not parts:
        return "", top
    if top and parts[0] != top:
        raise _refused(archive, f"it has more than one top directory: {top!r}, {member.name!r}")
    if len(parts) == 1 and not member.isdir():
        raise _refused(archive, f"{member.name!r} is at its top, where only a directory belongs")
    return "/".join(parts[1:]), parts[0]


def _parents(name: str) -> set[str]:
    """Return the directories above a path in a tree."""
    parts = name.split("/")
    return {"/".join(parts[:length]) for length in range(1, len(parts))}


def _check_link(archive: str, name: str, target: str) -> None:
    resolved = os.path.normpath(os.path.join(os.path.dirname(name), target))
    if os.path.isabs(target) or resolved == ".." or resolved.startswith("../"):
        raise _refused(archive, f"the link {name!r} to {target!r} leads out of it")


def _refused(archive: str, what: str) -> InstallError:
    return ArchiveRefused(f"to unpack {archive}", found=what, do="fetch it from where it was built")


def _copy(source: str, target: str) -> None:
    try:
        status = os.lstat(source)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(source), target)
            return
        if not stat.S_ISREG(status.st_mode):
            raise SourceBroken(f"to copy {source}", found="it is not a file", do="build it again")
        with open(source, "rb") as content:
            _write(content, target, program=bool(status.st_mode & stat.S_IXUSR))
    except FileNotFoundError as error:
        raise SourceBroken(
            f"to copy {source}", found="it is missing", do="build it again"
        ) from error


def _write(content: IO[bytes], path: str, *, program: bool) -> None:
    # O_EXCL: a name that is listed twice is an error.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        with _decompressing():
            shutil.copyfileobj(content, file, _CHUNK)
        os.fchmod(fd, _PROGRAM_MODE if program else _FILE_MODE)


@contextmanager
def _writing(target: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(
                f"to write {target}",
                found=os.strerror(error.errno or 0).lower(),
                do="make room, or choose another --prefix",
            ) from error
        if isinstance(error, FileExistsError):
            raise SourceBroken(
                f"to write {error.filename}", found="it is listed twice", do="build it again"
            ) from error
        raise
