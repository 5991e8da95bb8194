"""The rules by which a tree of JSON or YAML becomes a CDI spec.

Tables list the fields, their content, and the version of the specification that added them:

==================================  ===================================
since                               what
==================================  ===================================
0.4.0                               ``type`` of a mount
0.5.0                               ``hostPath`` of a device node;
                                    names of devices that start with a digit
0.6.0                               ``annotations``; a dot in a class
0.7.0                               ``additionalGids``, ``intelRdt``
0.7.0 to 1.0.0                      ``enableCMT``, ``enableMBM`` of ``intelRdt``
1.1.0                               ``schemata``, ``enableMonitoring`` of ``intelRdt``;
                                    ``netDevices``
==================================  ===================================

Rules
- An unknown field is an error, and so is one of a later version than the file declares: without it,
  the container would differ from what the vendor meant.
- An empty or null field counts as absent. Its name may be in any case, as in Go's decoder, with
  which vendors test their files.
- Where a string is expected, a number is accepted as it is written (``name: 0``).
- 0.1.0 and 0.2.0 were drafts; files with these versions are read as 0.3.0, as in the reference
  library. A ``v`` before the version is allowed for the same reason.
- A device must edit something, and a spec must have a device.

Source: CDI specification 1.1.0, "CDI JSON Specification"; its schema (schema.json, defs.json);
Kubernetes' rules for annotations, which it refers to.
"""

from __future__ import annotations

import re
from typing import Any, Final

from hooks.cdi.spec import (
    NO_PERMISSIONS,
    DeviceNode,
    Edits,
    SpecDevice,
    SpecFile,
    SpecHook,
    SpecMount,
    fault_of,
)
from hooks.cdi.tree import (
    VERSIONS,
    Field,
    List,
    Number,
    Object,
    Reader,
    Walk,
    integer,
    number_of,
    read_flag,
    read_text,
    text_of,
)
from hooks.plan import IntelRdt, NetDevice

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
    """Build a spec from the tree of a file.

    Raises:
        CdiSpecInvalid: it breaks one of the rules above; the message names the field.
    """
    walk = Walk(file)
    if not isinstance(tree, dict):
        walk.fail("it is not an object")
    spec: SpecFile = _SPEC(tree, walk)
    version = _version(spec.version, walk)
    where, needed, _ = max(walk.used, key=lambda used: used[1], default=("", version, None))
    if needed > version:
        walk.fail_at(where, f"it needs cdiVersion {text_of(needed)} or later")
    for where, _, until in walk.used:
        if until is not None and version >= until:
            walk.fail_at(where, f"cdiVersion {text_of(until)} has removed it")
    return spec


def minimum_version(tree: Any) -> str:
    """Return the lowest version of the specification that has everything a spec uses.

    Raises:
        CdiSpecInvalid: there is no such version.
    """
    walk = Walk("to be written")
    _SPEC(tree, walk)
    return text_of(max((since for _, since, _ in walk.used), default=number_of(VERSIONS[0])))


def to_tree(spec: SpecFile) -> dict[str, Any]:
    """Return a spec as a tree of JSON without absent fields, in the order of the tables."""
    tree: dict[str, Any] = _SPEC.tree(spec)
    return tree


def _version(text: str, walk: Walk) -> Number:
    plain = text.removeprefix("v")
    known = _DRAFTS.get(plain, plain)
    if known not in VERSIONS:
        walk.fail_at("cdiVersion", f"{text!r} is none of {', '.join(VERSIONS)}")
    return number_of(known)


# Rules that tables cannot express

