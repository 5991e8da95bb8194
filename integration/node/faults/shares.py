"""Compute GPU memory limits from the shares in a container's resource claims.

Rules
- The kubelet knows which claims a container has; the driver knows the size of their shares. The
  container's own variables are ignored.
- The kubelet's record of claims lists the pods of each claim by UID. Its pod-resources API may list
  the containers as well; then only the claims of that container count.
- If one of the two records is missing, the other decides. If both are missing, no share limits
  anything.
- Each share counts once.

Source: kubelet pkg/kubelet/cm/dra/state; Kubernetes, pkg/kubelet/apis/podresources.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from hooks.config import Config
from hooks.node.kubelet import read_claims
from integration.containers.bundles import Container
from integration.json_documents import MALFORMED, parse_json, read_each
from integration.kubelet.values import Claimed
from integration.node.values.claims import Claim

__all__ = ["PodClaims", "pod_claims", "share_limits"]

PodClaims = Mapping[str, frozenset[str]]
"""The UIDs of a pod's claims, by the pod's UID."""

_MEBI: Final = 20


def pod_claims(config: Config) -> tuple[PodClaims | None, str]:
    """Read the claims of each pod from the kubelet's record.

    Args:
        config: locates the kubelet's root directory.

    Returns:
        The claims, and which entries of the record are malformed, "" if none is; None and the
        reason if it cannot be read.
    """
    record = read_claims(config)
    if record.fault:
        return None, f"{record.path}: {record.fault}"
    try:
        data: Any = parse_json(parse_json(record.content)["Data"])
        entries = iter(data["ClaimInfoStateList"] or ())
    except MALFORMED as error:
        return None, f"{record.path}: not as a kubelet writes it ({error})"
    claims, malformed = read_each(entries, _pods_of)
    found: dict[str, set[str]] = {}
    for uid, pods in claims:
        for pod in pods:
            found.setdefault(pod, set()).add(uid)
    why = f"{record.path}: {malformed} of its entries are malformed" if malformed else ""
    return {pod: frozenset(uids) for pod, uids in found.items()}, why


def _pods_of(entry: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the UID of a claim in the kubelet's record, and those of its pods."""
    return str(entry["ClaimUID"]), tuple(map(str, (entry["PodUIDs"] or {}).keys()))


def share_limits(
    containers: Iterable[Container],
    claims: Iterable[Claim],
    of_pods: PodClaims | None,
    named: Iterable[Claimed] | None,
) -> dict[str, dict[str, int]]:
    """Return the memory limits of containers that have shares.

    Args:
        claims: the claims that the driver has prepared.
        of_pods: the kubelet's record; None if it cannot be read.
        named: the answer of the pod-resources API; None if there is no answer.

    Returns:
        The limits by the container's bundle, each in bytes by the device's UUID.
    """
    sized = [claim for claim in claims if any(device.memory for device in claim.devices)]
    by_container: dict[tuple[str, str, str], set[tuple[str, str]]] = {}
    for each in named or ():
        by_container.setdefault(each.container, set()).add((each.namespace, each.name))
    found: dict[str, dict[str, int]] = {}
    for container in containers if sized else ():
        pod = container.pod
        if pod is None or container.sandbox:
            continue
        names = by_container.get((pod.namespace, pod.name, container.name))
        if of_pods is None and names is None:
            continue
        theirs = [
            claim
            for claim in sized
            if (of_pods is None or claim.uid in of_pods.get(pod.uid, ()))
            and (names is None or (claim.namespace, claim.name) in names)
        ]
        shares = {
            (device.uuid, device.share): device.memory << _MEBI
            for claim in theirs
            for device in claim.devices
            if device.share and not device.admin
        }
        for (uuid, _), size in shares.items():
            of_device = found.setdefault(container.bundle, {})
            of_device[uuid] = of_device.get(uuid, 0) + size
    return found
