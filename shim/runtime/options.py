"""Read the runtime's options from any message that contains them.

``ctr`` and Docker send ``containerd.runc.v1.Options``. For a runtime type that it does not know,
CRI sends ``runtimeoptions.v1.Options``: the handler's options table as TOML text, or the path of a
TOML file. Both contain the same options, and both may be absent. For an unknown runtime, clients of
containerd 1.x send ``containerd.linux.runc.CreateOptions`` with a task's few flags (``ctr run
--uidmap``, ``--no-pivot``).

As in containerd's own reading of the table, the case of keys does not matter, and a number may be a
float. An unknown key is an error: a misspelt option must not silently have no effect.

These are accepted without effect: ``TaskApiAddress`` and ``TaskApiVersion`` (with them, containerd
uses an existing shim and starts none); ``TypeUrl``, ``ConfigPath`` and ``ConfigBody`` (fields of
CRI's message itself, which end up in the table if empty or next to other keys).

The verbs also use the options: ``start`` joins ``ShimCgroup``, and ``-info`` queries
``BinaryName``.

Source: containerd api/types/runc/options/oci.proto; internal/cri/config GenerateRuntimeOptions;
sd_booted(3); runc docs/systemd.md.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message

from api.errors import kind_name
from api.proto import linux_runc_pb2, runc_options_pb2, runtimeoptions_pb2
from api.values import dataclass, replace
from shim.bundle import cgroups_path_of
from shim.errors import InvalidRuntimeOptions, SystemdNotRunning

DEFAULT_BINARY: Final = "runc"

# The state directory of the runc family below containerd, with a directory for each namespace.
DEFAULT_ROOT: Final = "/run/containerd/runc"


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """The options of the low-level runtime."""

    binary_name: str = DEFAULT_BINARY  # runc, crun, or the path of one
    root: str = DEFAULT_ROOT  # the directory of its state; the namespace's directory is below it
    systemd_cgroup: bool = False  # whether systemd creates the cgroups
    no_pivot_root: bool = False  # move the root by chroot (for a rootfs on a ramdisk)
    no_new_keyring: bool = False  # keep the session keyring of the caller
    io_uid: int = 0  # owner of the container's stdio
    io_gid: int = 0  # its group
    criu_path: str = ""  # CRIU, which saves and restores containers; empty to search PATH
    criu_image_path: str = ""  # a checkpoint to restore containers from, if Create names none
    criu_work_path: str = ""  # the directory of CRIU's restore log; empty for our own
    shim_cgroup: str = ""  # the cgroup of the shim itself; empty for its caller's


# The TOML key of each option (as containerd documents them for runc), its field and type.
_KEYS: Final[dict[str, tuple[str, type]]] = {
    "BinaryName": ("binary_name", str),
    "Root": ("root", str),
    "SystemdCgroup": ("systemd_cgroup", bool),
    "NoPivotRoot": ("no_pivot_root", bool),
    "NoNewKeyring": ("no_new_keyring", bool),
    "IoUid": ("io_uid", int),
    "IoGid": ("io_gid", int),
    "CriuPath": ("criu_path", str),
    "CriuImagePath": ("criu_image_path", str),
    "CriuWorkPath": ("criu_work_path", str),
    "ShimCgroup": ("shim_cgroup", str),
}

# Keys without effect.
_IGNORED_KEYS: Final = ("TaskApiAddress", "TaskApiVersion", "TypeUrl", "ConfigPath", "ConfigBody")
# Keys that containerd 2 drops for a handler of runc's type, whose message lacks these fields.
_DROPPED_KEYS: Final = frozenset({"CriuPath", "TypeUrl", "ConfigPath", "ConfigBody"})

KNOWN_KEYS: Final = (*_KEYS, *_IGNORED_KEYS)
"""Every key of a handler's options; case does not matter."""
RUNC_KEYS: Final = tuple(key for key in KNOWN_KEYS if key not in _DROPPED_KEYS)
"""The keys that remain for a handler of runc's type."""
_BY_LOWER_CASE: Final = {key.lower(): key for key in KNOWN_KEYS}

# The most bytes of ConfigPath's file, far more than any such table needs.
_LARGEST_FILE: Final = 1 << 20

# uid_t has 32 bits; for chown(2), its highest value means "no change".
_HIGHEST_ID: Final = (1 << 32) - 2

# It exists if systemd is the init system.
_SYSTEMD: Final = "/run/systemd/system"


def read_options(message: AnyMessage | None) -> RuntimeOptions:
    """Read the options of a Create request.

    Args:
        message: the ``options`` of the request; None or empty for the defaults.

    Returns:
        The options, with defaults for missing ones.

    Raises:
        InvalidRuntimeOptions: the type, the encoding, a key or a value is unknown or invalid.
    """
    if message is None or not message.type_url:
        return RuntimeOptions()
    kind = _kind_of(message)
    if kind not in _READERS:
        raise _invalid(kind, "not a type of options that this shim knows")
    try:
        return _checked(_READERS[kind](message.value), kind)
    except DecodeError as error:
        raise _invalid(kind, f"cannot be decoded: {error}") from error


def can_read(message: AnyMessage) -> bool:
    """Whether :func:`read_options` supports this type of options."""
    return not message.type_url or _kind_of(message) in _READERS


def _kind_of(message: AnyMessage) -> str:
    return message.type_url.rpartition("/")[2]


