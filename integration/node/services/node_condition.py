"""Set a condition on the Node that names the GPUs out of service, and why.

``kubectl describe node`` then shows the condition :data:`TYPE`: ``True`` while an administrator has
taken a device out of service or a device is unhealthy, ``False`` if all devices are in service.
Schedulers ignore the condition: the device plugin and the shim refuse devices out of service.

Rules
- The service runs only with ``--node-condition``, and needs a token from the cluster.
- It writes the condition only when the condition changes.
- If only the message changes, ``lastTransitionTime`` stays, even after a restart of the agent.

Source: Kubernetes API core/v1 NodeCondition; API conventions, "Typical status properties".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from hooks.node.drained import Drain, read_drains
from integration.apiserver.client import ApiServer
from integration.node.device_health.device_state import Condition
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


def condition_of(drains: Iterable[Drain], health: Mapping[str, Condition]) -> NodeCondition:
    """Return the condition of a node.

    Args:
        drains: the devices that administrators took out of service.
        health: the health of each device, by UUID.
    """
    drained = {each.device: f"{each.name} is out of service {each.why}" for each in drains}
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
        wanted = condition_of(read_drains(context.config), context.state.health.value)
        if written != [wanted]:
            _write(api, context.options.node_name, wanted)
            written[:] = [wanted]

    await keep_reported(context, write, context.state.node, context.state.health)
