"""Write events on pods: a missing or denied device, and faults of their GPUs.

``kubectl describe pod`` then shows what only the node's log would show otherwise: that a container
runs without a device that the kubelet allocated to it, that its image asks for a GPU that no policy
granted, or that its GPU had a fault, which may be why the container exited.

Rules
- The service needs a token from the cluster, and permission to create events.
- It creates one event for each container and cause while the pod exists, however often the
  container restarts. If the text for a cause changes later (the driver names the recovery action),
  the service patches the event and raises its count. If patching is not allowed, or the event has
  expired, the first text stays.
- Full GPU memory causes no event, since many programs allocate all of it on purpose.
- If the server refuses one event (the pod's namespace is being deleted, a policy denies it), the
  service still creates the others. If the server is silent, busy or failing, the service stops
  until the next attempt.
- To compare the time of a fault with the agent's start, the service uses the current clock, which
  may have been set back since.

Source: Kubernetes API core/v1 Event; "Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from integration.agent_errors import ApiServerRefused, ApiServerSilent, EventNotMade
from integration.apiserver.client import ApiServer
from integration.apiserver.status import is_away
from integration.node.faults.fault_log import GPU_MEMORY, Entry, Key, first_faults
from integration.node.faults.limits import MEMORY_LIMIT
from integration.node.holders.values import Ledger
from integration.node.reporter import keep_reported
from integration.node.service import Context
from integration.nvml.values import epoch, now
from shim.causes.exit_message import exit_message
from shim.causes.record import Fault, Whose, by_weight

_RECENT: Final = 60.0  # seconds before the agent's start whose faults may have no event yet
_COMPONENT: Final = "nvshim-node"


def _write_event(
    api: ApiServer, namespace: str, event: dict[str, Any], name: str = ""
) -> dict[str, Any]:
    """Create or patch an event.

    Args:
        event: a core/v1 Event, or the changed fields for a patch.
        name: the event to patch; "" to create one.

    Returns:
        The server's version of the event.

    Raises:
        EventNotMade: the server does not answer, or refuses.
    """
    asked = f"to write an event in the namespace {namespace}"
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
    try:
        if name:
            return api.call("PATCH", f"{path}/{quote(name, safe='')}", event)
        return api.call("POST", path, event)
    except (ApiServerSilent, ApiServerRefused) as error:
        raise EventNotMade(asked, found=error.found, do=error.do) from error


@dataclass(frozen=True, slots=True, order=True)
class Notice:
    """The content of an event on a pod."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    cause: str  # with the fields above, identifies the notice; its text may change
    reason: str = field(compare=False)
    message: str = field(compare=False)

    def event(self, now: str) -> dict[str, Any]:
        """Return the Kubernetes event.

        Args:
            now: the time in RFC 3339.
        """
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{self.pod}.", "namespace": self.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": self.namespace,
                "name": self.pod,
                "uid": self.pod_uid,
                "fieldPath": f"spec.containers{{{self.container}}}",
            },
            "reason": self.reason,
            "message": self.message,
            "type": "Warning",
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": _COMPONENT, "host": os.uname().nodename},
        }


def _notices(ledger: Ledger) -> Iterator[Notice]:
    """Yield a notice for each missing device and each denied request."""
    for missing in ledger.missing:
        yield Notice(
            missing.namespace, missing.pod, missing.pod_uid, missing.container,
            missing.device, "DeviceMissing",
            f"container {missing.container} runs without {missing.device} ({missing.resource}), "
            "which the kubelet allocated to it; check that the pod names the shim's RuntimeClass, "
            "or that the agent served NRI when it started, and run `nvshim doctor` on the node",
        )  # fmt: skip
    for denied in ledger.denied:
        yield Notice(
            denied.namespace, denied.pod, denied.pod_uid, denied.container,
            denied.why, "DeviceDenied",
            f"container {denied.container} does not get the GPUs it asks for: {denied.why}",
        )  # fmt: skip


_REASONS: Final = {
    Whose.DEVICE: "GPUFailure",
    Whose.HOST: "GPUFailure",
    Whose.NEIGHBOUR: "GPUError",
    Whose.APPLICATION: "GPUError",
    Whose.UNCLEAR: "GPUError",
}


def notices_of_faults(causes: Mapping[Key, Entry], since: float) -> Iterator[Notice]:
    """Yield a notice for each fault that a pod's container met.

    Args:
        since: seconds since the epoch. Earlier faults were already reported by an earlier agent.
    """
    faults: dict[Notice, Fault] = {}
    for entry, fault in first_faults(causes):
        pod = entry.pod
        if fault.kind == GPU_MEMORY or fault.at < since:
            continue
        if not (pod.get("namespace") and pod.get("name")):
            continue  # it has no pod, or its file is damaged
        reason = "GPUMemoryLimit" if fault.kind == MEMORY_LIMIT else _REASONS[fault.whose]
        whose = "of another" if fault.whose == Whose.NEIGHBOUR else "its own"
        notice = Notice(
            pod["namespace"], pod["name"], pod.get("uid", ""), pod.get("container", ""),
            "/".join((fault.kind, str(fault.code), fault.gpu, whose)), reason,
            exit_message([fault]),
        )  # fmt: skip
        # Of two faults with the same cause, the driver may have named the recovery of only one.
        if notice not in faults or by_weight([fault, faults[notice]])[0] == fault:
            faults.pop(notice, None)
            faults[notice] = fault
    yield from faults


@dataclass(slots=True)
class _Created:
    """An event that this agent created."""

    name: str  # assigned by the server
    text: tuple[str, str]  # reason and message
    count: int = 1


def _write(api: ApiServer, notice: Notice, created: dict[Notice, _Created]) -> None:
    """Create the event of a notice, or patch it if the text has changed.

    Raises:
        EventNotMade: the server does not answer, or refuses.
    """
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    known, text = created.get(notice), (notice.reason, notice.message)
    if known is None:
        event = _write_event(api, notice.namespace, notice.event(moment))
        metadata = event.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        created[notice] = _Created(str(name or ""), text)
    elif known.text != text and known.name:
        change = {
            "reason": notice.reason,
            "message": notice.message,
            "count": known.count + 1,
            "lastTimestamp": moment,
        }
        try:
            _write_event(api, notice.namespace, change, known.name)
        except EventNotMade as error:
            if is_away(error.__cause__):
                raise
        else:
            known.count += 1
        known.text = text


async def run(context: Context) -> None:
    """Write events for missing devices, denied requests and faults, until cancelled."""
    state, since = context.state, now() - _RECENT
    created: dict[Notice, _Created] = {}

    def write_all(api: ApiServer) -> None:
        ledger = state.ledger.value
        notices = [*_notices(ledger), *notices_of_faults(state.causes.value, epoch(since))]
        pods = {(p.namespace, p.name, p.uid) for c in ledger.containers if (p := c.pod) is not None}
        gone = created.keys() - set(notices)
        for each in gone:
            if (each.namespace, each.pod, each.pod_uid) not in pods:
                del created[each]
        failed: EventNotMade | None = None
        for each in sorted(notices):
            try:
                _write(api, each, created)
            except EventNotMade as error:
                failed = failed or error
                if is_away(error.__cause__):
                    break
        if failed is not None:
            raise failed

    await keep_reported(context, write_all, state.ledger, state.causes)
