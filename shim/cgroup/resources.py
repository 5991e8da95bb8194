"""Check new limits for a container, and encode them for the low-level runtime.

Rules
- Limits are the OCI spec's ``linux.resources``. Keys outside of the table below are passed on,
  since a later runtime may support them.
- A null counts as absent, as in the Go programs that may send it. (runc 1.1 crashes on one.)
- Device rules are not limits, so they are left out. The runtime would replace the container's rules
  with them, and so remove the injected GPUs.

Source: opencontainers/runtime-spec config-linux.md, "Control groups"; runc-update(8).
"""

from __future__ import annotations

import json
from typing import Any, Final

from api.errors import kind_name
from shim.errors import InvalidResources, ShimError

# Keys by the type of their values.
_INTEGERS: Final = {
    "memory": {"limit", "reservation", "swap", "kernel", "kernelTCP", "swappiness"},
    "cpu": {"shares", "quota", "burst", "period", "realtimeRuntime", "realtimePeriod", "idle"},
    "pids": {"limit"},
    "blockIO": {"weight", "leafWeight"},
}
_STRINGS: Final = {"cpu": {"cpus", "mems"}}
_BOOLEANS: Final = {"memory": {"disableOOMKiller", "useHierarchy", "checkBeforeUpdate"}}
_OBJECTS: Final = (*_INTEGERS, "network", "rdma", "unified")
_LISTS: Final = ("hugepageLimits",)

_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


def encode(limits: dict[str, Any]) -> bytes:
    """Check limits, and encode them for the runtime.

    Args:
        limits: ``linux.resources`` as it was received.

    Returns:
        The JSON to pass to the runtime.

    Raises:
        InvalidResources: a value does not have the type that the OCI spec demands.
    """
    kept = {k: v for k, v in limits.items() if v is not None and k != "devices"}
    for key, value in kept.items():
        if key in _OBJECTS:
            _check(key, value, dict)
            kept[key] = _checked(key, {k: v for k, v in value.items() if v is not None})
        elif key in _LISTS:
            _check(key, value, list)
    try:
        return json.dumps(kept, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise _invalid("resources", str(error)) from error


def _checked(name: str, values: dict[str, Any]) -> dict[str, Any]:
    for key, value in values.items():
        path = f"{name}.{key}"
        if key in _INTEGERS.get(name, ()):
            _check(path, value, int)
            if not _SMALLEST <= value <= _LARGEST:
                raise _invalid(path, f"{value}, which has more than 64 bits")
        elif key in _STRINGS.get(name, ()) or name == "unified":
            _check(path, value, str)
        elif key in _BOOLEANS.get(name, ()):
            _check(path, value, bool)
    return values


def _check(path: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise _invalid(path, f"it is {kind_name(type(value))}, not {kind_name(kind)}")


def _invalid(path: str, found: str) -> ShimError:
    return InvalidResources(
        f"to change {path}", found=found, do="send linux.resources as the OCI spec has it"
    )
