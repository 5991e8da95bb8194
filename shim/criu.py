"""CRIU, which runc and crun call to save a container and to restore it: what it is told and says.

Rules
- The low-level runtime calls CRIU, and its own options say what they can. What they cannot say
  is written to a file that CRIU reads before (``CRIU_CONFIG_FILE``), so nothing is lost of what
  an operator has set for CRIU or for the runtime.
- A container's stdout is the very fifo or file that containerd named, outside of its mounts.
  CRIU saves such a file only if it is announced as *external*, and restores it only from a
  descriptor that is *inherited* under the same name. Pipes the runtimes announce themselves.
- A checkpoint comes from anywhere, as an image does. What we left in it is read as strictly as
  anything of an image: names of one form, and switches. CRIU opens the rest by name and follows
  links, with root's rights: a ``pages-1.img`` that leads to a file of the host would become a
  container's memory. So all that lies in a checkpoint has to be a regular file.
- The one link that CRIU itself makes, to the checkpoint that this one builds on, may lead to a
  checkpoint beside it. One that lies elsewhere has to be named by whoever restores.
- Of CRIU's log, the first error is the cause and the last one is what it gave up. Errors that
  CRIU itself goes on after are passed over.

Source: criu(8), sections CONFIGURATION FILES and "inheriting FDs on restore" of criu.org;
runc(8) checkpoint, restore; crun(1).
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from shim.errors import (
    CheckpointFailed,
    CheckpointOptionsInvalid,
    CheckpointUnusable,
    CriuNotFound,
    CriuTooOld,
    CriuUnsupportedByKernel,
    CriuUnsupportedByRuntime,
    RestoreFailed,
    ShimError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from google.protobuf.any_pb2 import Any as AnyMessage

# What we leave in a checkpoint, beside CRIU's images and the runtime's descriptors.json.
RECORD: Final = "containerd-shim-nvidia.json"

# What every checkpoint has: CRIU's own table of contents, and the runtime's list of descriptors.
INVENTORY: Final = "inventory.img"
DESCRIPTORS: Final = "descriptors.json"

# INVENTORY_MAGIC of CRIU's magic.h, as it is written.
_INVENTORY_MARK: Final = bytes.fromhex("16313158")

DUMP_LOG: Final = "dump.log"
RESTORE_LOG: Final = "restore.log"

# How CRIU follows the images of an earlier checkpoint that this one builds on.
PARENT: Final = "parent"

CONFIG_VARIABLE: Final = "CRIU_CONFIG_FILE"

_OTHER_PARTS: Final = frozenset({DESCRIPTORS, RECORD, PARENT, DUMP_LOG, "stats-dump"})

_LONGEST_RECORD: Final = 1 << 16
_LONGEST_LOG: Final = 1 << 20
_MOST_FILES: Final = 1 << 17
_MOST_PARENTS: Final = 64

_FILE_NAME: Final = re.compile(r"file\[[0-9a-f]{1,16}:[0-9a-f]{1,16}\]")


@dataclass(frozen=True, slots=True)
class Switches:
    """What CRIU is allowed to save, and has to be allowed again when it restores.

    Attributes:
        open_tcp: connected TCP sockets.
        external_unix_sockets: unix sockets whose other end is outside.
        terminal: processes of a session that was started outside ("shell job").
        file_locks: held file locks.
        empty_namespaces: namespaces that are made anew, and not saved ("network").
        cgroups_mode: what is done with cgroups: soft, full, strict; empty for the default.
    """

    open_tcp: bool = False
    external_unix_sockets: bool = False
    terminal: bool = False
    file_locks: bool = False
    empty_namespaces: tuple[str, ...] = ()
    cgroups_mode: str = ""

    def words(self) -> list[str]:
        """The arguments of ``checkpoint`` and ``restore`` that say the same."""
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


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """How a container is to be saved.

    Attributes:
        exit: whether it ends with that; else it goes on.
        switches: what CRIU is allowed to save.
        work_path: the directory for CRIU's log; empty for one of ours.
        parent_path: an earlier checkpoint; what has not changed since is not saved again.
    """

    exit: bool = False
    switches: Switches = field(default_factory=Switches)
    work_path: str = ""
    parent_path: str = ""

    def words(self, image_path: str, work_path: str) -> list[str]:
        """The arguments of ``checkpoint``, without the container's id.

        Args:
            image_path: where the checkpoint goes.
            work_path: where CRIU's log goes.
        """
        words = ["--image-path", image_path, "--work-path", work_path]
        if self.parent_path:
            # CRIU follows it from the images, which may be moved together with their parent.
            parent = self.parent_path
            if os.path.isabs(parent):
                parent = os.path.relpath(os.path.realpath(parent), os.path.realpath(image_path))
            words += ["--parent-path", parent]
        if not self.exit:
            words.append("--leave-running")
        return [*words, *self.switches.words()]


def read_options(message: AnyMessage | None) -> CheckpointOptions:
    """The options of a Checkpoint request.

    Args:
        message: the ``options`` of the request; None or empty means defaults. Clients of
            containerd 1.x send those of the first generation of shims to a runtime that they do
            not know.

    Raises:
        CheckpointOptionsInvalid: the type or the encoding cannot be understood.
    """
    from google.protobuf.message import DecodeError  # noqa: PLC0415 - with what is rare here

    from api.proto import linux_runc_pb2, runc_options_pb2  # noqa: PLC0415

    if message is None or not message.type_url:
        return CheckpointOptions()
    known = {
        known.DESCRIPTOR.full_name: known
        for known in (runc_options_pb2.CheckpointOptions, linux_runc_pb2.CheckpointOptions)
    }
    kind = message.type_url.rpartition("/")[2]
    if kind not in known:
        raise CheckpointOptionsInvalid(
            f"checkpoint options of type {kind}",
            found="not a type of options that this shim knows",
            do="send containerd.runc.v1.CheckpointOptions",
        )
    try:
        options = known[kind].FromString(message.value)
    except DecodeError as error:
        raise CheckpointOptionsInvalid(
            "the checkpoint options", found=f"they cannot be decoded: {error}"
        ) from error
    # The first generation knew no parents.
    parent_path = getattr(options, "parent_path", "")
    if "\0" in options.image_path + options.work_path + parent_path:
        raise CheckpointOptionsInvalid(
            "the checkpoint options", found="a zero byte in a path", do="leave that out"
        )
    return CheckpointOptions(
        exit=options.exit,
        switches=Switches(
            open_tcp=options.open_tcp,
            external_unix_sockets=options.external_unix_sockets,
            terminal=options.terminal,
            file_locks=options.file_locks,
            empty_namespaces=tuple(options.empty_namespaces),
            cgroups_mode=options.cgroups_mode,
        ),
        work_path=options.work_path,
        parent_path=parent_path,
    )


# -- the container's stdio ------------------------------------------------------------------


def external_files(init: int, pids: Iterable[int], paths: Sequence[str | None]) -> dict[str, int]:
    """Which open files of a container are its stdio and lie outside of its mounts.

    Args:
        init: the pid of its init process.
        pids: all its processes: a child may hold what init has closed.
        paths: where its stdin, stdout and stderr are; None for what is no file.

    Returns:
        For each file, by the name that CRIU has for it, which of 0, 1 and 2 it is.
    """
    inside = _mount_ids(init)
    numbers: dict[tuple[int, int], int] = {}
    for number in (2, 1, 0):  # what is both stdout and stderr is the first of them
        for path in (paths[number], f"/proc/{init}/fd/{number}"):
            if path is not None and (identity := _identity(path)) is not None:
                numbers[identity] = number
    files = {}
    for pid in {init, *pids}:
        for fd in _descriptors(pid):
            number = numbers.get(_identity(f"/proc/{pid}/fd/{fd}") or (0, 0), -1)
            if number < 0:
                continue
            mount, inode = _place_of(pid, fd)
            if mount is not None and mount not in inside:
                files[f"file[{mount:x}:{inode:x}]"] = number
    return files


def dump_config(files: Mapping[str, int]) -> str:
    """What CRIU reads before it saves a container with these external files."""
    return "".join(f"external {name}\n" for name in files)


def restore_config(files: Mapping[str, int]) -> str:
    """What CRIU reads before it restores them; its own 0, 1 and 2 are the new stdio."""
    return "".join(f"inherit-fd fd[{number}]:{name}\n" for name, number in files.items())


def _mount_ids(pid: int) -> set[int]:
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as file:
            return {int(line.split(maxsplit=1)[0]) for line in file}
    except OSError:
        return set()


def _descriptors(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []  # it has ended


def _identity(path: str) -> tuple[int, int] | None:
    """The device and inode of a fifo in a directory, or of a regular file."""
    try:
        status = os.stat(path)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            return None
        if path.startswith("/proc/") and not os.readlink(path).startswith("/"):
            return None  # a pipe
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _place_of(pid: int, fd: str) -> tuple[int | None, int]:
    """The mount that a descriptor's file is on, and its inode."""
    try:
        inode = os.stat(f"/proc/{pid}/fd/{fd}").st_ino
        with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
            for line in file:
                if line.startswith(b"mnt_id:"):
                    return int(line.split()[1]), inode
    except OSError:
        pass  # it was closed meanwhile
    return None, 0


