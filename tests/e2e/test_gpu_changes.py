"""Nodes whose driver is elsewhere, changes, or is older than an image's libcuda."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from integration.simulated.layouts import Layout
from integration.simulated.library import build_stand_in
from tests.harness import api
from tests.harness.libcuda import build_libcuda, note
from tests.harness.loaders import LOADERS, LOOK, NEWER_LAYERS, loaded, loaders
from tests.harness.nvshim import nvshim
from tests.harness.runtime import Runtime
from tests.harness.sealed import sealed
from tools.containerd import Completed, PrivateContainerd
from tools.images import GLIBC, File, Link, glibc, write_archive
from tools.nodes import changed_node

LISTED: Final = re.compile(r"\(UUID: ((?:GPU|MIG)-[0-9a-f-]+)\)")
COMPAT_IMAGE: Final = "nvshim.local/compat:latest"
COMPAT: Final = "/usr/local/cuda-13.1/compat"
NEWER: Final = "550.54.14"
FOUND_BY_MANIFESTS: Final = {
    "libnvidia-opencl", "libGLX_nvidia", "libEGL_nvidia", "libnvidia-egl-wayland",
}  # fmt: skip
ALL: Final = (
    "--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=all",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _image(
    session_containerd: PrivateContainerd,
    workshop: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Create an image like NVIDIA's, with a newer libcuda, and one with graphics loaders."""
    text = note("13.1", branches=[535, 550, 590], brands=[1, 2, 12, 13, 14])
    made = build_libcuda(tmp_path_factory.mktemp("compat") / "libcuda.so.590.44.01", text)
    plain = glibc()
    tree = {
        **plain.tree,
        f"{COMPAT[1:]}/{made.name}": File(made.read_bytes(), 0o755),
        f"{COMPAT[1:]}/libcuda.so.1": Link(made.name),
        "usr/local/cuda": Link("/usr/local/cuda-13.1"),
    }
    image = replace(plain, name=COMPAT_IMAGE, tree=tree)
    archive = write_archive(os.path.join(workshop, "compat.tar"), [image, loaders()])
    session_containerd.ctr("images", "import", archive)
    os.unlink(archive)
    yield
    session_containerd.ctr("images", "rm", "--sync", COMPAT_IMAGE, LOADERS)


@pytest.fixture
def make(workshop: str, configure: Callable[..., None]) -> Iterator[Callable[..., SimulatedNode]]:
    """Create the test's node, and configure the shim for it."""
    made: list[SimulatedNode] = []

    def make(scenario: Scenario, *, settings: str = "", **more: Any) -> SimulatedNode:
        node = SimulatedNode.create(f"{workshop}/changing", scenario, **more)
        made.append(node)
        configure(settings, node=node)
        return node

    yield make
    for node in made:
        node.remove()


def run(runtime: Runtime, *command: str, devices: str = "all", image: str = GLIBC) -> Completed:
    return runtime.run(*command, image=image, flags=env(devices))


def env(devices: str) -> list[str]:
    return ["--env", f"NVIDIA_VISIBLE_DEVICES={devices}"]


@pytest.mark.parametrize("layout", [Layout.CONTAINER, Layout.NIXOS], ids=lambda each: each.value)
def test_driver_is_found_wherever_it_lies(ours: Runtime, make: Any, layout: Layout) -> None:
    node = make(Scenario.load("two"), layout=layout)
    done = run(ours, "sh", "-c", "nvidia-smi -L && probe dlopen libcuda.so.1")
    assert done.code == 0, done.stdout + done.stderr
    assert LISTED.findall(done.stdout) == [gpu.uuid for gpu in node.scenario.gpus]
    # Inside, files are where the image's loader looks, and the host's root does not show.
    path = done.lines[-1].split()[1]
    assert os.path.dirname(path) == _libraries()


def _libraries() -> str:
    """Return the directory where the image's loader looks."""
    return next("/" + os.path.dirname(path) for path in glibc().tree if path.endswith("/libc.so.6"))


