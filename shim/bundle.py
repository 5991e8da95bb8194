"""The files of a bundle: their names, and how to read and write them.

A bundle is containerd's directory for a container. If the server is killed, the ``delete`` verb
relies on it; both use this module, so they agree.

======================  ===========  ======================================================
file                    written by   what it is
======================  ===========  ======================================================
``config.json``         containerd   the OCI spec; rewritten by us if GPUs are injected
``rootfs/``             containerd   where the image's file systems are mounted
``log``                 containerd   a fifo: our log
``address``             ``start``    where the shim listens, for containerd up to 1.7
``bootstrap.json``      containerd   what ``start`` answered, from 2.0 on; all there is for
                                     a pod's later container, as start is not called
``s``                   ``start``    a link to the directory of that socket
``options.json``        server       how the low-level runtime is called (`RuntimeRecord`)
``runtime``             server       the runtime's name, as containerd's own shim leaves it
``init.pid``            runc, crun   the pid of the container's init process
``log.*.json``          server       the log of one call of the runtime, while it lasts
``nvidia/``             server       files of ours that are mounted into the container
``nvidia.json``         server       what was injected, and why
``nvidia-before.json``  containerd   config.json before the injection: its other name
``claim``               server       the path of the container's claim on devices
                                     (:mod:`shim.work.claims`), and the pid and
                                     start time of the process that has them
``logger.*``            server       one for each running logger: its pid and start time
``shim-binary-path``    containerd   the program that it executed, from 1.7 on
``work``                containerd   a link to a directory on disk, removed with the bundle
``criu-work/``          server       in ``work``: CRIU's arguments and output, while it works
``criu-*.log``          server       CRIU's log of a failed call
``pod/``                server       of a sandbox: files that the pod's containers share
``holder``              server       of a sandbox: the process that holds its namespaces
``ns/``                 server       of a sandbox: its namespaces, mounted, if no process holds them
``member.*.json``       server       of a sandbox: how to end one of its containers
======================  ===========  ======================================================

:mod:`shim.sandbox.members` handles a sandbox's files. Our files have mode 0600, and appear by
rename, as a whole or not at all.

Source, for config.json: OCI runtime specification, config.md, config-linux.md.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any, Final

from shim import files
from shim.errors import BundleUnusable

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
SHIM_PROGRAM: Final = "shim-binary-path"
_CALL_PREFIX: Final = f"{LOG}."
_CALL_SUFFIX: Final = ".json"
_LOGGER_PREFIX: Final = "logger."

# Files left after an answered Delete. With only these, there is nothing to clean up
# (fast_delete.c).
FILES_AFTER_DELETE: Final = (
    ADDRESS, BEFORE, BOOTSTRAP, CONFIG, INIT_PID, LOG, OPTIONS, RECORD, ROOTFS, RUNTIME,
    SHIM_PROGRAM, SOCKET_DIRECTORY, WORK,
)  # fmt: skip

# Where runc, in its state directory, mounts the rootfs of a container that it restores.
RESTORED_ROOT: Final = "criu-root"

# A spec has some kilobytes; containerd itself would fail on more than this.
LONGEST_SPEC: Final = 32 << 20
_LONGEST_LINE: Final = 4096


class RuntimeRecord:
    """A container's low-level runtime and its options, for the clean-up.

    Attributes:
        binary: runc, crun, or the path of either.
        root: the runtime's state directory for this namespace.
        systemd_cgroup: whether systemd created the container's cgroup.
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
        The OCI spec, including parts that this project does not know.

    Raises:
        BundleUnusable: it is missing, unreadable, or not a JSON object.
    """
    path = os.path.join(bundle, CONFIG)
    return files.parse_object(files.read(path, LONGEST_SPEC), path)


def write_spec(bundle: str, spec: dict[str, Any]) -> None:
    """Replace config.json, keeping its mode.

    Args:
        bundle: the bundle's path.
        spec: the new OCI spec.

    Raises:
        BundleUnusable: it cannot be written.
    """
    path = os.path.join(bundle, CONFIG)
    try:
        mode = stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        mode = 0o600
    files.write(path, json.dumps(spec, separators=(",", ":")).encode(), mode=mode)


def keep_spec(bundle: str) -> None:
    """Keep the current config.json, so that later changes can be shown.

    It gets a second name, if possible, instead of a copy: a new config.json replaces only the
    first.

    Args:
        bundle: the bundle's path.

    Raises:
        BundleUnusable: it has no config.json, or it cannot be kept.
    """
    path, kept = os.path.join(bundle, CONFIG), os.path.join(bundle, BEFORE)
    try:
        files.remove(kept)  # left by a killed Create
        os.link(path, kept, follow_symlinks=False)
    except OSError:
        content = files.read(path, LONGEST_SPEC)
        mode = stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)
        files.write(kept, content, mode=mode)


def restore_spec(bundle: str) -> None:
    """Restore the config.json that :func:`keep_spec` kept, if any, with its mode and owner.

    Args:
        bundle: the bundle's path.

    Raises:
        BundleUnusable: it cannot be restored.
    """
    kept = os.path.join(bundle, BEFORE)
    try:
        # If both name the same file, this does nothing (rename(2)).
        os.rename(kept, os.path.join(bundle, CONFIG))
        files.remove(kept)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BundleUnusable(f"to put {kept} back", found=files.reason(error)) from error


def root_path_of(spec: dict[str, Any], bundle: str) -> str:
    """Return the path of the directory that the container's processes will see as /.

    Raises:
        BundleUnusable: the spec names none.
    """
    root = spec.get("root")
    path = root.get("path") if isinstance(root, dict) else None
    if not isinstance(path, str) or not path:
        raise BundleUnusable(
            f"the rootfs of {bundle}", found="no root.path in config.json", do="name one there"
        )
    return os.path.join(bundle, path)


def root_of(spec: dict[str, Any], bundle: str) -> str:
    """Return :func:`root_path_of`, which exists.

    Raises:
        BundleUnusable: the spec names no directory, or the directory does not exist.
    """
    path = root_path_of(spec, bundle)
    if not os.path.isdir(path):
        raise BundleUnusable(
            f"the rootfs {path}", found="no such directory", do="check the snapshot or --rootfs"
        )
    return path


def cgroups_path_of(spec: dict[str, Any]) -> str:
    """Return the spec's cgroup; "" for none."""
    linux = spec.get("linux")
    path = linux.get("cgroupsPath") if isinstance(linux, dict) else None
    return path if isinstance(path, str) else ""


