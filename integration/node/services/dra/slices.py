"""ResourceSlices: what is published of the devices, and which writes bring that about. Pure.

Rules
- The devices of a node are one pool, called as the node. It is one slice for each
  :data:`MOST_DEVICES` devices, and one without devices if there is none: the driver is alive. A
  slice whose devices have taints or counters may have half as many.
- Devices that exclude each other take from a set of counters. Servers from 1.35 on have the sets in
  slices without devices, 1.34 beside the devices that take from them. Where a server has no
  counters, MIG devices that need them are not published, and whole GPUs are without them. Sets are
  written first: a server that does not know them takes them silently, and keeps nothing.
- Only the slices of a pool's highest generation count for the scheduler, if there are as many of
  them as they say. So whatever is changed, all slices of the pool are written with the next
  generation.
- Nothing is written if what is there is what it should be. A server that keeps less than it was
  sent (a field of a newer version) is told the same only once.
- When a taint was added the server says, and it is to say the same for as long as the taint is
  there. So what is written has the time that the server has.
- A slice belongs to its Node, and goes with it.
- Slices of other pools of ours on this node are obsolete.
- In v1beta1 the attributes and capacity of a device are below ``basic``.

Source: Kubernetes, resource.k8s.io/v1 ResourceSlice; dynamic-resource-allocation/resourceslice
(the controller of its Go helper).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from integration.node.services.dra.sharing import policy_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from integration.node.services.dra.devices import Device

__all__ = [
    "GROUP", "MOST_DEVICES", "VERSIONS", "Content", "Counting", "Owner", "Write", "changes",
    "content_of", "contents", "deletion", "is_ours", "key_of", "lost_counters", "with_times",
]  # fmt: skip

GROUP: Final = "resource.k8s.io"
VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""Of the API, those that we speak, best first."""

MOST_DEVICES: Final = 128
_MOST_LARGE: Final = 64
_MOST_SETS: Final = 8
_BASIC: Final = "v1beta1"
_LARGE: Final = ("taints", "consumesCounters")
_CONTENT: Final = ("devices", "sharedCounters")
# In the driver's own domain, which has no name in a slice.
_OWN: Final = frozenset({"index", "minor", "health"})

Content = dict[str, Any]
"""What a slice has beside its head: ``devices``, ``sharedCounters``, or neither."""


class Counting(Enum):
    """Where a server wants the counters of devices that exclude each other."""

    APART = "in slices of their own"
    BESIDE = "in the slices of the devices"
    NONE = "nowhere"

    @property
    def next(self) -> Counting:
        """What is tried if this was refused."""
        return {Counting.APART: Counting.BESIDE}.get(self, Counting.NONE)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose the slices are."""

    driver: str  # its name
    node: str  # the Node's name, and so the pool's
    node_uid: str  # the Node's UID
    version: str = VERSIONS[0]  # of the API


class Write(NamedTuple):
    """A call by which a slice is made, replaced or deleted, as it was seen."""

    method: str  # "POST", "PUT" or "DELETE"
    body: dict[str, Any]
    name: str = ""  # of the slice; "" for one that is made


def contents(
    devices: Iterable[Device], version: str, counting: Counting = Counting.NONE
) -> tuple[Content, ...]:
    """What each slice has, as the API has it; one has nothing if there is nothing."""
    if counting is Counting.NONE:
        devices = [replace(each, counters=None) for each in devices if each.part is None]
    told = [
        (device, _told(device, version)) for device in sorted(devices, key=lambda each: each.name)
    ]
    counted = {device.counters.of: device.counters for device, _ in told if device.counters}
    sets: list[dict[str, Any]] = [
        {"name": name, "counters": {key: {"value": has} for key, has in each.left.items()}}
        for name, each in sorted(counted.items())
    ]
    found: list[Content] = []
    if counting is Counting.BESIDE:
        for each in sets:
            its = [what for device, what in told if _is_of(device, each["name"])]
            found.append({"devices": its, "sharedCounters": [each]})
        told = [(device, what) for device, what in told if device.counters is None]
    else:
        found += [{"sharedCounters": some} for some in _in_turn(sets, _MOST_SETS)]
    large = [what for _, what in told if _is_large(what, version)]
    small = [what for _, what in told if not _is_large(what, version)]
    found += [{"devices": some} for some in _in_turn(small, MOST_DEVICES)]
    found += [{"devices": some} for some in _in_turn(large, _MOST_LARGE)]
    return tuple(found) or ({},)


def _is_of(device: Device, name: str) -> bool:
    return device.counters is not None and device.counters.of == name


def _is_large(told: Mapping[str, Any], version: str) -> bool:
    what = told["basic"] if version == _BASIC else told
    return any(key in what for key in _LARGE)


def _in_turn(listed: list[Any], most: int) -> Iterator[list[Any]]:
    return (listed[start : start + most] for start in range(0, len(listed), most))


def _told(device: Device, version: str) -> dict[str, Any]:
    what: dict[str, Any] = {
        "attributes": {name: dict(value) for name, value in device.attributes.items()}
    }
    if device.capacity:
        what["capacity"] = {
            name: {"value": value, **policy_of(device, name)}
            for name, value in device.capacity.items()
        }
    if device.shares:
        what["allowMultipleAllocations"] = True
    if device.counters is not None:
        takes = {name: {"value": value} for name, value in device.counters.takes.items()}
        what["consumesCounters"] = [{"counterSet": device.counters.of, "counters": takes}]
    if device.taints:
        what["taints"] = [taint._asdict() for taint in device.taints]
    return {"name": device.name, **({"basic": what} if version == _BASIC else what)}


def content_of(spec: Mapping[str, Any]) -> Content:
    """What a slice has beside its head."""
    return {key: spec[key] for key in _CONTENT if spec.get(key)}


def lost_counters(sent: Mapping[str, Any], has: Mapping[str, Any]) -> bool:
    """Whether a server has dropped counters of what it was sent, as one without them does."""
    if "sharedCounters" in sent and "sharedCounters" not in has:
        return True
    key = "consumesCounters"
    pairs = zip(_whats(sent), _whats(has), strict=False)
    return any(key in ours and key not in theirs for ours, theirs in pairs)


def _whats(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What a slice has of each device, whichever version of the API it is of."""
    return (device.get("basic", device) for device in content.get("devices") or ())


