"""Where the node keeps its driver, device nodes, procfs and sysfs; which loggers are allowed.

One TOML file, read when a container asks for a GPU or names a logger::

    [node]
    driver-root = "/"        # "/run/nvidia/driver" where a container brings the driver
    dev = "/dev"
    proc = "/proc"
    sys = "/sys"
    state = "/run/containerd-shim-nvidia"
    nvml-timeout = 5         # seconds that NVML may take
    char-links = true        # make missing links DEV/char/MAJOR:MINOR (hooks.char_links)

    [requests]               # where hooks.request looks for what is asked
    swarm-resources = []     # variables that come before NVIDIA_VISIBLE_DEVICES
    annotation-prefixes = ["cdi.k8s.io/"]
    accept-mounts = true     # /dev/null on /var/run/nvidia-container-devices/DEVICE
    default-kind = "nvidia.com/gpu"  # of devices that are named without one

    [stdio]
    loggers = ["/usr/local/bin/logger"]  # programs that binary:// may name

Rules
- A key that is not there has the default above. So does every key if the file is not there,
  unless somebody named the file: then its absence is an error.
- An unknown table or key is an error, because a misspelt one would be a setting ignored.
- Paths are absolute. They are all the engine knows of the node's layout, so that the same
  code runs on a simulated one.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from hooks.errors import ConfigMalformed, ConfigUnreadable, UnknownConfigKey, WrongConfigValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DEFAULT_PATH", "ENVIRONMENT_VARIABLE", "Config", "load_config"]

DEFAULT_PATH: Final = "/etc/containerd-shim-nvidia/config.toml"
ENVIRONMENT_VARIABLE: Final = "NVSHIM_CONFIG"


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration, checked.

    Attributes:
        driver_root: the directory that is "/" for the driver's files.
        dev: the directory of the device nodes.
        proc: where procfs is.
        sys: where sysfs is.
        state: a directory of our own for what must not outlive a boot.
        nvml_timeout: how long NVML may take to answer, in seconds.
        loggers: the programs that may be loggers; None for any that is root's alone.
        char_links: whether missing links in ``dev/char`` are made for the nodes that are given.
        swarm_resources: names of variables that name devices as NVIDIA_VISIBLE_DEVICES does.
        annotation_prefixes: annotations whose names begin so hold CDI names.
        accept_mounts: whether mounts of /dev/null may name devices.
        default_kind: the CDI kind of a device that is named without one.
    """

    driver_root: str = "/"
    dev: str = "/dev"
    proc: str = "/proc"
    sys: str = "/sys"
    state: str = "/run/containerd-shim-nvidia"
    nvml_timeout: float = 5.0
    loggers: tuple[str, ...] | None = None
    char_links: bool = True
    swarm_resources: tuple[str, ...] = ()
    annotation_prefixes: tuple[str, ...] = ("cdi.k8s.io/",)
    accept_mounts: bool = True
    default_kind: str = "nvidia.com/gpu"


def load_config(path: str | None = None) -> Config:
    """The configuration from its file.

    Args:
        path: the file; None for the one that NVSHIM_CONFIG names, else :data:`DEFAULT_PATH`.

    Returns:
        The configuration; the defaults if nobody named a file and there is none.

    Raises:
        ConfigUnreadable: the file cannot be read, or was named and is not there.
        ConfigMalformed: it is no TOML.
        UnknownConfigKey: it has a table or key that means nothing.
        WrongConfigValue: a value has the wrong type or is out of range.
    """
    named = path or os.environ.get(ENVIRONMENT_VARIABLE)
    file = named or DEFAULT_PATH
    try:
        with open(file, "rb") as stream:
            content = stream.read()
    except FileNotFoundError as error:
        if named is None:
            return Config()
        raise _unreadable(file, error) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    return parse_config(content, file)


