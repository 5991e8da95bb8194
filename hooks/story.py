"""A record as a person reads it: what was asked, what was given, each edit and its reason.

The sections come in the order of the pipeline. What this module does not know is printed too,
as it stands in the record: a reader of the whole truth is never told less than the JSON says.

Source: the keys are those of :mod:`hooks.record`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from api.errors import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["tell"]

_WIDTH: Final = 10
_MOST_SOUGHT: Final = 3


def tell(record: Mapping[str, Any]) -> str:
    """The story of an injection.

    Args:
        record: what :func:`hooks.record.make_record` returned, or what JSON made of it.

    Returns:
        Lines for a terminal, each ended; no colours.
    """
    lines: list[str] = []
    rest = {key: value for key, value in record.items() if key != "format"}
    for key, section in _SECTIONS.items():
        if key in rest:
            lines += _titled(key, section(rest.pop(key)))
    for key, value in rest.items():
        lines += _titled(key, _plain(value))
    return "".join(f"{line}\n" for line in lines)


def _titled(key: str, lines: Iterable[str]) -> Iterator[str]:
    title = key.replace("_", " ")
    for line in lines:
        yield f"{title:<{_WIDTH}} {printable(line)}".rstrip()
        title = ""


def _request(value: Mapping[str, Any]) -> Iterator[str]:
    devices = value["devices"]
    named = devices if isinstance(devices, str) else ", ".join(devices)
    source = f", by {value['source']}" if value.get("source") else ""
    yield f"devices {named}{source}"
    yield f"capabilities {', '.join(value['capabilities']) or 'none'}"
    yield from _others(value, {"devices", "source", "capabilities"})


def _policy(value: Mapping[str, Any] | None) -> Iterator[str]:
    if value is None:
        return
    kind = "privileged" if value["privileged"] else "unprivileged"
    whose = f" of a pod in {value['namespace'] or 'no namespace'}" if value["kubernetes"] else ""
    what = "sandbox container" if value["sandbox"] else "container"
    yield f"mode {value['mode']}; asked by {_article(kind)} {kind} {what}{whose}"
    for denied in value["denied"]:
        yield f"denied: {denied}"
    for note in value["notes"]:
        yield f"note: {note}"
    told = {"mode", "kubernetes", "sandbox", "namespace", "privileged", "denied", "notes"}
    yield from _others(value, told)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _grant(value: Mapping[str, Any] | None) -> Iterator[str]:
    if value is None:
        yield "nothing by an inventory of NVIDIA's driver"
        return
    for gpu in value["gpus"]:
        yield f"GPU {gpu['index']}: {gpu['model']}, {gpu['uuid']}, at {gpu['bus_id']}"
    for device in value["mig_devices"]:
        yield f"MIG device {device['gpu']}:{device['index']}: {device['profile']}, {device['uuid']}"
    if not value["gpus"] and not value["mig_devices"]:
        yield "no GPU"
    yield f"capabilities {', '.join(value['capabilities']) or 'none'}"
    for note in value["notes"]:
        yield f"note: {note}"
    yield from _others(value, {"gpus", "mig_devices", "capabilities", "notes"})


def _vendors(value: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for each in value:
        yield f"{each['vendor']}: {', '.join(each['granted']) or 'no device'}"
        for note in each["notes"]:
            yield f"note: {note}"
        yield from _others(each, {"vendor", "granted", "notes"})


def _node(value: Mapping[str, Any] | None) -> Iterator[str]:
    if value is None:
        yield "its driver was not looked at"
        return
    nvml = value["nvml"]
    told = "NVML answered" if nvml == "answered" else f"without NVML: {nvml}"
    yield f"driver {value['driver']} in {value['driver_root']}; {told}"
    yield f"laid out as {value['driver_layout']}; {value['driver_why']}"
    for note in value["notes"]:
        yield f"note: {note}"
    known = {"nvml", "driver", "driver_root", "driver_layout", "driver_why", "notes"}
    yield from _others(value, known)


def _image(value: Mapping[str, Any]) -> Iterator[str]:
    for loader in value["loaders"]:
        told = "" if loader["searched"] else ", which its loader has to be told"
        libc = "no dynamic loader" if loader["libc"] == "none" else loader["libc"]
        yield f"{loader['arch']}, {libc}: libraries go to {loader['directory']}{told}"
    if not value["writable"]:
        yield "its root file system takes no writes"
    yield from _others(value, {"loaders", "writable", "has_cache"})


def _edits(value: Mapping[str, Any]) -> Iterator[str]:
    for kind, entries in value.items():
        if not entries:
            continue
        yield f"{kind.replace('_', ' ')}:"
        tell_one = _EDITS.get(kind, _compact)
        yield from (f"  {tell_one(entry)}" for entry in entries)


def _device(edit: Mapping[str, Any]) -> str:
    numbers = f"{edit['major']}:{edit['minor']} {edit['access']}"
    return f"{edit['path']:<40} {numbers:<14} {edit['reason']}"


def _mount(edit: Mapping[str, Any]) -> str:
    return f"{edit['destination']} from {edit['source']} ({edit['reason']})"


def _link(edit: Mapping[str, Any]) -> str:
    return f"{edit['path']} to {edit['target']} ({edit['reason']})"


def _library(edit: Mapping[str, Any]) -> str:
    return f"{edit['soname']} is {edit['path']} ({edit['arch']})"


def _process(value: Mapping[str, Any]) -> Iterator[str]:
    for name, setting in value["environment"]:
        yield f"{name}={setting}"
    if value["additional_gids"]:
        yield f"groups {', '.join(map(str, value['additional_gids']))}"
    yield from _others(value, {"environment", "additional_gids"})


def _missing(value: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for each in value:
        sought = list(each["sought"])
        more = f" and {len(sought) - _MOST_SOUGHT} more" if len(sought) > _MOST_SOUGHT else ""
        yield f"{each['what']}: not in {', '.join(sought[:_MOST_SOUGHT])}{more}"


def _cuda_compat(value: Mapping[str, str]) -> Iterator[str]:
    if value["directory"]:
        yield f"{value['directory']} comes before the driver's libraries"
    if value["why"]:
        yield value["why"]


def _identity(value: Mapping[str, Any] | None) -> Iterator[str]:
    if value is not None:
        yield f"{len(value['observations'])} things are compared when the container is started"


def _milliseconds(value: Mapping[str, float]) -> Iterator[str]:
    if value:
        steps = ", ".join(f"{step} {spent:.1f}" for step, spent in value.items())
        yield f"{sum(value.values()):.1f} ({steps})"


def _others(value: Mapping[str, Any], told: set[str]) -> Iterator[str]:
    """The entries of a section that its function does not know."""
    yield from _plain({key: entry for key, entry in value.items() if key not in told})


def _plain(value: object) -> Iterator[str]:
    """Any value of JSON, without what is empty."""
    if isinstance(value, dict):
        for key, entry in value.items():
            if entry or entry is False or entry == 0:
                lines = list(_plain(entry))
                yield f"{str(key).replace('_', ' ')}{':' if len(lines) != 1 else ''} " + (
                    lines[0] if len(lines) == 1 else ""
                )
                if len(lines) > 1:
                    yield from (f"  {line}" for line in lines)
    elif isinstance(value, list):
        for entry in value:
            yield _compact(entry)
    elif value is not None:
        yield _compact(value)


def _compact(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_EDITS: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "devices": _device,
    "mounts": _mount,
    "links": _link,
    "libraries": _library,
}
_SECTIONS: Final[dict[str, Callable[[Any], Iterable[str]]]] = {
    "request": _request,
    "policy": _policy,
    "grant": _grant,
    "vendors": _vendors,
    "node": _node,
    "image": _image,
    "edits": _edits,
    "process": _process,
    "missing": _missing,
    "left_out": _plain,
    "written": _plain,
    "char_links": _plain,
    "cuda_compat": _cuda_compat,
    "identity": _identity,
    "milliseconds": _milliseconds,
}
