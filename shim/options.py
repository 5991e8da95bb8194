"""The runtime's options, from whichever message brings them.

``ctr`` and Docker send ``containerd.runc.v1.Options``. CRI sends, for a runtime type it does
not know, ``runtimeoptions.v1.Options``: the handler's options table as a TOML text, or the
path of a TOML file. Both name the same things, and both may be absent.

Source: containerd api/types/runc/options/oci.proto; internal/cri/config GenerateRuntimeOptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from api.proto import runc_options_pb2, runtimeoptions_pb2
from shim.errors import InvalidRuntimeOptions

if TYPE_CHECKING:
    from google.protobuf.any_pb2 import Any as AnyMessage

DEFAULT_BINARY: Final = "runc"

# Where the runc family keeps its state below containerd; a namespace has a directory in it.
DEFAULT_ROOT: Final = "/run/containerd/runc"


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How the low-level runtime is to be called.

    Attributes:
        binary_name: runc, crun, or the path of one.
        root: the directory of its state; the namespace's directory is below it.
        systemd_cgroup: whether systemd makes the cgroups.
        no_pivot_root: move the root by chroot (for a rootfs on a ramdisk).
        no_new_keyring: keep the session keyring of the caller.
        io_uid: owner of the stdio that the container gets.
        io_gid: group of it.
    """

    binary_name: str = DEFAULT_BINARY
    root: str = DEFAULT_ROOT
    systemd_cgroup: bool = False
    no_pivot_root: bool = False
    no_new_keyring: bool = False
    io_uid: int = 0
    io_gid: int = 0


# The TOML key of each option (as containerd documents them for runc), its field and type.
_KEYS: Final[dict[str, tuple[str, type]]] = {
    "BinaryName": ("binary_name", str),
    "Root": ("root", str),
    "SystemdCgroup": ("systemd_cgroup", bool),
    "NoPivotRoot": ("no_pivot_root", bool),
    "NoNewKeyring": ("no_new_keyring", bool),
    "IoUid": ("io_uid", int),
    "IoGid": ("io_gid", int),
}

# Options of the runc shim that CRI hands on and that change nothing for this one.
_IGNORED_KEYS: Final = frozenset(
    {"ShimCgroup", "CriuPath", "CriuImagePath", "CriuWorkPath", "TaskApiAddress", "TaskApiVersion"}
)


def read_options(message: AnyMessage | None) -> RuntimeOptions:
    """The options of a Create request.

    Args:
        message: the ``options`` of the request; None or empty means defaults.

    Returns:
        The options, with defaults for what is not given.

    Raises:
        InvalidRuntimeOptions: the type, the encoding, a key or a value cannot be understood.
    """
    if message is None or not message.type_url:
        return RuntimeOptions()
    kind = message.type_url.rpartition("/")[2]
    try:
        if kind == runc_options_pb2.Options.DESCRIPTOR.full_name:
            return _from_runc(runc_options_pb2.Options.FromString(message.value))
        if kind == runtimeoptions_pb2.Options.DESCRIPTOR.full_name:
            return _from_toml(runtimeoptions_pb2.Options.FromString(message.value))
    except DecodeError as error:
        raise _invalid(kind, f"cannot be decoded: {error}") from error
    raise _invalid(kind, "not a type of options that this shim knows")


def _from_runc(options: runc_options_pb2.Options) -> RuntimeOptions:
    return RuntimeOptions(
        binary_name=options.binary_name or DEFAULT_BINARY,
        root=options.root or DEFAULT_ROOT,
        systemd_cgroup=options.systemd_cgroup,
        no_pivot_root=options.no_pivot_root,
        no_new_keyring=options.no_new_keyring,
        io_uid=options.io_uid,
        io_gid=options.io_gid,
    )


def _from_toml(options: runtimeoptions_pb2.Options) -> RuntimeOptions:
    import tomllib  # noqa: PLC0415 - 11 ms that only CRI's form of the options needs

    body, where = options.config_body, "the handler's options"
    if not body and options.config_path:
        where = options.config_path
        try:
            with open(options.config_path, "rb") as file:
                body = file.read()
        except OSError as error:
            raise _invalid(where, f"cannot be read: {error.strerror}") from error
    try:
        table = tomllib.loads(body.decode())
    except ValueError as error:
        raise _invalid(where, f"not TOML: {error}") from error
    return _from_table(table, where)


def _from_table(table: dict[str, Any], where: str) -> RuntimeOptions:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in _IGNORED_KEYS:
            continue
        if key not in _KEYS:
            raise _invalid(where, f"unknown key {key!r}")
        field, kind = _KEYS[key]
        if type(value) is not kind:
            raise _invalid(where, f"{key} is a {type(value).__name__}, not a {kind.__name__}")
        if value != "":
            values[field] = value
    return RuntimeOptions(**values)


def _invalid(what: str, found: str) -> InvalidRuntimeOptions:
    known = ", ".join(_KEYS)
    return InvalidRuntimeOptions(
        f"the runtime options in {what}", found=found, do=f"use the keys of runc's options: {known}"
    )
