"""The CDI spec that we generate works with containerd's own CDI and shim, without ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from integration.cli.app import main
from integration.simulated import Scenario, SimulatedNode
from tests.conftest import LOW_LEVEL, PARTS
from tests.harness.pods import IDLE, Pods, pods_of
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.runtime import STOCK
from tools.cri.plugin import CriPlugin
from tools.images import GLIBC, PAUSE, glibc, pause
from tools.parts import INSTALLED, Parts

# Debian 13 has containerd 1.7, sid has 2.x.
RELEASES: Final = of_releases("trixie", UNSTABLE)
LOADS: Final = "probe dlopen libcuda.so.1 libcuda.so libnvidia-ml.so.1"
LISTED: Final = re.compile(r"\(UUID: (GPU|MIG)-[0-9a-f-]+\)")

pytestmark = pytest.mark.skipif(
    (PARTS, LOW_LEVEL) != (INSTALLED, "runc"), reason="the test picks its own parts"
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    """Return a node with two GPUs in MIG mode, and two that are not."""
    with SimulatedNode.create(str(tmp_path / "node"), Scenario.load("mig")) as node:
        yield node


@pytest.mark.parametrize("release", RELEASES)
def test_generated_spec_gives_gpus_without_our_shim_and_without_hooks(
    release: str, node: SimulatedNode, tmp_path: Path, shim_directory: str, shim_config: str
) -> None:
    path = tmp_path / "cdi" / "nvidia.yaml"
    assert main(["cdi", "generate", "--config", node.config_path, "--to", str(path)]) == 0
    assert main(["cdi", "validate", "--config", node.config_path, str(path)]) == 0
    assert "hook" not in path.read_text()
    plugin = CriPlugin(
        {"runc": {"runtime_type": STOCK}}, sandbox_image=PAUSE, cdi_directories=(str(path.parent),)
    )
    where = {"shim_directory": shim_directory, "shim_config": shim_config}
    with pods_of(plugin, glibc(), pause(), parts=Parts.of_release(release), **where) as pods:
        look_into_containers(pods, node)


def look_into_containers(pods: Pods, node: SimulatedNode) -> None:
    pod = pods.run()
    for device, kinds in (("3", ["GPU"]), ("0:0", ["GPU", "MIG"])):
        named: dict[str, Any] = {"annotations": {"cdi.k8s.io/test": f"nvidia.com/gpu={device}"}}
        container = pod.start(*IDLE, image=GLIBC, **named)
        script = f"{LOADS} && nvidia-smi -L && env; probe open /dev/nvidia1 /dev/nvidiactl"
        shown = container.exec("sh", "-c", script)
        assert LISTED.findall(shown.stdout) == kinds, shown.stdout + shown.stderr
        assert (node.scenario.gpus[3].uuid in shown.stdout) == (kinds == ["GPU"])
        lines = shown.stdout.splitlines()
        assert "NVIDIA_VISIBLE_DEVICES=void" in lines
        assert lines[-2:] == ["/dev/nvidia1 ENOENT", "/dev/nvidiactl ENXIO"]
