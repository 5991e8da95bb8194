"""Send the health of GPUs to NVSentinel's platform connector on this node.

Rules
- The service runs only with ``--nvsentinel``. By default the connector only stores its events. If
  it may act on them (``--nvsentinel-acts``), a fatal event cordons, drains and reboots the node.
- Events have our own agent name and check (:data:`CHECK`): the connector keeps one condition for
  each check, and two writers would clear each other's. An event clears exactly what it raised, so
  a GPU is always identified by its UUID alone.
- An unhealthy GPU is reported as fatal, a suspect one as not fatal, and a healthy one clears both.
  A recovering GPU is not reported, so the last event still holds. Errors of single MIG devices are
  not reported, since the connector's actions are for GPUs and nodes.
- A GPU that the health table has forgotten, as after a replacement, is cleared like a healthy one:
  otherwise its condition would stay on the node.
- The first agent after a boot clears the whole check first, as NVSentinel's own monitors do,
  because it does not know which GPUs were replaced while the node was down. It does so even if the
  node has no GPU. A later agent does not, because that would cancel what NVSentinel does about a
  GPU that is still broken. It clears the GPUs that an earlier one has raised and that are forgotten
  since, also if no GPU is left. While the health table is empty and the inventory cannot be read,
  a GPU may still be there, and its condition stays.
- Only changes are sent. While the connector is unavailable, only the newest state of each GPU is
  kept for it. A new agent reports every GPU, to clear what the last one raised.
- The connector may be installed later, or restart. So the service keeps trying, and reports its
  absence as a fault.

Source: NVSentinel's health_event.proto and docs/INTEGRATIONS.md (see ``api/proto``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # the same

from api.errors import one_line
from api.proto import nvsentinel_pb2 as pb
from hooks.node.fingerprint import read_text
from integration.agent_errors import ConnectorSilent, FilesSilent
from integration.backoff import Backoff
from integration.files import replace_file
from integration.grpc_anyio import answer_of
from integration.node.device_health.device_state import Condition
from integration.node.device_health.health_store import boot_id
from integration.node.options import Options
from integration.node.service import Context
from integration.node.state.topic import version_of, wait_any
from integration.node.values.health import HealthState
from shim.causes.xids import Action, Remedy

AGENT: Final = "nvshim-node"
CHECK: Final = "NvshimGpuHealth"
"""The name of our check, which the connector makes the type of a node's condition."""

_METHOD: Final = "/datamodels.PlatformConnector/HealthEventOccurredV1"
_TO_ANSWER: Final = 10.0
_LONGEST_PAUSE: Final = 60.0
_FAULT: Final = "nvsentinel"
_CLEARED: Final = "nvsentinel.boot"
"""A file of STATE: the id of the last boot that cleared what earlier ones had raised, and the UUIDs
of the GPUs that are raised since."""

