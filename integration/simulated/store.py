"""Where simulated nodes are kept that have a name, and the scenarios that are shipped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

from api.errors import NvshimError
from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import SHIPPED, Scenario

STORE: Final = "/var/lib/containerd-shim-nvidia/simulated"
"""Where a node is made that is given a name and no path."""


def node_directory(name: str, store: str = STORE) -> str:
    """The directory of a node.

    Args:
        name: a path, if there is a slash in it; otherwise a name.
    """
    return os.path.abspath(name if os.sep in name else os.path.join(store, name))


def stored_nodes(store: str = STORE) -> Iterator[SimulatedNode]:
    """The nodes that have names.

    Args:
        shelf: where they are; it need not be there.
    """
    try:
        names = sorted(os.listdir(store))
    except OSError:
        return
    for name in names:
        try:
            yield SimulatedNode.open(os.path.join(store, name))
        except NvshimError:
            continue  # something else, or a node that is being made


def remove_node(name: str, store: str = STORE) -> None:
    """Remove a node, and where nodes with names are if it was the last.

    Args:
        name: as :func:`place_of` takes it.

    Raises:
        NodeNotFound: there is none.
    """
    node = SimulatedNode.open(node_directory(name, store))
    node.remove()
    if os.path.dirname(node.directory) == os.path.abspath(store):
        with contextlib.suppress(OSError):  # there are others
            os.rmdir(store)


def shipped_scenarios() -> dict[str, str]:
    """What each shipped scenario is, by its name."""
    found = {}
    for file in sorted(os.listdir(SHIPPED)):
        if file.endswith(".toml"):
            with open(os.path.join(SHIPPED, file), encoding="utf-8") as opened:
                comment = [line[1:].strip() for line in opened if line.startswith("#")]
            found[file.removesuffix(".toml")] = " ".join(comment)
    return found


def summary_of(scenario: Scenario) -> str:
    """What a scenario has, in a few words."""
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
    """What a node has, and how to use it.

    Returns:
        Plain values; the keys are an interface.
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
