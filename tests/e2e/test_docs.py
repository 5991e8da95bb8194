"""Every command in the documentation does what the page says, in the page's order.

The test types a page's commands into one shell on a separate machine (:mod:`tests.harness.world`).
It does not run ``make``, but checks that its targets exist. :mod:`tests.harness.pages` describes
how a page marks blocks that are not run, or that must fail.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from typing import Final

import pytest

from integration.simulated import SimulatedNode
from integration.tree import Tree
from tests.harness.launcher import REPOSITORY
from tests.harness.pages import blocks, pages
from tests.harness.world import World, matches, write_image
from tools.dist.archive import archive_name, write_tarball

RUN: Final = [name for name in pages() if any(not block.reason for block in blocks(name))]

# Pages about a node where the project is installed.
INSTALLED: Final = {
    "README.md",
    "docs/engines.md",
    "docs/migration.md",
    "docs/operations.md",
    "docs/requests.md",
}

CONFIG: Final = "/etc/containerd/config.toml"

# The configuration that NVIDIA's toolkit has written on a node before its migration. Without a
# handler runc, the default, containerd 1's CRI plugin would not start there.
NVIDIAS: Final = """
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
          runtime_type = "io.containerd.runc.v2"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
          runtime_type = "io.containerd.runc.v2"
          [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
            BinaryName = "/usr/bin/nvidia-container-runtime"
"""


@pytest.fixture(scope="module")
def image(workshop: str) -> str:
    return write_image(os.path.join(workshop, "world-image.tar"))


@pytest.fixture(scope="module")
def tarball(built_tree: Tree, workshop: str) -> str:
    path = os.path.join(workshop, archive_name(built_tree))
    write_tarball(built_tree, path, level=1)
    return path


@pytest.fixture
def world(two_gpus: SimulatedNode, image: str, tarball: str) -> Iterator[World]:
    with World(two_gpus, image, tarball) as world:
        yield world


@pytest.mark.parametrize("page", RUN)
def test_commands_of(page: str, world: World, built_tree: Tree) -> None:
    if page in INSTALLED:
        done = world.run(f"{built_tree.path}/bin/nvshim install --no-self-test")
        assert done.status == 0, done.output
    if page == "docs/migration.md":
        assert (
            world.run(f"cat >>{CONFIG} <<'END'\n{NVIDIAS}END\ncp {CONFIG} /root/before").status == 0
        )
    for block in blocks(page):
        if block.reason:
            continue
        for command in block.commands:
            words = shlex.split(command.text, comments=True)
            if words[0] == "make":
                assert _made_of(words[1:]) <= _makefile(), command.text
                continue
            ended = world.run(command.text)
            wanted = block.status if command is block.commands[-1] else 0
            said = f"{block}: {command.text}\n{ended.output}"
            assert ended.status == wanted, f"{ended.status} is the status of {said}"
            missing = matches(command, ended.output)
            assert missing == [], f"not printed: {missing} by {said}"
    if page == "docs/migration.md":
        assert world.run(f"cmp {CONFIG} /root/before").status == 0, "to the byte"


def _made_of(words: list[str]) -> set[str]:
    """Return the targets that a command names, and the variables that it sets, as ``NAME=``."""
    return {f"{name}{sign}" for name, sign, _ in (word.partition("=") for word in words)}


def _makefile() -> set[str]:
    with open(os.path.join(REPOSITORY, "Makefile"), encoding="utf-8") as file:
        text = file.read()
    targets = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
    return {*targets, *(f"{name}=" for name in re.findall(r"\$\((?:or \$\()?([A-Z]+)\b", text))}
