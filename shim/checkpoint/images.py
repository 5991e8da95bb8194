"""The directory of a checkpoint: CRIU's images, the runtime's descriptors.json, and our record.

Rules
- Like an image, a checkpoint can come from anywhere. So our record is parsed strictly, and every
  file must be regular: CRIU opens files by name as root and follows links. If ``pages-1.img`` were
  a link to a host file, that file would become a container's memory.
- The only link allowed is CRIU's own, ``parent``. It may lead to a checkpoint next to this one; the
  restore request must name one elsewhere.

Source: criu(8); runc(8) checkpoint, restore.
"""

from __future__ import annotations

import json
import os
import re
import stat
from typing import Any, Final

from api.values import dataclass
from shim.checkpoint.errors import CheckpointUnusable

# Our record in a checkpoint.
RECORD: Final = "containerd-shim-nvidia.json"

# Files of every checkpoint: CRIU's table of contents, and the runtime's list of descriptors.
INVENTORY: Final = "inventory.img"
DESCRIPTORS: Final = "descriptors.json"

# INVENTORY_MAGIC of CRIU's magic.h, in the file's byte order.
_INVENTORY_MARK: Final = bytes.fromhex("16313158")

DUMP_LOG: Final = "dump.log"

# CRIU's link to the earlier checkpoint that this one builds on.
PARENT: Final = "parent"

_OTHER_PARTS: Final = frozenset({DESCRIPTORS, RECORD, PARENT, DUMP_LOG, "stats-dump"})

_LONGEST_RECORD: Final = 1 << 16
_MOST_FILES: Final = 1 << 17
_MOST_PARENTS: Final = 64

_FILE_NAME: Final = re.compile(r"file\[[0-9a-f]{1,16}:[0-9a-f]{1,16}\]")


@dataclass(frozen=True, slots=True)
class Switches:
    """The features that CRIU may save, and must then be allowed to restore."""

    open_tcp: bool = False  # connected TCP sockets
    external_unix_sockets: bool = False  # unix sockets with the other end outside
    terminal: bool = False  # processes of a session started outside ("shell job")
    file_locks: bool = False  # held file locks
    # namespaces to create again instead of saving ("network")
    empty_namespaces: tuple[str, ...] = ()
    cgroups_mode: str = ""  # how to restore cgroups: soft, full, strict; empty for the default

    def words(self) -> list[str]:
        """Return the options as arguments of ``checkpoint`` and ``restore``."""
        flags = (
            ("--tcp-established", self.open_tcp),
            ("--ext-unix-sk", self.external_unix_sockets),
            ("--shell-job", self.terminal),
            ("--file-locks", self.file_locks),
        )
        words = [flag for flag, on in flags if on]
        for namespace in self.empty_namespaces:
            words += ["--empty-ns", namespace]
        if self.cgroups_mode:
            words += ["--manage-cgroups-mode", self.cgroups_mode]
        return words


NO_SWITCHES: Final = Switches()


@dataclass(frozen=True, slots=True)
class Record:
    """Our record in a checkpoint, for the shim that restores it."""

    files: dict[str, int]  # its external files, from shim.checkpoint.criu.external_files
    switches: Switches  # what CRIU was allowed to save
    # whether the driver's files were in a layer: CRIU treats them differently from mounted ones
    driver_layer: bool = False

    def encode(self) -> bytes:
        """Return the record in its written form."""
        switches = {name: getattr(self.switches, name) for name in Switches.__match_args__}
        record = {"files": self.files, "switches": switches, "driver_layer": self.driver_layer}
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, content: bytes) -> Record:
        """Read a record.

        Raises:
            ValueError: it is malformed.
        """
        record = json.loads(content)
        files = record["files"] if isinstance(record, dict) and "files" in record else None
        if not isinstance(files, dict) or not all(
            _FILE_NAME.fullmatch(name) and type(number) is int and number in (0, 1, 2)
            for name, number in files.items()
        ):
            message = "no table of files"
            raise ValueError(message)
        driver_layer = record.get("driver_layer", False)
        if not isinstance(driver_layer, bool):
            message = "not whether the driver's files were in a layer"
            raise ValueError(message)  # noqa: TRY004 - one type for all malformed records
        return cls(files, _decode_switches(record.get("switches")), driver_layer)


def _decode_switches(table: Any) -> Switches:
    message = "no table of switches"
    if not isinstance(table, dict):
        raise ValueError(message)  # noqa: TRY004 - one type for all malformed records
    known = {name: type(getattr(Switches(), name)) for name in Switches.__match_args__}
    values: dict[str, Any] = {}
    for name, value in table.items():
        kind = known.get(name)
        plain = tuple(value) if kind is tuple and isinstance(value, list) else value
        texts = plain if isinstance(plain, tuple) else (plain,) if kind is str else ()
        if type(plain) is not kind or not all(
            isinstance(text, str) and re.fullmatch(r"[a-z]{0,20}", text) for text in texts
        ):
            raise ValueError(message)
        values[name] = plain
    return Switches(**values)


