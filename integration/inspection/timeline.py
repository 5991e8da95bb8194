"""Render a record step by step: the request, the grant, and each edit with its reason.

The sections follow the pipeline. Keys that this module does not know are printed as they are, so
the text never says less than the JSON.

Source: the keys are those of :mod:`hooks.record`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from api.errors import printable
from hooks.record import is_needed

__all__ = ["render"]

_WIDTH: Final = 10
_MOST_SOUGHT: Final = 3
_TITLES: Final = {"missing": "absent"}


def render(record: Mapping[str, Any]) -> str:
    """Return the steps of an injection as text.

    Args:
        record: the result of :func:`hooks.record.make_record`, possibly read back from JSON.

    Returns:
        Lines for a terminal, without colours.
    """
    lines: list[str] = []
    rest = {key: value for key, value in record.items() if key != "format"}
    for key, section in _SECTIONS.items():
        if key in rest:
            lines += _titled(_TITLES.get(key, key), section(rest.pop(key)))
    for key, value in rest.items():
        lines += _titled(key, _plain(value))
    return "".join(f"{line}\n" for line in lines)


def _titled(key: str, lines: Iterable[str]) -> Iterator[str]:
    title = key.replace("_", " ")
    for line in lines:
        yield f"{title:<{_WIDTH}} {printable(line)}".rstrip()
        title = ""


class _Section:
    """A section of a record that remembers which entries were printed."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._rest = dict(value)
        self._value = value

    def __getitem__(self, key: str) -> Any:
        self._rest.pop(key, None)
        return self._value[key]

    def words(self, key: str) -> str:
        """Return a list of words as text; "none" if it is empty."""
        return ", ".join(self[key]) or "none"

    def lines(self, key: str, what: str) -> Iterator[str]:
        """Yield a line for each element of an entry."""
        return (f"{what}: {entry}" for entry in self[key])

    def rest(self) -> Iterator[str]:
        """Yield the entries that were not printed yet."""
        return _plain(self._rest)


def _request(value: Mapping[str, Any]) -> Iterator[str]:
    section = _Section(value)
    devices, source = section["devices"], section["source"] if value.get("source") else ""
    named = devices if isinstance(devices, str) else ", ".join(devices)
    yield f"devices {named}{f', by {source}' if source else ''}"
    yield f"capabilities {section.words('capabilities')}"
    yield from section.rest()


def _policy(value: Mapping[str, Any] | None) -> Iterator[str]:
    if value is None:
        return
    section = _Section(value)
    kind = "a privileged" if section["privileged"] else "an unprivileged"
    namespace = section["namespace"] or "no namespace"
    whose = f" of a pod in {namespace}" if section["kubernetes"] else ""
    what = "sandbox container" if section["sandbox"] else "container"
    yield f"mode {section['mode']}; requested by {kind} {what}{whose}"
    yield from section.lines("denied", "denied")
    yield from section.lines("notes", "note")
    yield from section.rest()


def _grant(value: Mapping[str, Any] | None) -> Iterator[str]:
    if value is None:
        yield "nothing from an inventory of NVIDIA's driver"
        return
    section = _Section(value)
    for gpu in section["gpus"]:
        yield f"GPU {gpu['index']}: {gpu['model']}, {gpu['uuid']}, at {gpu['bus_id']}"
    for device in section["mig_devices"]:
        yield f"MIG device {device['gpu']}:{device['index']}: {device['profile']}, {device['uuid']}"
    if not value["gpus"] and not value["mig_devices"]:
        yield "no GPU"
    yield f"capabilities {section.words('capabilities')}"
    yield from section.lines("notes", "note")
    yield from section.rest()


