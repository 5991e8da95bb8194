"""Show and change NVIDIA's config.toml; its defaults.

Without a configuration of its own, the shim reads this file (:mod:`hooks.config.nvidia` documents
each key). ``nvidia-ctk config --set`` therefore still takes effect.

Rules
- Comments, order and all other keys stay as they are.
- A key that NVIDIA's toolkit does not have is an error, as in the original.
- A file that the shim would refuse when it creates a container is not written.
- ``KEY`` alone sets a boolean to true; a list is ``KEY=a,b``.

Source: NVIDIA Container Toolkit, ``nvidia-ctk config``; the defaults of its release 1.20.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any, Final

from hooks.config.nvidia import kind_of_key, parse_nvidia_config
from hooks.errors import ConfigError
from hooks.schema import BOOLEAN, WrongValue
from integration import tomltext
from integration.compat.errors import ToolkitConfigUnusable
from integration.errors import IntegrationError
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
"""The default of each key; a line with a ``#`` documents a default that the file leaves unset."""


def read(path: str) -> str:
    """Return the file's text, or :data:`DEFAULT` if it does not exist.

    Raises:
        ToolkitConfigUnusable: the file cannot be read.
    """
    try:
        content = read_file(path)
        return DEFAULT if content is None else content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"to read {path}", getattr(error, "strerror", "") or str(error)) from error


def with_settings(text: str, settings: Sequence[str], path: str) -> str:
    """Return the file's text with keys changed.

    Args:
        text: the file's text.
        settings: ``KEY=VALUE`` each, or ``KEY`` for a boolean.
        path: the file's path, for messages.

    Raises:
        ToolkitConfigUnusable: the key does not exist, its value has the wrong type, or the shim
            would refuse the file.
    """
    try:
        tomltext.parse(text)
    except tomllib.TOMLDecodeError as error:
        raise _unusable(f"to set a key of {path}", str(error)) from error
    changed = text
    for setting in settings:
        key, value = _key_and_value(setting)
        *tables, name = key.split(".")
        changed = tomltext.with_value(changed, tuple(tables), name, value)
    try:
        parse_nvidia_config(changed.encode(), path)
    except ConfigError as error:
        raise _unusable(f"to set a key of {path}", f"{error.asked}: {error.found}") from error
    return changed


def notes_of(text: str, path: str, settings: Sequence[str]) -> list[str]:
    """Return a note for each setting that the shim ignores.

    Args:
        text: the file's text, with the settings.
        path: the file's path, for messages.
        settings: as :func:`with_settings` takes them.
    """
    keys = {setting.partition("=")[0] for setting in settings}
    notes = parse_nvidia_config(text.encode(), path).notes
    return [note for note in notes if note.partition(" ")[0] in keys]


def policy_of(text: str, path: str) -> str:
    """Return which device policy the shim applies because this file exists."""
    return parse_nvidia_config(text.encode(), path).notes[0]


def write(path: str, text: str) -> None:
    """Replace the file.

    Raises:
        ToolkitConfigUnusable: the file cannot be written; it is unchanged.
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
            raise _unusable(asked, "has no value; write KEY=VALUE,VALUE")
        return key, text.split(",")
    if kind is str:
        if not equals:
            raise _unusable(asked, "has no value; write KEY=VALUE")
        return key, text
    try:
        return key, not equals or BOOLEAN.parse(text)
    except WrongValue:
        raise _unusable(asked, f"{text!r} is neither true nor false") from None


def _unusable(asked: str, found: str) -> IntegrationError:
    return ToolkitConfigUnusable(asked, found=found, do="compare nvshim compat nvidia-ctk config")