def has_own_pid_namespace(spec: dict[str, Any]) -> bool:
    """Whether the spec requests a new pid namespace, in which all processes die with init.

    Raises:
        BundleUnusable: the spec's namespaces are malformed.
    """
    return any(n.get("type") == "pid" and not n.get("path") for n in _namespaces(spec))


def has_user_namespace(spec: dict[str, Any]) -> bool:
    """Whether the container's root user is another user on the host.

    Raises:
        BundleUnusable: the spec's namespaces are malformed.
    """
    return any(n.get("type") == "user" for n in _namespaces(spec))


def _namespaces(spec: dict[str, Any]) -> list[dict[str, Any]]:
    linux = spec.get("linux") or {}
    namespaces = linux.get("namespaces") if isinstance(linux, dict) else None
    if not isinstance(namespaces, list | None) or not all(
        isinstance(n, dict) for n in namespaces or []
    ):
        raise BundleUnusable(
            "the namespaces in config.json", found=f"{namespaces!r}", do="make a list of objects"
        )
    return namespaces or []


def read_runtime_record(bundle: str) -> RuntimeRecord | None:
    """Read options.json.

    Args:
        bundle: the bundle's path.

    Returns:
        The server's record; None if it had not got that far.

    Raises:
        BundleUnusable: the content is malformed.
    """
    path = os.path.join(bundle, OPTIONS)
    if not os.path.lexists(path):
        return None
    return parse_runtime_record(files.parse_object(files.read(path, files.CHUNK), path), path)


def write_runtime_record(bundle: str, record: RuntimeRecord) -> None:
    """Write options.json, for the delete verb if the server is killed.

    Args:
        bundle: the bundle's path.
        record: the container's runtime and its options.

    Raises:
        BundleUnusable: it cannot be written.
    """
    files.write(os.path.join(bundle, OPTIONS), json.dumps(record_fields(record)).encode())
    files.write(os.path.join(bundle, RUNTIME), record.binary.encode())


def record_fields(record: RuntimeRecord) -> dict[str, object]:
    """Return a runtime record as JSON values."""
    return {
        "binary": record.binary,
        "root": record.root,
        "systemd_cgroup": record.systemd_cgroup,
    }


def parse_runtime_record(content: dict[str, Any], path: str) -> RuntimeRecord:
    """Parse the fields from :func:`record_fields`.

    Args:
        content: the fields, and possibly others.
        path: the file that they come from, for messages.

    Raises:
        BundleUnusable: they are malformed.
    """
    binary, root = content.get("binary"), content.get("root")
    if not (isinstance(binary, str) and binary and isinstance(root, str) and root.startswith("/")):
        raise BundleUnusable(f"the runtime in {path}", found="no binary or no absolute root in it")
    for text in (binary, root):
        without_zero(text, path)
    return RuntimeRecord(binary, root, systemd_cgroup=content.get("systemd_cgroup") is True)


def bootstrap_address(bundle: str) -> str:
    """Return the shim's address from containerd's record.

    Args:
        bundle: the bundle's path.

    Returns:
        The address with its scheme; "" if there is none.

    Raises:
        BundleUnusable: bootstrap.json is malformed.
    """
    path = os.path.join(bundle, BOOTSTRAP)
    if not os.path.lexists(path):
        return ""
    address = files.parse_object(files.read(path, files.CHUNK), path).get("address")
    return without_zero(address, path) if isinstance(address, str) else ""