# -- a checkpoint's directory ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """What we remember in a checkpoint, for whoever restores it.

    Attributes:
        files: its external files, as of :func:`external_files`.
        switches: what CRIU was allowed to save.
    """

    files: dict[str, int] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)

    def encode(self) -> bytes:
        """The record as it is written."""
        return json.dumps({"files": self.files, "switches": asdict(self.switches)}).encode()

    @classmethod
    def decode(cls, content: bytes) -> Record:
        """Read a record.

        Raises:
            ValueError: it is not what :meth:`encode` writes.
        """
        record = json.loads(content)
        files = record["files"] if isinstance(record, dict) and "files" in record else None
        if not isinstance(files, dict) or not all(
            _FILE_NAME.fullmatch(name) and type(number) is int and number in (0, 1, 2)
            for name, number in files.items()
        ):
            message = "no table of files"
            raise ValueError(message)
        return cls(files, _decode_switches(record.get("switches")))


def _decode_switches(table: Any) -> Switches:
    message = "no table of switches"
    if not isinstance(table, dict):
        raise ValueError(message)  # noqa: TRY004 - as all that is wrong with a record
    known = {f.name: type(getattr(Switches(), f.name)) for f in fields(Switches)}
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
    """See that a directory holds a checkpoint, and read what we left in it.

    Args:
        directory: where containerd has unpacked it.
        parent: where it has unpacked the one that this one builds on; may be empty. The
            checkpoint is made to lead there.

    Returns:
        The record; an empty one of a checkpoint that another shim has made.

    Raises:
        CheckpointUnusable: it is missing or incomplete, or not what it should be.
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
            raise ValueError  # noqa: TRY301 - the same end as of what is no JSON
    except ValueError:
        found = f"no list of descriptors in {DESCRIPTORS}"
        raise CheckpointUnusable(asked, found=found, do=do) from None
    content = _read(asked, directory, RECORD, do)
    if content is None:
        return Record()
    try:
        return Record.decode(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointUnusable(asked, found=f"{RECORD}: {error}", do=do) from error


def is_part_of_checkpoint(name: str) -> bool:
    """Whether a file in a checkpoint's directory is one that CRIU, a runtime or we write."""
    return name.endswith(".img") or name in _OTHER_PARTS


def link_parent(directory: str, parent: str) -> None:
    """Let a checkpoint find the one that it builds on, wherever both have been unpacked.

    Args:
        directory: the checkpoint.
        parent: the earlier one.

    Raises:
        CheckpointUnusable: there is no such directory, or something else in the link's place.
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
    """See that nothing in a checkpoint, and in those that it builds on, leads elsewhere.

    Args:
        asked: what is being done, for the message.
        directory: the checkpoint.
        do: what helps, for the message.
        parent_is_named: whether its link to its parent is ours, and so may lead anywhere.
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
                "which is no directory beside it",
                do="name the parent in the request, or put both into one directory",
            )
        directory, parent_is_named = parent, False
    raise CheckpointUnusable(asked, found=f"more than {_MOST_PARENTS} parents", do=do)


