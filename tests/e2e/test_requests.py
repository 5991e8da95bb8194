"""A GPU requested in each form and in each place: the container sees that GPU and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import pytest

from integration.simulated import SimulatedNode
from tests.harness.runtime import Runtime
from tools.images import GLIBC

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"
LISTED: Final = re.compile(r"\(UUID: (GPU-[0-9a-f-]+)\)")
ANNOTATION: Final = "cdi.k8s.io/nvidia-device-plugin_1"


@pytest.fixture
def gpus(ours: Runtime, two_gpus: SimulatedNode, configure: Callable[..., None]) -> Runtime:
    """Return the runtime on that node, with a swarm resource variable configured."""
    configure('[requests]\nswarm-resources = ["DOCKER_RESOURCE_GPU"]\n', node=two_gpus)
    return ours


def env(value: str, name: str = DEVICES) -> list[str]:
    return ["--env", f"{name}={value}"]


def mount(name: str) -> list[str]:
    below = f"/var/run/nvidia-container-devices/{name}"
    return ["--mount", f"type=bind,src=/dev/null,dst={below},options=rbind:ro"]


def listed(runtime: Runtime, flags: list[str]) -> list[str]:
    done = runtime.run("nvidia-smi", "-L", image=GLIBC, flags=flags)
    assert done.code == 0, done.stdout + done.stderr
    return LISTED.findall(done.stdout)


def test_each_form_names_the_same_gpu(gpus: Runtime, two_gpus: SimulatedNode) -> None:
    """tests/unit/hooks/requests/test_naming.py tests how each form is recognized."""
    gpu = two_gpus.scenario.gpus[1]
    for name in (f"gpu-{gpu.uuid[4:10].upper()}", gpu.pci, "runtime.nvidia.com/gpu=gpu1"):
        assert listed(gpus, env(name)) == [gpu.uuid], name


def test_each_place_names_a_gpu_and_the_first_holds(gpus: Runtime, two_gpus: SimulatedNode) -> None:
    first, second = (gpu.uuid for gpu in two_gpus.scenario.gpus)
    both = "nvidia.com/gpu=0,1"
    annotated = ["--annotation", f"{ANNOTATION}={both}"]
    assert listed(gpus, [*env("void"), *annotated]) == [first, second]
    assert listed(gpus, [*env("all"), *mount("1")]) == [second]
    assert listed(gpus, [*env("1", "DOCKER_RESOURCE_GPU"), *env("0")]) == [second]
