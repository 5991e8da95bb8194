"""Decide which containers a fault hits, and what each of them learns about the cause.

Rules for an Xid
- A number that never ends a process (:attr:`shim.causes.xids.Xid.ends`) hits no container; neither
  does a line that says the error is not fatal (:func:`shim.causes.xids.is_nonfatal`).
- A fault of the device hits every container that holds it, or held it a moment ago. An error that
  was contained in one application (94) hits only the container of the named process, if known.
- A fault of an application hits the container of its process. For other containers on the device it
  is a neighbour's fault. It is uncertain whether it reached them, unless they share an MPS server,
  which terminates all of its clients.
- If the process is unknown, the only holder is the likely cause; with several holders the cause is
  unclear.
- A process outside any container is a neighbour of every container.
- The driver's own recovery action overrides the table (:func:`shim.causes.xids.with_recovery`): a
  device that needs a reset has failed, whatever the number says.

No container learns the name or the process of another one.

Source: NVIDIA's Xid catalogue; "Multi-Process Service", error containment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from api.values import dataclass, replace
from integration.containers.bundles import Container
from integration.node.faults.fault_attribution import Attribution, How
from integration.node.faults.policy import Verdict
from integration.node.faults.xids import Scope
from integration.node.holders.values import Holding
from integration.nvml.values import GpuEvent
from shim.causes.record import Fault, Whose
from shim.causes.xids import Action, is_nonfatal, with_recovery

XID: Final = "xid"
GPU_LOST: Final = "gpu-lost"
DRIVER_LOST: Final = "driver-lost"
MPS: Final = "mps"

_KNOWN: Final = frozenset({How.PROCESS, How.ENDED})


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault as one container sees it."""

    container: Container
    fault: Fault


def hits_of(
    event: GpuEvent,
    verdict: Verdict,
    whose: Attribution,
    holders: Iterable[Holding],
    *,
    at: float,
    action: Action | None = None,
    mps: Iterable[str] = (),
) -> tuple[Hit, ...]:
    """Return the containers that an Xid hits.

    Args:
        verdict: the meaning of the Xid on this node.
        whose: the container that the Xid is attributed to.
        holders: the holders of the affected devices.
        at: when it happened, in seconds since the epoch.
        action: the driver's recovery action; None if it named none.
        mps: UUIDs of GPUs whose containers share an MPS server.
    """
    xid = verdict.xid
    if xid is None or not xid.ends or is_nonfatal(event.xid, event.text):
        return ()
    blamed, needed = with_recovery(xid, action)
    own = whose.container
    fault = Fault(
        at,
        XID,
        xid.number,
        xid.meaning,
        gpu=verdict.gpu or event.bus_id,
        whose=blamed,
        sure=verdict.certain,
        action=needed,
    )
    held = {each.container.bundle: each for each in holders} if verdict.gpu else {}
    others = [each for bundle, each in held.items() if own is None or bundle != own.bundle]
    mine = held.get(own.bundle) if own is not None else None
    found = []
    if own is not None:
        sure = verdict.certain and whose.how in _KNOWN
        pid = event.pid if whose.how in _KNOWN else 0
        told = replace(fault, pid=pid, mig=_part(mine, verdict))
        found.append(Hit(own, told if blamed == Whose.DEVICE else replace(told, sure=sure)))
    if blamed == Whose.DEVICE:
        is_contained = xid.scope == Scope.INSTANCE and action is None and whose.how in _KNOWN
        them = () if is_contained else others
        return (*found, *(_hit(each, fault, verdict) for each in them))
    if own is None and whose.how != How.OUTSIDE:
        sure_of_none = replace(fault, sure=False)
        if len(others) > 1:
            sure_of_none = replace(sure_of_none, whose=Whose.UNCLEAR)
        return tuple(_hit(each, sure_of_none, verdict) for each in others)
    shared = verdict.gpu in mps and whose.how in {*_KNOWN, How.OUTSIDE}
    theirs = replace(
        fault, whose=Whose.NEIGHBOUR, sure=shared and verdict.certain, action=Action.NOTHING
    )
    return (*found, *(_hit(each, theirs, verdict) for each in others))


def lost(
    kind: str,
    name: str,
    holders: Iterable[Holding],
    *,
    at: float,
    gpu: str = "",
    whose: Whose = Whose.DEVICE,
    action: str = "",
    sure: bool = True,
) -> tuple[Hit, ...]:
    """Return the containers hit by the loss of a shared resource: a GPU, the driver, an MPS server.

    Args:
        kind: :data:`GPU_LOST`, :data:`DRIVER_LOST` or :data:`MPS`.
        name: display name of what was lost.
        holders: the containers that use it.
        at: when the loss was seen, in seconds since the epoch.
        gpu: the UUID of the GPU; "" for the first device of each holder.
    """
    held = {each.container.bundle: each for each in holders}
    return tuple(
        Hit(
            each.container,
            Fault(
                at, kind, name=name, gpu=gpu or (*each.gpus, "")[0], whose=whose, sure=sure,
                action=action,
            ),
        )
        for each in held.values()
    )  # fmt: skip


def _hit(holding: Holding, fault: Fault, verdict: Verdict) -> Hit:
    return Hit(holding.container, replace(fault, mig=_part(holding, verdict)))


def _part(holding: Holding | None, verdict: Verdict) -> str:
    """Return the affected MIG device of a holder; "" for a whole GPU, or if unknown."""
    if holding is None:
        return ""
    parts = [each for each in holding.devices if each in verdict.devices and each != verdict.gpu]
    return parts[0] if len(parts) == 1 else ""