def _require_plain(asked: str, directory: str, do: str) -> None:
    """See that a directory has nothing in it that opens as something else than its own file."""
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
    """Whether it is a regular file, or a directory that no part of a checkpoint would be."""
    is_other = not is_part_of_checkpoint(entry.name)
    return entry.is_file(follow_symlinks=False) or (
        is_other and entry.is_dir(follow_symlinks=False)
    )


def _link_target(path: str) -> str:
    """What a link says; empty for what is none."""
    return os.readlink(path) if os.path.islink(path) else ""


def _read(asked: str, directory: str, name: str, do: str) -> bytes | None:
    """A small file of a checkpoint; None if it is not there."""
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


# -- what went wrong ------------------------------------------------------------------------

# (00.143559) Error (criu/net.c:3282): net: Locking network failed
_ERROR: Final = re.compile(r"^(?:\(\d+\.\d+\)\s*)?(?:\d+: )?Error \([^)]*\): (.*)$")

# What CRIU says and goes on, or says of every failure alike.
_NOT_THE_CAUSE: Final = re.compile(
    r"exited, status=|rlimit: Can't setup|(Dumping|Restoring|Pre-dumping) FAILED"
    r"|Could not initialize kernel features|killed by signal"
)

_KERNEL: Final = re.compile(r"kerndat|vdso: |kernel (does not|doesn't) support|features detection")
_MISSING: Final = re.compile(r'"?criu"?: executable file not found|(load|open).*libcriu')
_TOO_OLD: Final = re.compile(
    r"CRIU version \S+ must be|(requires?|needs?|at least) CRIU|criu lacks support", re.IGNORECASE
)
_NO_SUCH_VERB: Final = re.compile(
    r"unknown command|no help topic|without criu|criu.*(not compiled|not supported|disabled)",
    re.IGNORECASE,
)


