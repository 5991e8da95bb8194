"""What is thought of the devices, in a file: ``STATE/health.json``.

Rules
- It is replaced as a whole, whenever something of it differs; ``nvshim list`` and ``nvshim health``
  read it, and the agent when it begins anew. So an unhealthy device is not made healthy by
  restarting the agent.
- It counts for the boot that it was written in. When the driver was loaded anew meanwhile, that is
  a reset for each device.
- Only who may write it could have lied, which is root. Still, what of it makes no sense is left
  out, and said: a damaged file keeps nobody from watching.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from integration.files import read_file, replace_file
from integration.node.health.book import Book, Place
from integration.node.health.machine import Condition, Need
from integration.node.health.values import State

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hooks.config import Config

__all__ = ["Record", "boot_id", "load_of_driver", "path_of", "read", "read_devices", "write"]

_NAME: Final = "health.json"
_FORMAT: Final = 1
_MODE: Final = 0o600  # it names containers


@dataclass(frozen=True, slots=True)
class Record:
    """What the file says.

    Attributes:
        book: what was known; empty if it is of another boot, or unusable.
        fault: what is wrong with it; "" for nothing.
    """

    book: Book
    fault: str = ""


def path_of(config: Config) -> str:
    """Where the file is."""
    return os.path.join(config.state, _NAME)


def boot_id(config: Config) -> str:
    """Which boot this is; "" if that is not known."""
    return (_text(f"{config.proc}/sys/kernel/random/boot_id") or "").strip()


def load_of_driver(config: Config) -> str:
    """Which loading of the driver this is; "" if it is not loaded.

    The directory of a module in sysfs is made when it is loaded, with a number of its own.
    """
    module = f"{config.sys}/module/nvidia"
    try:
        number = os.stat(module).st_ino
    except OSError:
        return ""
    version = (_text(f"{module}/version") or "").strip()
    return f"{version or 'unknown'}:{number}"


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def write(config: Config, book: Book, *, judged: bool = True) -> None:
    """Write the file.

    Args:
        config: where it is.
        book: what is known.
        judged: whether anybody judges devices: otherwise it is only kept for an agent that does.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    document = {
        "format": _FORMAT,
        "boot": boot_id(config),
        "load": book.load,
        "judged": judged,
        "devices": [
            {
                **asdict(book.places[uuid]),
                "gone": uuid in book.gone,
                **asdict(condition),
            }
            for uuid, condition in book.conditions.items()
        ],
    }
    content = json.dumps(document, indent=1).encode() + b"\n"
    path = path_of(config)
    if read_file(path) != content:
        replace_file(path, content, mode=_MODE)


def read_devices(config: Config) -> list[dict[str, Any]] | None:
    """What the file says of each device, as it is written; None if it says nothing of this boot.

    Args:
        config: where it is.
    """
    try:
        document = json.loads(read_file(path_of(config)) or b"null")
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return None
    devices = document.get("devices") if document.get("judged") is True else None
    if document.get("boot") != boot_id(config) or not isinstance(devices, list):
        return None
    return [each for each in devices if _place(each) is not None and _condition(each) is not None]


def read(config: Config) -> Record:
    """What an agent before this one knew.

    Args:
        config: where the file is.
    """
    path = path_of(config)
    try:
        content = read_file(path)
        document: Any = json.loads(content) if content is not None else None
    except (OSError, ValueError, RecursionError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is damaged"
        return Record(Book(), f"{path}: {what}; what it said of devices is not known any more")
    if document is None:
        return Record(Book())
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return Record(Book(), f"{path}: it is of another version; what it said is not known")
    if document.get("boot") != boot_id(config):
        return Record(Book())
    places: dict[str, Place] = {}
    conditions: dict[str, Condition] = {}
    gone: set[str] = set()
    devices = document.get("devices")
    devices = devices if isinstance(devices, list) else [None]
    for each in devices:
        place, condition = _place(each), _condition(each)
        if place is None or condition is None:
            continue
        places[place.uuid] = place
        conditions[place.uuid] = condition
        if each["gone"] is True:
            gone.add(place.uuid)
    fault = ""
    if len(places) != len(devices):
        fault = f"{path}: {len(devices) - len(places)} of its entries make no sense"
    load = document.get("load")
    book = Book(places, conditions, frozenset(gone), load if isinstance(load, str) else "")
    return Record(book, fault)


# -- entries -----------------------------------------------------------------------------------

_TEXTS: Final = frozenset({"reason", "remedy", "lost", "unwatched"})
_COUNTS: Final = frozenset({"xid", "falls"})
_TIMES: Final = frozenset({"since", "last_error", "answers_since", "fell"})
_FLAGS: Final = frozenset({"pending", "failed", "was_away"})


def _place(entry: Any) -> Place | None:
    if not isinstance(entry, dict):
        return None
    uuid, gpu, bus_id = entry.get("uuid"), entry.get("gpu"), entry.get("bus_id")
    instances = [entry.get("gpu_instance"), entry.get("compute_instance")]
    if not (isinstance(uuid, str) and uuid and isinstance(gpu, str) and isinstance(bus_id, str)):
        return None
    if not all(each is None or _is_count(each) for each in instances):
        return None
    return Place(uuid, gpu, bus_id, *instances)


def _condition(entry: Any) -> Condition | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("gone"), bool):
        return None
    values: dict[str, Any] = {}
    for each in fields(Condition):
        value = _value(each.name, entry.get(each.name))
        if value is _WRONG:
            return None
        values[each.name] = value
    known = Condition(**values)
    # Whatever was written: what is given needs nothing, and what is not needs a proof.
    if known.state.is_given == (known.need > Need.NOTHING) or (known.lost and known.state.is_given):
        return None
    return known


_WRONG: Final = object()


def _value(name: str, value: Any) -> Any:
    """What a field has, if the file's value is one; :data:`_WRONG` otherwise."""
    if name == "state":
        return State(value) if value in list(State) else _WRONG
    if name == "need":
        return Need(value) if _is_count(value) and value in list(Need) else _WRONG
    if name in _TEXTS:
        return value if isinstance(value, str) else _WRONG
    if name in _COUNTS:
        return value if _is_count(value) else _WRONG
    if name in _FLAGS:
        return value if isinstance(value, bool) else _WRONG
    if name in _TIMES:
        return _time(value)
    if name == "silent_since":
        return None if value is None else _time(value)
    if not isinstance(value, list):
        return _WRONG
    if name == "errors":
        times = [_time(each) for each in value]
        return _WRONG if _WRONG in times else tuple(times)
    return tuple(value) if all(isinstance(each, str) for each in value) else _WRONG  # blamed


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _time(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _WRONG
    return float(value) if 0 <= value < _FAR else _WRONG  # nor NaN


_FAR: Final = 1e12


def of_uuids(devices: list[dict[str, Any]]) -> Mapping[str, dict[str, Any]]:
    """The entries by UUID, without those that are gone.

    Args:
        devices: as :func:`read_devices` has them.
    """
    return {each["uuid"]: each for each in devices if not each["gone"]}
