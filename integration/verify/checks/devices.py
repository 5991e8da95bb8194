"""Checks of the device plugin, from the kubelet's point of view."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from hooks.config import Config
from integration.agent_status import status_path
from integration.files import read_file
from integration.json_documents import parse_json
from integration.node.device_health.report import read_health
from integration.verify.checks.containers import check_visibility, device_numbers, report_from
from integration.verify.node import Node
from integration.verify.outcomes import CheckFailed, CheckSkipped
from integration.verify.pods import Pod
from integration.verify.visibility import ExpectedDevice

_SHARE: Final = "::"


def plugin_is_registered(node: Node) -> str:
    """Check that a plugin for this node's GPUs is registered with the kubelet."""
    known = node.kubelet.allocatable()
    if not any(known.values()):
        raise CheckFailed(
            "a device plugin for nvidia.com/… is registered with the kubelet and has devices",
            seen=f"the kubelet has {', '.join(known) + ' without devices' if known else 'none'}"
            + _agent_fault(node.config),
            do="see the log of nvshim node (`journalctl -u nvshim-node`, `kubectl logs`), or of "
            "the device plugin that should serve this node",
        )
    counts = (f"{len(ids)} of {name}" for name, ids in sorted(known.items()))
    return f"the kubelet has {', '.join(counts)}"


def devices_are_allocatable(node: Node) -> str:
    """Check that each GPU, or its MIG devices, can be allocated: by the kubelet if one runs."""
    who = "the kubelet" if node.kubelet.is_there else "the shim"
    if node.kubelet.is_there:
        known = _uuids(frozenset().union(*node.kubelet.allocatable().values()))
    else:
        known = _uuids(device.request for device in node.devices)
    wanted = {gpu: {gpu.uuid.lower()} for gpu in node.inventory.gpus if not gpu.excluded}
    for gpu in [gpu for gpu in wanted if gpu.mig]:
        # A GPU in MIG mode without MIG devices has nothing to allocate.
        wanted[gpu] |= _mig_of(node, gpu.index)
        if len(wanted[gpu]) == 1 and not gpu.lost:
            del wanted[gpu]
    lacking = [gpu for gpu, uuids in wanted.items() if not known & uuids]
    if lacking:
        health = read_health(node.config) or {}
        faults = node.inventory.nodes.faults
        seen = []
        for gpu in lacking:
            why = _health_reason(health, gpu.uuid) or gpu.lost or faults.get(gpu.path, "")
            seen.append(f"GPU {gpu.index}{f': {why}' if why else ''}")
        raise CheckFailed(
            f"{who} can allocate each GPU of the node",
            seen=f"it cannot allocate {'; '.join(seen)}",
            do="run `nvshim list --health` for what each GPU needs, and `nvshim doctor`",
        )
    return f"{who} can allocate each of {len(wanted)} GPUs"


def allocation_works(node: Node) -> str:
    """Check that a container created from the plugin's answer sees that device."""
    resource, device, wanted = _free_device(node)
    answer = node.kubelet.answer_for(resource, device)

    def work(pod: Pod) -> None:
        ran = pod.run("look", *device_numbers(node), answer=answer, trusted=True)
        check_visibility(
            node, wanted, report_from(ran), f"a container with the plugin's answer for {resource}"
        )

    node.pods.attempt(work)
    return f"a container got {wanted.name} from the answer of the plugin for {resource}"


def _free_device(node: Node) -> tuple[str, str, ExpectedDevice]:
    """Return a device that no pod holds: its resource, its id and the device itself."""
    allocated = node.kubelet.allocated()
    known = {device.request.lower(): device for device in node.devices}
    for resource, ids in sorted(node.kubelet.allocatable().items()):
        for each in sorted(ids - allocated):
            wanted = known.get(each.partition(_SHARE)[0].lower())
            if wanted is not None:
                return resource, each, wanted
    raise CheckSkipped("pods hold all devices of the plugin, or its device ids are not UUIDs")


def _uuids(ids: Iterable[str]) -> frozenset[str]:
    return frozenset(each.partition(_SHARE)[0].lower() for each in ids)


def _mig_of(node: Node, index: int) -> set[str]:
    return {each.uuid.lower() for each in node.inventory.mig_devices if each.gpu == index}


def _health_reason(known: Any, uuid: str) -> str:
    row = known.get(uuid)
    if row is None or row["state"] == "healthy":
        return ""
    return f"{row['state']}, {row['reason']}" if row["reason"] else str(row["state"])


def _agent_fault(config: Config) -> str:
    """Return the first fault that the node agent reports, if an agent runs here."""
    try:
        faults = parse_json(read_file(status_path(config)) or b"{}").get("faults") or []
    except (OSError, ValueError, AttributeError):
        return ""
    return f"; the agent reports: {faults[0]}" if faults else ""
