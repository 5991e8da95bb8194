"""The files of a bundle: their names, and how they are read and written.

A bundle is the directory that containerd makes for a container. The server leaves in it what
the ``delete`` verb needs if the server is killed; both go through this module, so they agree.

======================  ===========  ======================================================
file                    written by   what it is
======================  ===========  ======================================================
``config.json``         containerd   the OCI spec; rewritten by us if GPUs are injected
``rootfs/``             containerd   where the image's file systems are mounted
``log``                 containerd   a fifo: our log
``address``             ``start``    where the shim listens, for containerd up to 1.7
``bootstrap.json``      containerd   what ``start`` answered, from 2.0 on; all there is in the
                                     bundle of a pod's later container, for which it is not called
``s``                   ``start``    a link to the directory of that socket
``options.json``        server       how the low-level runtime is called (`RuntimeRecord`)
``runtime``             server       the runtime's name, as containerd's own shim leaves it
``init.pid``            runc, crun   the pid of the container's init process
``log.*.json``          server       the log of one call of the runtime, while it lasts
``nvidia/``             server       files of ours that are mounted into the container
``nvidia.json``         server       what was injected, and why
``nvidia-before.json``  containerd   config.json as it was before that, kept by its other name
``claim``               server       where it says which devices it claims (:mod:`shim.claims`), and
                                     the pid and start time of the process that has them
``logger.*``            server       one for each logger that runs: its pid and start time
``work``                containerd   a link to a directory on disk, which goes with the bundle
``criu-work/``          server       in ``work``: what CRIU is told and says, while it works
``criu-*.log``          server       what CRIU said when it failed
``pod/``                server       of a sandbox: files that the pod's containers share
``holder``              server       of a sandbox: the process that holds its namespaces
``member.*.json``       server       of a sandbox: how to end one of its containers
======================  ===========  ======================================================

Everything that we write has mode 0600 and appears whole, by rename, or not at all.
"""

from __future__ import annotations

import os
import stat

from shim.errors import BundleUnusable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Final

CONFIG: Final = "config.json"
ROOTFS: Final = "rootfs"
LOG: Final = "log"
ADDRESS: Final = "address"
BOOTSTRAP: Final = "bootstrap.json"
SOCKET_DIRECTORY: Final = "s"
OPTIONS: Final = "options.json"
RUNTIME: Final = "runtime"
INIT_PID: Final = "init.pid"
STAGING: Final = "nvidia"
RECORD: Final = "nvidia.json"
BEFORE: Final = "nvidia-before.json"
CLAIM: Final = "claim"
WORK: Final = "work"
POD: Final = "pod"
HOLDER: Final = "holder"
_MEMBER_PREFIX: Final = "member."
_MEMBER_SUFFIX: Final = ".json"
_CALL_PREFIX: Final = f"{LOG}."
_CALL_SUFFIX: Final = ".json"
_LOGGER_PREFIX: Final = "logger."

# Where runc mounts a container's rootfs while it restores it, in its state of the container.
RESTORED_ROOT: Final = "criu-root"

# A spec has some kilobytes; containerd itself would choke on what is more than this.
LONGEST_SPEC: Final = 32 << 20
_LONGEST_LINE: Final = 4096
_CHUNK: Final = 1 << 16
_JSON_SPACE: Final = " \t\n\r"


class RuntimeRecord:
    """How a container's low-level runtime is called, for whoever has to clean up.

    Attributes:
        binary: runc, crun, or the path of one.
        root: the directory of its state for this namespace.
        systemd_cgroup: whether systemd made the container's cgroup.
    """

    __slots__ = ("binary", "root", "systemd_cgroup")

    def __init__(self, binary: str, root: str, *, systemd_cgroup: bool) -> None:
        self.binary = binary
        self.root = root
        self.systemd_cgroup = systemd_cgroup


def read_spec(bundle: str) -> dict[str, Any]:
    """Read config.json.

    Args:
        bundle: the bundle's path.

    Returns:
        The OCI spec, with all that we do not know in it.

    Raises:
        BundleUnusable: it is missing, unreadable, or not a JSON object.
    """
    path = os.path.join(bundle, CONFIG)
    return parse_object(read(path, LONGEST_SPEC), path)


def write_spec(bundle: str, spec: dict[str, Any]) -> None:
    """Replace config.json, keeping its mode.

    Args:
        bundle: the bundle's path.
        spec: the new OCI spec.

    Raises:
        BundleUnusable: it cannot be written.
    """
    import json  # noqa: PLC0415 - 12 ms, and only the server writes one

    path = os.path.join(bundle, CONFIG)
    try:
        mode = stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        mode = 0o600
    write(path, json.dumps(spec, separators=(",", ":")).encode(), mode=mode)