def begin_call(bundle: str, call: str) -> str:
    """Create the log of a low-level runtime's call.

    It exists while the call runs, to show the clean-up after a killed shim that a runtime may still
    be running.

    Args:
        bundle: the bundle's path.
        call: a name that no other call uses.

    Returns:
        The log's path.
    """
    path = os.path.join(bundle, f"{_CALL_PREFIX}{call}{_CALL_SUFFIX}")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError:
        pass  # the runtime will fail to open it, and report that
    return path


def calls_under_way(bundle: str) -> list[str]:
    """Return the names of the logs of calls that were running when the shim ended.

    Args:
        bundle: the bundle's path; it need not exist.
    """
    try:
        names = os.listdir(bundle)
    except OSError:
        return []
    return [n for n in names if n.startswith(_CALL_PREFIX) and n.endswith(_CALL_SUFFIX)]


def record_logger(bundle: str, pid: int, start_time: int) -> str:
    """Record a running logger, for the clean-up after a killed shim.

    Args:
        bundle: the bundle's path.
        pid: the logger's pid.
        start_time: when it started, in clock ticks since boot.

    Returns:
        The path of the record; remove it once the logger has ended.
    """
    path = os.path.join(bundle, f"{_LOGGER_PREFIX}{pid}.{start_time}")
    files.write(path, b"")
    return path


def loggers_left(bundle: str) -> list[tuple[int, int]]:
    """Return the pid and start time of each logger that was running when the shim ended.

    Args:
        bundle: the bundle's path; it need not exist.
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
        path: the runtime's file.

    Returns:
        The pid; 0 if there is no file.

    Raises:
        BundleUnusable: the file does not contain a pid.
    """
    if not os.path.lexists(path):
        return 0
    text = files.read(path, _LONGEST_LINE).strip()
    if not (text.isdigit() and text.isascii()):
        raise BundleUnusable(f"the pid in {path}", found=f"{text!r}, which is not a number")
    return int(text)


def read_line(path: str) -> str:
    """Read a file that contains one short line.

    Args:
        path: the file.

    Returns:
        The line without surrounding white space; "" if there is no file.

    Raises:
        BundleUnusable: the file cannot be read, is longer than 4096 bytes, or contains a zero byte.
    """
    if not os.path.lexists(path):
        return ""
    return without_zero(files.read(path, _LONGEST_LINE).decode(errors="replace").strip(), path)


def without_zero(text: str, path: str) -> str:
    """Return a text from a file if it can be a path."""
    if "\0" in text:
        raise BundleUnusable(
            f"the path {text!r} in {path}", found="a zero byte in it", do="remove that file"
        )
    return text


def write_claim(bundle: str, claim: str, pid: int = 0, start_time: int = 0) -> None:
    """Record in the bundle the container's claim, and its process.

    Args:
        bundle: the bundle's path.
        claim: the path of the claim.
        pid: the container's init process; 0 before it exists.
        start_time: when init started, in clock ticks since boot.

    Raises:
        BundleUnusable: it cannot be written.
    """
    files.write(os.path.join(bundle, CLAIM), f"{claim}\n{pid} {start_time}\n".encode())


def read_claim(bundle: str) -> tuple[str, int, int]:
    """Read the file of :func:`write_claim`.

    Returns:
        The path, "" without a file; the pid and the start time, 0 if missing.

    Raises:
        BundleUnusable: the file is malformed.
    """
    path = os.path.join(bundle, CLAIM)
    claim, _, process = read_line(path).partition("\n")
    pid, start_time = pid_and_start_time(path, process) if process else (0, 0)
    return claim, pid, start_time


def pid_and_start_time(path: str, text: str) -> tuple[int, int]:
    """Return the two numbers in a file; raise BundleUnusable for anything else."""
    words = text.split()
    if len(words) != 2 or not all(w.isdigit() and w.isascii() for w in words):  # noqa: PLR2004 - as it says
        raise BundleUnusable(f"the process in {path}", found="no pid and start time")
    return int(words[0]), int(words[1])


def release_claim(bundle: str) -> None:
    """Release the container's claim (:mod:`shim.work.claims`), if it has one.

    Args:
        bundle: the bundle's path; it may no longer exist.

    Raises:
        BundleUnusable: the record of the claim cannot be read.
        OSError: the claim cannot be removed.
    """
    claim, _, _ = read_claim(bundle)
    if claim:
        files.remove(claim)
        files.remove(os.path.join(bundle, CLAIM))


def remove_staging(bundle: str) -> None:
    """Remove the directory of our files for the container's mounts.

    Args:
        bundle: the bundle's path.

    Raises:
        OSError: something in it cannot be removed, or is still a mount point.
    """
    files.remove_tree(os.path.join(bundle, STAGING))
