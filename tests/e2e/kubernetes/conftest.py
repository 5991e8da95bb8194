"""A cluster node in private namespaces: its images, simulated GPUs, and a kubelet's part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from integration.tree import Tree
from tests.harness.kubelet import Kubelet
from tests.harness.world import World, write_image
from tools.images import PAUSE, glibc, pause, write_archive
from tools.node_image import node_image

CONFIG: Final = "/etc/containerd/config.toml"

# An administrator's file; the last lines help machines without some capabilities.
_CONTAINERD: Final = f"""\
version = 2  # of this file
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
"""


@pytest.fixture(scope="module")
def gpus(workshop: str, request: pytest.FixtureRequest) -> Iterator[SimulatedNode]:
    where = f"{workshop}/{request.module.__name__.rpartition('.')[2]}-node"
    with SimulatedNode.create(where, Scenario.load("two")) as node:
        yield node


@pytest.fixture(scope="session")
def images(workshop: str, built_tree: Tree) -> str:
    ours = node_image(built_tree.path)
    return write_archive(os.path.join(workshop, "kubernetes.tar"), [ours, pause(), glibc()])


@pytest.fixture
def kubelet(gpus: SimulatedNode, images: str, workshop: str) -> Iterator[Kubelet]:
    image = write_image(os.path.join(workshop, "kubernetes-world.tar"))
    with World(gpus, image) as world:
        world.do(f"cat >{CONFIG} <<'end'\n{_CONTAINERD}end")
        # As systemd sets it: mounts made later on the node propagate into containers.
        world.do("mount --make-rshared /")
        world.do(f"systemctl restart containerd && ctr -n k8s.io images import {images}")
        with Kubelet(world) as kubelet:
            yield kubelet
    kubelet.remove_cgroups()