def _vendors(value: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for each in value:
        section = _Section(each)
        yield f"{section['vendor']}: {', '.join(section['granted']) or 'no device'}"
        yield from section.lines("notes", "note")
        yield from section.rest()


def _node(value: Mapping[str, Any] | None) -> Iterator[str]:
    if value is None:
        yield "its driver was not needed"
        return
    section = _Section(value)
    nvml = section["nvml"]
    detail = "NVML answered" if nvml == "answered" else f"without NVML: {nvml}"
    yield f"driver {section['driver']} in {section['driver_root']}; {detail}"
    yield f"layout {section['driver_layout']}; {section['driver_why']}"
    yield from section.lines("notes", "note")
    yield from section.rest()


def _image(value: Mapping[str, Any]) -> Iterator[str]:
    section = _Section({name: entry for name, entry in value.items() if name != "has_cache"})
    for loader in section["loaders"]:
        detail = "" if loader["searched"] else ", which must be added to the loader's path"
        libc = "no dynamic loader" if loader["libc"] == "none" else loader["libc"]
        yield f"{loader['arch']}, {libc}: libraries go to {loader['directory']}{detail}"
    if not section["writable"]:
        yield "its root file system is read-only"
    yield from section.rest()


def _edits(value: Mapping[str, Any]) -> Iterator[str]:
    for kind, entries in value.items():
        if not entries:
            continue
        yield f"{kind.replace('_', ' ')}:"
        tell_one = _EDITS.get(kind, _compact)
        yield from (f"  {tell_one(entry)}" for entry in entries)


def _in_spec(value: Mapping[str, Any]) -> Iterator[str]:
    for kind, places in value.items():
        if places:
            yield f"{len(places)} of the {kind} are by an engine that applies CDI or --device:"
            yield from (f"  {place}" for place in places)


def _elsewhere(value: Mapping[str, str]) -> Iterator[str]:
    return (f"{path} is at {place}" for path, place in value.items())


def _driver_layer(value: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for file in value:
        yield f"{_EDITS['mounts'](file)}, not mounted"


def _spec_hooks(value: Mapping[str, Any]) -> Iterator[str]:
    section = _Section(value)
    for hook in section["done"]:
        yield f"{hook['stage']} {hook['command']}: done in process, not run"
    for hook in section["left"]:
        yield f"{hook['stage']} {hook['command']}: the runtime runs it"
    yield from section.lines("notes", "note")
    yield from section.rest()


def _device(edit: Mapping[str, Any]) -> str:
    numbers = f"{edit['major']}:{edit['minor']} {edit['access']}"
    return f"{edit['path']:<40} {numbers:<14} {edit['reason']}"


def _file(edit: Mapping[str, Any]) -> str:
    origin = f", a copy of {edit['source']}" if edit.get("source") else ""
    return f"{edit['path']}{origin} ({edit['reason']})"


def _process(value: Mapping[str, Any]) -> Iterator[str]:
    section = _Section(value)
    for name, setting in section["environment"]:
        yield f"{name}={setting}"
    if section["additional_gids"]:
        yield f"groups {', '.join(map(str, value['additional_gids']))}"
    yield from section.rest()


def _missing(value: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    absent = []
    for each in value:
        if not is_needed(str(each["what"])):
            absent.append(str(each["what"]))
            continue
        sought = list(each["sought"])
        more = f" and {len(sought) - _MOST_SOUGHT} more" if len(sought) > _MOST_SOUGHT else ""
        yield f"missing: {each['what']}: not in {', '.join(sought[:_MOST_SOUGHT])}{more}"
    if absent:
        yield f"not part of this driver, which is normal: {', '.join(absent)}"


def _cuda_compat(value: Mapping[str, str]) -> Iterator[str]:
    if value["directory"]:
        yield f"{value['directory']} comes before the driver's libraries"
    if value["why"]:
        yield value["why"]


def _identity(value: Mapping[str, Any] | None) -> Iterator[str]:
    if value is not None:
        yield f"{len(value['observations'])} facts are checked when the container starts"


def _milliseconds(value: Mapping[str, float]) -> Iterator[str]:
    if value:
        steps = ", ".join(f"{step} {spent:.1f}" for step, spent in value.items())
        yield f"{sum(value.values()):.1f} ({steps})"


def _plain(value: object) -> Iterator[str]:
    """Yield any JSON value as text, without its empty parts."""
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
    "mounts": "{0[destination]} from {0[source]} ({0[reason]})".format,
    "links": "{0[path]} to {0[target]} ({0[reason]})".format,
    "libraries": "{0[soname]} is {0[path]} ({0[arch]})".format,
    "files": _file,
}
_SECTIONS: Final[dict[str, Callable[[Any], Iterable[str]]]] = {
    "request": _request,
    "policy": _policy,
    "grant": _grant,
    "vendors": _vendors,
    "node": _node,
    "image": _image,
    "edits": _edits,
    "in_spec": _in_spec,
    "spec_hooks": _spec_hooks,
    "process": _process,
    "missing": _missing,
    "left_out": _plain,
    "elsewhere": _elsewhere,
    "written": _plain,
    "driver_layer": _driver_layer,
    "char_links": _plain,
    "cuda_compat": _cuda_compat,
    "identity": _identity,
    "milliseconds": _milliseconds,
}
