"""Write events on pods: a missing or denied device, and faults of their GPUs.

``kubectl describe pod`` then has what a person would otherwise look for in a node's log: that a
container runs without a device that the kubelet has given it, or without one that its image asks
for and nobody granted; and what its GPU suffered, which may be why it ended.

Rules
- Only where the cluster has given the agent a token, and the right to make events.
- An event is made once for each container and cause, as long as its pod is there, however often the
  container starts. When the text for the same cause changes, because the driver tells later what
  the GPU needs, the agent changes that event and raises its count. If it may not, or the event has
  expired, the first text stays.
- That the memory of a GPU is full is no event: many programs take all of it on purpose.
- An event that the server refuses (the pod's namespace is being deleted, a policy denies it) keeps
  no other from being made. A server that is silent, busy or failing is asked for no more of them.
- Which faults are of this agent's time is told by the clock as it is now: it may be set back.

Source: Kubernetes API core/v1 Event; "Accessing the Kubernetes API from a Pod".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from integration.agent_errors import ApiServerRefused, ApiServerSilent, EventNotMade
from integration.apiserver.client import ApiServer
from integration.apiserver.status import is_away
from integration.node.faults.fault_log import GPU_MEMORY, Entry, Key, first_faults
from integration.node.faults.limits import MEMORY_LIMIT
from integration.node.holders.values import Ledger
from integration.node.reporter import keep_reported
from integration.nvml.values import epoch, now
from shim.causes.exit_message import exit_message
from shim.causes.record import Whose, by_weight

if TYPE_CHECKING:
    from integration.node.service import Context
    from shim.causes.record import Fault

_RECENT: Final = 60.0  # seconds before the agent began of which nobody may have told
_COMPONENT: Final = "nvshim-node"


def _write_event(
    api: ApiServer, namespace: str, event: dict[str, Any], name: str = ""
) -> dict[str, Any]:
    """Make an event, or change one.

    Args:
        event: core/v1; what differs of one that is changed.
        name: of the event that is changed; "" to make one.

    Returns:
        The event as the server has it.

    Raises:
        EventNotMade: the server does not answer, or says no.
    """
    asked = f"an event in the namespace {namespace}"
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/events"
    try:
        if name:
            return api.call("PATCH", f"{path}/{quote(name, safe='')}", event)
        return api.call("POST", path, event)
    except (ApiServerSilent, ApiServerRefused) as error:
        raise EventNotMade(asked, found=error.found, do=error.do) from error


@dataclass(frozen=True, slots=True, order=True)
class Notice:
    """What is said on a pod."""

    namespace: str
    pod: str
    pod_uid: str
    container: str
    cause: str  # what it is about: two that differ in nothing but what they say of it are one
    reason: str = field(compare=False)
    message: str = field(compare=False)

    def event(self, now: str) -> dict[str, Any]:
        """The event that says it.

        Args:
            now: the time, as Kubernetes writes it.
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
    """What there is to say on pods now."""
    for missing in ledger.missing:
        yield Notice(
            missing.namespace, missing.pod, missing.pod_uid, missing.container,
            missing.device, "DeviceMissing",
            f"container {missing.container} runs without {missing.device} ({missing.resource}), "
            "which the kubelet has given it; see that the pod names the shim's RuntimeClass, and "
            "`nvshim doctor` on the node",
        )  # fmt: skip
    for denied in ledger.denied:
        yield Notice(
            denied.namespace, denied.pod, denied.pod_uid, denied.container,
            denied.why, "DeviceDenied",
            f"container {denied.container} is not given what it asks for: {denied.why}",
        )  # fmt: skip


_REASONS: Final = {
    Whose.DEVICE: "GPUFailure",
    Whose.HOST: "GPUFailure",
    Whose.NEIGHBOUR: "GPUError",
    Whose.APPLICATION: "GPUError",
    Whose.UNCLEAR: "GPUError",
}


def notices_of_faults(causes: Mapping[Key, Entry], since: float) -> Iterator[Notice]:
    """What there is to say of faults that containers of pods had to do with.

    Args:
        since: seconds since the epoch; what was before, another agent has told.
    """
    found: dict[Notice, Fault] = {}
    for entry, fault in first_faults(causes):
        pod = entry.pod
        if not pod or fault.kind == GPU_MEMORY or fault.at < since:
            continue
        reason = "GPUMemoryLimit" if fault.kind == MEMORY_LIMIT else _REASONS[fault.whose]
        whose = "of another" if fault.whose == Whose.NEIGHBOUR else "its own"
        notice = Notice(
            pod["namespace"], pod["name"], pod.get("uid", ""), pod.get("container", ""),
            "/".join((fault.kind, str(fault.code), fault.gpu, whose)), reason,
            exit_message([fault]),
        )  # fmt: skip
        # Of two faults with the same cause, the driver may have judged only one.
        if notice not in found or by_weight([fault, found[notice]])[0] == fault:
            found.pop(notice, None)
            found[notice] = fault
    yield from found


@dataclass(slots=True)
class _Made:
    """An event that was made."""

    name: str  # what the server calls it
    said: tuple[str, str]  # reason and message
    count: int = 1


def _say(api: ApiServer, notice: Notice, made: dict[Notice, _Made]) -> None:
    """Make the event of a notice, or change it if the notice's text has changed.

    Raises:
        EventNotMade: the server does not answer, or makes no such event.
    """
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    known, said = made.get(notice), (notice.reason, notice.message)
    if known is None:
        event = _write_event(api, notice.namespace, notice.event(moment))
        metadata = event.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        made[notice] = _Made(str(name or ""), said)
    elif known.said != said and known.name:
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
        known.said = said


async def run(context: Context) -> None:
    """Make events of what is missing or denied, and of faults, until cancelled."""
    state, since = context.state, now() - _RECENT
    made: dict[Notice, _Made] = {}

    def tell(api: ApiServer) -> None:
        ledger = state.ledger.value
        notices = [*_notices(ledger), *notices_of_faults(state.causes.value, epoch(since))]
        pods = {(p.namespace, p.name, p.uid) for c in ledger.containers if (p := c.pod) is not None}
        gone = made.keys() - set(notices)
        for each in gone:
            if (each.namespace, each.pod, each.pod_uid) not in pods:
                del made[each]
        failed: EventNotMade | None = None
        for each in sorted(notices):
            try:
                _say(api, each, made)
            except EventNotMade as error:
                failed = failed or error
                if is_away(error.__cause__):
                    break
        if failed is not None:
            raise failed

    await keep_reported(context, tell, state.ledger, state.causes)
