"""Set a condition on the Node that says which of its GPUs no pod can get, and why.

``kubectl describe node`` then shows one condition more, :data:`TYPE`: ``True`` while a person has
taken anything out of service, or while a device is unhealthy; ``False`` if all are in service. No
scheduler goes by it: the device plugin and the shim give no pod what is out of service.

Rules
- It is said only if it is wanted (``--node-condition``), and where the cluster has given the agent
  a token.
- It is written when it changes, and not more often.
- The time of its change is kept where only the words change, also by another agent.

Source: Kubernetes API core/v1 NodeCondition; API conventions, "Typical status properties".
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from hooks.node.drained import Drain, read_drains
from integration.apiserver.client import ApiServer
from integration.node.reporter import keep_reported

if TYPE_CHECKING:
    from integration.node.device_health.device_state import Condition
    from integration.node.service import Context

TYPE: Final = "GPUOutOfService"
"""The type of the condition."""

_LONGEST: Final = 1024  # characters of a message


class Said(NamedTuple):
    """What the condition says; its words are Kubernetes' own."""

    status: str
    reason: str
    message: str


def said_of(drains: Iterable[Drain], health: Mapping[str, Condition]) -> Said:
    """What there is to say of a node.

    Args:
        drains: what persons have taken out of service.
        health: what is thought of each device, by its UUID.
    """
    drained = {each.device: f"{each.name} is out of service {each.why}" for each in drains}
    ill = [
        f"{uuid} is {known.state}{f': {known.reason}' if known.reason else ''}"
        for uuid, known in sorted(health.items())
        if not known.state.is_given and uuid not in drained
    ]
    if not drained and not ill:
        return Said("False", "AllInService", "every GPU can be given")
    reason = "Drained" if not ill else "Unhealthy" if not drained else "DrainedAndUnhealthy"
    message = "; ".join([*(drained[name] for name in sorted(drained)), *ill])
    return Said("True", reason, message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…")


def _write(api: ApiServer, node: str, said: Said) -> None:
    """Say it on the Node.

    Raises:
        ApiServerSilent: the server does not answer.
        ApiServerRefused: it says no.
    """
    path = f"/api/v1/nodes/{quote(node, safe='')}"
    known = api.call("GET", path).get("status") or {}
    before: dict[str, Any] = next(
        (c for c in known.get("conditions") or () if c.get("type") == TYPE), {}
    )
    if said == (before.get("status"), before.get("reason"), before.get("message")):
        return
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    condition: dict[str, Any] = {"type": TYPE, **said._asdict(), "lastHeartbeatTime": now}
    if said.status != before.get("status"):
        condition["lastTransitionTime"] = now
    # Merged by the type: other conditions stay.
    api.call("PATCH", f"{path}/status", {"status": {"conditions": [condition]}})


async def run(context: Context) -> None:
    """Keep the condition true, until cancelled."""
    written: list[Said] = []

    def tell(api: ApiServer) -> None:
        said = said_of(read_drains(context.config), context.state.health.value)
        if written != [said]:
            _write(api, context.options.node_name, said)
            written[:] = [said]

    await keep_reported(context, tell, context.state.node, context.state.health)
