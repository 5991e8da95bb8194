"""ResourceSlices: the content to publish, and the writes that publish it. Pure.

Rules
- The devices of a node form one pool, named after the node. It has one slice for each
  :data:`MOST_DEVICES` devices; without devices it has one empty slice, which shows that the driver
  runs. The limit is half of that if devices have taints or counters.
- Devices that exclude each other consume a shared set of counters. Servers from 1.35 on want the
  sets in slices without devices; 1.34 wants them next to the devices. On servers without counters,
  MIG devices that need them are not published, and whole GPUs have none. Slices with sets are
  written first, because a server that does not know sets drops them without an error.
- The scheduler uses only the slices of a pool's highest generation, and only if all of them exist.
  So each change writes all slices of the pool, with the next generation.
- Nothing is written if the slices are already up to date. A server that drops a field of a newer
  version gets the same content only once.
- The server records when a taint was added, and that time must not change while the taint exists.
  So writes repeat the server's time.
- A slice is owned by its Node, and is deleted with it.
- Slices of this driver's other pools on the node are obsolete.
- In v1beta1 the attributes and capacity of a device are below ``basic``.

Source: Kubernetes, resource.k8s.io/v1 ResourceSlice; dynamic-resource-allocation/resourceslice
(the controller of its Go helper).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple

from integration.node.services.dra.devices import Device
from integration.node.services.dra.sharing import policy_of

__all__ = [
    "GROUP", "MOST_DEVICES", "VERSIONS", "Content", "Counting", "Owner", "Write", "changes",
    "content_of", "contents", "deletion", "is_ours", "key_of", "lost_counters", "with_times",
]  # fmt: skip

GROUP: Final = "resource.k8s.io"
VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
"""The versions of the API that the driver supports, newest first."""

MOST_DEVICES: Final = 128
_MOST_LARGE: Final = 64
_MOST_SETS: Final = 8
_BASIC: Final = "v1beta1"
_LARGE: Final = ("taints", "consumesCounters")
_CONTENT: Final = ("devices", "sharedCounters")
# Attributes in the driver's own domain, which slices do not spell out.
_OWN: Final = frozenset({"index", "minor", "health"})

Content = dict[str, Any]
"""The variable part of a slice: ``devices``, ``sharedCounters``, or neither."""


class Counting(Enum):
    """Where a server wants the counters of devices that exclude each other."""

    APART = "in slices of their own"
    BESIDE = "in the slices of the devices"
    NONE = "nowhere"

    @property
    def next(self) -> Counting:
        """What to try after the server refused this."""
        return {Counting.APART: Counting.BESIDE}.get(self, Counting.NONE)


@dataclass(frozen=True, slots=True)
class Owner:
    """The driver and the Node that slices belong to."""

    driver: str
    node: str  # the name of the Node and of the pool
    node_uid: str
    version: str = VERSIONS[0]  # of the API


class Write(NamedTuple):
    """A call that creates, replaces or deletes a slice."""

    method: str  # "POST", "PUT" or "DELETE"
    body: dict[str, Any]
    name: str = ""  # of the slice; "" for a new one


def contents(
    devices: Iterable[Device], version: str, counting: Counting = Counting.NONE
) -> tuple[Content, ...]:
    """Return the content of each slice; without devices there is one empty slice."""
    if counting is Counting.NONE:
        devices = [replace(each, counters=None) for each in devices if each.part is None]
    entries = [
        (device, _entry(device, version)) for device in sorted(devices, key=lambda each: each.name)
    ]
    counted = {device.counters.of: device.counters for device, _ in entries if device.counters}
    sets: list[dict[str, Any]] = [
        {"name": name, "counters": {key: {"value": has} for key, has in each.left.items()}}
        for name, each in sorted(counted.items())
    ]
    found: list[Content] = []
    if counting is Counting.BESIDE:
        for each in sets:
            its = [what for device, what in entries if _uses(device, each["name"])]
            found.append({"devices": its, "sharedCounters": [each]})
        entries = [(device, what) for device, what in entries if device.counters is None]
    else:
        found += [{"sharedCounters": some} for some in _batches(sets, _MOST_SETS)]
    large = [what for _, what in entries if _is_large(what, version)]
    small = [what for _, what in entries if not _is_large(what, version)]
    found += [{"devices": some} for some in _batches(small, MOST_DEVICES)]
    found += [{"devices": some} for some in _batches(large, _MOST_LARGE)]
    return tuple(found) or ({},)


def _uses(device: Device, name: str) -> bool:
    return device.counters is not None and device.counters.of == name


def _is_large(entry: Mapping[str, Any], version: str) -> bool:
    what = entry["basic"] if version == _BASIC else entry
    return any(key in what for key in _LARGE)


def _batches(listed: list[Any], most: int) -> Iterator[list[Any]]:
    return (listed[start : start + most] for start in range(0, len(listed), most))


def _entry(device: Device, version: str) -> dict[str, Any]:
    what: dict[str, Any] = {
        "attributes": {name: dict(value) for name, value in device.attributes.items()}
    }
    if device.capacity:
        what["capacity"] = {
            name: {"value": value, **policy_of(device, name)}
            for name, value in device.capacity.items()
        }
    if device.share_memory:
        what["allowMultipleAllocations"] = True
    if device.counters is not None:
        takes = {name: {"value": value} for name, value in device.counters.takes.items()}
        what["consumesCounters"] = [{"counterSet": device.counters.of, "counters": takes}]
    if device.taints:
        what["taints"] = [taint._asdict() for taint in device.taints]
    return {"name": device.name, **({"basic": what} if version == _BASIC else what)}


def content_of(spec: Mapping[str, Any]) -> Content:
    """Return the variable part of a slice."""
    return {key: spec[key] for key in _CONTENT if spec.get(key)}


def lost_counters(sent: Mapping[str, Any], has: Mapping[str, Any]) -> bool:
    """Return whether the server dropped counters, as older servers do."""
    if "sharedCounters" in sent and "sharedCounters" not in has:
        return True
    key = "consumesCounters"
    pairs = zip(_entries(sent), _entries(has), strict=False)
    return any(key in ours and key not in theirs for ours, theirs in pairs)


def _entries(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the facts of each device in a slice of any version of the API."""
    return (device.get("basic", device) for device in content.get("devices") or ())


