"""The health of devices as the node agent's file reports it.

The file is valid only while an agent is running: without one, nobody notices changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from api.errors import NvshimError
from hooks.config import Config
from hooks.node.drained import DRIVER, read_drains
from integration.agent_errors import DeviceUnwatched, HealthUnknown
from integration.agent_status import is_ready
from integration.devices.targets import targets_of
from integration.node.device_health import requests
from integration.node.device_health.health_store import read_devices
from integration.node.values.health import HealthState
from integration.nvml.inventory import look_at_node

_TO_ANSWER: Final = 10.0


def read_health(config: Config) -> Mapping[str, Mapping[str, Any]] | None:
    """Return the entry of each device by UUID; None without a running agent, or without access."""
    devices = read_devices(config)
    if devices is None or not is_ready(config):
        return None
    return {each["uuid"]: each for each in devices if not each["gone"]}


def health_rows(config: Config) -> list[dict[str, Any]]:
    """Return the health of each device.

    Returns:
        One object per device; the keys are a public interface.

    Raises:
        HealthUnknown: no agent watches the devices, or the caller has no access.
    """
    known = read_health(config)
    if known is None:
        raise HealthUnknown(
            "the health of this node's devices",
            found="no agent is running and ready",
            do="start nvshim node, and run this as root with the agent's configuration",
        )
    drains = {drain.device: drain.why for drain in read_drains(config)}

    def drained(each: Mapping[str, Any]) -> str | None:
        names = (each["uuid"], each["gpu"], each["bus_id"], DRIVER)
        return next((drains[name] for name in names if name in drains), None)

    return [
        {
            "uuid": each["uuid"],
            "kind": "gpu" if each["uuid"] == each["gpu"] else "mig",
            "gpu": each["gpu"],
            "state": each["state"],
            "given": HealthState(each["state"]).is_allocatable and drained(each) is None,
            "out_of_service": drained(each),
            "since": each["since"] or None,
            "reason": each["reason"] or None,
            "xid": each["xid"] or None,
            "containers": each["blamed"],
            "do": each["remedy"] or None,
        }
        for each in known.values()
    ]


def clear(config: Config, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return devices to service.

    Args:
        config: the node's configuration.
        names: as for :func:`integration.devices.targets.targets_of`, and also names of devices that
            the node no longer has. The MIG devices of a named GPU are returned to service with it.

    Returns:
        The rows of these devices afterwards, as in :func:`health_rows`.

    Raises:
        HealthUnknown: no agent watches the devices.
        DeviceUnwatched: a name matches no device, or several.
        AgentSilent: the agent did not carry out the request.
    """
    known = {row["uuid"]: row["bus_id"] for row in read_devices(config) or () if not row["gone"]}
    health_rows(config)  # raises without a running agent
    meant = [uuid for name in names for uuid in _meant(name, known, config)]
    for uuid in dict.fromkeys(meant):
        requests.ask(config, uuid, _TO_ANSWER)
    return [row for row in health_rows(config) if row["uuid"] in meant or row["gpu"] in meant]


def _meant(name: str, known: Mapping[str, str], config: Config) -> list[str]:
    """Return the UUIDs of the devices that a name matches.

    Args:
        known: the PCI address of each watched device, by UUID.
    """
    low = name.lower()
    if exact := [uuid for uuid in known if uuid.lower() == low]:
        return exact
    found = [uuid for uuid in known if name and uuid.lower().startswith(low)]
    if len(found) == 1:
        return found
    what = f"{len(found)} devices match"
    if not found:
        what = "no watched device"
        try:
            targets = {each.device for each in targets_of([name], look_at_node(config))}
        except NvshimError as error:
            targets, what = set(), error.found
        # A GPU that fell off the bus has no UUID; it is named by its PCI address.
        if meant := [uuid for uuid, bus_id in known.items() if {uuid, bus_id} & targets]:
            return meant
    raise DeviceUnwatched(
        f"to return {name} to service",
        found=what,
        do="use a name from `nvshim list --health`",
    )
