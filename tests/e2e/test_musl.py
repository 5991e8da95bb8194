"""Images with musl, whose loader knows neither ld.so.cache nor sonames."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from integration.simulated import SimulatedNode
from tests.harness.musl import MUSL, PATHS, musl
from tests.harness.runtime import Runtime
from tests.harness.sealed import sealed
from tools.containerd import PrivateContainerd
from tools.images import File, Image, write_archive

GPUS: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=utility")


@pytest.fixture(scope="module")
def image(session_containerd: PrivateContainerd, workshop: str) -> Iterator[Image]:
    made = musl()
    archive = write_archive(os.path.join(workshop, "musl.tar"), [made])
    session_containerd.ctr("images", "import", archive)
    os.unlink(archive)
    yield made
    session_containerd.ctr("images", "rm", "--sync", MUSL)


def test_nvml_is_found(gpus: Runtime, two_gpus: SimulatedNode, image: Image) -> None:
    done = gpus.run("musl", image=image.name, flags=GPUS)
    assert done.lines == [gpu.uuid for gpu in two_gpus.scenario.gpus], done.stderr
    assert gpus.run("musl", image=image.name).code == 3


@pytest.mark.parametrize("paths", [None, b"/opt/lib:/lib\n"])
def test_nvml_is_found_in_a_root_that_takes_no_writes(
    gpus: Runtime, two_gpus: SimulatedNode, image: Image, workshop: str, paths: bytes | None
) -> None:
    """By LD_LIBRARY_PATH, or where the image has a file of paths by another that covers it."""
    tree = {**image.tree, **({PATHS: File(paths)} if paths is not None else {})}
    script = f"musl; echo ${{LD_LIBRARY_PATH:+set}}; tail -n 1 /{PATHS} 2>/dev/null"
    with sealed(tree, f"{workshop}/sealed-musl") as root:
        done = gpus.run("sh", "-c", script, image=root, flags=(*GPUS, "--rootfs"))
    uuids = [gpu.uuid for gpu in two_gpus.scenario.gpus]
    assert done.lines[:2] == uuids, done.stderr
    if paths is None:
        assert done.lines[2:] == ["set"]
    else:
        assert done.lines[2] == ""
        assert done.lines[3].startswith("/run/")