def changes(
    there: Iterable[Mapping[str, Any]],
    wanted: Sequence[Content],
    owner: Owner,
    *,
    kept: Mapping[str, Any] | None = None,
) -> list[Write]:
    """The writes after which what is published is what is wanted; none if it is already.

    Args:
        kept: what the server has made of a content, by :func:`key_of` that.

    Returns:
        The writes, in the order in which they are to be made.
    """
    slices = sorted(there, key=_name)
    ours = [each for each in slices if each["spec"]["pool"]["name"] == owner.node]
    obsolete = [each for each in slices if each not in ours]
    highest = max((each["spec"]["pool"]["generation"] for each in ours), default=0)
    pairs, unpaired, surplus = _paired(ours, wanted, kept or {})
    is_whole = all(_says(each, highest, len(wanted), owner) for each in ours)
    if not (unpaired or surplus) and is_whole:
        return [deletion(each) for each in obsolete]
    generation = highest + 1
    reused, superfluous = surplus[: len(unpaired)], surplus[len(unpaired) :]
    updates = [*pairs, *zip(reused, unpaired[: len(reused)], strict=True)]
    size = len(wanted)
    writes = [
        Write("PUT", _body(owner, content, generation, size, each["metadata"]), _name(each))
        for each, content in updates
    ]
    made = unpaired[len(reused) :]
    writes += [Write("POST", _body(owner, content, generation, size)) for content in made]
    writes.sort(key=lambda write: "sharedCounters" not in write.body["spec"])
    return [*(deletion(each) for each in (*obsolete, *superfluous)), *writes]


def key_of(content: Content) -> str:
    """What stands for a content in a table."""
    return repr(content)


def _paired(
    ours: Iterable[Mapping[str, Any]], wanted: Sequence[Content], kept: Mapping[str, Any]
) -> tuple[list[tuple[Mapping[str, Any], Content]], list[Content], list[Mapping[str, Any]]]:
    """Slices that have what is wanted, with it; what no slice has; and the other slices."""
    unpaired, pairs, surplus = list(wanted), [], []
    for each in ours:
        has = content_of(each["spec"])
        for content in unpaired:
            if has in (content, kept.get(key_of(content))):
                unpaired.remove(content)
                pairs.append((each, content))
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
    content: Content,
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
            **content,  # an empty list would count as having devices
        },
    }


def _name(each: Mapping[str, Any]) -> str:
    return str(each["metadata"]["name"])


def is_ours(each: Mapping[str, Any]) -> bool:
    """Return whether a slice has devices as only this driver publishes them, by whatever name."""
    return any((what.get("attributes") or {}).keys() >= _OWN for what in _whats(each["spec"]))


def deletion(each: Mapping[str, Any]) -> Write:
    """Return the call that deletes a slice, unless it has changed meanwhile."""
    seen = each["metadata"]
    conditions = {key: seen[key] for key in ("uid", "resourceVersion") if key in seen}
    return Write("DELETE", {"preconditions": conditions}, _name(each))


def with_times(content: dict[str, Any], there: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a slice has, with the times that the server has of its devices' taints."""
    times = {
        (device["name"], *_taint_of(taint)): taint["timeAdded"]
        for each in there
        for device in each["spec"].get("devices") or ()
        for taint in device.get("basic", device).get("taints") or ()
        if "timeAdded" in taint
    }

    def timed(device: dict[str, Any]) -> dict[str, Any]:
        what = device.get("basic", device)
        if not what.get("taints"):
            return device
        taints = [
            {**taint, **({"timeAdded": times[key]} if key in times else {})}
            for taint in what["taints"]
            for key in [(device["name"], *_taint_of(taint))]
        ]
        what = {**what, "taints": taints}
        return {**device, "basic": what} if "basic" in device else what

    if not content.get("devices"):
        return content
    return {**content, "devices": [timed(device) for device in content["devices"]]}


def _taint_of(taint: Mapping[str, Any]) -> tuple[str, str, str]:
    return taint["key"], taint.get("value", ""), taint["effect"]
