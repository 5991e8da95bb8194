"""The engine on simulated nodes with different driver roots, and on nodes that change."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hooks import engine
from hooks.config import Config, load_config
from hooks.node.driver import find_driver
from hooks.node.fingerprint import Fingerprint
from hooks.node.inventory import Inventory, load_inventory, take_inventory
from hooks.node.manifests import library_paths
from integration.simulated import Scenario, SimulatedNode
from integration.simulated.layouts import Layout

MakeNode = Callable[..., SimulatedNode]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make device nodes")

WHERE = {
    Layout.CONTAINER: ("distribution", "/run/nvidia/driver/usr/lib/"),
    Layout.GOOGLE: ("google", "/usr/local/nvidia/lib64/"),
    Layout.NIXOS: ("nixos", "/nix/store/"),
    Layout.TALOS: ("talos", "/usr/local/glibc/usr/lib/"),
    Layout.BOTTLEROCKET: ("bottlerocket", "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/"),
    Layout.LOADER: ("loader", "/srv/vendor/nvidia/lib/"),
    Layout.INSTALLER: ("distribution", "/usr/lib/"),
    Layout.FEDORA: ("distribution", "/usr/lib64/"),
    Layout.SUSE: ("distribution", "/usr/lib64/"),
    Layout.DEBIAN: ("distribution", "/usr/lib/"),
}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeNode]:
    nodes: list[SimulatedNode] = []

    def make(scenario: Scenario, layout: Layout = Layout.INSTALLER) -> SimulatedNode:
        node = SimulatedNode.create(str(tmp_path / "node"), scenario, layout=layout)
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.remove()


def ask(config: Config) -> bytes:
    """Query the node's own NVML."""
    command = engine.probe_command(config)
    return subprocess.run(command, env={}, capture_output=True, check=False).stdout


def inventory(config: Config) -> Inventory:
    """Load the inventory as the shim does: from the cache, or from the node."""
    return load_inventory(config) or take_inventory(config, ask(config))


def names(found: Inventory) -> set[str]:
    driver = found.driver
    return {f.name for f in driver.libraries} | {f.name for f in driver.files}


@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
def test_whole_driver_is_found_in_every_layout(make: MakeNode, layout: Layout) -> None:
    node: SimulatedNode = make(Scenario.load("two"), layout)
    config = load_config(node.config_path)
    found = inventory(config)
    name, below = WHERE[layout]
    assert (found.driver.layout, found.nvml_failure) == (name, "")
    assert [gpu.index for gpu in found.gpus] == [0, 1]
    sources = [file.source for file in found.driver.libraries]
    sources += [file.source for file in found.driver.files]
    assert all(os.path.isfile(source) and not os.path.islink(source) for source in sources)
    libcuda = next(file for file in found.driver.libraries if file.soname == "libcuda.so.1")
    assert libcuda.source.startswith(node.driver_root + below)
    if layout.is_hosts:
        assert "found by looking" in found.driver.why
    # In every layout the driver has all the files of the installer's.
    reference = {
        "nvidia-smi", "10_nvidia.json",
        f"libnvidia-ml.so.{node.driver_version}", f"libnvoptix.so.{node.driver_version}",
        f"libvdpau_nvidia.so.{node.driver_version}", "gsp_ga10x.bin", "nvoptix.bin",
    }  # fmt: skip
    assert reference <= names(found)
    assert load_inventory(config) == found


MANIFESTS = {
    Layout.FEDORA: ["nvidia_icd.x86_64.json"],
    Layout.SUSE: ["nvidia_icd.i686.json", "nvidia_icd.x86_64.json"],
    Layout.NIXOS: [
        "10_nvidia.json", "10_nvidia_wayland.json", "15_nvidia_gbm.json", "nvidia.icd",
        "nvidia_icd.x86_64.json", "nvidia_layers.json",
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", MANIFESTS, ids=lambda layout: layout.value)
def test_manifests_name_libraries_as_the_packages_have_it(make: MakeNode, layout: Layout) -> None:
    node: SimulatedNode = make(Scenario.load("one"), layout)
    driver = find_driver(Fingerprint("/"), load_config(node.config_path))
    changed = [file for file in driver.files if file.manifest]
    assert sorted(file.name for file in changed) == MANIFESTS[layout]
    for file in changed:
        # Each path resolves to a library below the driver's root, which has no 32-bit libraries.
        (path,) = library_paths(file.name, file.manifest)
        assert bool(Fingerprint(node.driver_root).file(path)) is ("i686" not in file.name)


def test_program_of_nixos_is_the_one_that_nobody_patched(make: MakeNode) -> None:
    node: SimulatedNode = make(Scenario.load("one"), Layout.NIXOS)
    driver = find_driver(Fingerprint("/"), load_config(node.config_path))
    smi = next(file for file in driver.files if file.name == "nvidia-smi")
    assert "/origBin/" in smi.source
