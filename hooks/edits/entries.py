"""A plan's edits as the JSON that an OCI spec has for them.

Source: OCI runtime specification, config.md and config-linux.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hooks.edits.plan import Device, Hook, IntelRdt, Mount, NetDevice

    Json: TypeAlias = dict[str, Any]

__all__ = [
    "RULED_KINDS",
    "device_node",
    "device_rule",
    "hook_entry",
    "mount_entry",
    "mounted_node",
    "moved_interfaces",
    "resource_control",
]

RULED_KINDS: Final = frozenset("cb")
"""The types of devices that the device cgroup has rules for."""


def device_node(device: Device) -> Json:
    """An entry of linux.devices."""
    return {
        "path": device.path,
        "type": device.kind,
        "major": device.major,
        "minor": device.minor,
        "fileMode": device.mode,
        "uid": device.uid,
        "gid": device.gid,
    }


def mounted_node(device: Device) -> Json | None:
    """An entry of mounts that stands for a device where a runtime makes no nodes.

    In a user namespace it mounts what the host has at the very path that the container is to
    have it at. If that is the right node, it may.
    """
    if device.host in {"", device.path}:
        return None
    return {
        "destination": device.path,
        "type": "bind",
        "source": device.host,
        "options": ["bind", "rw", "nosuid", "noexec"],
    }


def device_rule(device: Device) -> Json:
    """An entry of linux.resources.devices that allows a device."""
    return {
        "allow": True,
        "type": device.kind,
        "major": device.major,
        "minor": device.minor,
        "access": device.access,
    }


def mount_entry(mount: Mount) -> Json:
    """An entry of mounts."""
    return {
        "destination": mount.destination,
        "type": mount.kind,
        "source": mount.source,
        "options": list(mount.options),
    }


def hook_entry(hook: Hook) -> Json:
    """An entry of a list of hooks."""
    entry: Json = {
        "path": hook.path,
        "args": list(hook.args),
        "env": list(hook.environment),
    }
    return entry if hook.timeout is None else {**entry, "timeout": hook.timeout}


def resource_control(control: IntelRdt) -> Json:
    """linux.intelRdt, without what is not set."""
    fields = {
        "closID": control.clos_id,
        "l3CacheSchema": control.l3_cache_schema,
        "memBwSchema": control.mem_bw_schema,
        "schemata": list(control.schemata),
        "enableMonitoring": control.enable_monitoring,
        "enableCMT": control.enable_cmt,
        "enableMBM": control.enable_mbm,
    }
    return {name: value for name, value in fields.items() if value}


def moved_interfaces(devices: Iterable[NetDevice]) -> Json:
    """linux.netDevices, by the interfaces' names on the host."""
    return {device.host_name: {"name": device.name} for device in devices}
