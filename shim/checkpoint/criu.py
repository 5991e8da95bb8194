"""CRIU, with which runc and crun save and restore a container: its options, files and log.

Rules
- The low-level runtime calls CRIU. Settings go into the runtime's options, where they exist, and
  otherwise into a file that CRIU reads first (``CRIU_CONFIG_FILE``), so an operator's settings for
  CRIU or the runtime stay in effect.
- A container's stdout is containerd's fifo, which is outside of its mounts. CRIU saves such a file
  only if declared as *external*, and restores it only from a descriptor *inherited* under the same
  name. The runtimes themselves declare pipes.
- In CRIU's log, the first error is the cause, and the last one the final result. Errors after which
  CRIU continues are ignored.

Source: criu(8), sections CONFIGURATION FILES and "inheriting FDs on restore" of criu.org;
runc(8) checkpoint, restore; crun(1).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError

from api.proto import linux_runc_pb2, runc_options_pb2
from api.values import dataclass
from shim.checkpoint.errors import (
    CheckpointFailed,
    CheckpointOptionsInvalid,
    CriuNotFound,
    CriuTooOld,
    CriuUnsupportedByKernel,
    CriuUnsupportedByRuntime,
    RestoreFailed,
)
from shim.checkpoint.images import NO_SWITCHES, Switches
from shim.errors import ShimError

RESTORE_LOG: Final = "restore.log"

CONFIG_VARIABLE: Final = "CRIU_CONFIG_FILE"

_LONGEST_LOG: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """How to save a container."""

    exit: bool = False  # whether the container ends with the checkpoint
    switches: Switches = NO_SWITCHES  # the allowed features
    work_path: str = ""  # the directory for CRIU's log; empty for one of ours
    # an earlier checkpoint, whose unchanged memory is not saved again
    parent_path: str = ""

    def words(self, image_path: str, work_path: str) -> list[str]:
        """Return the arguments of ``checkpoint``, without the container's id.

        Args:
            image_path: the checkpoint's directory.
            work_path: the directory of CRIU's log.
        """
        words = ["--image-path", image_path, "--work-path", work_path]
        if self.parent_path:
            # CRIU resolves it from the images, which may move together with their parent.
            parent = self.parent_path
            if os.path.isabs(parent):
                parent = os.path.relpath(os.path.realpath(parent), os.path.realpath(image_path))
            words += ["--parent-path", parent]
        if not self.exit:
            words.append("--leave-running")
        return [*words, *self.switches.words()]


def read_options(message: AnyMessage | None) -> CheckpointOptions:
    """Read the options of a Checkpoint request.

    Args:
        message: the ``options`` of the request; None or empty for the defaults. For an unknown
            runtime, clients of containerd 1.x send the options of the first generation of shims.

    Raises:
        CheckpointOptionsInvalid: the type or the encoding is invalid.
    """
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
    # The first generation had no parents.
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
    """Find a container's open stdio files outside of its mounts.

    Args:
        init: the pid of the container's init process.
        pids: all of the container's processes: a child may still have open what init has closed.
        paths: the paths of its stdin, stdout and stderr; None if one is not a file.

    Returns:
        The descriptor (0, 1 or 2) of each file, by CRIU's name. All are on our mounts.
    """
    # Examine nothing else: a container may have opened a file in its own mount namespace, whose
    # server may be gone, or never answer.
    outside = _mount_ids("self") - _mount_ids(init)
    numbers: dict[tuple[int, int], int] = {}
    for number in (2, 1, 0):  # a file that is stdout and stderr counts as stdout
        own = f"/proc/{init}/fd/{number}" if _mount_of(init, str(number)) in outside else None
        for path in (paths[number], own):
            if path is not None and (identity := _identity(path)) is not None:
                numbers[identity] = number
    files = {}
    for pid in {init, *pids}:
        for fd in _descriptors(pid):
            mount = _mount_of(pid, fd)
            if mount not in outside:
                continue
            identity = _identity(f"/proc/{pid}/fd/{fd}")
            if identity is not None and identity in numbers:
                files[f"file[{mount:x}:{identity[1]:x}]"] = numbers[identity]
    return files


def dump_config(files: Mapping[str, int]) -> str:
    """Return CRIU's configuration to save a container with these external files."""
    return "".join(f"external {name}\n" for name in files)


def restore_config(files: Mapping[str, int]) -> str:
    """Return CRIU's configuration to restore them; CRIU's own 0, 1 and 2 are the new stdio."""
    return "".join(f"inherit-fd fd[{number}]:{name}\n" for name, number in files.items())


def _mount_ids(pid: int | str) -> set[int]:
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
    """Return the device and inode of a fifo in a directory, or of a regular file."""
    try:
        status = os.stat(path)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
            return None
        if path.startswith("/proc/") and not os.readlink(path).startswith("/"):
            return None  # a pipe
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _mount_of(pid: int, fd: str) -> int | None:
    """Return the mount of a descriptor's file; None if it was closed meanwhile."""
    try:
        with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
            for line in file:
                if line.startswith(b"mnt_id:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return None


# -- failures -------------------------------------------------------------------------------

# (00.143559) Error (criu/net.c:3282): net: Locking network failed
# Without CAP_SYS_RESOURCE CRIU always logs, harmlessly, that it keeps its limit of files.
_ERROR: Final = re.compile(
    r"^(?:\(\d+\.\d+\)\s*)?(?:\d+: )?Error \([^)]*\): (?!rlimit: Can't setup)(.*)$"
)

# Errors after which CRIU continues, or that it logs with every failure.
_NOT_THE_CAUSE: Final = re.compile(
    r"exited, status=|(Dumping|Restoring|Pre-dumping) FAILED"
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
    """Extract the cause of a failure from CRIU's log.

    Args:
        log: the text of dump.log or restore.log, which may be truncated.

    Returns:
        The first real error, and the last one if different; "" for none.
    """
    errors = [match[1].strip() for line in log.splitlines() if (match := _ERROR.match(line))]
    causes = [error for error in errors if error and not _NOT_THE_CAUSE.search(error)]
    return "; ".join(dict.fromkeys((*causes[:1], *causes[-1:]))) or "; ".join(errors[-1:])


def failure(verb: str, container_id: str, *, said: str, log: str, kept: str) -> ShimError:
    """Return the error of a runtime that failed to save or restore a container.

    Args:
        verb: "checkpoint" or "restore".
        container_id: the container's id.
        said: the runtime's own message; "" if it lacks the verb.
        log: CRIU's log; "" if it did not run.
        kept: the path of the kept log; "" if it was not kept.
    """
    asked = f"{verb} of {container_id}"
    cause = last_words(log)
    if not said or (not cause and _NO_SUCH_VERB.search(said)):
        return CriuUnsupportedByRuntime(
            asked,
            found=said or f"the low-level runtime has no command {verb}",
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
    kind = CheckpointFailed if verb == "checkpoint" else RestoreFailed
    if not cause:
        return kind(asked, found=said)
    return kind(asked, found=f"CRIU: {cause}", do=f"read {kept}" if kept else "")


def is_complete(log: str) -> bool:
    """Whether the log shows that CRIU has saved the container."""
    return "Dumping finished successfully" in log


def read_log(path: str) -> str:
    """Return the end of a CRIU log; "" if there is none.

    Args:
        path: the log file; others may write to its directory.
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
