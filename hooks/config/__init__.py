"""The configuration: the place of the node's driver, who may have which GPU, allowed loggers.

:func:`load_config` reads our file (:mod:`~hooks.config.settings` describes it) or, if there is
none, that of NVIDIA's container toolkit (:mod:`~hooks.config.nvidia`). Other rooms use the names
below; only the tools that convert NVIDIA's file read it directly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from hooks.config.nvidia import parse_nvidia_config
from hooks.config.settings import (
    TABLES,
    Beyond,
    Config,
    Denied,
    Holders,
    Mode,
    Namespaces,
    Platform,
    parse_config,
    parse_toml,
)
from hooks.errors import ConfigUnreadable
from hooks.named_files import read_named
from hooks.words import quotes_in

__all__ = [
    "DEFAULT_PATH",
    "ENVIRONMENT_VARIABLE",
    "TABLES",
    "Beyond",
    "Config",
    "Denied",
    "Holders",
    "Mode",
    "Namespaces",
    "Platform",
    "find_files",
    "load_config",
    "parse_config",
    "parse_toml",
]

DEFAULT_PATH: Final = "/etc/containerd-shim-nvidia/config.toml"
ENVIRONMENT_VARIABLE: Final = "NVSHIM_CONFIG"

NVIDIA_PATH: Final = "/etc/nvidia-container-runtime/config.toml"
"""The configuration of NVIDIA's container toolkit."""
NVIDIA_ENVIRONMENT_VARIABLE: Final = "NVIDIA_CTK_CONFIG_FILE_PATH"
"""Names another file, in containerd's environment (an image's environment has no effect)."""


def load_config(path: str | None = None) -> Config:
    """Return the configuration; without a file, the defaults, unless a file was named.

    Args:
        path: the file; None for the one in NVSHIM_CONFIG, or else :data:`DEFAULT_PATH`, or else
            NVIDIA's own.

    Raises:
        ConfigError: the file is not readable, is invalid, or was named but does not exist.
    """
    (ours, named), (nvidias, nvidias_named) = find_files(path)
    content = _read(ours, ENVIRONMENT_VARIABLE, needed=named)
    if content is not None:
        return _parse_once(parse_config, content, ours)
    content = _read(nvidias, NVIDIA_ENVIRONMENT_VARIABLE, needed=nvidias_named)
    return Config() if content is None else _parse_once(parse_nvidia_config, content, nvidias)


def find_files(path: str | None = None) -> tuple[tuple[str, bool], tuple[str, bool]]:
    """Return the files that :func:`load_config` looks for, ours and NVIDIA's.

    Returns:
        Each file, and whether it was named: its absence is then an error.
    """
    ours = path or os.environ.get(ENVIRONMENT_VARIABLE)
    nvidias = os.environ.get(NVIDIA_ENVIRONMENT_VARIABLE)
    return (ours or DEFAULT_PATH, bool(ours)), (nvidias or NVIDIA_PATH, bool(nvidias))


# The last result, which forked processes inherit. The file seldom changes.
_parsed: tuple[bytes, str, Config] | None = None


def _parse_once(parse: Callable[[bytes, str], Config], content: bytes, file: str) -> Config:
    global _parsed  # noqa: PLW0603 - a cache of one result of a pure function
    if _parsed is None or _parsed[:2] != (content, file):
        _parsed = (content, file, parse(content, file))
    return _parsed[2]


def _read(file: str, variable: str, *, needed: bool) -> bytes | None:
    """Return a file's content; None if it does not exist and is optional."""
    try:
        return read_named(file)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not needed:
            return None
        raise ConfigUnreadable(
            f"configuration {file}",
            found=f"{error.strerror or error}{quotes_in(file)}",
            do=f"make the file readable, or name another in {variable}",
        ) from error