def last_words(log: str) -> str:
    """The cause of a failure, as CRIU's log tells it.

    Args:
        log: the text of dump.log or restore.log; it may be cut off.

    Returns:
        The first error that is one, and the last if it says more; empty if there is none.
    """
    errors = [match[1].strip() for line in log.splitlines() if (match := _ERROR.match(line))]
    causes = [error for error in errors if error and not _NOT_THE_CAUSE.search(error)]
    return "; ".join(dict.fromkeys((*causes[:1], *causes[-1:]))) or "; ".join(errors[-1:])


def failure(verb: str, container_id: str, *, said: str, log: str, kept: str) -> ShimError:
    """What it means that a runtime could not save or restore a container.

    Args:
        verb: "checkpoint" or "restore".
        container_id: which container.
        said: the runtime's own word; empty if it does not know the verb.
        log: what CRIU logged; empty if it was not reached.
        kept: the path where that log can be read; empty if there is none.
    """
    asked = f"{verb} of {container_id}"
    cause = last_words(log)
    if not said or (not cause and _NO_SUCH_VERB.search(said)):
        return CriuUnsupportedByRuntime(
            asked,
            found=said or f"the low-level runtime knows no {verb}",
            do="use runc, or a crun that is built with CRIU (`crun --version` lists +CRIU)",
        )
    if not cause and _MISSING.search(said):
        return CriuNotFound(
            asked, found=said, do="install CRIU where containerd finds it, or name it in CriuPath"
        )
    if not cause and _TOO_OLD.search(said):
        return CriuTooOld(asked, found=said, do="install a newer CRIU")
    if _KERNEL.search(cause):
        return CriuUnsupportedByKernel(
            asked,
            found=f"CRIU: {cause}",
            do="run `criu check`; a kernel that is newer than CRIU needs a newer CRIU",
        )
    kind: type[ShimError] = CheckpointFailed if verb == "checkpoint" else RestoreFailed
    if not cause:
        return kind(asked, found=said)
    return kind(asked, found=f"CRIU: {cause}", do=f"read {kept}" if kept else "")


def is_complete(log: str) -> bool:
    """Whether CRIU had saved the container when its log ended."""
    return "Dumping finished successfully" in log


def read_log(path: str) -> str:
    """The end of a log of CRIU's; empty if there is none.

    Args:
        path: the file, in a directory that may not be ours alone.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return ""
        start = max(0, status.st_size - _LONGEST_LOG)
        return os.pread(fd, _LONGEST_LOG, start).decode(errors="replace")
    finally:
        os.close(fd)
