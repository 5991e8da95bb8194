"""The health table on disk: ``STATE/health.json``.

Rules
- The file is replaced whole when it changes. ``nvshim list`` and ``nvshim health`` read it, and so
  does the agent at start: restarting the agent does not make a device healthy.
- It is valid only for the boot in which it was written. A driver reload since then is a reset for
  every device.
- Only root can write it. Entries that are invalid are skipped and reported, so that a damaged file
  does not stop the health checks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from api.values import dataclass
from hooks.config import Config
from hooks.node.fingerprint import read_text
from integration.files import read_file, replace_file
from integration.json_documents import parse_json
from integration.node.device_health.device_state import Condition, Need
from integration.node.device_health.health_table import HealthTable, Place
from integration.node.values.health import HealthState

_NAME: Final = "health.json"
_FORMAT: Final = 1
_MODE: Final = 0o600  # it names containers


@dataclass(frozen=True, slots=True)
class Record:
    """The content of the file."""

    table: HealthTable  # empty if the file is from another boot, or unusable
    fault: str = ""  # what is wrong with the file; "" for nothing


def path_of(config: Config) -> str:
    """Return the path of the file."""
    return os.path.join(config.state, _NAME)


def boot_id(config: Config) -> str:
    """Return the id of this boot; "" if unknown."""
    return (read_text(f"{config.proc}/sys/kernel/random/boot_id") or "").strip()


def load_of_driver(config: Config) -> str:
    """Return an id of the current load of the driver; "" if it is not loaded.

    Sysfs creates a module's directory, with a new inode number, whenever the module is loaded.
    """
    module = f"{config.sys}/module/nvidia"
    try:
        number = os.stat(module).st_ino
    except OSError:
        return ""
    version = (read_text(f"{module}/version") or "").strip()
    return f"{version or 'unknown'}:{number}"


def write(config: Config, table: HealthTable, *, judged: bool = True) -> None:
    """Write the file.

    Args:
        judged: False if health checks are off; the file is then only kept for a later agent.

    Raises:
        OSError: the file cannot be written; the old one is untouched.
    """
    document = {
        "format": _FORMAT,
        "boot": boot_id(config),
        "load": table.load,
        "judged": judged,
        "devices": [
            {
                **asdict(table.places[uuid]),
                "gone": uuid in table.gone,
                **asdict(condition),
            }
            for uuid, condition in table.conditions.items()
        ],
    }
    content = json.dumps(document, indent=1).encode() + b"\n"
    path = path_of(config)
    if read_file(path) != content:
        replace_file(path, content, mode=_MODE)


def read_devices(config: Config) -> list[dict[str, Any]] | None:
    """Return the raw entry of each device; None if the file is not from this boot."""
    document, _ = _read_document(config)
    devices = document.get("devices")
    if document.get("judged") is not True or not isinstance(devices, list):
        return None
    return [entry for entry, _, _ in _entries(devices)]


def read(config: Config) -> Record:
    """Read the table that an earlier agent wrote."""
    document, fault = _read_document(config)
    if not document:
        return Record(HealthTable(), fault)
    devices = document.get("devices")
    devices = devices if isinstance(devices, list) else [None]
    known = _entries(devices)
    table = HealthTable(
        places={place.uuid: place for _, place, _ in known},
        conditions={place.uuid: condition for _, place, condition in known},
        gone=frozenset(place.uuid for entry, place, _ in known if entry["gone"]),
        load=load if isinstance(load := document.get("load"), str) else "",
    )
    if len(table.places) != len(devices):
        wrong = len(devices) - len(table.places)
        fault = f"{path_of(config)}: {wrong} of its entries are invalid"
    return Record(table, fault)


def _read_document(config: Config) -> tuple[dict[str, Any], str]:
    """Return the document, empty if it is not from this boot, and what is wrong with it."""
    path = path_of(config)
    try:
        content = read_file(path)
        document: Any = parse_json(content) if content is not None else None
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else "damaged"
        return {}, f"{path}: {what}; the earlier health of devices is lost"
    if document is None:
        return {}, ""
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return {}, f"{path}: written by another version; the earlier health of devices is lost"
    return (document if document.get("boot") == boot_id(config) else {}), ""


# -- entries -----------------------------------------------------------------------------------


def _entries(devices: list[Any]) -> list[tuple[dict[str, Any], Place, Condition]]:
    """Return the valid entries."""
    read = ((each, _place(each), _condition(each)) for each in devices)
    return [(each, place, known) for each, place, known in read if place and known]


def _place(entry: Any) -> Place | None:
    if not isinstance(entry, dict):
        return None
    instances = [entry.get("gpu_instance"), entry.get("compute_instance")]
    if not all(each is None or _is_count(each) for each in instances):
        return None
    try:
        uuid, gpu, bus_id = (_string(entry.get(key)) for key in ("uuid", "gpu", "bus_id"))
        profile = _string(entry.get("profile", ""))  # missing in older files
    except ValueError:
        return None
    return Place(uuid, gpu, bus_id, instances[0], instances[1], profile) if uuid else None


def _condition(entry: Any) -> Condition | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("gone"), bool):
        return None
    try:
        known = Condition(
            **{
                each.name: _READ[str(each.type)](entry.get(each.name))
                for each in fields(Condition)
                if each.name in entry or each.name not in _NEWER
            }
        )
    except ValueError:
        return None
    # An allocatable device needs nothing; one that is not allocatable needs evidence.
    if known.state.is_allocatable == (known.need > Need.NOTHING) or (
        known.lost and known.state.is_allocatable
    ):
        return None
    return known


# Fields that older files do not have.
_NEWER: Final = frozenset({"asks", "own"})

_FAR: Final = 1e12


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checked(value: Any, is_right: object) -> Any:
    if not is_right:
        raise ValueError(value)
    return value


def _time(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(_checked(value, is_number and 0 <= value < _FAR))  # excludes NaN


def _list(value: Any) -> list[Any]:
    return list(_checked(value, isinstance(value, list)))


def _string(value: Any) -> str:
    return str(_checked(value, isinstance(value, str)))


_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "str": _string,
    "bool": lambda value: _checked(value, isinstance(value, bool)),
    "int": lambda value: _checked(value, _is_count(value)),
    "float": _time,
    "float | None": lambda value: None if value is None else _time(value),
    "tuple[float, ...]": lambda value: tuple(map(_time, _list(value))),
    "tuple[str, ...]": lambda value: tuple(map(_string, _list(value))),
    "HealthState": lambda value: HealthState(_string(value)),
    "Need": lambda value: Need(_checked(value, _is_count(value))),
}
"""Readers by the type of the field; they raise ValueError for an invalid value."""
