"""Set a condition on the Node that names the GPUs out of service, and why.

``kubectl describe node`` then shows the condition :data:`TYPE`: ``True`` while an administrator has
taken a device out of service or a device is unhealthy, ``False`` if all devices are in service.
Schedulers ignore the condition: the device plugin and the shim refuse devices out of service.

Rules
- The service runs only with ``--node-condition``, and needs a token from the cluster.
- It writes the condition when it changes. Every ten minutes it compares the Node with it, because
  the Node may have been registered again.
- Marks may name a GPU that fell off the bus by its PCI address, or both by that and by its UUID.
  The message names the GPU once, by its UUID if that is known.
- If only the message changes, ``lastTransitionTime`` stays, even after a restart of the agent.

Source: Kubernetes API core/v1 NodeCondition; API conventions, "Typical status properties".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from hooks.config import Config
from hooks.node.drained import DRIVER, Drain, read_drains
from integration.apiserver.client import ApiServer
from integration.node.device_health.device_state import Condition
from integration.node.device_health.health_store import read_devices
from integration.node.reporter import keep_reported
from integration.node.service import Context

TYPE: Final = "GPUOutOfService"
"""The type of the condition."""

_LONGEST: Final = 1024  # characters of a message


class NodeCondition(NamedTuple):
    """The fields of the condition, in Kubernetes' terms."""

    status: str
    reason: str
    message: str


def condition_of(
    drains: Iterable[Drain],
    health: Mapping[str, Condition],
    addresses: Mapping[str, str] = MappingProxyType({}),
) -> NodeCondition:
    """Return the condition of a node.

    Args:
        drains: the devices that administrators took out of service.
        health: the health of each device, by UUID.
        addresses: the PCI address of each GPU, by UUID.
    """
    named = {address: uuid for uuid, address in addresses.items()}
    marks: dict[str, list[Drain]] = {}
    for each in drains:
        marks.setdefault(named.get(each.device, each.device), []).append(each)
    drained = {name: _out_of_service(name, of_device) for name, of_device in marks.items()}
    unhealthy = [
        f"{uuid} is {known.state}{f': {known.reason}' if known.reason else ''}"
        for uuid, known in sorted(health.items())
        if not known.state.is_allocatable and uuid not in drained
    ]
    if not drained and not unhealthy:
        return NodeCondition("False", "AllInService", "all GPUs are in service")
    reason = "Drained" if not unhealthy else "Unhealthy" if not drained else "DrainedAndUnhealthy"
    message = "; ".join([*(drained[name] for name in sorted(drained)), *unhealthy])
    return NodeCondition(
        "True", reason, message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"
    )


def _out_of_service(name: str, marks: list[Drain]) -> str:
    shown = marks[0].name if name == DRIVER else name
    return f"{shown} is out of service {' and '.join(each.why for each in marks)}"


def _addresses(config: Config) -> dict[str, str]:
    """Return the PCI address of each GPU whose health is known, by UUID; present GPUs last."""
    return {
        each["uuid"]: each["bus_id"]
        for each in sorted(read_devices(config) or (), key=lambda each: not each["gone"])
        if each["uuid"] == each["gpu"] and each["bus_id"]
    }


def _write(api: ApiServer, node: str, wanted: NodeCondition) -> None:
    """Write the condition to the Node.

    Raises:
        ApiServerSilent: the server does not answer.
        ApiServerRefused: the server refuses.
    """
    path = f"/api/v1/nodes/{quote(node, safe='')}"
    status = api.call("GET", path).get("status") or {}
    before: dict[str, Any] = next(
        (c for c in status.get("conditions") or () if c.get("type") == TYPE), {}
    )
    if wanted == (before.get("status"), before.get("reason"), before.get("message")):
        return
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    condition: dict[str, Any] = {"type": TYPE, **wanted._asdict(), "lastHeartbeatTime": now}
    if wanted.status != before.get("status"):
        condition["lastTransitionTime"] = now
    # The server merges conditions by type; the others stay.
    api.call("PATCH", f"{path}/status", {"status": {"conditions": [condition]}})


async def run(context: Context) -> None:
    """Keep the condition up to date until cancelled."""
    written: list[NodeCondition] = []

    def write(api: ApiServer) -> None:
        config = context.config
        drains = read_drains(config)
        wanted = condition_of(drains, context.state.health.value, _addresses(config))
        if written != [wanted]:
            _write(api, context.options.node_name, wanted)
            written[:] = [wanted]

    state = context.state
    await keep_reported(context, write, state.node, state.health, forget=written.clear)
