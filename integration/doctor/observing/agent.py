"""Read the node agent's status, and the kubelet's device plugins.

The kubelet's knowledge is read from its checkpoint, because its sockets are for plugins.

Source: integration.node.agent; kubelet pkg/kubelet/cm/devicemanager/checkpoint; kmsg in the
kernel's Documentation/ABI/testing/dev-kmsg.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from glob import glob
from typing import Any, Final

from hooks.config import Config
from hooks.node.kubelet import kubelet_root, read_checkpoint
from hooks.requests.kubelet_record import CHECKPOINT
from integration.agent_status import is_ready, status_path
from integration.containers.held_devices import LEDGER
from integration.containers.node_processes import host_processes, node_processes
from integration.doctor.facts import NodeAgent, Plugins
from integration.doctor.observing.kubernetes import KUBELETS
from integration.doctor.observing.running import read_file
from integration.doctor.places import Places
from integration.json_documents import parse_json
from integration.node.options import DRA_DRIVER
from shim.causes.agent import agent_runs

_UNITS: Final = ("/etc/systemd/system/*.wants", "/run/systemd/system/*.wants")
_UNIT: Final = "nvshim-node.service"
# NAMESPACE_POD_UID/CONTAINER of the DaemonSet in our manifests.
_LOGS: Final = "/var/log/pods"
_POD: Final = "*_node-agent-*_*/node-agent"
_KUBELET: Final = "/var/lib/kubelet"
_NVIDIAS: Final = "nvidia-device-plugin"
_VENDOR: Final = "nvidia.com/"
_DRIVERS: Final = ("gpu.nvidia.com", DRA_DRIVER)


def look_at_agent(places: Places) -> NodeAgent:
    """Return the status that the node agent reports."""
    config = places.config()
    pods = sorted(glob(_POD, root_dir=places.at(_LOGS)))
    age: float | None = None
    status: dict[str, Any] = {}
    path = status_path(config)
    if os.path.exists(path):
        age = max(0.0, time.time() - os.stat(path).st_mtime)
        status = parse_json(read_file(path))
    resources = status.get("resources", {})
    return NodeAgent(
        unit=any(glob(f"{places.at('/')}/{wants}/{_UNIT}") for wants in _UNITS),
        pod=f"{_LOGS}/{pods[0]}" if pods else "",
        runs=agent_runs(config.state),
        age=age,
        poll=float(status.get("poll", 0)),
        ready=is_ready(config),
        faults=tuple(str(fault) for fault in status.get("faults", ())),
        resources=tuple(
            (str(name), int(each["devices"]), int(each["healthy"]))
            for name, each in sorted(resources.items())
        ),
        kernel_log=_kernel_log(config),
        strategies=tuple(str(each) for each in status.get("device_list_strategies", ())),
        unheard=str(status.get("device_list_why", "")),
        missing=tuple(_missing(f"{config.state}/{LEDGER}")),
    )


def _missing(path: str) -> Iterator[str]:
    """Yield a line for each container that runs without a device, from the agent's ledger."""
    ledger = parse_json(read_file(path)) if os.path.exists(path) else {}
    for each in ledger.get("unheld", ()):
        if each.get("pid"):
            title = f"{each['namespace']}/{each['pod']}/{each['container']}"
            yield f"{title} (process {each['pid']}) runs without {each['device']}"


def _kernel_log(config: Config) -> str:
    path = f"{config.dev}/kmsg"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def look_at_plugins(places: Places) -> Plugins | None:
    """Return the device plugins that the kubelet knows."""
    kubelets = [p for p in host_processes(places.at("/proc")) if p.name in KUBELETS]
    if not kubelets:
        return None
    root = next((d for k in kubelets if (d := k.option("--root-dir"))), _KUBELET)
    directory = f"{root}/device-plugins"
    here = places.at(directory)
    names = sorted(os.listdir(here)) if os.path.isdir(here) else []
    return Plugins(
        directory=directory,
        registered=_registered(f"{places.at(root)}/{CHECKPOINT}"),
        sockets=tuple(n for n in names if n.endswith(".sock") and "nvidia" in n),
        nvidias=tuple(p.pid for p in node_processes(places.at("/proc")) if _is_nvidias(p.words)),
        dra=any(glob(f"{places.at(root)}/plugins_registry/*{name}*.sock") for name in _DRIVERS),
        unread=_unread(places, root),
    )


def _unread(places: Places, root: str) -> str:
    config = places.config()
    ours = kubelet_root(config)
    if os.path.realpath(ours) != os.path.realpath(places.at(root)):
        return f"the shim looks in {places.within(ours)}, but the kubelet's root is {root}"
    checkpoint = read_checkpoint(config)
    # The checkpoint does not exist until the first plugin registers.
    is_there = os.path.lexists(checkpoint.path)
    return f"{root}/{CHECKPOINT}: {checkpoint.fault}" if checkpoint.fault and is_there else ""


def _registered(path: str) -> tuple[tuple[str, int], ...] | None:
    if not os.path.exists(path):
        return None
    known = parse_json(read_file(path))["Data"]["RegisteredDevices"] or {}
    return tuple(
        (str(name), len(ids or ()))
        for name, ids in sorted(known.items())
        if str(name).startswith(_VENDOR)
    )


def _is_nvidias(words: list[str]) -> bool:
    return os.path.basename(words[0]) == _NVIDIAS if words else False