_KEY_NAME: Final = re.compile(r"(?:[A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]", re.ASCII)
_SUBDOMAIN: Final = re.compile(
    r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_LONGEST_KEY_NAME: Final = 63
_LONGEST_SUBDOMAIN: Final = 253


class _Annotations:
    """Keys and values, with Kubernetes' limits for annotations."""

    def __call__(self, value: Any, walk: Walk) -> tuple[tuple[str, str], ...]:
        if not isinstance(value, dict):
            walk.fail("it is not an object")
        size = 0
        found = []
        for key, entry in value.items():
            if not _is_annotation_key(key.lower()):
                walk.fail(
                    "it is no key of an annotation: PREFIX/NAME, at most 253 and 63 long", key
                )
            if not isinstance(entry, str):
                walk.fail("it is no string", key)
            text = read_text(entry, walk)
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


def _variable(value: Any, walk: Walk) -> str:
    text = read_text(value, walk)
    if text.find("=") <= 0:
        walk.fail(f"{text!r} is not of the form NAME=VALUE")
    return text


def _path(value: Any, walk: Walk) -> str:
    text = read_text(value, walk)
    if not text.startswith("/"):
        walk.fail(f"{text!r} is no absolute path")
    return text


def _one_of(*words: str) -> Reader:
    def read(value: Any, walk: Walk) -> str:
        text = read_text(value, walk)
        if text not in words:
            walk.fail(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


def _permissions(value: Any, walk: Walk) -> str:
    text = read_text(value, walk)
    if text != NO_PERMISSIONS and not set(text) <= set("rwm"):
        walk.fail(f"{text!r} has other letters than r, w and m")
    return text


def _clos(value: Any, walk: Walk) -> str:
    text = read_text(value, walk)
    if text != "/" and (
        len(text) >= _LONGEST_CLOS or text in {".", ".."} or not {"/", "\n"}.isdisjoint(text)
    ):
        walk.fail(f"{text!r} is no name of a class of service")
    return text


_LONGEST_INTERFACE: Final = 15


def _interface(value: Any, walk: Walk) -> str:
    # dev_valid_name() of the kernel
    text = read_text(value, walk)
    if (
        len(text.encode()) > _LONGEST_INTERFACE
        or text in {".", ".."}
        or any(c in "/:" or c.isspace() for c in text)
    ):
        walk.fail(f"{text!r} is no name of a network interface")
    return text


def _kind(value: Any, walk: Walk) -> str:
    text = read_text(value, walk)
    vendor, slash, class_ = text.partition("/")
    fault = fault_of("vendor", vendor) or fault_of("class", class_)
    if not slash or fault:
        walk.fail(fault if slash else f"{text!r} is not of the form vendor/class")
    if "." in class_:
        walk.meets("0.6.0")
    return text


def _device_name(value: Any, walk: Walk) -> str:
    text = read_text(value, walk)
    fault = fault_of("device", text)
    if fault:
        walk.fail(fault)
    if text[0].isdigit():
        walk.meets("0.5.0")
    return text


def _check_edits(edits: Edits, walk: Walk) -> None:
    if not edits.net_devices:
        return
    for told, which in (
        ("hostInterfaceName", [each.host_name for each in edits.net_devices]),
        ("name", [each.name for each in edits.net_devices]),
    ):
        twice = _twice(which)
        if twice is not None:
            walk.fail(f"{told} {twice!r} is there twice", "netDevices")


def _check_device(device: SpecDevice, walk: Walk) -> None:
    if device.edits == Edits():
        walk.fail("a device has to edit something", "containerEdits")


def _check_spec(spec: SpecFile, walk: Walk) -> None:
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

_DEVICE_NODE: Final = Object(
    DeviceNode,
    {
        "path": Field("path", _path, required=True),
        "hostPath": Field("host_path", _path, since="0.5.0"),
        "type": Field("kind", _one_of("b", "c", "u", "p")),
        "major": Field("major", integer(_MOST_MAJORS)),
        "minor": Field("minor", integer(_MOST_MINORS)),
        "fileMode": Field("mode", integer(_LARGEST_MODE + 1)),
        "permissions": Field("permissions", _permissions),
        "uid": Field("uid", integer(_MOST_IDS)),
        "gid": Field("gid", integer(_MOST_IDS)),
    },
)
_MOUNT: Final = Object(
    SpecMount,
    {
        # The source of a tmpfs is any word.
        "hostPath": Field("host_path", read_text, required=True),
        "containerPath": Field("container_path", _path, required=True),
        "options": Field("options", List(read_text)),
        "type": Field("kind", read_text, since="0.4.0"),
    },
)
_HOOK: Final = Object(
    SpecHook,
    {
        "hookName": Field("name", _one_of(*HOOK_NAMES), required=True),
        "path": Field("path", _path, required=True),
        "args": Field("args", List(read_text)),
        "env": Field("env", List(_variable)),
        "timeout": Field("timeout", integer(_LONGEST_TIMEOUT, 1)),
    },
)
_INTEL_RDT: Final = Object(
    IntelRdt,
    {
        "closID": Field("clos_id", _clos),
        "l3CacheSchema": Field("l3_cache_schema", read_text),
        "memBwSchema": Field("mem_bw_schema", read_text),
        "schemata": Field("schemata", List(read_text), since="1.1.0"),
        "enableMonitoring": Field("enable_monitoring", read_flag, since="1.1.0"),
        "enableCMT": Field("enable_cmt", read_flag, since="0.7.0", until="1.1.0"),
        "enableMBM": Field("enable_mbm", read_flag, since="0.7.0", until="1.1.0"),
    },
)
_NET_DEVICE: Final = Object(
    NetDevice,
    {
        "hostInterfaceName": Field("host_name", _interface, required=True),
        "name": Field("name", _interface, required=True),
    },
)
_EDITS: Final = Object(
    Edits,
    {
        "env": Field("env", List(_variable)),
        "deviceNodes": Field("device_nodes", List(_DEVICE_NODE)),
        "netDevices": Field("net_devices", List(_NET_DEVICE), since="1.1.0"),
        "mounts": Field("mounts", List(_MOUNT)),
        "hooks": Field("hooks", List(_HOOK)),
        "additionalGids": Field("additional_gids", List(integer(_MOST_IDS)), since="0.7.0"),
        "intelRdt": Field("intel_rdt", _INTEL_RDT, since="0.7.0"),
    },
    _check_edits,
)
_DEVICE: Final = Object(
    SpecDevice,
    {
        "name": Field("name", _device_name, required=True),
        "annotations": Field("annotations", _Annotations(), since="0.6.0"),
        "containerEdits": Field("edits", _EDITS, required=True),
    },
    _check_device,
)
_SPEC: Final = Object(
    SpecFile,
    {
        "cdiVersion": Field("version", read_text, required=True),
        "kind": Field("kind", _kind, required=True),
        "annotations": Field("annotations", _Annotations(), since="0.6.0"),
        "devices": Field("devices", List(_DEVICE), required=True),
        "containerEdits": Field("edits", _EDITS),
    },
    _check_spec,
)
