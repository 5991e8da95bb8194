"""What tests against hostile images share: real runtimes, a node with GPUs, a canary."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.containerds import nothing_left
from tests.harness.hostile import Ground
from tests.harness.low_level import crun_for_this_host
from tests.harness.releases import UNSTABLE
from tools.parts import Parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.containerd import PrivateContainerd

SECONDS: Final = float(os.environ.get("NVSHIM_TEST_HOSTILE_SECONDS", "5"))
"""How long races are run."""
THOROUGH: Final = SECONDS > 30
"""Whether all ways are tried, and the newest runc and crun that Debian has: make test-hostile."""


@pytest.fixture(scope="module")
def gpu_node(workshop: str, shim_config: str) -> Iterator[SimulatedNode]:
    """A node with two GPUs, which the shim's configuration names."""
    with open(shim_config, encoding="utf-8") as file:
        before = file.read()
    with SimulatedNode.create(f"{workshop}/hostile-node", Scenario.load("two")) as node:
        with open(node.config_path, encoding="utf-8") as file:
            ours = file.read()
        with open(shim_config, "w", encoding="utf-8") as file:
            file.write(ours)
        yield node
        with open(shim_config, "w", encoding="utf-8") as file:
            file.write(before)


@pytest.fixture(scope="module")
def low_levels(parts: Parts, workshop: str) -> dict[str, str]:
    """The low-level runtimes: those installed, and newer ones."""
    found = {}
    for release in (parts, Parts.of_release(UNSTABLE if THOROUGH else "trixie", say=print)):
        directory = f"{workshop}/low-level-{release.name}"
        os.makedirs(directory, exist_ok=True)
        found[f"runc {release.name}"] = release.runc
        found[f"crun {release.name}"] = crun_for_this_host(directory, release.crun)
    return found


@pytest.fixture(scope="module")
def ground(
    session_containerd: PrivateContainerd, gpu_node: SimulatedNode, workshop: str
) -> Iterator[Ground]:
    """Where images become containers; at the end nothing may be left of any."""
    directory = f"{workshop}/ground"
    os.makedirs(directory, exist_ok=True)
    with nothing_left(session_containerd), Ground(session_containerd, gpu_node, directory) as made:
        yield made
