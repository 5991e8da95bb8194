"""The meaning of each key in NVIDIA's config.toml, from the code that reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hooks.config import Config
from hooks.config.nvidia import KEYS, parse_nvidia_config
from hooks.errors import WrongConfigValue
from tools.reference.configuration import setting_of, written
from tools.reference.markdown import by_reason, code, table

__all__ = ["defaults", "keys"]

# Values that show a key's effect, tried in turn; values that a key refuses are skipped.
_SAMPLES: Final[tuple[Any, ...]] = (
    True,
    False,
    "/srv/nvidia",
    "DOCKER_RESOURCE_GPU",
    "compute,utility",
    "vendor.com/gpu",
    "csv",
    "legacy",
    "disabled",
    ["/srv/cdi"],
    ["vendor.com/"],
    ["enable-cuda-compat"],
    ["disable-ipc-discoverer"],
    ["value"],
    "value",
)

_FILE: Final = "config.toml"
_IN_MODE_CDI: Final = b'nvidia-container-runtime.mode = "cdi"\n'


def keys() -> str:
    """Return the tables: their key and ours; and the ignored keys."""
    meanings = {name: _meaning(name) for name in KEYS}
    rows = [(code(name), meaning) for name, meaning in meanings.items() if meaning]
    ignored = [(name, why) for name, why in KEYS.items() if not meanings[name]]
    known = table(("NVIDIA's key", "here"), rows)
    return f"{known}\n{by_reason('no meaning here', ignored)}"


def defaults() -> str:
    """Return what differs from our defaults on a node with only NVIDIA's file."""
    read = parse_nvidia_config(b"", _FILE)
    changed = "; ".join(code(line) for line in _differences(read, Config()))
    return (
        "With an empty file of NVIDIA's and without a file of ours, these settings differ from our "
        f"defaults: {changed}.\n"
    )


def _meaning(name: str) -> str:
    """Return what a key sets, with the first value that shows it, and the mode it applies in."""
    in_any = _settings(name, b"")
    in_cdi = {} if in_any else _settings(name, _IN_MODE_CDI)
    only = [f"with {code(_IN_MODE_CDI.decode().strip())} only"] if in_cdi else []
    return "; ".join([*(in_any or in_cdi).values(), *only])


def _settings(name: str, above: bytes) -> dict[str, str]:
    """Return each of our settings that a key stands for, with an example."""
    plain = parse_nvidia_config(above, _FILE)
    found: dict[str, str] = {}
    for sample in _SAMPLES:
        try:
            read = parse_nvidia_config(above + _toml(name, sample), _FILE)
        except WrongConfigValue:
            continue
        for line in _differences(read, plain):
            ours = line.partition(" = ")[0]
            found.setdefault(ours, f"{code(_said(name, sample))} → {code(line)}")
    return found


def _differences(read: Config, plain: Config) -> Iterator[str]:
    for field, value in _fields(read).items():
        if value != getattr(plain, field):
            setting = setting_of(field)
            table_name, _, key = setting.key.partition(".")
            yield f"[{table_name}] {key} = {written(value, setting)}"


def _fields(config: Config) -> Mapping[str, Any]:
    hidden = {"source", "notes"}
    return {
        n: getattr(config, n) for n in Config.__annotations__ if n not in hidden and n[0] != "_"
    }


def _said(name: str, sample: Any) -> str:
    return f"{name.rpartition('.')[2]} = {json.dumps(sample)}"


def _toml(name: str, sample: Any) -> bytes:
    return f"{name} = {json.dumps(sample)}\n".encode()
