"""Checks of the device plugin, as the kubelet has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from hooks.config import Config
from integration.agent_status import status_path
from integration.files import read_file
from integration.json_documents import parse_json
from integration.node.device_health.report import read_health
from integration.verify.checks.containers import check_sight, numbers_of, report_of
from integration.verify.node import Node
from integration.verify.outcomes import NotAsExpected, NotMade
from integration.verify.visibility import Wanted

if TYPE_CHECKING:
    from integration.verify.pods import Pod

_SHARE: Final = "::"


def plugin_is_registered(node: Node) -> str:
    """The kubelet knows a plugin for this node's GPUs."""
    known = node.kubelet.allocatable()
    if not any(known.values()):
        raise NotAsExpected(
            "the kubelet has devices of a plugin for nvidia.com/…",
            seen=f"it has {'none' if not known else ', '.join(known) + ' without a device'}"
            + _agents_word(node.config),
            do="see the log of nvshim node (`journalctl -u nvshim-node`, `kubectl logs`), or of "
            "the plugin that is to serve this node",
        )
    counts = (f"{len(ids)} of {name}" for name, ids in sorted(known.items()))
    return f"the kubelet has {', '.join(counts)}"


def devices_are_given(node: Node) -> str:
    """Each GPU can be given, itself or as its MIG devices: by the kubelet where there is one."""
    who = "the kubelet" if node.kubelet.is_there else "the shim"
    if node.kubelet.is_there:
        known = _uuids(frozenset().union(*node.kubelet.allocatable().values()))
    else:
        known = _uuids(device.request for device in node.devices)
    wanted = {gpu: {gpu.uuid.lower()} for gpu in node.inventory.gpus if not gpu.excluded}
    for gpu in [gpu for gpu in wanted if gpu.mig]:
        # In MIG mode without a MIG device there is nothing to give.
        wanted[gpu] |= _mig_of(node, gpu.index)
        if len(wanted[gpu]) == 1 and not gpu.lost:
            del wanted[gpu]
    lacking = [gpu for gpu, uuids in wanted.items() if not known & uuids]
    if lacking:
        thought = read_health(node.config) or {}
        faults = node.inventory.nodes.faults
        seen = []
        for gpu in lacking:
            why = _thought(thought, gpu.uuid) or gpu.lost or faults.get(gpu.path, "")
            seen.append(f"GPU {gpu.index}{f': {why}' if why else ''}")
        raise NotAsExpected(
            f"{who} can give each GPU of the node",
            seen=f"it cannot give {'; '.join(seen)}",
            do="see `nvshim list --health` for what each needs, and `nvshim doctor`",
        )
    return f"{who} can give each of {len(wanted)} GPUs"


def answer_arrives(node: Node) -> str:
    """What the plugin answers for a device gives a container that device."""
    resource, device, wanted = _free(node)
    answer = node.kubelet.answer_for(resource, device)

    def work(pod: Pod) -> None:
        ran = pod.run("look", *numbers_of(node), answer=answer, trusted=True)
        check_sight(node, wanted, report_of(ran), f"a container with the answer of {resource}")

    node.pods.attempt(work)
    return f"a container got {wanted.name} by what the plugin of {resource} answers"


def _free(node: Node) -> tuple[str, str, Wanted]:
    """A device that no pod has: its resource, its id there, and what it is."""
    given = node.kubelet.given()
    known = {device.request.lower(): device for device in node.devices}
    for resource, ids in sorted(node.kubelet.allocatable().items()):
        for each in sorted(ids - given):
            wanted = known.get(each.partition(_SHARE)[0].lower())
            if wanted is not None:
                return resource, each, wanted
    raise NotMade("pods have all devices of the plugin, or it calls them by other names than UUIDs")


def _uuids(ids: Iterable[str]) -> frozenset[str]:
    return frozenset(each.partition(_SHARE)[0].lower() for each in ids)


def _mig_of(node: Node, index: int) -> set[str]:
    return {each.uuid.lower() for each in node.inventory.mig_devices if each.gpu == index}


def _thought(known: Any, uuid: str) -> str:
    row = known.get(uuid)
    if row is None or row["state"] == "healthy":
        return ""
    return f"{row['state']}, {row['reason']}" if row["reason"] else str(row["state"])


def _agents_word(config: Config) -> str:
    """What the node agent says is wrong, if one runs here."""
    try:
        faults = parse_json(read_file(status_path(config)) or b"{}").get("faults") or []
    except (OSError, ValueError, AttributeError):
        return ""
    return f"; the agent says: {faults[0]}" if faults else ""
