"""ResourceSlices: what is published of the devices, and which writes bring that about. Pure.

Rules
- The devices of a node are one pool, called as the node. It is one slice for each
  :data:`MOST_DEVICES` devices, and one without devices if there is none: the driver is alive. Those
  with taints are in slices of their own, which may have half as many.
- Only the slices of a pool's highest generation count for the scheduler, if there are as many of
  them as they say. So whatever is changed, all slices of the pool are written with the next
  generation.
- Nothing is written if what is there is what it should be. A server that keeps less than it was
  sent (a field of a newer version) is told the same only once.
- A slice belongs to its Node, and goes with it.
- Slices of other pools of ours on this node are obsolete.
- In v1beta1 the attributes and capacity of a device are below ``basic``.

Source: Kubernetes, resource.k8s.io/v1 ResourceSlice; dynamic-resource-allocation/resourceslice
(the controller of its Go helper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from integration.node.dra.devices import Device

__all__ = [
    "GROUP", "MOST_DEVICES", "VERSIONS", "Change", "Create", "Delete", "Owner", "Update", "changes",
    "device_lists", "key_of",
]  # fmt: skip

GROUP: Final = "resource.k8s.io"
VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""Of the API, those that we speak, best first."""

MOST_DEVICES: Final = 128
_MOST_LARGE: Final = 64
_BASIC: Final = "v1beta1"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose the slices are.

    Attributes:
        driver: its name.
        node: the Node's name, and so the pool's.
        node_uid: the Node's UID.
        version: of the API.
    """

    driver: str
    node: str
    node_uid: str
    version: str = VERSIONS[0]


@dataclass(frozen=True, slots=True)
class Create:
    """A slice that is to be made."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Update:
    """A slice that is to be replaced; the body has the version that was seen."""

    name: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delete:
    """A slice that is to go, if it is still the one that was seen."""

    name: str
    body: dict[str, Any]


Change = Create | Update | Delete


def device_lists(devices: Iterable[Device], version: str) -> tuple[list[dict[str, Any]], ...]:
    """The devices of each slice, as the API has them; one empty list if there are none."""
    ordered = sorted(devices, key=lambda each: each.name)
    found: list[list[dict[str, Any]]] = []
    for is_large, most in ((False, MOST_DEVICES), (True, _MOST_LARGE)):
        told = [_told(device, version) for device in ordered if bool(device.taints) is is_large]
        found += [told[start : start + most] for start in range(0, len(told), most)]
    return tuple(found) or ([],)


def _told(device: Device, version: str) -> dict[str, Any]:
    what: dict[str, Any] = {
        "attributes": {name: dict(value) for name, value in device.attributes.items()}
    }
    if device.capacity:
        what["capacity"] = {name: {"value": value} for name, value in device.capacity.items()}
    if device.taints:
        what["taints"] = [taint._asdict() for taint in device.taints]
    return {"name": device.name, **({"basic": what} if version == _BASIC else what)}


def changes(
    there: Iterable[Mapping[str, Any]],
    wanted: Sequence[list[dict[str, Any]]],
    owner: Owner,
    *,
    kept: Mapping[str, Any] | None = None,
) -> list[Change]:
    """The writes after which what is published is what is wanted; none if it is already.

    Args:
        there: the driver's slices of this node.
        wanted: as :func:`device_lists` makes it.
        kept: what the server has made of a list of devices, by :func:`key_of` that list.

    Returns:
        The writes, in the order in which they are to be made.
    """
    slices = sorted(there, key=lambda each: str(each["metadata"]["name"]))
    ours = [each for each in slices if each["spec"]["pool"]["name"] == owner.node]
    obsolete = [each for each in slices if each not in ours]
    highest = max((each["spec"]["pool"]["generation"] for each in ours), default=0)
    pairs, unpaired, surplus = _paired(ours, wanted, kept or {})
    is_whole = all(_says(each, highest, len(wanted), owner) for each in ours)
    if not (unpaired or surplus) and is_whole:
        return [_delete(each) for each in obsolete]
    generation = highest + 1
    reused, superfluous = surplus[: len(unpaired)], surplus[len(unpaired) :]
    updates = [*pairs, *zip(reused, unpaired[: len(reused)], strict=True)]
    return [
        *(_delete(each) for each in (*obsolete, *superfluous)),
        *(
            Update(
                str(each["metadata"]["name"]),
                _body(owner, devices, generation, len(wanted), each["metadata"]),
            )
            for each, devices in updates
        ),
        *(
            Create(_body(owner, devices, generation, len(wanted)))
            for devices in unpaired[len(reused) :]
        ),
    ]


def key_of(devices: Sequence[Mapping[str, Any]]) -> str:
    """What stands for a list of devices in a table."""
    return repr(devices)


def _paired(
    ours: Iterable[Mapping[str, Any]],
    wanted: Sequence[list[dict[str, Any]]],
    kept: Mapping[str, Any],
) -> tuple[
    list[tuple[Mapping[str, Any], list[dict[str, Any]]]],
    list[list[dict[str, Any]]],
    list[Mapping[str, Any]],
]:
    """Slices that have what is wanted, with it; what no slice has; and the other slices."""
    unpaired, pairs, surplus = list(wanted), [], []
    for each in ours:
        has = each["spec"].get("devices") or []
        for devices in unpaired:
            if has == devices or has == kept.get(key_of(devices)):
                unpaired.remove(devices)
                pairs.append((each, devices))
                break
        else:
            surplus.append(each)
    return pairs, unpaired, surplus


def _says(each: Mapping[str, Any], generation: int, count: int, owner: Owner) -> bool:
    """Whether a slice says of its pool, and of its owner, what it should."""
    pool = each["spec"]["pool"]
    owners = [one.get("uid") for one in each["metadata"].get("ownerReferences") or ()]
    return (
        pool["generation"] == generation
        and pool["resourceSliceCount"] == count
        and owners == [owner.node_uid]
    )


def _body(
    owner: Owner,
    devices: list[dict[str, Any]],
    generation: int,
    count: int,
    seen: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"generateName": f"{owner.node}-{owner.driver}-"}
    if seen is not None:
        metadata = {key: seen[key] for key in ("name", "uid", "resourceVersion") if key in seen}
    reference = {
        "apiVersion": "v1",
        "kind": "Node",
        "name": owner.node,
        "uid": owner.node_uid,
        "controller": True,
    }
    return {
        "apiVersion": f"{GROUP}/{owner.version}",
        "kind": "ResourceSlice",
        "metadata": {**metadata, "ownerReferences": [reference]},
        "spec": {
            "driver": owner.driver,
            "nodeName": owner.node,
            "pool": {"name": owner.node, "generation": generation, "resourceSliceCount": count},
            # An empty list counts as having devices.
            **({"devices": devices} if devices else {}),
        },
    }


def _delete(each: Mapping[str, Any]) -> Delete:
    seen = each["metadata"]
    conditions = {key: seen[key] for key in ("uid", "resourceVersion") if key in seen}
    return Delete(str(seen["name"]), {"preconditions": conditions})
