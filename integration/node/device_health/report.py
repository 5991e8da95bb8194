"""What the node agent thinks of the devices, as it says it in its file.

It counts while an agent keeps the node: what one that is gone has thought says nothing of now.
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
from integration.node.values.health import State
from integration.nvml.inventory import look_at_node

_TO_ANSWER: Final = 10.0


def read_health(config: Config) -> Mapping[str, Mapping[str, Any]] | None:
    """What is thought of each device, by its UUID; None if nobody watches, or may tell."""
    devices = read_devices(config)
    if devices is None:
        return None

    if not is_ready(config):
        return None
    return {each["uuid"]: each for each in devices if not each["gone"]}


def health_rows(config: Config) -> list[dict[str, Any]]:
    """What is thought of each device.

    Returns:
        An object for each; the keys are an interface.

    Raises:
        HealthUnknown: nobody watches them, or the caller may not know.
    """
    known = read_health(config)
    if known is None:
        raise HealthUnknown(
            "the health of this node's devices",
            found="no agent that watches them and is ready",
            do="start nvshim node; ask as root, with the agent's configuration",
        )
    drains = {drain.device: drain.why for drain in read_drains(config)}

    def drained(each: Mapping[str, Any]) -> str | None:
        named = (name for name in (each["uuid"], each["gpu"], DRIVER) if name in drains)
        return next((drains[name] for name in named), None)

    return [
        {
            "uuid": each["uuid"],
            "kind": "gpu" if each["uuid"] == each["gpu"] else "mig",
            "gpu": each["gpu"],
            "state": each["state"],
            "given": State(each["state"]).is_given and drained(each) is None,
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
    """Have devices put back.

    Args:
        config: where the node is.
        names: as for :func:`integration.devices.targets.targets_of`, also of devices that the node
            does not have any more; of a GPU, its MIG devices are put back too.

    Returns:
        Those that were meant, as :func:`health_rows` has them, after that.

    Raises:
        HealthUnknown: nobody watches them.
        DeviceUnwatched: a name is no device's, or several devices'.
        AgentSilent: the agent did not do it.
    """
    known = {row["uuid"]: row["bus_id"] for row in read_devices(config) or () if not row["gone"]}
    health_rows(config)  # somebody watches them
    meant = [uuid for name in names for uuid in _meant(name, known, config)]
    for uuid in dict.fromkeys(meant):
        requests.ask(config, uuid, _TO_ANSWER)
    return [row for row in health_rows(config) if row["uuid"] in meant or row["gpu"] in meant]


def _meant(name: str, known: Mapping[str, str], config: Config) -> list[str]:
    """The UUIDs of the devices that a name stands for.

    Args:
        known: the PCI address of each device that is watched, by its UUID.
    """
    low = name.lower()
    if exact := [uuid for uuid in known if uuid.lower() == low]:
        return exact
    found = [uuid for uuid in known if name and uuid.lower().startswith(low)]
    if len(found) == 1:
        return found
    what = f"{len(found)} devices begin so"
    if not found:
        what = "no device that is watched"
        try:
            targets = {each.device for each in targets_of([name], look_at_node(config))}
        except NvshimError as error:
            targets, what = set(), error.found
        # A GPU that has fallen off the bus has no UUID, and is named by its address.
        if meant := [uuid for uuid, bus_id in known.items() if {uuid, bus_id} & targets]:
            return meant
    raise DeviceUnwatched(
        f"to put {name} back", found=what, do="name one that `nvshim list --health` shows"
    )
