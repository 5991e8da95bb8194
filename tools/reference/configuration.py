"""The keys of config.toml, from the parser's table."""

from __future__ import annotations

import json
from typing import Any, Final

from hooks import config
from hooks.schema import Setting
from tools.reference.markdown import code, prose, table

__all__ = ["page", "setting_of", "written"]

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
    "requests": "Where a container can request devices; see "
    "[what a container can ask for](../requests.md).",
    "policy": "What of it is granted; see [who gets a GPU](../security.md#who-gets-a-gpu).",
    "sharing": "How many containers may have a device at once; see [sharing](../sharing.md).",
    "cdi": "Specs of any vendor; see [device names](../requests.md#device-names).",
    "stdio": "Where the output of containers may go.",
    "sandbox": "Pods that the shim holds itself; see "
    "[sandboxes](../engines.md#sandboxes-without-a-pause-container).",
    "health": "How `nvshim node` judges the health of devices, read at its start; see "
    "[errors of the driver](xids.md).",
    "guard": "Whom `nvshim node` watches for the memory of shared GPUs, after the fact; see "
    "[sharing](../sharing.md#a-guard-for-gpu-memory).",
    "doctor": "What `nvshim doctor` leaves out on this node; [all checks](findings.md).",
}

_SHORT: Final = {'an absolute path ("/…")': "a path", "true or false": "boolean"}


def page() -> str:
    """Return the page of all keys."""
    parts = [_HEAD]
    for name, keys in config.TABLES.items():
        rows = [
            (
                code(key),
                _SHORT.get(setting.kind.wanted, setting.kind.wanted),
                code(written(setting.default, setting)),
                prose(setting.text),
            )
            for key, setting in keys.items()
        ]
        parts.append(
            f"## [{name}]\n\n{_OF_TABLES[name]}\n\n"
            + table(("key", "value", "default", "meaning"), rows)
        )
    return "\n".join(parts)


def setting_of(field: str) -> Setting:
    """Return the setting of a field."""
    found = (each for keys in config.TABLES.values() for each in keys.values())
    return next(setting for setting in found if setting.field == field)


def written(value: Any, setting: Setting) -> str:
    """Return a setting's value as in the file; "" if the key would be missing."""
    value = setting.kind.written(value)
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
