"""The inventory's cache: ``inventory.json`` in the state directory.

Rules
- It contains an inventory with every observation that led to it. It is valid if each observation
  still gives the same result, and if the same version of this code made it from the same
  directories: another release knows other files of a driver. The boot id is one of the
  observations.
- Any fault of the file, from a torn write to a forged owner, makes it stale. It is never an error:
  a new inventory replaces the file.
- The file names sources of mounts, so only root may have written it: the directory and the file
  belong to us, no other user may write them, and the file is not a link.
- The file is written under another name and renamed, so a reader sees all of it or none.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from api.values import dataclass
from hooks.config import Config
from hooks.node import temporary
from hooks.node.driver import Driver, DriverFile, LibraryFile
from hooks.node.fingerprint import first_change
from hooks.node.gpus import Gpu, MigDevice
from hooks.words import Arch

NAME: Final = "inventory.json"
RELEASE: Final = "0.2.0"
"""The project's version, as in ``shim.VERSION``: what another release has found is stale."""

# Raise it if what is observed or written changes within a release.
FORMAT: Final = 10

_MOST_BYTES: Final = 16 << 20
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
# The errors from reading a document of another shape.
_DAMAGED: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class StoredInventory:
    """The cached part of an inventory: see :class:`hooks.node.inventory.Inventory`."""

    driver: Driver
    gpus: tuple[Gpu, ...]
    mig_devices: tuple[MigDevice, ...]
    notes: tuple[str, ...]
    nvml_failure: str
    taken: float
    # what only NVML reported: procfs cannot confirm it, so no observation shows a change; "" for
    # nothing
    unsettled: str = ""
    cuda_version: str = ""
    id: str = ""  # unique to this inventory


def boot_id_path(config: Config) -> str:
    """Return the procfs file that changes with each boot."""
    return f"{config.proc}/sys/kernel/random/boot_id"


class _Decoded(NamedTuple):
    content: bytes
    document: Any
    inventory: StoredInventory
    files: dict[str, Any]


# The last result. A forked process inherits it.
_decoded: _Decoded | None = None


def load(config: Config) -> tuple[StoredInventory, dict[str, Any]] | None:
    """Return the cached inventory, and the observations of its files by path.

    Returns:
        None if there is none, or if anything has changed.
    """
    try:
        decoded = _decode(config)
        if decoded is None or _why_stale(config, decoded.document):
            return None
    except _DAMAGED:
        return None
    return decoded.inventory, decoded.files


def recall(config: Config) -> StoredInventory | None:
    """Return the last cached inventory, even if stale; None without one.

    A failing GPU changes the observations just when its identity is needed most.
    """
    try:
        decoded = _decode(config)
    except _DAMAGED:
        return None
    return None if decoded is None else decoded.inventory


def decode_ahead(config: Config) -> None:
    """Decode the cache, valid or not, so that processes forked later need not."""
    try:
        _decode(config)
    except _DAMAGED:
        pass  # its users handle the error


def _decode(config: Config) -> _Decoded | None:
    global _decoded  # noqa: PLW0603 - of a pure function's results, the last
    content = _read(config)
    if content is None:
        return None
    if _decoded is None or _decoded.content != content:
        document = json.loads(content)
        files = {path: seen for kind, path, seen in document["observations"] if kind == "stat"}
        _decoded = _Decoded(content, document, _kept(document), files)
    return _decoded


@dataclass(frozen=True, slots=True)
class File:
    """The state of the file itself."""

    path: str
    is_there: bool  # whether it exists and only root may write it
    stale: str = ""  # why its content does not count; "" if it does
    format: int = 0  # the content's format; 0 if unknown
    boot_id: str = ""  # the boot that wrote it; "" if unknown
    observations: int = 0  # how many must be unchanged


def look_at_file(config: Config) -> File:
    """Return whether the file is valid, and if not, why, for display."""
    path = f"{config.state}/{NAME}"
    content = _read(config)
    if content is None:
        why = "it is not root's alone" if os.path.lexists(path) else "nothing was kept"
        if os.path.isdir(config.state) and not os.access(config.state, os.R_OK | os.X_OK):
            why = "it is not ours to read"
        return File(path, is_there=False, stale=why)
    try:
        document = json.loads(content)
        observations = document["observations"]
        boot_id = next((s for k, p, s in observations if p == boot_id_path(config)), None) or ""
        found = File(
            path, True, _why_stale(config, document), document["format"], boot_id.strip(),
            len(observations),
        )  # fmt: skip
    except _DAMAGED:
        return File(path, is_there=True, stale="it is damaged")
    return found


