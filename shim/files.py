"""Read files safely, write them whole, remove trees safely, and check names used in paths.

Only regular files are read, up to a limit, and not through a link. Files are written under another
name and renamed. Trees are removed through descriptors, without following a link or entering a
mount. Ids of containers, execs and sandboxes, and namespaces, become parts of paths.

Source: containerd pkg/identifiers; open(2) O_NOFOLLOW; rename(2); proc(5), /proc/PID/fdinfo.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import Any, Final

from shim.errors import BundleUnusable, InvalidIdentifier, remedy_of

# hashlib loads OpenSSL: 3 ms and 2.5 MB. The C module alone costs nothing, but its name changed
# with Python 3.12, and some builds of Python lack it.
try:
    from _sha2 import sha256  # type: ignore[import-not-found]
except ImportError:
    try:
        from _sha256 import sha256  # type: ignore[import-not-found]
    except ImportError:
        from hashlib import sha256

_ALPHANUMERIC: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_ALLOWED: Final = _ALPHANUMERIC | frozenset("_.-")

LONGEST_ID: Final = 76

CHUNK: Final = 1 << 16


def read(path: str, limit: int) -> bytes:
    """Read a regular file.

    Args:
        path: the file; a link is refused.
        limit: the maximum size in bytes.

    Returns:
        The content.

    Raises:
        BundleUnusable: the file is missing, unreadable, not a regular file, or larger.
    """
    asked = f"to read {path}"
    try:
        # Without O_NONBLOCK, opening a fifo would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        do = remedy_of(error, "start the container through containerd")
        raise BundleUnusable(asked, found=reason(error), do=do) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BundleUnusable(asked, found="not a regular file")
        content = bytearray()
        while chunk := os.read(fd, CHUNK):
            content += chunk
            if len(content) > limit:
                raise BundleUnusable(asked, found=f"more than {limit} bytes")
        return bytes(content)
    except OSError as error:
        raise BundleUnusable(asked, found=reason(error), do=remedy_of(error)) from error
    finally:
        os.close(fd)


def write(path: str, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file so that a reader sees all of it or none.

    Args:
        path: the file; an existing one is replaced.
        content: the new content.
        mode: the permissions, regardless of the umask.

    Raises:
        BundleUnusable: it cannot be written.
    """
    # A process has one writer per name at a time, so the pid makes the name unique.
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        # Truncate it: a predecessor with our pid may have been killed in this function.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600)
        try:
            os.fchmod(fd, mode)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        remove(temporary)
        raise BundleUnusable(
            f"to write {path}", found=reason(error), do=remedy_of(error)
        ) from error


def remove(path: str) -> None:
    """Remove a file, if it exists."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def remove_tree(path: str) -> None:
    """Remove a directory and everything in it, except mounts.

    It descends by descriptors and never through a link, so nobody can redirect it.

    Args:
        path: the directory; it need not exist.

    Raises:
        OSError: something cannot be removed; EBUSY if there is a mount below.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return
    except NotADirectoryError:  # or a link, of which only the link is removed
        os.unlink(path)
        return
    try:
        _empty(fd, _mount_id(fd))
    finally:
        os.close(fd)
    os.rmdir(path)


def _empty(directory: int, mount_id: bytes) -> None:
    with os.scandir(directory) as entries:
        listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in listed:
        if not is_directory:
            os.unlink(name, dir_fd=directory)
            continue
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=directory)
        try:
            # A bind mount can have the same device, but not the same mount id.
            if _mount_id(fd) == mount_id:
                _empty(fd, mount_id)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=directory)  # EBUSY if something is mounted on it


def _mount_id(fd: int) -> bytes:
    """Return the mount that an open directory is on. Source: proc(5), /proc/PID/fdinfo."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return line
    return b""


def parse_object(content: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        content: UTF-8 text.
        path: the file that it comes from, for messages.

    Returns:
        The object.

    Raises:
        BundleUnusable: it is not a JSON object.
    """
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise BundleUnusable(f"to parse {path}", found=f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BundleUnusable(f"to parse {path}", found="JSON, but not an object")
    return value


def reason(error: OSError) -> str:
    """Return the kernel's message for an error."""
    return os.strerror(error.errno or 0).lower()


def at_and_below(directory: str) -> Iterator[str]:
    """Yield a directory and all directories below it, parents first, however deep they are.

    :func:`os.walk` recurses before Python 3.12, and a container that may create cgroups can nest
    them beyond its limit.

    Args:
        directory: the top. Unreadable directories (removed, or with too long a path) are skipped.
            Links are not followed.
    """
    waiting = [directory]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                below = [e.path for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        yield folder
        waiting += below


def check_id(text: str, what: str = "container id") -> str:
    """Refuse a text that is unsafe as part of a path.

    Args:
        text: an id or a namespace.
        what: the kind of text, for messages.

    Returns:
        ``text``, unchanged.

    Raises:
        InvalidIdentifier: the text does not match ``[A-Za-z0-9][A-Za-z0-9_.-]*``, or is longer than
            76 characters.
    """
    if not text or text[0] not in _ALPHANUMERIC or not _ALLOWED.issuperset(text):
        raise InvalidIdentifier(
            f"{what} {text!r}",
            found="not a letter or digit followed by letters, digits, '_', '.' and '-'",
            do="name it so",
        )
    if len(text) > LONGEST_ID:
        raise InvalidIdentifier(
            f"{what} {text!r}",
            found=f"{len(text)} characters",
            do=f"use at most {LONGEST_ID}",
        )
    return text


def digest(data: bytes) -> str:
    """Return the SHA-256 of ``data``, in hexadecimal digits."""
    return str(sha256(data).hexdigest())
