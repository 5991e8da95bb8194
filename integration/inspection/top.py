"""Build the frames of ``nvshim top``, as plain values and as table rows.

A frame combines a sample of NVML with a ledger of the same moment, so it needs no agent. If an
agent runs, the frame includes its health states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from hooks.node.inventory import Inventory
from hooks.sharing import id_of
from integration.node.holders.values import DeviceUse
from integration.nvml.values import DeviceSample, GpuSample, Sample


class Sort(StrEnum):
    """The order of a device's containers; the largest value comes first."""

    MEMORY = "memory"
    SM = "sm"
    ENERGY = "energy"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class UsageSnapshot:
    """Who uses which device at one moment."""

    time: float  # seconds since the epoch
    sample: Sample  # NVML's values
    uses: tuple[DeviceUse, ...] = ()  # what each container uses
    names: Mapping[int, str] = field(default_factory=dict)  # of processes, by pid
    inventory: Inventory | None = None  # the node's devices; None if unknown
    # the agent's state of each device, by UUID
    health: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what is not visible, and why; a line each


def frame_of(snapshot: UsageSnapshot, sort: Sort = Sort.MEMORY) -> dict[str, Any]:
    """Return a frame as plain values; the keys are a public interface.

    Args:
        sort: the order of a device's containers.
    """
    sample = snapshot.sample
    return {
        "time": round(snapshot.time, 3),
        "driver": sample.driver or None,
        "failure": sample.failure or None,
        "notes": [*snapshot.notes, *_notes_of(sample)],
        "devices": [
            {**row, "containers": _uses(snapshot, row["uuid"], sort)} for row in _devices(snapshot)
        ],
    }


def _notes_of(sample: Sample) -> list[str]:
    """Return what NVML could not report, and the GPUs that it has lost."""
    return [*sample.notes, *(f"{gpu.uuid}: {gpu.lost}" for gpu in sample.gpus if gpu.lost)]


# -- devices ---------------------------------------------------------------------------------

_MEASURED: Final = (
    "gpu_percent", "memory_percent", "memory_used_bytes", "memory_total_bytes", "encoder_percent",
    "decoder_percent", "temperature_celsius", "power_watts", "energy_joules",
)  # fmt: skip


def _devices(snapshot: UsageSnapshot) -> list[dict[str, Any]]:
    """Return a row for each GPU followed by its MIG devices, then other devices in use."""
    rows: list[dict[str, Any]] = []
    inventory = snapshot.inventory
    samples = {gpu.uuid: gpu for gpu in snapshot.sample.gpus}
    gpus = {id_of(gpu): gpu for gpu in inventory.gpus} if inventory is not None else {}
    for uuid in dict.fromkeys((*gpus, *samples)):
        row = _row(snapshot, uuid, samples.get(uuid))
        if (gpu := gpus.get(uuid)) is not None:
            row |= {"index": str(gpu.index), "name": gpu.model or None, "pci": gpu.bus_id}
        rows += [row, *_mig_rows(snapshot, row, samples.get(uuid))]
    listed = {row["uuid"] for row in rows}
    others = dict.fromkeys(use.device for use in snapshot.uses if use.device not in listed)
    return rows + [_row(snapshot, uuid) for uuid in others]


def _row(
    snapshot: UsageSnapshot, uuid: str, sampled: GpuSample | DeviceSample | None = None
) -> dict[str, Any]:
    """Return NVML's values for a device, and its health."""
    missing = getattr(sampled, "missing", {})
    return {
        "index": None,
        "uuid": uuid,
        "kind": "mig" if uuid.startswith("MIG-") else "gpu",
        "name": None,
        "pci": None,
        **{name: getattr(sampled, name, None) for name in _MEASURED},
        "health": snapshot.health.get(uuid),
        "lost": getattr(sampled, "lost", None) or None,
        "missing": {name: missing[name] for name in _MEASURED if name in missing},
    }


def _mig_rows(
    snapshot: UsageSnapshot, gpu: Mapping[str, Any], sampled: GpuSample | None
) -> list[dict[str, Any]]:
    inventory = snapshot.inventory
    samples = {device.uuid: device for device in (sampled.mig if sampled is not None else ())}
    listed = inventory.mig_devices if inventory is not None else ()
    known = {d.uuid: d for d in listed if str(d.gpu) == gpu["index"]}
    rows = []
    for uuid in dict.fromkeys((*known, *samples)):
        row = _row(snapshot, uuid, samples.get(uuid))
        if (device := known.get(uuid)) is not None:
            row["index"] = f"{device.gpu}:{device.index}"
            row["name"] = f"{gpu['name'] or ''} MIG {device.profile}".strip()
            row["pci"] = gpu["pci"]
        rows.append(row)
    return rows


# -- containers ------------------------------------------------------------------------------

