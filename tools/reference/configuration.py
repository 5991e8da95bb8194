"""The keys of config.toml, from the table that the parser goes by."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from hooks import config
from tools.reference.markdown import code, prose, table

__all__ = ["default_of", "key_of", "page", "written"]

_HEAD: Final = """\
# Configuration

`/etc/containerd-shim-nvidia/config.toml`, or the file that `NVSHIM_CONFIG` names. It is read for
each container that may ask for a GPU, so a change needs no restart. A key that is not there has its
default; an unknown table or key is an error. Where this file is not there and
`/etc/nvidia-container-runtime/config.toml` is, that one is read and means what it meant: see
[migration](../migration.md#configuration).

`nvshim config show` says what holds on a node and where it comes from; `nvshim config set` changes
a key and keeps the file's comments.
"""

_OF_TABLES: Final = {
    "node": "Where things are on this node.",
    "devices": "What is made ready for a container that needs it.",
    "requests": "Where it is said what a container asks for; see "
    "[what a container can ask for](../requests.md).",
    "policy": "What of it is granted; see [who gets a GPU](../security.md#who-gets-a-gpu).",
    "sharing": "How many containers may have a device at once; see [sharing](../sharing.md).",
    "cdi": "Specs of any vendor; see [device names](../requests.md#device-names).",
    "stdio": "Where the output of containers may go.",
    "sandbox": "Pods that the shim holds itself; see "
    "[sandboxes](../engines.md#sandboxes-without-a-pause-container).",
    "health": "What `nvshim node` thinks of devices, read when it begins; see "
    "[errors of the driver](xids.md).",
    "guard": "Whom `nvshim node` watches for the memory of shared GPUs, after the fact; see "
    "[sharing](../sharing.md#a-guard-for-gpu-memory).",
    "doctor": "What `nvshim doctor` leaves out on this node; [all checks](findings.md).",
}

_SHORT: Final = {'an absolute path ("/…")': "a path", "true or false": "boolean"}


def page() -> str:
    """The page of all keys."""
    fields = _meanings()
    parts = [_HEAD]
    for name, keys in config.TABLES.items():
        rows = [
            (
                code(key),
                _SHORT.get(wanted, wanted),
                code(default_of(field, key)),
                prose(fields[field]),
            )
            for key, (field, _, wanted) in keys.items()
        ]
        parts.append(
            f"## [{name}]\n\n{_OF_TABLES[name]}\n\n"
            + table(("key", "value", "default", "meaning"), rows)
        )
    return "\n".join(parts)


def _meanings() -> dict[str, str]:
    """What each field is, as the class's own documentation says."""
    _, _, attributes = (config.Config.__doc__ or "").partition("Attributes:")
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", attributes, re.MULTILINE)
    return {name: _for_people(text) for name, text in found}


def _for_people(text: str) -> str:
    """Without what only a reader of the code can use."""
    first = re.split(
        r"(?<=[.;])\s", " ".join(text.split()).replace("; None for ", "; without it, ")
    )
    kept = [part for part in first if "hooks." not in part]
    words = re.sub(r",? of :class:`\w+`", "", " ".join(kept)).rstrip(".;")
    return words.replace("None if the engine searches", "or the engine searches")


def default_of(field: str, key: str) -> str:
    """A key's default, as TOML would have it; "" where the default is that it is not there."""
    return written(getattr(config.Config(), field), key)


def key_of(field: str) -> tuple[str, str]:
    """The table and the key that set a field."""
    for name, keys in config.TABLES.items():
        for key, (sets, _, _) in keys.items():
            if sets == field:
                return name, key
    raise LookupError(field)


_WORDS: Final = {
    ("driver-root", None): '"auto"',
    ("kubelet-root", None): '"auto"',
    ("other-hooks", False): '"fail"',
    ("other-hooks", True): '"leave-out"',
    ("loggers", None): "",
}


def written(value: Any, key: str) -> str:
    """A field's value as the file would have it.

    Args:
        key: that sets it, since some are written as words.
    """
    if isinstance(value, (bool, type(None))) and (key, value) in _WORDS:
        return _WORDS[key, value]
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
