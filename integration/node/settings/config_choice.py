"""Choose one of several configurations for this node, as NVIDIA's config-manager does.

A directory (a ConfigMap) has one file for each configuration. Another file, the name file, contains
the name of the chosen one: either the name alone, or the labels that the kubelet writes for a pod
(the downward API: a line ``KEY="VALUE"`` for each label), one of which has the name. Any program
may write that file, so the agent needs no Kubernetes client here.

Rules
- The name must be that of a file in the directory; it is never used as a path.
- If the name file contains no name, the default applies. Without a default, the first fallback that
  matches decides: ``named`` chooses the file "default", ``single`` the only file, ``empty`` no
  configuration.

Source: k8s-device-plugin cmd/config-manager/main.go; Kubernetes, "Downward API".
"""

from __future__ import annotations

import os
from typing import Final

from api.values import dataclass
from hooks.schema import Declarations, list_of, one_of, text
from integration.agent_errors import NoSettingsChosen, SettingsUnreadable
from integration.files import read_some

FALLBACKS: Final = ("named", "single", "empty")
_NAMED: Final = "default"
_LARGEST_FILE: Final = 1 << 16
_ACTION: Final = "which configuration the device plugin uses"
_set: Final = Declarations()


@dataclass(frozen=True, slots=True)
class Choice:
    """The configurations, and how to choose one. The text of each field says what it does."""

    # fmt: off
    directory: str = _set(text("DIR"),
        "A directory of configuration files; one is selected by name.",
        "CONFIG_FILE_SRCDIR", options=["--config-dir", "--config-file-srcdir"], default="")
    name_file: str = _set(text("FILE"),
        "A file with that name, or with node labels that include --node-label.",
        options=["--config-name-file"], default="")
    default: str = _set(text("NAME"), "The name to use if none is set.",
        "DEFAULT_CONFIG", options=["--default-config"], default="")
    fallbacks: tuple[str, ...] = _set(
        list_of(one_of(*FALLBACKS), f"a list of {', '.join(FALLBACKS)}"),
        "Without any name, try in this order: the file called default (named), the only file"
        " (single), no file (empty).",
        "FALLBACK_STRATEGIES", options=["--fallback-strategies"], default=("named", "single"))
    label: str = _set(text("LABEL"), "The node label with the name.",
        "NODE_LABEL", options=["--node-label"], default="nvidia.com/device-plugin.config")
    file: str = _set(text("FILE"),
        "The device plugin's configuration file, in the format of NVIDIA's plugin. It is read"
        " again when it changes.",
        "CONFIG_FILE", options=["--config-file"], default="")  # instead of a directory
    # fmt: on


SETTINGS: Final = _set.of(Choice)
"""The options that say where the device plugin's settings come from."""


def choose(choice: Choice) -> str:
    """Return the path of the configuration to use now; "" for none.

    Raises:
        SettingsUnreadable: the directory or the name file cannot be read.
        NoSettingsChosen: the named configuration does not exist, or none is named and no fallback
            matches.
    """
    names = _names(choice.directory)
    name, origin = _chosen_name(choice), choice.name_file
    if not name:
        name, origin = choice.default, "--default-config"
    if name:
        if name not in names:
            raise NoSettingsChosen(
                _ACTION,
                found=f"{origin} names {name!r}, and {choice.directory} has "
                f"{', '.join(names) or 'no files'}",
                do="name one of those, or add it",
            )
        return os.path.join(choice.directory, name)
    for fallback in choice.fallbacks:
        if fallback == "named" and _NAMED in names:
            return os.path.join(choice.directory, _NAMED)
        if fallback == "single" and len(names) == 1:
            return os.path.join(choice.directory, names[0])
        if fallback == "empty":
            return ""
    raise NoSettingsChosen(
        _ACTION,
        found=f"none is named, and {choice.directory} has {', '.join(names) or 'no files'}",
        do="name one with --default-config, or call it default",
    )


def _names(directory: str) -> list[str]:
    try:
        # Names with ".." in front are the kubelet's: it uses them to replace all files at once.
        return sorted(
            entry.name
            for entry in os.scandir(directory)
            if not entry.name.startswith("..") and entry.is_file()
        )
    except OSError as error:
        raise SettingsUnreadable(
            f"the configurations in {directory}",
            found=str(error.strerror).lower(),
            do="name another directory with --config-dir",
        ) from error


def _chosen_name(choice: Choice) -> str:
    """Return the name in the name file; "" if it has none, or does not exist yet."""
    if not choice.name_file:
        return ""
    try:
        content = read_some(choice.name_file, _LARGEST_FILE).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SettingsUnreadable(
            f"the name of the configuration in {choice.name_file}",
            found=str(error.strerror).lower(),
            do="make it a readable file",
        ) from error
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    for line in lines:
        key, equals, value = line.partition("=")
        if equals and key == choice.label:
            return value.strip('"')
    # A file of labels without ours names none.
    return lines[0] if len(lines) == 1 and "=" not in lines[0] else ""