_KEYS: Final[Mapping[Sort, Callable[[DeviceUse], float]]] = {
    Sort.MEMORY: lambda use: -(use.memory_bytes or 0),
    Sort.SM: lambda use: -(use.sm_percent or 0),
    Sort.ENERGY: lambda use: -(use.energy_joules or 0.0),
    Sort.NAME: lambda _: 0,
}


def _uses(snapshot: UsageSnapshot, uuid: str, sort: Sort) -> list[dict[str, Any]]:
    def order(use: DeviceUse) -> tuple[bool, float, str]:
        # Processes outside containers come last.
        return use.holding is None, _KEYS[sort](use), _title(use)

    return [
        _use_row(use, snapshot.names)
        for use in sorted((use for use in snapshot.uses if use.device == uuid), key=order)
    ]


def _title(use: DeviceUse) -> str:
    return "" if use.holding is None else use.holding.container.title


_USED: Final = (
    "memory_bytes", "sm_percent", "memory_percent", "encoder_percent", "decoder_percent",
    "energy_joules",
)  # fmt: skip


def _use_row(use: DeviceUse, names: Mapping[int, str]) -> dict[str, Any]:
    holding = use.holding
    return {
        "container": None if holding is None else holding.container.to_json(),
        "holds": holding is not None and use.device in holding.devices,
        "stale": (holding.stale or None) if holding is not None else None,
        "orphan": (holding.orphan or None) if holding is not None else None,
        **{name: getattr(use, name) for name in _USED},
        "processes": [{"pid": pid, "name": names.get(pid) or None} for pid in use.processes],
    }


# -- lines -----------------------------------------------------------------------------------

_MOST_PROCESSES: Final = 3


def lines_of(frame: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return table rows: each device, followed by the containers that use it.

    Returns:
        Texts by column, not yet escaped for a terminal.
    """
    lines = []
    for device in frame["devices"]:
        lines.append(_device_line(device))
        lines += [_use_line(use) for use in device["containers"]]
    return lines


def _device_line(device: Mapping[str, Any]) -> dict[str, Any]:
    def cell(name: str, show: Callable[[Any], str]) -> str:
        # n/a: NVML does not support the value. "-": the value is unknown.
        return "n/a" if name in device["missing"] else show(device[name])

    total = device["memory_total_bytes"]
    return {
        "what": " ".join(filter(None, (device["index"], device["name"] or device["uuid"]))),
        "sm": cell("gpu_percent", _percent),
        "mem": cell("memory_percent", _percent),
        "memory": cell("memory_used_bytes", lambda used: _of(used, total)),
        "enc": cell("encoder_percent", _percent),
        "dec": cell("decoder_percent", _percent),
        "power": cell("power_watts", lambda watts: _unit(watts, "W")),
        "temp": cell("temperature_celsius", lambda celsius: _unit(celsius, "C")),
        "state": (device["lost"] and "lost") or device["health"] or "-",
        "processes": "",
        "is_device": True,
    }


def _use_line(use: Mapping[str, Any]) -> dict[str, Any]:
    wrong = [word for word in ("stale", "orphan") if use[word]]
    named = [f"{each['pid']} {each['name'] or ''}".strip() for each in use["processes"]]
    more = len(named) - _MOST_PROCESSES
    return {
        "what": f"  {_container(use['container'])}",
        "sm": _percent(use["sm_percent"]),
        "mem": _percent(use["memory_percent"]),
        "memory": _of(use["memory_bytes"], None),
        "enc": _percent(use["encoder_percent"]),
        "dec": _percent(use["decoder_percent"]),
        "power": _joules(use["energy_joules"]),
        "temp": "",
        "state": ",".join(wrong) or ("" if use["holds"] or not use["container"] else "not given"),
        "processes": ", ".join(named[:_MOST_PROCESSES]) + (f" and {more} more" if more > 0 else ""),
        "is_device": False,
    }


def _container(container: Mapping[str, Any] | None) -> str:
    if container is None:
        return "(no container)"
    name, pod = container["name"] or container["id"], container["pod"]
    if pod is not None:
        return f"{pod['namespace']}/{pod['name']}/{name}"
    return f"{container['namespace']}/{name}"


def _percent(value: int | None) -> str:
    return "-" if value is None else f"{value}%"


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f} {unit}"


def _of(used: int | None, total: int | None) -> str:
    shown = "-" if used is None else _bytes(used)
    return shown if total is None else f"{shown} / {_bytes(total)}"


def _bytes(value: float) -> str:
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _joules(value: float | None) -> str:
    return "-" if value is None else _scaled(value, 1000, ("J", "kJ", "MJ", "GJ"))


def _scaled(value: float, base: int, units: Iterable[str]) -> str:
    *smaller, largest = units
    for unit in smaller:
        if value < base:
            return f"{value:.0f} {unit}" if unit == smaller[0] else f"{value:.1f} {unit}"
        value /= base
    return f"{value:.1f} {largest}"
