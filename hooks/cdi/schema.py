"""The rules that make a CDI spec of a tree of JSON or YAML.

Tables say which fields there are, what they hold, and since which version of the specification:

==================================  ===================================
since                               what
==================================  ===================================
0.4.0                               ``type`` of a mount
0.5.0                               ``hostPath`` of a device node;
                                    names of devices that begin with a digit
0.6.0                               ``annotations``; a dot in a class
0.7.0                               ``additionalGids``, ``intelRdt``
0.7.0 to 1.0.0                      ``enableCMT``, ``enableMBM`` of ``intelRdt``
1.1.0                               ``schemata``, ``enableMonitoring`` of ``intelRdt``;
                                    ``netDevices``
==================================  ===================================

Rules
- An unknown field is an error, and so is one of a later version than the file says it is of: a
  runtime that passes over it would make another container than the vendor meant.
- A field that is empty or null counts as absent. Its name may be written in any case, as Go's
  decoder, by which vendors test their files, has it.
- Where a text is wanted, a number is taken as it is written (``name: 0``).
- 0.1.0 and 0.2.0 were drafts; files that call themselves so are read as 0.3.0, as the reference
  library does. A ``v`` before the version is allowed for the same reason.
- A device has to edit something; a spec has to have a device.

Source: CDI specification 1.1.0, "CDI JSON Specification"; its schema (schema.json, defs.json);
Kubernetes' rules for annotations, which it refers to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

from hooks.cdi import names
from hooks.cdi.errors import CdiSpecInvalid
from hooks.cdi.spec import (
    NO_PERMISSIONS,
    DeviceNode,
    Edits,
    SpecDevice,
    SpecFile,
    SpecHook,
    SpecMount,
)
from hooks.cdi.tree import Plain
from hooks.edits.plan import IntelRdt, NetDevice

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HOOK_NAMES", "VERSIONS", "minimum_version", "parse", "to_tree"]

VERSIONS: Final = (
    "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0",
)  # fmt: skip
"""The versions that are known, the oldest first."""

_DRAFTS: Final = {"0.1.0": "0.3.0", "0.2.0": "0.3.0"}

HOOK_NAMES: Final = (
    "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop",
)  # fmt: skip
"""The lists of OCI hooks that a spec may add to."""

_MOST_MAJORS: Final = 1 << 12
_MOST_MINORS: Final = 1 << 20
_MOST_IDS: Final = (1 << 32) - 1
_LARGEST_MODE: Final = 0o177777
_LONGEST_TIMEOUT: Final = 1 << 31
_LONGEST_CLOS: Final = 4096
_LARGEST_ANNOTATIONS: Final = 256 << 10


def parse(tree: Any, file: str) -> SpecFile:
    """A spec from the tree of a file.

    Args:
        tree: as :func:`hooks.cdi.files.read` returns it.
        file: the file's name, for messages.

    Returns:
        The spec.

    Raises:
        CdiSpecInvalid: it breaks a rule of this module's head; the message names the field.
    """
    walk = _Walk(file)
    if not isinstance(tree, dict):
        walk.fail("it is no object")
    spec: SpecFile = _SPEC(tree, walk)
    version = _version(spec.version, walk)
    where, needed, _ = max(walk.used, key=lambda used: used[1], default=("", version, None))
    if needed > version:
        walk.fail_at(where, f"it needs cdiVersion {_text_of(needed)} or later")
    for where, _, until in walk.used:
        if until is not None and version >= until:
            walk.fail_at(where, f"it is not in cdiVersion {_text_of(until)} any more")
    return spec


def minimum_version(tree: Any) -> str:
    """The lowest version of the specification that has everything a spec uses.

    Args:
        tree: a spec that is otherwise valid.

    Raises:
        CdiSpecInvalid: it is not.
    """
    walk = _Walk("to be written")
    _SPEC(tree, walk)
    return _text_of(max((since for _, since, _ in walk.used), default=_number(VERSIONS[0])))


def to_tree(spec: SpecFile) -> dict[str, Any]:
    """A spec as a tree of JSON, without what is absent.

    Args:
        spec: the spec.

    Returns:
        Its fields by their names, in the order of the tables.
    """
    tree: dict[str, Any] = _SPEC.tree(spec)
    return tree


_Number: TypeAlias = tuple[int, int, int]


def _number(version: str) -> _Number:
    major, minor, patch = version.split(".")
    return int(major), int(minor), int(patch)


def _text_of(version: _Number) -> str:
    return ".".join(map(str, version))


def _version(text: str, walk: _Walk) -> _Number:
    plain = text.removeprefix("v")
    known = _DRAFTS.get(plain, plain)
    if known not in VERSIONS:
        walk.fail_at("cdiVersion", f"{text!r} is none of {', '.join(VERSIONS)}")
    return _number(known)


class _Walk:
    """One walk through a file: whose it is, where one is in it, and what needs which version.

    ``path`` has the names of fields and the indices of lists on the way; ``used`` has where each
    field of a later version is, since when there are such, and from when on no more.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self.path: list[str | int] = []
        self.used: list[tuple[str, _Number, _Number | None]] = []

    def fail(self, fault: str, *below: str) -> NoReturn:
        self.path += below
        self.fail_at(self._where(), fault)

    def fail_at(self, where: str, fault: str) -> NoReturn:
        raise CdiSpecInvalid(
            f"the CDI spec {self._file}",
            found=f"{where}: {fault}" if where else fault,
            do="have the vendor's program write it anew, or mend it by the CDI specification",
        )

    def meets(self, since: str, until: str | None = None) -> None:
        if since != VERSIONS[0]:
            end = None if until is None else _number(until)
            self.used.append((self._where(), _number(since), end))

    def _where(self) -> str:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return "".join(parts).removeprefix(".")


