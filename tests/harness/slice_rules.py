"""Validate the fields of a ResourceSlice's spec that our driver writes, as an API server does.

The published schemas of Kubernetes do not have these limits. They come from its validation code,
and agree with the answers of a real server (tests/recorded/kubernetes-1.36/dra/slices.jsonl).

Source: Kubernetes pkg/apis/resource/validation, 1.36.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from integration.node.values.claims import parse_quantity

__all__ = ["faults"]

_LABEL: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME: Final = re.compile(_LABEL, re.ASCII)
_LABEL_VALUE: Final = re.compile("([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", re.ASCII)
_SUBDOMAIN: Final = re.compile(rf"{_LABEL}(\.{_LABEL})*", re.ASCII)
_IDENTIFIER: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_VERSION: Final = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)([-+].*)?", re.ASCII)
_QUANTITY: Final = re.compile(r"\d+(\.\d+)?([KMGTPE]i|[mkMGTPE])?", re.ASCII)
_WHERE: Final = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
_KINDS: Final = ("int", "bool", "string", "version")
_LARGE: Final = ("taints", "consumesCounters")
_EFFECTS: Final = ("None", "NoSchedule", "NoExecute")


def _is_subdomain(text: str) -> bool:
    return len(text) <= 63 and bool(_SUBDOMAIN.fullmatch(text))


def _is_qualified(name: str) -> bool:
    domain, slash, identifier = name.rpartition("/")
    is_named = len(identifier) <= 32 and bool(_IDENTIFIER.fullmatch(identifier))
    return is_named and (not slash or _is_subdomain(domain))


def _is_value(value: Mapping[str, Any]) -> bool:
    return (
        len(value) == 1
        and next(iter(value)) in _KINDS
        and all(len(value.get(kind, "")) <= 64 for kind in ("string", "version"))
        and ("version" not in value or bool(_VERSION.fullmatch(value["version"])))
    )


def _is_taint(taint: Mapping[str, Any]) -> bool:
    domain, _, name = taint["key"].rpartition("/")
    return (
        taint.get("effect") in _EFFECTS
        and (not domain or _is_subdomain(domain))
        and all(
            len(text) <= 63 and bool(_LABEL_VALUE.fullmatch(text))
            for text in (name, taint.get("value", ""))
        )
        and bool(name)
    )


def _policies(device: Mapping[str, Any]) -> list[tuple[Any, Mapping[str, Any]]]:
    """Yield the policies of a device's capacities, each with the total amount."""
    return [
        (each["value"], each["requestPolicy"])
        for each in device.get("capacity", {}).values()
        if "requestPolicy" in each
    ]


def _is_policy(told: tuple[Any, Mapping[str, Any]]) -> bool:
    value, policy = told
    valid = policy["validRange"]
    values = (policy["default"], valid["min"], valid.get("max", value), valid.get("step", 1), value)
    sizes = [parse_quantity(each) for each in values]
    if None in sizes:
        return False
    default, least, most, step, total = (size or 0 for size in sizes)
    on_steps = "step" not in valid or all((size - least) % step == 0 for size in (default, most))
    return least <= default <= most <= total and on_steps


def _count(device: Mapping[str, Any], *keys: str) -> int:
    return sum(len(device.get(key, ())) for key in keys)


_OF_SPEC: Final[dict[str, Callable[[Any], bool]]] = {
    "driver": lambda spec: _is_subdomain(spec["driver"].lower()),
    "pool.name": lambda spec: (
        len(spec["pool"]["name"]) <= 253
        and all(map(_SUBDOMAIN.fullmatch, spec["pool"]["name"].split("/")))
    ),
    "pool.generation": lambda spec: spec["pool"]["generation"] >= 0,
    "pool.resourceSliceCount": lambda spec: spec["pool"]["resourceSliceCount"] > 0,
    "one of the node's": lambda spec: sum(key in spec for key in _WHERE) == 1,
    "devices and counters": lambda spec: not ("devices" in spec and "sharedCounters" in spec),
    "sharedCounters": lambda spec: (
        _count(spec, "sharedCounters") <= 8
        and all(len(each["counters"]) <= 32 for each in spec.get("sharedCounters", ()))
    ),
    "devices: too many": lambda spec: (
        _count(spec, "devices")
        <= (64 if any(key in each for each in spec.get("devices", ()) for key in _LARGE) else 128)
    ),
    "devices: twice": lambda spec: (
        len({each["name"] for each in spec.get("devices", ())}) == _count(spec, "devices")
    ),
}
_OF_DEVICE: Final[dict[str, Callable[[Any], bool]]] = {
    "name": lambda device: len(device["name"]) <= 63 and bool(_NAME.fullmatch(device["name"])),
    "attributes: too many": lambda device: _count(device, "attributes", "capacity") <= 32,
    "attributes: names": lambda device: all(
        map(_is_qualified, (*device.get("attributes", ()), *device.get("capacity", ())))
    ),
    "attributes": lambda device: all(map(_is_value, device.get("attributes", {}).values())),
    # A number is valid, too.
    "capacity": lambda device: all(
        _QUANTITY.fullmatch(str(each["value"])) for each in device.get("capacity", {}).values()
    ),
    "requestPolicy": lambda device: all(
        map(_is_policy, (each for each in _policies(device)))
        if device.get("allowMultipleAllocations")
        else (False for _ in _policies(device))
    ),
    "taints": lambda device: (
        _count(device, "taints") <= 16 and all(map(_is_taint, device.get("taints", ())))
    ),
    "consumesCounters": lambda device: _count(device, "consumesCounters") <= 2,
    "bindingConditions": lambda device: (
        bool(device.get("bindingConditions")) == bool(device.get("bindingFailureConditions"))
    ),
}


def faults(spec: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a slice; nothing if a server would accept it."""
    found = [what for what, is_right in _OF_SPEC.items() if not is_right(spec)]
    return found + [
        f"device {device['name']}: {what}"
        for device in spec.get("devices", ())
        for what, is_right in _OF_DEVICE.items()
        if not is_right(device)
    ]