def keep_spec(bundle: str) -> None:
    """Keep config.json as it is, for whoever asks later what was changed in it.

    Nothing is copied where the file can have a second name: it is replaced under the first.

    Args:
        bundle: the bundle's path.

    Raises:
        BundleUnusable: it has no config.json, or it cannot be kept.
    """
    path, kept = os.path.join(bundle, CONFIG), os.path.join(bundle, BEFORE)
    try:
        remove(kept)  # of a Create that was killed
        os.link(path, kept, follow_symlinks=False)
    except OSError:
        content = read(path, LONGEST_SPEC)
        mode = stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)
        write(kept, content, mode=mode)


def restore_spec(bundle: str) -> None:
    """Put back the config.json that :func:`keep_spec` kept, with its mode and owner, if it did.

    Args:
        bundle: the bundle's path.

    Raises:
        BundleUnusable: it cannot be put back.
    """
    kept = os.path.join(bundle, BEFORE)
    try:
        # If both names are of one file, this does nothing (rename(2)).
        os.rename(kept, os.path.join(bundle, CONFIG))
        remove(kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BundleUnusable(f"to put {kept} back", found=_reason(error)) from error


def read_runtime_record(bundle: str) -> RuntimeRecord | None:
    """Read options.json.

    Args:
        bundle: the bundle's path.

    Returns:
        What the server left; None if it had not come so far.

    Raises:
        BundleUnusable: it is not what the server writes.
    """
    path = os.path.join(bundle, OPTIONS)
    if not os.path.lexists(path):
        return None
    return _runtime_record(parse_object(read(path, _CHUNK), path), path)


def _runtime_record(content: dict[str, Any], path: str) -> RuntimeRecord:
    binary, root = content.get("binary"), content.get("root")
    if not (isinstance(binary, str) and binary and isinstance(root, str) and root.startswith("/")):
        raise BundleUnusable(f"the runtime in {path}", found="no binary or no absolute root in it")
    for text in (binary, root):
        _without_zero(text, path)
    return RuntimeRecord(binary, root, systemd_cgroup=content.get("systemd_cgroup") is True)


def bootstrap_address(bundle: str) -> str:
    """The shim's address as containerd noted it.

    Args:
        bundle: the bundle's path.

    Returns:
        The address with its scheme; empty if there is none.

    Raises:
        BundleUnusable: bootstrap.json is not what containerd writes.
    """
    path = os.path.join(bundle, BOOTSTRAP)
    if not os.path.lexists(path):
        return ""
    address = parse_object(read(path, _CHUNK), path).get("address")
    return _without_zero(address, path) if isinstance(address, str) else ""


def write_member(
    sandbox_bundle: str, container_id: str, bundle: str, record: RuntimeRecord
) -> None:
    """Note in a sandbox's bundle how to end one of its containers.

    Args:
        sandbox_bundle: the sandbox's bundle.
        container_id: the container.
        bundle: the container's bundle.
        record: how its runtime is called.

    Raises:
        BundleUnusable: it cannot be written.
    """
    import json  # noqa: PLC0415 - 12 ms, and only the server writes one

    content = {
        "bundle": bundle,
        "binary": record.binary,
        "root": record.root,
        "systemd_cgroup": record.systemd_cgroup,
    }
    write(_member(sandbox_bundle, container_id), json.dumps(content).encode())


def forget_member(sandbox_bundle: str, container_id: str) -> None:
    """Remove what :func:`write_member` wrote, if it is there."""
    remove(_member(sandbox_bundle, container_id))


def members(sandbox_bundle: str) -> list[str]:
    """The ids of the containers that are noted in a sandbox's bundle.

    Args:
        sandbox_bundle: the bundle; it need not be there, nor be a sandbox's.
    """
    try:
        names = os.listdir(sandbox_bundle)
    except OSError:
        return []
    return [
        name.removeprefix(_MEMBER_PREFIX).removesuffix(_MEMBER_SUFFIX)
        for name in names
        if name.startswith(_MEMBER_PREFIX) and name.endswith(_MEMBER_SUFFIX)
    ]


def read_member(sandbox_bundle: str, container_id: str) -> tuple[str, RuntimeRecord]:
    """Read what :func:`write_member` wrote.

    Returns:
        The container's bundle, and how its runtime is called.

    Raises:
        BundleUnusable: it is gone, or is not what the server writes.
    """
    path = _member(sandbox_bundle, container_id)
    content = parse_object(read(path, _CHUNK), path)
    bundle = content.get("bundle")
    if not (isinstance(bundle, str) and bundle.startswith("/")):
        raise BundleUnusable(f"the bundle in {path}", found="no absolute path")
    return _without_zero(bundle, path), _runtime_record(content, path)


def _member(sandbox_bundle: str, container_id: str) -> str:
    return os.path.join(sandbox_bundle, f"{_MEMBER_PREFIX}{container_id}{_MEMBER_SUFFIX}")


def write_holder(bundle: str, pid: int, start_time: int) -> None:
    """Note the process that holds a sandbox's namespaces.

    Args:
        bundle: the sandbox's bundle.
        pid: the process.
        start_time: when it started, in clock ticks since boot.

    Raises:
        BundleUnusable: it cannot be written.
    """
    write(os.path.join(bundle, HOLDER), f"{pid} {start_time}\n".encode())


def read_holder(bundle: str) -> tuple[int, int]:
    """Read what :func:`write_holder` wrote.

    Returns:
        The pid and the start time; zeros if there is no such file.

    Raises:
        BundleUnusable: there is something else in it.
    """
    path = os.path.join(bundle, HOLDER)
    line = read_line(path)
    return _pid_and_start_time(path, line) if line else (0, 0)


def begin_call(bundle: str, call: str) -> str:
    """Make the log of a call of the low-level runtime.

    It is there before the call and removed after it, so that whoever cleans up after a killed
    shim knows that a runtime may still be at work.

    Args:
        bundle: the bundle's path.
        call: a name that no other call has.

    Returns:
        The log's path.
    """
    path = os.path.join(bundle, f"{_CALL_PREFIX}{call}{_CALL_SUFFIX}")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError:
        pass  # the runtime will fail to open it, and say so
    return path


def calls_under_way(bundle: str) -> list[str]:
    """The names of the logs of calls that had not ended when the shim did.

    Args:
        bundle: the bundle's path; it need not be there.
    """
    try:
        names = os.listdir(bundle)
    except OSError:
        return []
    return [n for n in names if n.startswith(_CALL_PREFIX) and n.endswith(_CALL_SUFFIX)]


def record_logger(bundle: str, pid: int, start_time: int) -> str:
    """Write down that a logger runs, for whoever cleans up after a killed shim.

    Args:
        bundle: the bundle's path.
        pid: the logger's.
        start_time: when it started, in clock ticks since boot.

    Returns:
        The record's path; to be removed when the logger has ended.
    """
    path = os.path.join(bundle, f"{_LOGGER_PREFIX}{pid}.{start_time}")
    write(path, b"")
    return path


def loggers_left(bundle: str) -> list[tuple[int, int]]:
    """The loggers that had not ended when the shim did: the pid and start time of each.

    Args:
        bundle: the bundle's path; it need not be there.
    """
    try:
        names = os.listdir(bundle)
    except OSError:
        return []
    records = [
        n.removeprefix(_LOGGER_PREFIX).split(".") for n in names if n.startswith(_LOGGER_PREFIX)
    ]
    return [
        (int(record[0]), int(record[1]))
        for record in records
        if len(record) == 2 and all(part.isdigit() and part.isascii() for part in record)  # noqa: PLR2004 - a pid and a time
    ]


def read_pid(path: str) -> int:
    """Read a pid file.

    Args:
        path: the file, as a runtime writes it.

    Returns:
        The pid; 0 if there is no file.

    Raises:
        BundleUnusable: there is something else in it.
    """
    if not os.path.lexists(path):
        return 0
    text = read(path, _LONGEST_LINE).strip()
    if not (text.isdigit() and text.isascii()):
        raise BundleUnusable(f"the pid in {path}", found=f"{text!r}, which is no number")
    return int(text)


def read_line(path: str) -> str:
    """Read a file of one short line.

    Args:
        path: the file.

    Returns:
        The line without white space around it; empty if there is no file.

    Raises:
        BundleUnusable: it cannot be read, is longer than 4096 bytes, or has a zero byte in it.
    """
    if not os.path.lexists(path):
        return ""
    return _without_zero(read(path, _LONGEST_LINE).decode(errors="replace").strip(), path)


def _without_zero(text: str, path: str) -> str:
    """A text of a file, if it can be the path of another."""
    if "\0" in text:
        raise BundleUnusable(
            f"the path {text!r} in {path}", found="a zero byte in it", do="remove that file"
        )
    return text


def read(path: str, limit: int) -> bytes:
    """Read a regular file.

    Args:
        path: the file; a link is refused.
        limit: the most bytes it may have.

    Returns:
        Its content.

    Raises:
        BundleUnusable: it is missing, unreadable, no regular file, or larger.
    """
    asked = f"to read {path}"
    try:
        # Without O_NONBLOCK, opening a fifo would wait for whoever made it.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BundleUnusable(
            asked, found=_reason(error), do="start the container through containerd"
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BundleUnusable(asked, found="not a regular file")
        content = bytearray()
        while chunk := os.read(fd, _CHUNK):
            content += chunk
            if len(content) > limit:
                raise BundleUnusable(asked, found=f"more than {limit} bytes")
        return bytes(content)
    except OSError as error:
        raise BundleUnusable(asked, found=_reason(error)) from error
    finally:
        os.close(fd)


def write(path: str, content: bytes, *, mode: int = 0o600) -> None:
    """Write a file so that whoever reads it sees all of it or none.

    Args:
        path: the file; what stood there is replaced.
        content: what is to be in it.
        mode: its permissions, whatever the umask.

    Raises:
        BundleUnusable: it cannot be written.
    """
    # One writer per process and name at a time: the pid makes the name ours.
    temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}")
    try:
        remove(temporary)  # of a predecessor with our pid, killed in this very function
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
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
        raise BundleUnusable(f"to write {path}", found=_reason(error)) from error


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def write_claim(bundle: str, claim: str, pid: int = 0, start_time: int = 0) -> None:
    """Write down where it says what the container claims, and for which process.

    Args:
        bundle: the bundle's path.
        claim: the path of what it claims.
        pid: its init process; 0 before it is made.
        start_time: when that started, in clock ticks since boot.

    Raises:
        BundleUnusable: it cannot be written.
    """
    write(os.path.join(bundle, CLAIM), f"{claim}\n{pid} {start_time}\n".encode())