if TYPE_CHECKING:
    _Reader: TypeAlias = Callable[[Any, _Walk], Any]


def _text(value: Any, walk: _Walk) -> str:
    if isinstance(value, bool):
        value = "true" if value else "false"
    if isinstance(value, int):
        value = str(value)
    if not isinstance(value, str):
        walk.fail("it is no string")
    text = str(value)
    if "\0" in text or not _is_encodable(text):
        walk.fail("it has a character that no file name or variable has")
    return text


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_INTEGER: Final = re.compile(r"[+-]?(?:0x[0-9a-fA-F]+|0o?[0-7]+|0|[1-9][0-9]*)", re.ASCII)
_MOST_DIGITS: Final = 24


def _integer(below: int, least: int = 0) -> _Reader:
    def read(value: Any, walk: _Walk) -> int:
        number = value
        if isinstance(value, Plain):
            number = _of_plain(value)
        if isinstance(number, bool) or not isinstance(number, int):
            walk.fail("it is no whole number")
        if not least <= number < below:
            walk.fail(f"{number} is not from {least} to {below - 1}")
        return number

    return read


def _of_plain(text: str) -> int | None:
    """A number as YAML writes it: 0660 and 0o660 are octal."""
    if len(text) > _MOST_DIGITS or not _INTEGER.fullmatch(text):
        return None
    if re.fullmatch(r"[+-]?0[0-7]+", text):
        return int(text, 8)
    return int(text, 0)


def _flag(value: Any, walk: _Walk) -> bool:
    if isinstance(value, Plain) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        walk.fail("it is neither true nor false")
    return value