def _why_stale(config: Config, document: Any) -> str:
    if document["format"] != FORMAT:
        return f"it has format {document['format']}, and this version writes {FORMAT}"
    if document["release"] != RELEASE:
        return f"it is of version {document['release']}, and this is {RELEASE}"
    if document["config"] != _settings(config):
        return "it was made with another configuration"
    changed = first_change(document["observations"])
    return "" if changed is None else f"{changed} is not as it was"


def store(
    config: Config, kept: StoredInventory, observations: Mapping[tuple[str, str], Any]
) -> str:
    """Store an inventory, replacing any other.

    Args:
        config: locates the state directory, which is created if missing.
        observations: its observations, by kind and path.

    Returns:
        Why it could not be stored; "" on success. This is not an error, because the inventory is
        still true.
    """
    document: dict[str, Any] = {
        "format": FORMAT,
        "release": RELEASE,
        "config": _settings(config),
        "observations": [[kind, path, seen] for (kind, path), seen in observations.items()],
    } | {name: getattr(kept, name) for name in kept.__match_args__}
    content = json.dumps(document, default=_as_json, separators=(",", ":")).encode()
    try:
        os.makedirs(config.state, mode=0o700, exist_ok=True)
        directory = _open_directory(config.state)
    except OSError as error:
        return f"{config.state}: {error.strerror}"
    try:
        _replace(directory, content)
    except OSError as error:
        return f"{config.state}/{NAME}: {error.strerror}"
    finally:
        os.close(directory)
    return ""


_SETTINGS: Final = ("driver_root", "host_root", "dev", "proc", "sys", "nvml_timeout")


def _settings(config: Config) -> dict[str, Any]:
    """Return the part of a configuration on which an inventory depends."""
    return {name: getattr(config, name) for name in _SETTINGS}


def _read(config: Config) -> bytes | None:
    try:
        directory = _open_directory(config.state)
    except OSError:
        return None
    try:
        fd = os.open(
            NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
        )
    except OSError:
        return None
    finally:
        os.close(directory)
    try:
        seen = os.fstat(fd)
        if not (stat.S_ISREG(seen.st_mode) and _is_ours(seen) and seen.st_size <= _MOST_BYTES):
            return None
        # The file is never written in place. A buffer for the largest would take longer than the
        # rest.
        return os.read(fd, seen.st_size)
    except OSError:
        return None
    finally:
        os.close(fd)


def _open_directory(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not _is_ours(os.fstat(fd)):
        os.close(fd)
        raise PermissionError(1, "not ours, or others may write it")
    return fd


def _is_ours(seen: os.stat_result) -> bool:
    return seen.st_uid == os.geteuid() and not seen.st_mode & _OTHERS_MAY_WRITE


def _replace(directory: int, content: bytes) -> None:
    # A worker has a deadline, and may be killed here.
    temporary.sweep(directory, lambda name: name.startswith(f".{NAME}."))
    fd, new = _temporary(directory)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.rename(new, NAME, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        os.unlink(new, dir_fd=directory)
        raise


def _temporary(directory: int) -> tuple[int, str]:
    """Create and lock a temporary file; return its descriptor and name."""
    # O_EXCL: never write a file that another process put there.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        name = f".{NAME}.{os.urandom(8).hex()}"
        fd = os.open(name, flags, 0o600, dir_fd=directory)
        if temporary.lock(fd, name, directory):
            return fd, name
        os.close(fd)


def _as_json(thing: object) -> object:
    if isinstance(thing, Arch):
        return thing.value
    if isinstance(thing, Driver | LibraryFile | DriverFile | Gpu | MigDevice):
        return {name: getattr(thing, name) for name in thing.__match_args__}
    raise TypeError(f"{thing!r} is not written to JSON")


def _kept(document: Any) -> StoredInventory:
    driver = document["driver"]
    libraries = [LibraryFile(**{**f, "arch": Arch(f["arch"])}) for f in driver["libraries"]]
    return StoredInventory(
        driver=Driver(
            **{
                **driver,
                "arch": Arch(driver["arch"]),
                "libraries": tuple(libraries),
                "files": tuple(DriverFile(**file) for file in driver["files"]),
                "library_directories": tuple(driver["library_directories"]),
            }
        ),
        gpus=tuple(Gpu(**{**gpu, "drm": tuple(gpu["drm"])}) for gpu in document["gpus"]),
        mig_devices=tuple(
            MigDevice(**{**device, "caps": tuple(device["caps"])})
            for device in document["mig_devices"]
        ),
        notes=tuple(document["notes"]),
        taken=float(document["taken"]),
        **{name: document[name] for name in ("nvml_failure", "unsettled", "cuda_version", "id")},
    )
