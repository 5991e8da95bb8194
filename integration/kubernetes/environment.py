"""Read the installer's settings from its variables.

Rules
- An invalid value is an error. Variables that the installer does not know are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hooks.schema import WrongValue
from integration.kubernetes.errors import VariableUnusable
from integration.kubernetes.settings import SETTINGS, VARIABLES, Settings


def settings_from(environment: Mapping[str, str]) -> Settings:
    """Parse the installer's environment.

    Args:
        environment: the installer's environment; an empty value counts as unset.

    Raises:
        VariableUnusable: a value is invalid, or not allowed here.
    """
    fields: dict[str, Any] = {}
    for setting in SETTINGS:
        for name in reversed(setting.variables):  # the first wins, and all of them are checked
            if not (text := environment.get(name, "")):
                continue
            try:
                fields[setting.field] = setting.kind.parse(text)
            except WrongValue as error:
                raise VariableUnusable(
                    f"{name}={text}",
                    found="is not a valid value",
                    do=f"set it to {error.wanted_text}",
                ) from None
    settings = Settings(**fields)
    return replace(settings, engine="") if settings.no_engine else settings


def ignored(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set but have no effect, each with the reason."""
    is_docker = settings_from(environment).engine == "docker"
    found = {}
    for name, setting in VARIABLES.items():
        if environment.get(name) and not setting.field:
            found[name] = setting.text
        elif environment.get(name) and setting.field == "drop_in" and is_docker:
            found[name] = "Docker has no drop-in files"
    return found