class _List:
    """A list of what ``item`` reads."""

    def __init__(self, item: _Reader) -> None:
        self._item = item

    def __call__(self, value: Any, walk: _Walk) -> tuple[Any, ...]:
        if not isinstance(value, list):
            walk.fail("it is no list")
        made = []
        walk.path.append(0)
        for index, entry in enumerate(value):
            walk.path[-1] = index
            made.append(self._item(entry, walk))
        walk.path.pop()
        return tuple(made)

    def tree(self, value: tuple[Any, ...]) -> list[Any]:
        return [_tree(self._item, entry) for entry in value]


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of an object: whose attribute it becomes, how it is read, and when there was it."""

    attribute: str
    read: _Reader
    required: bool = False
    since: str = VERSIONS[0]
    until: str | None = None


class _Object:
    """An object with certain fields, which becomes a value of ``make``."""

    def __init__(
        self,
        make: Callable[..., Any],
        table: dict[str, _Field],
        check: Callable[[Any, _Walk], None] | None = None,
    ) -> None:
        self._make = make
        self._table = table
        self._check = check
        self._folded = {name.lower(): row for name, row in table.items()}
        self._required = tuple(name for name, row in table.items() if row.required)

    def __call__(self, value: Any, walk: _Walk) -> Any:
        if not isinstance(value, dict):
            walk.fail("it is no object")
        given: dict[str, Any] = {}
        walk.path.append("")
        for key, entry in value.items():
            walk.path[-1] = key
            row = self._row(key)
            if row is None:
                walk.fail(f"unknown field; known are {', '.join(self._table)}")
            if row.attribute in given:
                walk.fail("the field is there twice")
            if _is_empty(entry):
                continue
            walk.meets(row.since, row.until)
            given[row.attribute] = row.read(entry, walk)
        walk.path.pop()
        for name in self._required:
            if self._table[name].attribute not in given:
                walk.fail("it is missing", name)
        made = self._make(**given)
        if self._check is not None:
            self._check(made, walk)
        return made

    def _row(self, key: str) -> _Field | None:
        """The row of a field; its name may be written in any case."""
        return self._table.get(key) or self._folded.get(key.lower())

    def tree(self, value: Any) -> dict[str, Any]:
        absent = {each.name: each.default for each in fields(value)}
        made = {}
        for name, row in self._table.items():
            entry = getattr(value, row.attribute)
            shown = _tree(row.read, entry) if entry is not None else None
            if row.required or (entry != absent[row.attribute] and not _is_empty(shown)):
                made[name] = shown
        return made


def _tree(reader: Any, value: Any) -> Any:
    return reader.tree(value) if isinstance(reader, _List | _Object | _Annotations) else value


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


# Rules that tables cannot say

_KEY_NAME: Final = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]", re.ASCII)
_SUBDOMAIN: Final = re.compile(
    r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_LONGEST_KEY_NAME: Final = 63
_LONGEST_SUBDOMAIN: Final = 253


class _Annotations:
    """Keys and values, with the limits that Kubernetes sets to annotations."""

    def __call__(self, value: Any, walk: _Walk) -> tuple[tuple[str, str], ...]:
        if not isinstance(value, dict):
            walk.fail("it is no object")
        size = 0
        found = []
        for key, entry in value.items():
            if not _is_annotation_key(key.lower()):
                walk.fail(
                    "it is no key of an annotation: PREFIX/NAME, at most 253 and 63 long", key
                )
            if not isinstance(entry, str):
                walk.fail("it is no string", key)
            text = _text(entry, walk)
            size += len(key.encode()) + len(text.encode())
            found.append((key, text))
        if size > _LARGEST_ANNOTATIONS:
            walk.fail(f"they are {size} bytes; the limit is {_LARGEST_ANNOTATIONS}")
        return tuple(found)

    def tree(self, value: tuple[tuple[str, str], ...]) -> dict[str, str]:
        return dict(value)


def _is_annotation_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > _LONGEST_SUBDOMAIN or not _SUBDOMAIN.fullmatch(prefix)):
        return False
    return len(name) <= _LONGEST_KEY_NAME and _KEY_NAME.fullmatch(name) is not None


def _variable(value: Any, walk: _Walk) -> str:
    text = _text(value, walk)
    if text.find("=") <= 0:
        walk.fail(f"{text!r} is not of the form NAME=VALUE")
    return text


def _path(value: Any, walk: _Walk) -> str:
    text = _text(value, walk)
    if not text.startswith("/"):
        walk.fail(f"{text!r} is no absolute path")
    return text


def _one_of(*words: str) -> _Reader:
    def read(value: Any, walk: _Walk) -> str:
        text = _text(value, walk)
        if text not in words:
            walk.fail(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


def _permissions(value: Any, walk: _Walk) -> str:
    text = _text(value, walk)
    if text != NO_PERMISSIONS and not set(text) <= set("rwm"):
        walk.fail(f"{text!r} has other letters than r, w and m")
    return text


def _clos(value: Any, walk: _Walk) -> str:
    text = _text(value, walk)
    if text != "/" and (
        len(text) >= _LONGEST_CLOS or text in {".", ".."} or not {"/", "\n"}.isdisjoint(text)
    ):
        walk.fail(f"{text!r} is no name of a class of service")
    return text


_LONGEST_INTERFACE: Final = 15


def _interface(value: Any, walk: _Walk) -> str:
    # dev_valid_name() of the kernel
    text = _text(value, walk)
    if (
        len(text.encode()) > _LONGEST_INTERFACE
        or text in {".", ".."}
        or any(c in "/:" or c.isspace() for c in text)
    ):
        walk.fail(f"{text!r} is no name of a network interface")
    return text


def _kind(value: Any, walk: _Walk) -> str:
    text = _text(value, walk)
    vendor, slash, class_ = text.partition("/")
    fault = names.fault_of_vendor(vendor) or names.fault_of_class(class_)
    if not slash or fault:
        walk.fail(fault if slash else f"{text!r} is not of the form vendor/class")
    if "." in class_:
        walk.meets("0.6.0")
    return text


def _device_name(value: Any, walk: _Walk) -> str:
    text = _text(value, walk)
    fault = names.fault_of_device(text)
    if fault:
        walk.fail(fault)
    if text[0].isdigit():
        walk.meets("0.5.0")
    return text


def _check_edits(edits: Edits, walk: _Walk) -> None:
    if not edits.net_devices:
        return
    for told, which in (
        ("hostInterfaceName", [each.host_name for each in edits.net_devices]),
        ("name", [each.name for each in edits.net_devices]),
    ):
        twice = _twice(which)
        if twice is not None:
            walk.fail(f"{told} {twice!r} is there twice", "netDevices")


def _check_device(device: SpecDevice, walk: _Walk) -> None:
    if device.edits == Edits():
        walk.fail("a device has to edit something", "containerEdits")


def _check_spec(spec: SpecFile, walk: _Walk) -> None:
    twice = _twice([device.name for device in spec.devices])
    if twice is not None:
        walk.fail(f"{twice!r} is there twice", "devices")


def _twice(words: list[str]) -> str | None:
    seen: set[str] = set()
    for word in words:
        if word in seen:
            return word
        seen.add(word)
    return None


# The tables

_DEVICE_NODE: Final = _Object(
    DeviceNode,
    {
        "path": _Field("path", _path, required=True),
        "hostPath": _Field("host_path", _path, since="0.5.0"),
        "type": _Field("kind", _one_of("b", "c", "u", "p")),
        "major": _Field("major", _integer(_MOST_MAJORS)),
        "minor": _Field("minor", _integer(_MOST_MINORS)),
        "fileMode": _Field("mode", _integer(_LARGEST_MODE + 1)),
        "permissions": _Field("permissions", _permissions),
        "uid": _Field("uid", _integer(_MOST_IDS)),
        "gid": _Field("gid", _integer(_MOST_IDS)),
    },
)
_MOUNT: Final = _Object(
    SpecMount,
    {
        # The source of a tmpfs is any word.
        "hostPath": _Field("host_path", _text, required=True),
        "containerPath": _Field("container_path", _path, required=True),
        "options": _Field("options", _List(_text)),
        "type": _Field("kind", _text, since="0.4.0"),
    },
)
_HOOK: Final = _Object(
    SpecHook,
    {
        "hookName": _Field("name", _one_of(*HOOK_NAMES), required=True),
        "path": _Field("path", _path, required=True),
        "args": _Field("args", _List(_text)),
        "env": _Field("env", _List(_variable)),
        "timeout": _Field("timeout", _integer(_LONGEST_TIMEOUT, 1)),
    },
)
_INTEL_RDT: Final = _Object(
    IntelRdt,
    {
        "closID": _Field("clos_id", _clos),
        "l3CacheSchema": _Field("l3_cache_schema", _text),
        "memBwSchema": _Field("mem_bw_schema", _text),
        "schemata": _Field("schemata", _List(_text), since="1.1.0"),
        "enableMonitoring": _Field("enable_monitoring", _flag, since="1.1.0"),
        "enableCMT": _Field("enable_cmt", _flag, since="0.7.0", until="1.1.0"),
        "enableMBM": _Field("enable_mbm", _flag, since="0.7.0", until="1.1.0"),
    },
)
_NET_DEVICE: Final = _Object(
    NetDevice,
    {
        "hostInterfaceName": _Field("host_name", _interface, required=True),
        "name": _Field("name", _interface, required=True),
    },
)
_EDITS: Final = _Object(
    Edits,
    {
        "env": _Field("env", _List(_variable)),
        "deviceNodes": _Field("device_nodes", _List(_DEVICE_NODE)),
        "netDevices": _Field("net_devices", _List(_NET_DEVICE), since="1.1.0"),
        "mounts": _Field("mounts", _List(_MOUNT)),
        "hooks": _Field("hooks", _List(_HOOK)),
        "additionalGids": _Field("additional_gids", _List(_integer(_MOST_IDS)), since="0.7.0"),
        "intelRdt": _Field("intel_rdt", _INTEL_RDT, since="0.7.0"),
    },
    _check_edits,
)
_DEVICE: Final = _Object(
    SpecDevice,
    {
        "name": _Field("name", _device_name, required=True),
        "annotations": _Field("annotations", _Annotations(), since="0.6.0"),
        "containerEdits": _Field("edits", _EDITS, required=True),
    },
    _check_device,
)
_SPEC: Final = _Object(
    SpecFile,
    {
        "cdiVersion": _Field("version", _text, required=True),
        "kind": _Field("kind", _kind, required=True),
        "annotations": _Field("annotations", _Annotations(), since="0.6.0"),
        "devices": _Field("devices", _List(_DEVICE), required=True),
        "containerEdits": _Field("edits", _EDITS),
    },
    _check_spec,
)