def changes(
    there: Iterable[Mapping[str, Any]],
    wanted: Sequence[Content],
    owner: Owner,
    *,
    kept: Mapping[str, Any] | None = None,
) -> list[Write]:
    """Return the writes that turn the published slices into the wanted ones, in order.

    Args:
        there: the published slices.
        kept: what the server stored of each content, by its :func:`key_of`.
    """
    slices = sorted(there, key=_name)
    ours = [each for each in slices if each["spec"]["pool"]["name"] == owner.node]
    obsolete = [each for each in slices if each not in ours]
    highest = max((each["spec"]["pool"]["generation"] for each in ours), default=0)
    pairs, unpaired, surplus = _paired(ours, wanted, kept or {})
    is_whole = all(_is_current(each, highest, len(wanted), owner) for each in ours)
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
    """Return a key for a content, which is not hashable."""
    return repr(content)


def _paired(
    ours: Iterable[Mapping[str, Any]], wanted: Sequence[Content], kept: Mapping[str, Any]
) -> tuple[list[tuple[Mapping[str, Any], Content]], list[Content], list[Mapping[str, Any]]]:
    """Return slices with the content that they have, content without a slice, and other slices."""
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


def _is_current(each: Mapping[str, Any], generation: int, count: int, owner: Owner) -> bool:
    """Return whether pool and owner of a slice are as they should be."""
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
            **content,  # without empty lists: the API takes those for devices
        },
    }


def _name(each: Mapping[str, Any]) -> str:
    return str(each["metadata"]["name"])


def is_ours(each: Mapping[str, Any]) -> bool:
    """Return whether a slice has devices as only this driver publishes them, under any name."""
    return any((what.get("attributes") or {}).keys() >= _OWN for what in _entries(each["spec"]))


def deletion(each: Mapping[str, Any]) -> Write:
    """Return the call that deletes a slice unless it has changed in the meantime."""
    seen = each["metadata"]
    conditions = {key: seen[key] for key in ("uid", "resourceVersion") if key in seen}
    return Write("DELETE", {"preconditions": conditions}, _name(each))


def with_times(content: dict[str, Any], there: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a content with the times at which the server recorded its taints."""
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