@pytest.mark.parametrize(
    "layout", [Layout.NIXOS, pytest.param(Layout.SUSE, marks=pytest.mark.thorough)]
)
def test_loaders_find_libraries_whose_manifests_have_paths_of_the_host(
    ours: Runtime, make: Any, layout: Layout
) -> None:
    make(Scenario.load("one"), layout=layout)
    done = ours.run("sh", "-c", LOOK, image=LOADERS, flags=ALL)
    assert loaded(done.stdout) >= FOUND_BY_MANIFESTS, done.stdout + done.stderr


@pytest.fixture(name="root")
def _root(workshop: str) -> Iterator[str]:
    """The root of a container with loaders, on a file system that takes no writes."""
    with sealed(loaders().tree, f"{workshop}/sealed") as root:
        yield root


@pytest.mark.parametrize("layout", [Layout.INSTALLER, Layout.NIXOS])
def test_loaders_find_manifests_in_a_root_that_takes_no_writes(
    ours: Runtime, make: Any, root: str, layout: Layout
) -> None:
    """By variables that name them: NVIDIA's driver, for example, reads that of EGL's platforms."""
    make(Scenario.load("one"), layout=layout)
    done = ours.run("sh", "-c", LOOK, image=root, flags=[*ALL, "--rootfs"])
    assert loaded(done.stdout) >= FOUND_BY_MANIFESTS, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ([], ["VK_LAYER_NV_optimus"]),
        # With it the loader ignores the shim's.
        (["--env", "VK_IMPLICIT_LAYER_PATH="], []),
    ],
)
def test_newer_loader_of_vulkan_finds_layers_in_a_root_that_takes_no_writes(
    ours: Runtime, make: Any, root: str, flags: list[str], layers: list[str]
) -> None:
    node = make(Scenario.load("one"))
    container = ours.start_idle(image=root, flags=[*ALL, *flags, "--rootfs"])
    done = container.exec("sh", "-c", NEWER_LAYERS)
    assert done.lines == layers, done.stderr
    state = f"{ours.containerd.directory}/state"
    where = ("--config", node.config_path, "--containerd-state", state)
    record = nvshim("explain", container.name, *where, "-o", "json").document["record"]
    manifest = "/etc/vulkan/implicit_layer.d/nvidia_layers.json"
    assert (manifest in record["elsewhere"]) is bool(layers)
    assert (manifest in record["left_out"]) is not bool(layers)


def test_library_that_no_capability_knows_comes_with_all_of_them(ours: Runtime, make: Any) -> None:
    node = make(Scenario.load("one"))
    name = f"libnvfuture.so.{node.driver_version}"
    build_stand_in(f"{node.driver_root}{_libraries()}/{name}", "libnvfuture.so.1")
    script = "probe dlopen libnvfuture.so.1; true"
    flags = [*env("all"), "--env", "NVIDIA_DRIVER_CAPABILITIES=all"]
    done = ours.run("sh", "-c", script, image=GLIBC, flags=flags)
    assert done.lines == [f"libnvfuture.so.1 {_libraries()}/{name}"]
    assert run(ours, "sh", "-c", script).lines[0].startswith("libnvfuture.so.1 - ")
    told = nvshim("info", "-o", "json", "--no-nvml", "--config", node.config_path).stdout
    assert f"{name}: of no capability that this version knows" in told


def test_driver_that_is_updated_under_a_container_is_the_next_one_s(
    ours: Runtime, make: Any
) -> None:
    node = make(Scenario.load("one"))
    running = ours.start_idle(image=GLIBC, flags=env("all"))
    script = "ls /usr/lib/*-linux-gnu/ | grep libcuda.so."
    before = running.exec("sh", "-c", script).stdout
    assert f"libcuda.so.{node.driver_version}\n" in before
    node = changed_node(node, replace(node.scenario, driver=NEWER))
    assert f"libcuda.so.{NEWER}\n" in run(ours, "sh", "-c", script).stdout
    # The running container keeps its driver, and exec still works.
    assert running.exec("sh", "-c", script).stdout == before


def test_nvml_is_asked_once_and_again_only_when_something_has_changed(
    ours: Runtime, make: Any
) -> None:
    node = make(Scenario.load("two"))
    inits = Path(node.state, "nvml-inits")
    inits.touch()
    for devices in ("all", "0", "none", node.scenario.gpus[1].uuid):
        assert run(ours, "true", devices=devices).code == 0
    assert inits.read_text() == "."
    node = changed_node(node, replace(node.scenario, driver=NEWER))
    assert run(ours, "true").code == 0
    assert run(ours, "true").code == 0
    assert inits.read_text() == ".."


