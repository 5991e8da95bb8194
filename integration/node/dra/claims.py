"""What a claim has been given, and whether it can have it here. Pure.

Rules
- The scheduler has chosen; the claim's ``status.allocation`` says what. Results of other drivers
  are theirs.
- The claim has to be the one that the kubelet means: its UID decides, not its name.
- A device that another claim has, or is a part of what it has, is not given again: the scheduler's
  races do give one twice. ``adminAccess`` is no possession: who only looks after a device takes
  nothing from others. Of shares of one device, their sum counts (:mod:`.shares`); what is made for
  a claim has none.
- What a person has taken out of service is not given. Who has it, keeps it.
- What is configured for our driver is read strictly (:mod:`.configuration`), and every device of
  the claim gets its part of it (:mod:`.sharing`).

Source: Kubernetes, resource.k8s.io/v1 ResourceClaim; dynamic-resource-allocation/kubeletplugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hooks.node.drained import DRIVER
from integration.node.dra.configuration import read_all
from integration.node.dra.shares import consumed
from integration.node.dra.sharing import Result, configured
from integration.node.dra.values import Claim, ClaimDevice
from integration.node.errors import (
    ClaimedDeviceMissing,
    DeviceDrained,
    DeviceTaken,
    ResourceClaimUnusable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hooks.node.drained import Drain
    from integration.node.dra.devices import Device

__all__ = ["Reference", "read_claim", "refuse_drained", "refuse_taken"]


class Reference(NamedTuple):
    """A claim as the kubelet names it."""

    namespace: str
    uid: str
    name: str


def read_claim(
    found: Mapping[str, Any],
    reference: Reference,
    driver: str,
    pool: str,
    devices: Mapping[str, Device],
) -> Claim:
    """What a claim is to have of us.

    Args:
        found: the claim, as the API server has it.
        reference: as the kubelet names it.
        driver: our name.
        pool: ours on this node.
        devices: by their names.

    Raises:
        ResourceClaimUnusable: it is another claim, or has no allocation.
        ClaimedDeviceMissing: this node does not have one of its devices.
        ClaimConfigUnknown: it is configured in a way that we do not know, or that cannot be.
    """
    asked = f"the claim {reference.namespace}/{reference.name}"
    uid = (found.get("metadata") or {}).get("uid")
    if uid != reference.uid:
        raise ResourceClaimUnusable(
            asked, found=f"it is {uid} by now, and {reference.uid} is meant"
        )
    allocation = ((found.get("status") or {}).get("allocation") or {}).get("devices") or {}
    results = [each for each in allocation.get("results") or () if each.get("driver") == driver]
    if not results:
        raise ResourceClaimUnusable(asked, found=f"nothing of {driver} is allocated to it")
    configurations = read_all(allocation.get("config") or (), driver, asked)
    allocated = []
    for each in results:
        device = _device(each, pool, devices, asked)
        allocated.append(Result(str(each.get("request")), device, devices[device.device]))
    return Claim(
        reference.uid,
        reference.namespace,
        reference.name,
        configured(reference.uid, allocated, configurations, asked),
    )


def _device(
    result: Mapping[str, Any], pool: str, devices: Mapping[str, Device], asked: str
) -> ClaimDevice:
    name = str(result.get("device"))
    device = devices.get(name)
    if device is None or device.lost or result.get("pool") != pool:
        why = "it does not answer, or has no node" if device is not None else "it is not here"
        if result.get("pool") != pool:
            why = f"it is of the pool {result.get('pool')}, and this is {pool}"
        raise ClaimedDeviceMissing(
            f"the device {name} of {asked}", found=why,
            do="have the pod made anew, and see `nvshim list` on the node",
        )  # fmt: skip
    share, memory, shares = consumed(result)
    if share and device.part is not None:
        raise ResourceClaimUnusable(
            f"a share of the device {name} for {asked}",
            found="it is made for one claim, which has all of it",
        )
    return ClaimDevice(
        # "gpu/any" is the subrequest "any": the kubelet knows the request.
        str(result.get("request")).partition("/")[0],
        pool,
        name,
        device.uuid,
        device.gpu,
        admin=result.get("adminAccess") is True,
        share=share,
        memory=memory,
        shares=shares,
    )


def refuse_drained(claim: Claim, drains: Iterable[Drain]) -> None:
    """See that nothing of what a claim is to have is out of service.

    Raises:
        DeviceDrained: something is.
    """
    marks = {drain.device: drain for drain in drains}
    for device in claim.devices:
        drain = marks.get(device.uuid) or marks.get(device.gpu) or marks.get(DRIVER)
        if drain is not None:
            raise DeviceDrained(
                f"the device {device.device} of {claim}",
                found=f"is out of service {drain.why}",
                do="have the pod made anew; it gets another device, or another node",
            )


def refuse_taken(
    claim: Claim, others: Iterable[Claim], plugin_gave: Mapping[str, str] | None = None
) -> None:
    """See that nobody else has what a claim is to have.

    Args:
        others: what is prepared for other claims.
        plugin_gave: who has been given what by a device plugin, by the device's UUID.

    Raises:
        DeviceTaken: somebody has.
    """
    taken = [
        (device.uuid, device.gpu, str(other), bool(device.share))
        for other in others
        if other.uid != claim.uid
        for device in other.devices
        if not device.admin
    ]
    taken += [(uuid, uuid, who, False) for uuid, who in (plugin_gave or {}).items()]
    for device in claim.devices:
        if device.admin:
            continue
        for uuid, gpu, who, is_share in taken:
            if is_share and device.share and uuid == device.uuid:
                continue
            if device.uuid in {uuid, gpu} or uuid == device.gpu:
                raise DeviceTaken(f"the device {device.device} of {claim}", found=f"{who} has it")
