"""NVIDIA's config.toml: shown, set, and its defaults.

The shim reads the file where there is no configuration of our own (:mod:`hooks.config.nvidia` has
the meaning of each key), so that to set a key by ``nvidia-ctk config --set`` does what it did.

Rules
- Comments, order and everything that is not set stay as they are.
- A key that NVIDIA's toolkit does not have is an error, as there; so is a file that would be
  refused when a container is made: it is not written.
- ``KEY`` alone sets a flag; a list is written as ``KEY=a,b``.

Source: NVIDIA Container Toolkit, ``nvidia-ctk config``; the defaults of its release 1.20.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any, Final

from hooks.config.nvidia import kind_of_key, parse_nvidia_config
from hooks.errors import ConfigError
from integration import tomltext
from integration.compat.errors import ToolkitConfigUnusable
from integration.files import read_file, replace_file

DEFAULT: Final = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
#debug = "/var/log/nvidia-container-toolkit.log"
environment = []
#ldcache = "/etc/ld.so.cache"
ldconfig = "@/sbin/ldconfig"
load-kmods = true
#no-cgroups = false
#path = "/usr/bin/nvidia-container-cli"
#root = "/run/nvidia/driver"
#user = "root:video"

[nvidia-container-runtime]
#debug = "/var/log/nvidia-container-runtime.log"
log-level = "info"
mode = "auto"
runtimes = ["runc", "crun"]

[nvidia-container-runtime.modes]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime.modes.legacy]
cuda-compat-mode = "ldconfig"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"
"""
"""What every key is if it is not set; those behind a # are so without being written."""

_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "false", "FALSE", "False"})


def read(path: str) -> str:
    """The file's text.

    Returns:
        The text; :data:`DEFAULT` if there is no such file.

    Raises:
        ToolkitConfigUnusable: it cannot be read.
    """
    try:
        content = read_file(path)
        return DEFAULT if content is None else content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"to read {path}", getattr(error, "strerror", "") or str(error)) from error


def with_settings(text: str, settings: Sequence[str], path: str) -> str:
    """A file's text with keys set.

    Args:
        text: of the file.
        settings: each ``KEY=VALUE``, or ``KEY`` for a flag.
        path: of the file, for messages.

    Raises:
        ToolkitConfigUnusable: there is no such key, its value is of another type, or the shim
            would refuse the file.
    """
    try:
        tomltext.parse(text)
    except tomllib.TOMLDecodeError as error:
        raise _unusable(f"to set a key of {path}", str(error)) from error
    made = text
    for setting in settings:
        key, value = _key_and_value(setting)
        *tables, name = key.split(".")
        made = tomltext.with_value(made, tuple(tables), name, value)
    try:
        parse_nvidia_config(made.encode(), path)
    except ConfigError as error:
        raise _unusable(f"to set a key of {path}", f"{error.asked}: {error.found}") from error
    return made


def notes_of(text: str, path: str, settings: Sequence[str]) -> list[str]:
    """What of the settings means nothing to the shim.

    Args:
        text: of the file, with the settings.
        path: of the file, for messages.
        settings: as :func:`with_settings` takes them.
    """
    keys = {setting.partition("=")[0] for setting in settings}
    notes = parse_nvidia_config(text.encode(), path).notes
    return [note for note in notes if note.partition(" ")[0] in keys]


def policy_of(text: str, path: str) -> str:
    """What it means for who may have a GPU that such a file is there."""
    return parse_nvidia_config(text.encode(), path).notes[0]


def write(path: str, text: str) -> None:
    """Put a file in place.

    Raises:
        ToolkitConfigUnusable: it cannot be written. Nothing has changed.
    """
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise _unusable(f"to write {path}", error.strerror or str(error)) from error


def _key_and_value(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    kind = kind_of_key(key)
    asked = f"--set {setting}"
    if kind is None:
        raise _unusable(asked, f"NVIDIA's toolkit has no key {key}")
    if kind is list:
        if not equals:
            raise _unusable(asked, "it has no value: KEY=VALUE,VALUE")
        return key, text.split(",")
    if kind is str:
        if not equals:
            raise _unusable(asked, "it has no value: KEY=VALUE")
        return key, text
    if equals and text not in _TRUE | _FALSE:
        raise _unusable(asked, f"{text!r} is neither true nor false")
    return key, not equals or text in _TRUE


def _unusable(asked: str, found: str) -> ToolkitConfigUnusable:
    return ToolkitConfigUnusable(asked, found=found, do="see nvshim compat nvidia-ctk config")