def read_claim(bundle: str) -> tuple[str, int, int]:
    """Read what :func:`write_claim` wrote.

    Returns:
        The path, empty if there is no such file; the pid and the start time, zeros if it has none.

    Raises:
        BundleUnusable: there is something else in it.
    """
    path = os.path.join(bundle, CLAIM)
    claim, _, process = read_line(path).partition("\n")
    pid, start_time = _pid_and_start_time(path, process) if process else (0, 0)
    return claim, pid, start_time


def _pid_and_start_time(path: str, text: str) -> tuple[int, int]:
    words = text.split()
    if len(words) != 2 or not all(w.isdigit() and w.isascii() for w in words):  # noqa: PLR2004 - as it says
        raise BundleUnusable(f"the process in {path}", found="no pid and start time")
    return int(words[0]), int(words[1])


def release_claim(bundle: str) -> None:
    """Give back what the container claims (:mod:`shim.claims`), if it claims anything.

    Args:
        bundle: the bundle's path; it may be gone.

    Raises:
        BundleUnusable: what it claims cannot be told.
        OSError: the claim cannot be removed.
    """
    claim, _, _ = read_claim(bundle)
    if claim:
        remove(claim)
        remove(os.path.join(bundle, CLAIM))


def remove_staging(bundle: str) -> None:
    """Remove the directory with the files of ours that are mounted into the container.

    Args:
        bundle: the bundle's path.

    Raises:
        OSError: something in it cannot be removed, or is still mounted on.
    """
    remove_tree(os.path.join(bundle, STAGING))


