"""Parts of an OCI spec, whose types are checked where they are read.

As in the specification, an absent part is empty. A part of the wrong type is an error.

Source: OCI runtime specification, config.md and config-linux.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from hooks.errors import MalformedSpec, SpecError

Json: TypeAlias = dict[str, Any]

_KINDS: Final[dict[type, str]] = {dict: "an object", list: "a list", str: "a string"}


def part(table: Mapping[str, Any], name: str, kind: type, where: str = "") -> Any:
    """Return an entry of a table (not a copy); an empty one if it is absent or null.

    Args:
        where: the names of the tables around this one ("linux.resources."), for the message.

    Raises:
        MalformedSpec: it has another type.
    """
    value = table.get(name)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise misshapen(where + name, _KINDS[kind])
    return value


def parts(table: Mapping[str, Any], name: str, kind: type, where: str = "") -> list[Any]:
    """Return the entries of a list, all of one kind.

    Raises:
        MalformedSpec: it is not a list, or an entry has another type.
    """
    entries: list[Any] = part(table, name, list, where)
    if not all(isinstance(entry, kind) for entry in entries):
        raise misshapen(where + name, f"a list, each entry of which is {_KINDS[kind]}")
    return entries


def misshapen(name: str, wanted: str) -> SpecError:
    """Return the error for a part of the wrong shape."""
    return MalformedSpec(
        f"{name} of config.json",
        found=f"it is not {wanted}",
        do="make the spec by the OCI runtime specification",
    )


def variables_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return all variables of the process, each with its last value, as the process sees them.

    Raises:
        MalformedSpec: there is no process, or its environment has the wrong shape.
    """
    process = spec.get("process") if isinstance(spec, dict) else None
    if not isinstance(process, dict):
        raise misshapen("process", _KINDS[dict])
    entries = parts(process, "env", str, "process.")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def has_user_namespace(spec: Mapping[str, Any]) -> bool:
    """Whether the container's root user is another user on the host.

    Raises:
        MalformedSpec: its namespaces have the wrong shape.
    """
    linux = part(spec, "linux", dict)
    namespaces = part(linux, "namespaces", list, "linux.")
    is_listed = any(isinstance(n, dict) and n.get("type") == "user" for n in namespaces)
    return bool(is_listed or linux.get("uidMappings"))