def open_checkpoint(directory: str, parent: str = "") -> Record:
    """Check that a directory contains a checkpoint, and read our record in it.

    Args:
        directory: the unpacked checkpoint, from containerd.
        parent: the unpacked earlier checkpoint that this one builds on; may be empty. The
            checkpoint's link is set to it.

    Returns:
        The record; an empty one for another shim's checkpoint.

    Raises:
        CheckpointUnusable: it is missing, incomplete, or not a checkpoint.
    """
    asked = f"to restore from {directory}"
    if not os.path.isabs(directory) or not os.path.isdir(directory):
        raise CheckpointUnusable(
            asked, found="no such directory", do="name the directory of a checkpoint"
        )
    do = "restore from a directory that `checkpoint` of runc or crun has filled"
    if parent:
        link_parent(directory, parent)
    _require_plain_files(asked, directory, do, parent_is_named=bool(parent))
    inventory = _read(asked, directory, INVENTORY, do)
    if inventory is None or not inventory.startswith(_INVENTORY_MARK):
        found = f"no {INVENTORY} in it" if inventory is None else f"{INVENTORY} is not CRIU's"
        raise CheckpointUnusable(asked, found=found, do=do)
    descriptors = _read(asked, directory, DESCRIPTORS, do)
    try:
        if descriptors is None or not isinstance(json.loads(descriptors), list):
            raise ValueError  # noqa: TRY301 - the same error as for invalid JSON
    except (ValueError, RecursionError):
        found = f"no list of descriptors in {DESCRIPTORS}"
        raise CheckpointUnusable(asked, found=found, do=do) from None
    content = _read(asked, directory, RECORD, do)
    if content is None:
        return Record({}, NO_SWITCHES)
    try:
        return Record.decode(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointUnusable(asked, found=f"{RECORD}: {error}", do=do) from error


def is_part_of_checkpoint(name: str) -> bool:
    """Whether CRIU, a runtime or the shim writes a file with this name into a checkpoint."""
    return name.endswith(".img") or name in _OTHER_PARTS


def link_parent(directory: str, parent: str) -> None:
    """Link a checkpoint to the one that it builds on, wherever both were unpacked.

    Args:
        directory: the checkpoint.
        parent: the earlier one.

    Raises:
        CheckpointUnusable: the directory does not exist, or the link's name is taken.
    """
    asked = f"to restore from {directory} and its parent {parent}"
    if not os.path.isabs(parent) or not os.path.isdir(parent):
        raise CheckpointUnusable(asked, found="no such directory of the parent")
    link = os.path.join(directory, PARENT)
    try:
        if os.path.islink(link):
            os.unlink(link)
        os.symlink(parent, link)
    except OSError as error:
        raise CheckpointUnusable(
            asked, found=f"{link}: {os.strerror(error.errno or 0).lower()}"
        ) from error


def _require_plain_files(asked: str, directory: str, do: str, *, parent_is_named: bool) -> None:
    """Check that nothing in a checkpoint, or in its parents, leads elsewhere.

    The link to its parent may lead anywhere if it is ours (``parent_is_named``).
    """
    for _ in range(_MOST_PARENTS):
        _require_plain(asked, directory, do)
        link = os.path.join(directory, PARENT)
        if not os.path.lexists(link):
            return
        below, parent = os.path.dirname(os.path.realpath(directory)), os.path.realpath(link)
        is_beside = parent_is_named or (
            not os.path.isabs(_link_target(link)) and os.path.dirname(parent) == below
        )
        if not is_beside or not os.path.isdir(parent):
            raise CheckpointUnusable(
                asked,
                found=f"{PARENT} in {directory} leads to {_link_target(link)!r}, "
                "which is not a directory next to it",
                do="name the parent in the request, or put both into one directory",
            )
        directory, parent_is_named = parent, False
    raise CheckpointUnusable(asked, found=f"more than {_MOST_PARENTS} parents", do=do)


def _require_plain(asked: str, directory: str, do: str) -> None:
    """Check that a directory has no links, fifos or devices in it."""
    try:
        with os.scandir(directory) as entries:
            for number, entry in enumerate(entries):
                if entry.name != PARENT and not _is_plain(entry):
                    found = f"{entry.name!r} in it, which is not a regular file"
                    raise CheckpointUnusable(asked, found=found, do=do)
                if number == _MOST_FILES:
                    raise CheckpointUnusable(asked, found=f"more than {_MOST_FILES} files", do=do)
    except OSError as error:
        found = os.strerror(error.errno or 0).lower()
        raise CheckpointUnusable(asked, found=found, do=do) from error


def _is_plain(entry: os.DirEntry[str]) -> bool:
    """Whether it is a regular file, or a directory without the name of a checkpoint's file."""
    is_other = not is_part_of_checkpoint(entry.name)
    return entry.is_file(follow_symlinks=False) or (
        is_other and entry.is_dir(follow_symlinks=False)
    )


def _link_target(path: str) -> str:
    """Return the target of a link; empty if it is not a link."""
    return os.readlink(path) if os.path.islink(path) else ""


def _read(asked: str, directory: str, name: str, do: str) -> bytes | None:
    """Return a small file of a checkpoint; None if it does not exist."""
    path = os.path.join(directory, name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        found = f"{name}: {os.strerror(error.errno or 0).lower()}"
        raise CheckpointUnusable(asked, found=found, do=do) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointUnusable(asked, found=f"{name} is not a regular file", do=do)
        content = os.read(fd, _LONGEST_RECORD + 1)
    finally:
        os.close(fd)
    if len(content) > _LONGEST_RECORD:
        raise CheckpointUnusable(asked, found=f"{name} is too long", do=do)
    return content