def remove_tree(path: str) -> None:
    """Remove a directory and all that is in it, but nothing that is mounted there.

    Descends by descriptors and never through a link, so nobody can lead it astray.

    Args:
        path: the directory; it need not be there.

    Raises:
        OSError: something cannot be removed; EBUSY if there is a mount below.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return
    except NotADirectoryError:  # or a link: that alone is removed
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
            # A bind mount can have the same device; its mount differs.
            if _mount_id(fd) == mount_id:
                _empty(fd, mount_id)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=directory)  # EBUSY if something is mounted on it


def _mount_id(fd: int) -> bytes:
    """Which mount an open directory is on. Source: proc(5), /proc/PID/fdinfo."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return line
    return b""


class _StrictScanner:
    """What the C scanner of the json module asks of its decoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    memo: Final[dict[str, str]] = {}


def parse_object(content: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        content: UTF-8 text.
        path: the file it is from, for the message.

    Returns:
        The object.

    Raises:
        BundleUnusable: it is not one.
    """
    try:
        value = _loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise BundleUnusable(f"to parse {path}", found=f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise BundleUnusable(f"to parse {path}", found="JSON, but not an object")
    return value


def _loads(text: str) -> Any:
    """What ``json.loads`` returns, without importing json where all is well.

    The module imports re and enum, which doubles the time of a verb (12 ms more), and then
    calls the very function that is called here. For what is not plain JSON it is asked after
    all, and its word counts.
    """
    try:
        from _json import make_scanner  # noqa: PLC0415 - an interpreter may lack it

        scanner = make_scanner(_StrictScanner)  # type: ignore[arg-type] # reads attributes only
        start = len(text) - len(text.lstrip(_JSON_SPACE))
        value, end = scanner(text, start)
        if not text[end:].strip(_JSON_SPACE):
            return value
    except (ImportError, StopIteration, SystemError, ValueError):
        pass  # SystemError: the C code looks for an exception of a module nobody imported
    import json  # noqa: PLC0415 - see above

    return json.loads(text)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()