def test_mig_devices_that_are_made_and_destroyed_are_the_next_container_s(
    ours: Runtime, make: Any
) -> None:
    node = make(Scenario.of(1, model="h100"))
    assert len(LISTED.findall(run(ours, "nvidia-smi", "-L").stdout)) == 1
    node = changed_node(
        node, Scenario.parse({"gpus": 1, "gpu": [{"index": 0, "mig": ["3g.40gb"]}]})
    )
    first = run(ours, "nvidia-smi", "-L", devices="0:0")
    assert first.code == 0, first.stdout + first.stderr
    assert any(uuid.startswith("MIG-") for uuid in LISTED.findall(first.stdout))
    refused = run(ours, "true", devices="0")
    assert "NVSHIM-E0204" in refused.stderr
    changed_node(node, Scenario.of(1, model="h100"))
    again = run(ours, "nvidia-smi", "-L", devices="0")
    assert not any(uuid.startswith("MIG-") for uuid in LISTED.findall(again.stdout))
    assert again.code == 0


def test_container_is_not_started_with_another_driver_than_it_was_made_with(
    ours: Runtime, make: Any
) -> None:
    node = make(Scenario.load("one"))
    container = ours.expect()
    ours.containerd.ctr(
        "containers", "create", "--runtime", ours.name, *env("all"), GLIBC, container.name,
        "sleep", "1000",
    )  # fmt: skip
    rootfs = ours.prepare_rootfs(container.name)
    api.create_task(ours.containerd, container.name, mounts=rootfs)
    changed = changed_node(node, replace(node.scenario, driver=NEWER))
    with pytest.raises(api.ApiRefused) as refused:
        api.start_task(ours.containerd, container.name)
    for word in ("NVSHIM-E0140", node.driver_version, NEWER):
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    assert container.status == "CREATED"
    api.remove_task(ours.containerd, container.name)
    assert not os.path.exists(ours.containerd.bundle(container.name))
    # A new container gets the current driver.
    api.create_task(ours.containerd, container.name, mounts=rootfs)
    api.start_task(ours.containerd, container.name)
    listed = container.exec("nvidia-smi", "-L")
    assert LISTED.findall(listed.stdout) == [gpu.uuid for gpu in changed.scenario.gpus]


def test_newer_libcuda_of_an_image_comes_first_and_stays_first(ours: Runtime, make: Any) -> None:
    make(Scenario.load("one"))
    script = "probe dlopen libcuda.so.1 && ldconfig && probe dlopen libcuda.so.1"
    done = run(ours, "sh", "-c", script, image=COMPAT_IMAGE)
    paths = [line.split()[1] for line in done.lines]
    assert [os.path.dirname(path) for path in paths] == [COMPAT, COMPAT]
    sealed = ours.run(
        "probe", "dlopen", "libcuda.so.1", image=COMPAT_IMAGE, flags=[*env("all"), "--read-only"]
    )
    assert os.path.dirname(sealed.lines[0].split()[1]) == COMPAT


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        (Scenario.of(1, model="rtx4090"), ""),
        (Scenario.load("one"), "cuda-compat = false\n"),
    ],
    ids=["a gamer's GPU", "turned off"],
)
def test_libcuda_of_an_image_is_left_alone_where_it_would_fail(
    ours: Runtime, make: Any, scenario: Scenario, settings: str
) -> None:
    make(scenario, settings=settings)
    done = run(ours, "probe", "dlopen", "libcuda.so.1", image=COMPAT_IMAGE)
    assert done.code == 0, done.stdout
    assert COMPAT not in done.stdout
    container = ours.start_idle(image=COMPAT_IMAGE, flags=env("all"))
    with open(os.path.join(ours.containerd.bundle(container.name), "nvidia.json")) as file:
        told = json.load(file)["cuda_compat"]
    assert told["directory"] == ""
    assert ("590.44.01" in told["why"]) is not bool(settings)