def with_cgroup_driver(options: RuntimeOptions, spec: dict[str, Any]) -> RuntimeOptions:
    """Return the options with the decision whether systemd creates the container's cgroup.

    It does if the options say so, or if it runs and the spec names the cgroup in systemd's form
    (``slice:prefix:name``): the kubelet's cgroup driver, not the handler's options, determines how
    CRI names cgroups.

    Args:
        options: the options from :func:`read_options`.
        spec: the container's OCI spec.

    Raises:
        SystemdNotRunning: the options request systemd, but it does not run.
    """
    runs = os.path.isdir(_SYSTEMD)
    if options.systemd_cgroup:
        if not runs:
            raise SystemdNotRunning(
                "cgroups made by systemd (SystemdCgroup)",
                found=f"systemd is not this machine's init system: there is no {_SYSTEMD}",
                do="remove SystemdCgroup from the runtime's options",
            )
        return options
    if runs and _is_of_systemd(cgroups_path_of(spec)):
        return replace(options, systemd_cgroup=True)
    return options


def _is_of_systemd(cgroups_path: str) -> bool:
    parts = cgroups_path.split(":")
    if len(parts) != 3 or "/" in cgroups_path:  # noqa: PLR2004 - slice:prefix:name
        return False
    return parts[0].endswith(".slice") and parts[2] != ""


def _from_runc(value: bytes) -> RuntimeOptions:
    return _from_message(runc_options_pb2.Options.FromString(value))


def _from_first_generation(value: bytes) -> RuntimeOptions:
    # The rest is about saving a container, which the checkpoint itself records.
    return _from_message(linux_runc_pb2.CreateOptions.FromString(value))


def _from_message(message: Message) -> RuntimeOptions:
    """Return the options in a message whose fields have our names."""
    given = {field: getattr(message, field, None) for field, _ in _KEYS.values()}
    return RuntimeOptions(**{field: value for field, value in given.items() if value})


def _from_toml(value: bytes) -> RuntimeOptions:
    options = runtimeoptions_pb2.Options.FromString(value)
    body, where = options.config_body, "the handler's options"
    if not body and options.config_path:
        where = options.config_path
        body = _read_file(where)
    try:
        table = tomllib.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"not TOML: {error}") from error
    return _from_table(table, where)


def _from_table(table: dict[str, Any], where: str) -> RuntimeOptions:
    taken: dict[str, Any] = {}
    for written, value in table.items():
        key = _BY_LOWER_CASE.get(written.lower())
        if key is None:
            raise _invalid(where, f"unknown key {written!r}")
        if key in _IGNORED_KEYS:
            continue
        field, kind = _KEYS[key]
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)  # noqa: PLW2901 - the same number
        if type(value) is not kind:
            raise _invalid(where, f"{key} is {kind_name(type(value))}, not {kind_name(kind)}")
        if field in taken:
            raise _invalid(where, f"{key} is there twice")
        if value != "":
            taken[field] = value
    return RuntimeOptions(**taken)


def _read_file(path: str) -> bytes:
    """Return the content of the options' file; follow links, since ConfigMaps use them."""
    if not os.path.isabs(path) or "\0" in path:
        raise _invalid(repr(path), "not an absolute path")
    try:
        # Without O_NONBLOCK, opening a fifo would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _invalid(path, "not a regular file")
            content = bytearray()
            while len(content) <= _LARGEST_FILE and (chunk := os.read(fd, _LARGEST_FILE + 1)):
                content += chunk
        finally:
            os.close(fd)
    except OSError as error:
        found = f"cannot be read: {os.strerror(error.errno or 0).lower()}"
        raise _invalid(path, found) from error
    if len(content) > _LARGEST_FILE:
        raise _invalid(path, f"more than {_LARGEST_FILE} bytes")
    return bytes(content)


# By the message's name.
_READERS: Final[Mapping[str, Callable[[bytes], RuntimeOptions]]] = {
    runc_options_pb2.Options.DESCRIPTOR.full_name: _from_runc,
    runtimeoptions_pb2.Options.DESCRIPTOR.full_name: _from_toml,
    linux_runc_pb2.CreateOptions.DESCRIPTOR.full_name: _from_first_generation,
}


def _checked(options: RuntimeOptions, where: str) -> RuntimeOptions:
    """Check the options' values, and return the options."""
    paths = (
        options.binary_name,
        options.root,
        options.criu_path,
        options.criu_image_path,
        options.criu_work_path,
        options.shim_cgroup,
    )
    if "\0" in "".join(paths):
        raise _invalid(where, "a zero byte in a path")
    if "/" in options.binary_name and not os.path.isabs(options.binary_name):
        raise _invalid(where, f"BinaryName {options.binary_name!r}: not a name or an absolute path")
    if not os.path.isabs(options.root):
        raise _invalid(where, f"Root {options.root!r} is not an absolute path")
    for key, number in (("IoUid", options.io_uid), ("IoGid", options.io_gid)):
        if not 0 <= number <= _HIGHEST_ID:
            raise _invalid(where, f"{key} is {number}, not from 0 to {_HIGHEST_ID}")
    return options


def _invalid(what: str, found: str) -> InvalidRuntimeOptions:
    known = ", ".join(_KEYS)
    return InvalidRuntimeOptions(
        f"the runtime options in {what}", found=found, do=f"use the keys of runc's options: {known}"
    )