def parse_config(content: bytes, file: str) -> Config:
    """The configuration from a file's content.

    Args:
        content: the TOML.
        file: its name, for messages.

    Returns:
        The configuration.

    Raises:
        ConfigMalformed: it is no TOML.
        UnknownConfigKey: it has a table or key that means nothing.
        WrongConfigValue: a value has the wrong type or is out of range.
    """
    import tomllib  # noqa: PLC0415 - 15 ms that a node without the file does not pay

    try:
        tables = tomllib.loads(content.decode())
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are both one
        raise ConfigMalformed(f"configuration {file}", found=f"no TOML: {error}") from error
    fields: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in _TABLES:
            raise UnknownConfigKey(
                f"configuration {file}",
                found=f"unknown table or key {name}",
                do=f"use {', '.join(f'[{known}]' for known in _TABLES)}",
            )
        if not isinstance(table, dict):
            raise WrongConfigValue(
                f"{name} in configuration {file}",
                found=f"{table!r}",
                do=f"write a table, [{name}]",
            )
        fields |= _fields(name, table, file)
    return replace(Config(), **fields)


def _fields(name: str, table: Mapping[str, Any], file: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    keys = _TABLES[name]
    for key, value in table.items():
        if key not in keys:
            raise UnknownConfigKey(
                f"configuration {file}",
                found=f"unknown key {key} in [{name}]",
                do=f"use {', '.join(keys)}",
            )
        field, check, wanted = keys[key]
        checked = check(value)
        if checked is None:
            raise WrongConfigValue(
                f"{key} in [{name}] of configuration {file}",
                found=f"{value!r}",
                do=f"write {wanted}",
            )
        fields[field] = checked
    return fields


def _path(value: object) -> str | None:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        return None
    # normpath keeps two leading slashes, which POSIX lets mean something else
    return "/" + posixpath.normpath(value).lstrip("/")


_LONGEST_TIMEOUT: Final = 600.0


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value <= _LONGEST_TIMEOUT else None


def _paths(value: object) -> tuple[str, ...] | None:
    if not isinstance(value, list):
        return None
    paths = [_path(entry) for entry in value]
    return None if None in paths else tuple(path for path in paths if path)


_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A name that begins with a domain; "" would make every annotation a list of devices.
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_./-]*")
_KIND: Final = re.compile(
    r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?"
)


def _text_like(pattern: re.Pattern[str]) -> Callable[[object], object]:
    def check(value: object) -> str | None:
        return value if isinstance(value, str) and pattern.fullmatch(value) else None

    return check


def _texts_like(pattern: re.Pattern[str]) -> Callable[[object], object]:
    check = _text_like(pattern)

    def check_all(value: object) -> tuple[object, ...] | None:
        if not isinstance(value, list) or not all(check(entry) for entry in value):
            return None
        return tuple(dict.fromkeys(value))

    return check_all


def _yes_or_no(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


_A_PATH: Final = 'an absolute path ("/…")'
_TABLES: Final[dict[str, dict[str, tuple[str, Callable[[object], object], str]]]] = {
    "node": {
        "driver-root": ("driver_root", _path, _A_PATH),
        "dev": ("dev", _path, _A_PATH),
        "proc": ("proc", _path, _A_PATH),
        "sys": ("sys", _path, _A_PATH),
        "state": ("state", _path, _A_PATH),
        "char-links": ("char_links", _yes_or_no, "true or false"),
        "nvml-timeout": ("nvml_timeout", _seconds, "seconds, more than 0 and at most 600"),
    },
    "requests": {
        "swarm-resources": (
            "swarm_resources",
            _texts_like(_VARIABLE),
            "a list of names of variables",
        ),
        "annotation-prefixes": (
            "annotation_prefixes",
            _texts_like(_PREFIX),
            'a list of prefixes ("cdi.k8s.io/")',
        ),
        "accept-mounts": ("accept_mounts", _yes_or_no, "true or false"),
        "default-kind": ("default_kind", _text_like(_KIND), 'a kind ("nvidia.com/gpu")'),
    },
    "stdio": {"loggers": ("loggers", _paths, "a list of absolute paths")},
}


def _unreadable(file: str, error: OSError) -> ConfigUnreadable:
    return ConfigUnreadable(
        f"configuration {file}",
        found=error.strerror or str(error),
        do=f"make the file readable, or name another in {ENVIRONMENT_VARIABLE}",
    )
