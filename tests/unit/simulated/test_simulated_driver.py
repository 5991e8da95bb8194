"""The layout of the driver's files below the driver root."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from integration.simulated import Scenario, SimulatedNode, driver
from integration.simulated.driver import DriverFiles
from integration.simulated.errors import DriverIncomplete
from integration.simulated.layouts import Layout
from integration.simulated.library import build_stand_in
from tests.harness.raising import raises
from tests.unit.simulated.conftest import MakeNode

# Links that programs open, and their targets.
SONAMES = {
    "libcuda.so.1": "libcuda.so.{v}",
    "libcuda.so": "libcuda.so.{v}",
    "libnvidia-ml.so.1": "libnvidia-ml.so.{v}",
    "libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.{v}",
    "libnvcuvid.so.1": "libnvcuvid.so.{v}",
    "libnvidia-encode.so.1": "libnvidia-encode.so.{v}",
    "libEGL_nvidia.so.0": "libEGL_nvidia.so.{v}",
    "libGLX_nvidia.so.0": "libGLX_nvidia.so.{v}",
    "libnvoptix.so.1": "libnvoptix.so.{v}",
    "libnvidia-nvvm.so.4": "libnvidia-nvvm.so.{v}",
}


def resolve(root: str, path: str) -> str:
    """Resolve links as a process with this root does; return the real path below it."""
    for _ in range(10):
        full = os.path.join(root, path.lstrip("/"))
        if not os.path.islink(full):
            return os.path.relpath(full, root)
        path = os.path.join("/", os.path.dirname(path), os.readlink(full))
        path = os.path.normpath(path)
    raise AssertionError(path)


def soname(library: str) -> str:
    done = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True)
    match = re.search(r"\(SONAME\).*\[(.*)\]", done.stdout)
    assert match is not None, library
    return match[1]


def cached(root: str) -> dict[str, str]:
    """Return the loader cache of a root, as ldconfig prints it."""
    done = subprocess.run(
        ["/sbin/ldconfig", "-r", root, "-p"], capture_output=True, text=True, check=True
    )
    return dict(re.findall(r"^\s(\S+) \(.*\) => (\S+)$", done.stdout, re.MULTILINE))


def test_the_installers_layout_has_versioned_libraries_in_one_directory(
    two: SimulatedNode, driver_files: DriverFiles
) -> None:
    lib = f"usr/lib/{driver_files.triplet}"
    for link, target in SONAMES.items():
        expected = f"{lib}/{target.format(v=two.driver_version)}"
        assert resolve(two.driver_root, f"/{lib}/{link}") == expected
        assert os.path.isfile(os.path.join(two.driver_root, expected))
    for path in (
        "usr/bin/nvidia-smi",
        "usr/bin/nvidia-debugdump",
        "usr/bin/nvidia-persistenced",
        "usr/bin/nvidia-cuda-mps-control",
        "usr/bin/nvidia-cuda-mps-server",
        f"lib/firmware/nvidia/{two.driver_version}/gsp_ga10x.bin",
        f"lib/firmware/nvidia/{two.driver_version}/gsp_tu10x.bin",
        "usr/share/nvidia/nvoptix.bin",
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        "usr/share/vulkan/icd.d/nvidia_icd.json",
        "usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
        "etc/OpenCL/vendors/nvidia.icd",
        f"{lib}/vdpau/libvdpau_nvidia.so.{two.driver_version}",
        "usr/lib/xorg/modules/drivers/nvidia_drv.so",
    ):
        assert os.path.isfile(os.path.join(two.driver_root, path)), path
    assert resolve(two.driver_root, f"/{lib}/gbm/nvidia-drm_gbm.so") == (
        f"{lib}/libnvidia-allocator.so.{two.driver_version}"
    )
    assert not os.path.exists(os.path.join(two.driver_root, lib, "nvidia/current"))


def test_debians_layout_goes_through_alternatives(
    make_node: MakeNode, driver_files: DriverFiles
) -> None:
    node = make_node(Scenario.of(), layout=Layout.DEBIAN)
    lib = f"usr/lib/{driver_files.triplet}"
    for link, target in SONAMES.items():
        step = os.readlink(os.path.join(node.driver_root, lib, link))
        assert step == f"/etc/alternatives/nvidia--{link}-{driver_files.triplet}"
        found = resolve(node.driver_root, f"/{lib}/{link}")
        assert found == f"{lib}/nvidia/current/{target.format(v=node.driver_version)}"
        assert os.path.isfile(os.path.join(node.driver_root, found))
    assert resolve(node.driver_root, "/usr/bin/nvidia-smi") == "usr/lib/nvidia/current/nvidia-smi"
    assert cached(node.driver_root)["libcuda.so.1"] == f"/{lib}/libcuda.so.1"


@pytest.mark.parametrize("layout", list(Layout))
def test_no_link_of_a_driver_root_leads_nowhere(make_node: MakeNode, layout: Layout) -> None:
    node = make_node(Scenario.of(), layout=layout)
    for parent, directories, files in os.walk(node.driver_root):
        for name in (*directories, *files):
            path = "/" + os.path.relpath(os.path.join(parent, name), node.driver_root)
            found = resolve(node.driver_root, path)
            assert os.path.exists(os.path.join(node.driver_root, found)), path


def test_the_loader_cache_of_the_driver_root_knows_every_soname(
    two: SimulatedNode, driver_files: DriverFiles
) -> None:
    cache = cached(two.driver_root)
    for link in SONAMES.keys() - {"libcuda.so"}:
        assert cache[link] == f"/usr/lib/{driver_files.triplet}/{link}"


def test_what_is_stood_in_for_is_small_and_has_the_right_soname(
    two: SimulatedNode, driver_files: DriverFiles
) -> None:
    lib = os.path.join(two.driver_root, "usr/lib", driver_files.triplet)
    for name, expected in (
        (f"libnvoptix.so.{two.driver_version}", "libnvoptix.so.1"),
        (f"libnvidia-nvvm.so.{two.driver_version}", "libnvidia-nvvm.so.4"),
        (f"libnvidia-rtcore.so.{two.driver_version}", f"libnvidia-rtcore.so.{two.driver_version}"),
        (f"libnvidia-ml.so.{two.driver_version}", "libnvidia-ml.so.1"),
    ):
        assert soname(os.path.join(lib, name)) == expected
        assert os.path.getsize(os.path.join(lib, name)) < 200_000


def test_large_files_are_not_copied(two: SimulatedNode, driver_files: DriverFiles) -> None:
    cuda = f"usr/lib/{driver_files.triplet}/libcuda.so.{two.driver_version}"
    status = os.stat(os.path.join(two.driver_root, cuda))
    if os.stat(driver_files.directory).st_dev != status.st_dev:
        pytest.skip("the cache is on another file system than the tests' directory")
    assert status.st_nlink > 1


def test_a_scenario_can_name_another_version_of_the_driver(
    make_node: MakeNode, driver_files: DriverFiles
) -> None:
    node = make_node(Scenario.of(driver="550.54.15"))
    assert node.driver_version == "550.54.15"
    names = os.listdir(os.path.join(node.driver_root, "usr/lib", driver_files.triplet))
    assert "libcuda.so.550.54.15" in names
    assert not [name for name in names if driver_files.version in name]
    for parent, _, files in os.walk(node.driver_root):
        for name in files:
            path = os.path.join(parent, name)
            if os.path.islink(path):
                assert driver_files.version not in os.readlink(path)


def test_a_directory_without_a_driver_is_refused(tmp_path: Path) -> None:
    with raises(DriverIncomplete, match=r"no libcuda\.so\.VERSION"):
        DriverFiles.at(str(tmp_path))


def test_a_stand_in_that_another_process_made_meanwhile_stays(
    driver_files: DriverFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both may already be linking it: a replaced file has no name to link from.
    os.symlink(driver_files.directory, tmp_path / "driver")
    files = DriverFiles.at(str(tmp_path / "driver"))

    def build_while_another_does(target: str, soname: str) -> None:
        build_stand_in(target, soname)
        with open(target.removesuffix(f".{os.getpid()}"), "x", encoding="ascii") as file:
            file.write("the other's")

    monkeypatch.setattr(driver, "build_stand_in", build_while_another_does)
    driver.lay_out(str(tmp_path / "root"), files, version=files.version, layout=Layout.DEBIAN)
    made = tmp_path / f"driver.stand-ins-{files.version}"
    assert {path.read_text() for path in made.iterdir()} == {"the other's"}
