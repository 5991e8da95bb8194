"""Fixtures for tests with hostile images: real runtimes and a node with GPUs."""

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
"""Seconds for which each race runs."""
THOROUGH: Final = SECONDS > 30
"""Whether to test every way out, with Debian's newest runc and crun (make test-hostile)."""


@pytest.fixture(scope="module")
def gpu_node(workshop: str, shim_config: str) -> Iterator[SimulatedNode]:
    """Yield a node with two GPUs, and point the shim's configuration to it."""
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
    """Return the paths of the installed low-level runtimes and of newer ones."""
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
    """Yield the place that runs images as containers; fail if one leaves anything behind."""
    directory = f"{workshop}/ground"
    os.makedirs(directory, exist_ok=True)
    with nothing_left(session_containerd), Ground(session_containerd, gpu_node, directory) as made:
        yield made
