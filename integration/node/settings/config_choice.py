"""Which of several configurations holds, as NVIDIA's config-manager chooses it for each node.

A directory has a file for each configuration (a ConfigMap), and another file has the name of the
one that holds: by itself, or as a label of those that the kubelet writes for a pod (the downward
API: ``KEY="VALUE"``, a line each). Who writes that file is no matter of ours: no client of
Kubernetes is needed here.

Rules
- A name that is said has to be that of a file in the directory; it is data, and never a path.
- If none is said, the default holds; without a default, what the fallbacks find, in their order:
  ``named`` the one that is called "default", ``single`` the only one, ``empty`` none at all.

Source: k8s-device-plugin cmd/config-manager/main.go; Kubernetes, "Downward API".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from integration.agent_errors import NoSettingsChosen, SettingsUnreadable
from integration.files import read_some

LABEL: Final = "nvidia.com/device-plugin.config"
FALLBACKS: Final = ("named", "single", "empty")
_NAMED: Final = "default"
_LARGEST_FILE: Final = 1 << 16
_ASKED: Final = "which configuration of the device plugin holds"


@dataclass(frozen=True, slots=True)
class Choice:
    """Among what is chosen, and how."""

    directory: str  # of the configurations
    name_file: str = ""  # has the name of the one that holds; "" for none
    default: str = ""  # the name of the one that holds if none is said; "" for none
    fallbacks: tuple[str, ...] = ("named", "single")  # of FALLBACKS
    label: str = LABEL  # that says the name, in a file of labels


def choose(choice: Choice) -> str:
    """The path of the configuration that holds now; "" for none.

    Raises:
        SettingsUnreadable: the directory, or the file with the name, cannot be read.
        NoSettingsChosen: the one that is said is not there, or none is said, and nothing else
            decides.
    """
    there = _names(choice.directory)
    name, said_by = _said(choice), choice.name_file
    if not name:
        name, said_by = choice.default, "--default-config"
    if name:
        if name not in there:
            raise NoSettingsChosen(
                _ASKED,
                found=f"{said_by} says {name!r}, and {choice.directory} has "
                f"{', '.join(there) or 'nothing'}",
                do="name one of those, or add it",
            )
        return os.path.join(choice.directory, name)
    for fallback in choice.fallbacks:
        if fallback == "named" and _NAMED in there:
            return os.path.join(choice.directory, _NAMED)
        if fallback == "single" and len(there) == 1:
            return os.path.join(choice.directory, there[0])
        if fallback == "empty":
            return ""
    raise NoSettingsChosen(
        _ASKED,
        found=f"none is named, and {choice.directory} has {', '.join(there) or 'nothing'}",
        do="name one with --default-config, or call it default",
    )


def _names(directory: str) -> list[str]:
    try:
        # What begins with ".." is the kubelet's, by which it exchanges all files at once.
        return sorted(
            entry.name
            for entry in os.scandir(directory)
            if not entry.name.startswith("..") and entry.is_file()
        )
    except OSError as error:
        raise SettingsUnreadable(
            f"the configurations in {directory}",
            found=str(error.strerror).lower(),
            do="name their directory with --config-dir",
        ) from error


def _said(choice: Choice) -> str:
    """The name that the file says; "" if it says none, or is not there yet."""
    if not choice.name_file:
        return ""
    try:
        text = read_some(choice.name_file, _LARGEST_FILE).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SettingsUnreadable(
            f"the name of the configuration in {choice.name_file}",
            found=str(error.strerror).lower(),
            do="make it a file that can be read",
        ) from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        key, equals, value = line.partition("=")
        if equals and key == choice.label:
            return value.strip('"')
    # A file of labels without ours says nothing.
    return lines[0] if len(lines) == 1 and "=" not in lines[0] else ""
