"""Manage simulated nodes by name, and list the shipped scenarios."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

from api.errors import NvshimError
from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import SHIPPED, Scenario

STORE: Final = "/var/lib/containerd-shim-nvidia/simulated"
"""The directory of nodes that have a name instead of a path."""


def node_directory(name: str, store: str = STORE) -> str:
    """Return the directory of a node.

    Args:
        name: a path if it has a slash, otherwise a name.
    """
    return os.path.abspath(name if os.sep in name else os.path.join(store, name))


def stored_nodes(store: str = STORE) -> Iterator[SimulatedNode]:
    """Yield the named nodes.

    Args:
        store: the directory of named nodes; it need not exist.
    """
    try:
        names = sorted(os.listdir(store))
    except OSError:
        return
    for name in names:
        try:
            yield SimulatedNode.open(os.path.join(store, name))
        except NvshimError:
            continue  # not a node, or one that is being created


def remove_node(name: str, store: str = STORE) -> None:
    """Remove a node; after the last named node, remove the store as well.

    Args:
        name: see :func:`node_directory`.

    Raises:
        NodeNotFound: there is no such node.
    """
    node = SimulatedNode.open(node_directory(name, store))
    node.remove()
    if os.path.dirname(node.directory) == os.path.abspath(store):
        with contextlib.suppress(OSError):  # other nodes remain
            os.rmdir(store)


def shipped_scenarios() -> dict[str, str]:
    """Return the description of each shipped scenario, by name."""
    found = {}
    for file in sorted(os.listdir(SHIPPED)):
        if file.endswith(".toml"):
            with open(os.path.join(SHIPPED, file), encoding="utf-8") as opened:
                comment = [line[1:].strip() for line in opened if line.startswith("#")]
            found[file.removesuffix(".toml")] = " ".join(comment)
    return found


def summary_of(scenario: Scenario) -> str:
    """Return a short description of a scenario's hardware."""
    count: dict[str, int] = {}
    for gpu in scenario.gpus:
        mig = "" if gpu.mig is None else " with MIG"
        count[gpu.model.name + mig] = count.get(gpu.model.name + mig, 0) + 1
    words = [f"{number} of {name}" for name, number in count.items()]
    words += [other.entry for other in scenario.others]
    if scenario.platform:
        words.append(scenario.platform)
    return ", ".join(words) or "no GPU"


def describe(node: SimulatedNode) -> dict[str, Any]:
    """Return a node's hardware and paths.

    Returns:
        Plain values; the keys are a public interface.
    """
    scenario = node.scenario
    cuda = None
    if scenario.nvidia:
        cuda = ".".join(map(str, scenario.cuda_version(node.driver_version)))
    return {
        "directory": node.directory,
        "config": node.config_path,
        "driver": node.driver_version or None,
        "cuda": cuda,
        "platform": scenario.platform or None,
        "gpus": [
            {
                "index": gpu.index,
                "model": gpu.model.name,
                "uuid": gpu.uuid,
                "pci": gpu.pci,
                "minor": gpu.minor,
                "mig": None
                if gpu.mig is None
                else [
                    {"name": instance.device_name(compute), "uuid": compute.uuid}
                    for instance in gpu.mig
                    for compute in instance.compute
                ],
            }
            for gpu in scenario.gpus
        ],
        "others": [{"entry": other.entry, "pci": other.pci} for other in scenario.others],
    }
