from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest

from hooks.errors import DriverMismatch, DriverNotFound
from hooks.node.driver import Driver, find_driver, find_sockets
from hooks.node.witness import Witness
from hooks.words import Arch
from integration.simulated.driver import DriverFiles
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node


def found(node: Node) -> Driver:
    return find_driver(Witness("/"), node.config)


def sources(driver: Driver) -> dict[str, str]:
    libraries = {file.name: file.source for file in driver.libraries}
    return libraries | {file.name: file.source for file in driver.files}


@pytest.mark.parametrize(
    "directory",
    [
        MULTIARCH,
        f"{MULTIARCH}/nvidia/current",
        "usr/lib64",
        "lib64",
        "usr/lib",
        "usr/local/nvidia/lib64",
    ],
)
def test_driver_is_found_wherever_distributions_put_it(bare_node: Node, directory: str) -> None:
    bare_node.add_driver(directory=directory)
    driver = found(bare_node)
    assert (driver.version, driver.arch) == (VERSION, Arch.X86_64)
    assert {(lib.name, lib.soname) for lib in driver.libraries} == {
        (f"libcuda.so.{VERSION}", "libcuda.so.1"),
        (f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1"),
    }
    assert all(
        lib.source.startswith(f"{bare_node.driver}/{directory}/") for lib in driver.libraries
    )


def test_programs_configuration_firmware_and_modules_are_found(node: Node) -> None:
    wanted = {
        "usr/bin/nvidia-smi",
        "usr/sbin/nvidia-cuda-mps-server",
        "usr/lib/nvidia/current/nvidia-debugdump",
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "etc/vulkan/icd.d/nvidia_icd.json",
        "etc/OpenCL/vendors/nvidia.icd",
        f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
        f"lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin",
        "usr/lib/xorg/modules/drivers/nvidia_drv.so",
        f"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}",
    }
    for path in (*wanted, "lib/firmware/nvidia/470.1.1/gsp.bin", "usr/bin/bash"):
        node.write(node.driver / path, "x")
    assert {file.source for file in found(node).files} == {
        f"{node.driver}/{path}" for path in wanted
    }


def test_firmware_that_goes_while_it_is_looked_at_is_none(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    firmware = node.write(node.driver / f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin", "x")
    listdir = os.listdir

    def removed(path: str) -> list[str]:
        if path == str(firmware.parent):
            raise FileNotFoundError(2, "No such file or directory", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", removed)
    assert str(firmware) not in {file.source for file in found(node).files}


def test_absolute_links_of_a_driver_container_stay_in_its_root(node: Node) -> None:
    real = node.write(node.driver / "usr/lib/nvidia/535/nvidia-smi", "x")
    (node.driver / "etc/alternatives").mkdir(parents=True)
    (node.driver / "etc/alternatives/smi").symlink_to("/usr/lib/nvidia/535/nvidia-smi")
    (node.driver / "usr/bin").mkdir()
    (node.driver / "usr/bin/nvidia-smi").symlink_to("/etc/alternatives/smi")
    (node.driver / "usr/bin/nvidia-debugdump").symlink_to("/etc/hostname")
    assert sources(found(node))["nvidia-smi"] == str(real)
    assert "nvidia-debugdump" not in sources(found(node))


def test_version_is_the_kernel_modules(node: Node) -> None:
    node.add_driver("550.54.14")
    assert found(node).version == VERSION
    node.add_kernel_version("550.54.14")
    assert found(node).version == "550.54.14"


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Rel", "560.35.03"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65  Thu", "580.65"),
        ("", "550.54.14"),
        ("nonsense 1.8.1", "550.54.14"),
    ],
)  # fmt: skip
def test_version_is_read_from_every_banner(bare_node: Node, banner: str, version: str) -> None:
    bare_node.write(bare_node.proc / "driver/nvidia/version", banner)
    bare_node.write(bare_node.sys / "module/nvidia/version", "550.54.14\n")
    for each in ("560.35.03", "580.65", "550.54.14"):
        bare_node.add_driver(each)
    assert found(bare_node).version == version


def test_without_a_module_the_newest_files_count(bare_node: Node) -> None:
    bare_node.add_driver("535.9.1")
    bare_node.add_driver("535.104.05")
    bare_node.add_library("libcuda.so.1.1", "libcuda.so.1")
    assert found(bare_node).version == "535.104.05"


def test_files_of_another_version_than_the_module_are_refused(node: Node) -> None:
    node.add_kernel_version("550.54.14")
    with pytest.raises(DriverMismatch) as caught:
        found(node)
    assert "550.54.14" in caught.value.asked
    assert VERSION in caught.value.found


def test_no_driver_is_said_with_the_place_searched(bare_node: Node) -> None:
    with pytest.raises(DriverNotFound) as caught:
        found(bare_node)
    assert str(bare_node.driver) in caught.value.found
    assert caught.value.code == "NVSHIM-E0102"


def test_library_of_a_name_only_is_none(bare_node: Node) -> None:
    bare_node.write(bare_node.driver / MULTIARCH / f"libcuda.so.{VERSION}", "not an ELF file")
    with pytest.raises(DriverNotFound, match="no ELF"):
        found(bare_node)


@pytest.mark.parametrize("directory", ["usr/lib32", "usr/lib/i386-linux-gnu", "usr/lib"])
def test_32_bit_libraries_are_told_apart_by_their_header(node: Node, directory: str) -> None:
    path = node.add_library(f"libcuda.so.{VERSION}", "libcuda.so.1", directory, bits=32)
    driver = found(node)
    assert driver.arch is Arch.X86_64
    assert driver.arch32 is Arch.I386
    assert {lib.arch: lib.source for lib in driver.libraries if "libcuda" in lib.name} == {
        Arch.X86_64: str(node.driver / MULTIARCH / f"libcuda.so.{VERSION}"),
        Arch.I386: str(path),
    }


def test_directory_reached_by_two_names_is_searched_once(node: Node) -> None:
    (node.driver / "lib").symlink_to("usr/lib")
    directories = found(node).library_directories
    assert len(directories) == len(set(directories))
    assert str(node.driver / MULTIARCH) in directories


def test_longest_name_of_a_pattern_wins(node: Node) -> None:
    node.add_library("libnvidia-egl-gbm.so.1.1.0", "libnvidia-egl-gbm.so.1")
    (node.driver / MULTIARCH / "libnvidia-egl-gbm.so.1").symlink_to("libnvidia-egl-gbm.so.1.1.0")
    assert "libnvidia-egl-gbm.so.1.1.0" in sources(found(node))


def test_sockets_count_only_while_they_are_sockets(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = node.driver / "run/nvidia-persistenced/socket"
    node.write(place, "a file")
    assert find_sockets(str(node.driver)) == {}
    place.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(place.parent)  # the path is too long for an address
        listener.bind("socket")
        assert find_sockets(str(node.driver)) == {"/run/nvidia-persistenced/socket": str(place)}


def test_directory_of_pipes_counts_only_if_root_made_it(node: Node) -> None:
    pipes = node.driver / "tmp/nvidia-mps"
    pipes.mkdir(parents=True)
    assert find_sockets(str(node.driver)) == {"/tmp/nvidia-mps": str(pipes)}
    os.chown(pipes, 1000, 1000)
    assert find_sockets(str(node.driver)) == {}
    pipes.rmdir()
    (node.driver / "tmp/evil").mkdir()
    os.chown(node.driver / "tmp/evil", 1000, 1000)
    pipes.symlink_to("evil")
    assert find_sockets(str(node.driver)) == {}


def test_real_driver_has_what_cuda_and_nvidia_smi_need(bare_node: Node) -> None:
    config = replace(bare_node.config, driver_root=DriverFiles.fetch().directory)
    driver = find_driver(Witness("/"), config)
    sonames = {lib.soname for lib in driver.libraries}
    assert {"libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1"} <= sonames
    assert "nvidia-smi" in {file.name for file in driver.files}