# The recommended actions, in NVSentinel's terms; anything else needs a person.
_ACTIONS: Final[Mapping[str, int]] = {
    "": pb.NONE,
    **dict.fromkeys((Remedy.NOTHING, Remedy.RESTART_APP, Action.DRAIN), pb.NONE),
    **dict.fromkeys(
        (Remedy.RESET, Remedy.RESET_LATER, Remedy.REPLACE, Remedy.LINKS, Action.RESET,
         Action.DRAIN_AND_RESET, "reset the GPU, or reboot the node"), pb.COMPONENT_RESET
    ),
    **dict.fromkeys(
        (Remedy.REBOOT, Remedy.BUS_RESET, Remedy.SWITCHES, Action.REBOOT, Action.BUS_RESET),
        pb.RESTART_BM,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """A GPU's health in the connector's terms."""

    gpu: str  # its UUID; "" for all GPUs that the check has reported
    is_healthy: bool
    is_fatal: bool = False
    message: str = ""  # why it is not healthy
    xid: int = 0  # 0 for none
    action: int = pb.NONE  # a RecommendedAction

    def event(self, options: Options) -> pb.HealthEvent:
        """Return the event for the present state."""
        acts = options.nvsentinel_acts
        event = pb.HealthEvent(
            version=1,
            agent=AGENT,
            componentClass="GPU",
            checkName=CHECK,
            isFatal=self.is_fatal,
            isHealthy=self.is_healthy,
            message=self.message,
            recommendedAction=self.action,  # type: ignore[arg-type] # the enum's number
            errorCode=[str(self.xid)] if self.xid else [],
            entitiesImpacted=(
                [pb.Entity(entityType="GPU_UUID", entityValue=self.gpu)] if self.gpu else []
            ),
            nodeName=options.node_name,
            processingStrategy=pb.EXECUTE_REMEDIATION if acts else pb.STORE_ONLY,
        )
        event.generatedTimestamp.GetCurrentTime()
        if not self.gpu:  # the connector sorts by time; this must not clear reports sent with it
            event.generatedTimestamp.seconds -= 1
        return event


def reports_of(health: Mapping[str, Condition]) -> dict[str, Report]:
    """Return the report on each GPU, by UUID; GPUs that are recovering have none.

    Args:
        health: the condition of each GPU and MIG device, by UUID.
    """
    found = {}
    for uuid, known in health.items():
        if not uuid.startswith("GPU-") or known.state == HealthState.RECOVERING:
            continue
        found[uuid] = Report(uuid, is_healthy=True)
        if known.state != HealthState.HEALTHY:
            is_fatal = known.state == HealthState.UNHEALTHY
            action = _ACTIONS.get(known.remedy, pb.CONTACT_SUPPORT) if is_fatal else pb.NONE
            message = one_line("; ".join(filter(None, (known.reason, known.remedy))))
            found[uuid] = Report(uuid, False, is_fatal, message, known.xid, action)
    return found


async def run(context: Context) -> NoReturn:
    """Send the health of GPUs whenever it changes, until cancelled."""
    health, node = context.state.health, context.state.node
    backoff = Backoff(longest=_LONGEST_PAUSE)
    path, boot = os.path.join(context.config.state, _CLEARED), boot_id(context.config)
    written = (read_text(path) or "").split()
    is_cleared = written[:1] == [boot]
    sent = {uuid: Report(uuid, is_healthy=False) for uuid in (written[1:] if is_cleared else ())}
    while True:
        version, timeout, line = version_of(health, node), math.inf, ""
        known, inventory = health.value, node.value.inventory
        has_none = inventory is not None and not inventory.gpus
        gone = sent.keys() - known.keys() if known or has_none else set[str]()
        wanted = reports_of(known) | {uuid: Report(uuid, is_healthy=True) for uuid in gone}
        changed = [report for uuid, report in wanted.items() if sent.get(uuid) != report]
        earlier = [] if is_cleared else [Report("", is_healthy=True)]
        if is_cleared:  # first, since the agent may be killed once the connector has it
            raised = _record(boot, [*sent.values(), *changed])
            if raised != written and await _write(context, path, raised):
                written = raised
        try:
            if earlier or changed:
                await _send(context.options, earlier + changed)
        except ConnectorSilent as error:
            line, timeout = str(error), backoff.pause()
        else:
            is_cleared = True
            sent = {uuid: each for uuid, each in (sent | wanted).items() if uuid not in gone}
            raised = _record(boot, sent.values())
            if raised != written and await _write(context, path, raised):
                written = raised
            backoff = Backoff(longest=_LONGEST_PAUSE)
        context.fault(_FAULT, line, level="warning")
        await wait_any(health, node, since=version, timeout=timeout)


def _record(boot: str, reports: Iterable[Report]) -> list[str]:
    """Return the words of the file: the boot, and the GPUs that one of these reports raises."""
    return [boot, *sorted({each.gpu for each in reports if not each.is_healthy})]


async def _write(context: Context, path: str, words: Collection[str]) -> bool:
    """Write a line for each word to a file; return whether that was possible."""
    content = "".join(f"{each}\n" for each in words).encode()
    write = partial(replace_file, path, content, durable=False)
    try:
        await context.files.run(context.config.state, f"to write {path}", write)
    except (OSError, FilesSilent):  # the next agent clears again
        return False
    return True


async def _send(options: Options, reports: Collection[Report]) -> None:
    """Send reports to the connector.

    Raises:
        ConnectorSilent: the connector does not accept them.
    """
    events = pb.HealthEvents(version=1, events=[each.event(options) for each in reports])
    target = f"unix:{options.nvsentinel}"
    async with grpc.aio.insecure_channel(target, (("grpc.use_local_subchannel_pool", 1),)) as link:
        call: Any = link.unary_unary(
            _METHOD,
            request_serializer=pb.HealthEvents.SerializeToString,
            response_deserializer=lambda _: None,
        )
        try:
            await answer_of(call(events, timeout=_TO_ANSWER))
        except grpc.aio.AioRpcError as error:
            raise ConnectorSilent(
                f"to report the health of GPUs to NVSentinel at {options.nvsentinel}",
                found=one_line(error.details() or error.code().name),
                do="check that its platform connector runs on this node; the agent retries",
            ) from error
