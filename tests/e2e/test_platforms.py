"""Containers on a Jetson and in WSL2, both simulated, with NVIDIA's drivers for these."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.simulated import Scenario, SimulatedNode
from integration.simulated.platforms import STORE
from tests.harness.runtime import Runtime
from tools.containerd import Completed
from tools.images import GLIBC

OWN = f"/usr/lib/{os.uname().machine}-linux-gnu/nvidia"
# A simulated node answers ENXIO; a node that may not be opened answers EPERM.
NOBODY = {"ENXIO", "ENODEV"}


@pytest.fixture(params=["tegra", "wsl"])
def platform(request: pytest.FixtureRequest, workshop: str, shim_config: str) -> Iterator[str]:
    """Configure the shim for a node of the platform."""
    name: str = request.param
    before = Path(shim_config).read_text()
    node = SimulatedNode.create(f"{workshop}/{name}", Scenario.parse({"platform": name}))
    Path(shim_config).write_text(Path(node.config_path).read_text())
    yield name
    Path(shim_config).write_text(before)
    node.remove()


@pytest.fixture
def gpus(ours: Runtime, platform: str) -> Runtime:
    return ours


def run(runtime: Runtime, *command: str, **asked: str) -> Completed:
    flags = [word for name, value in asked.items() for word in ("--env", f"{name}={value}")]
    return runtime.run(*command, image=GLIBC, flags=flags)


def test_container_sees_the_platforms_gpu_and_its_driver(gpus: Runtime, platform: str) -> None:
    {"tegra": _see_tegra, "wsl": _see_wsl}[platform](gpus)
    refused = run(gpus, "true", NVIDIA_VISIBLE_DEVICES="0:0")
    assert "NVSHIM-E0663" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    other = run(gpus, "true", NVIDIA_VISIBLE_DEVICES="3")
    assert "NVSHIM-E0202" in other.stderr
    assert len(other.stderr.splitlines()) == 1


def _see_tegra(gpus: Runtime) -> None:
    names = ["libcuda.so.1", "libcuda.so", "libnvidia-ptxjitcompiler.so.1"]
    script = (
        f"probe dlopen {' '.join(names)}; probe open /dev/nvmap /dev/nvhost-gpu; "
        f"readlink {OWN}/libcuda.so; ls /dev/nvgpu/igpu0 /lib/firmware/tegra23x; "
        "ls -d /dev/nvhost-vic /usr/local/cuda; ldconfig && ldconfig -p | grep libcuda.so.1; "
        "cat /etc/nv_tegra_release"
    )
    done = run(gpus, "sh", "-c", script, NVIDIA_VISIBLE_DEVICES="all")
    loaded = dict(line.split(maxsplit=1) for line in done.lines[:3])
    assert set(loaded) == set(names), done.stdout + done.stderr
    assert {os.path.dirname(path) for path in loaded.values()} == {OWN}
    assert {line.split()[1] for line in done.lines[3:5]} <= NOBODY
    assert done.lines[5] == "libcuda.so.1"
    assert {"as", "ctrl", "nvhost_nvdec050.fw"} <= set(done.lines)
    assert "/dev/nvhost-vic" not in done.lines, "it is not listed"
    assert "/usr/local/cuda" not in done.lines, "its list is not for every container"
    assert any(OWN in line for line in done.lines if "libcuda.so.1 " in line), "in the cache"
    assert done.lines[-1].startswith("# R36")
    every = run(
        gpus, "readlink", "-f", "/usr/local/cuda/version.json",
        NVIDIA_VISIBLE_DEVICES="0", NVIDIA_REQUIRE_JETPACK="csv-mounts=all",
    )  # fmt: skip
    assert every.stdout == "/usr/local/cuda-12.6/version.json\n"
    none = run(gpus, "sh", "-c", "ls /dev", NVIDIA_VISIBLE_DEVICES="none")
    assert not [name for name in none.lines if name.startswith("nv")]


def _see_wsl(gpus: Runtime) -> None:
    names = ["libcuda.so.1", "libnvidia-ml.so.1", "libdxcore.so", "libnvdxgdmal.so.1"]
    script = f"probe dlopen {' '.join(names)}; probe open /dev/dxg; nvidia-smi"
    done = run(
        gpus, "sh", "-c", script, NVIDIA_VISIBLE_DEVICES="all", NVIDIA_DRIVER_CAPABILITIES="all"
    )
    loaded = dict(line.split(maxsplit=1) for line in done.lines[:4])
    assert set(loaded) == set(names), done.stdout + done.stderr
    where = {name: os.path.dirname(path) for name, path in loaded.items()}
    assert where.pop("libdxcore.so") == "/usr/lib/wsl/lib"
    assert set(where.values()) == {f"/{STORE}"}
    assert done.lines[4].split()[1] in NOBODY
    assert done.lines[5] == "nvidia-smi of Windows"
    bare = run(
        gpus, "sh", "-c", f"ls /{STORE}; ls /dev/dxg",
        NVIDIA_VISIBLE_DEVICES="0", NVIDIA_DRIVER_CAPABILITIES="utility",
    )  # fmt: skip
    assert "libnvidia-ml.so.1" in bare.lines
    assert "libcuda.so.1.1" not in bare.lines
    assert "/dev/dxg" in bare.lines
