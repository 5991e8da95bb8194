"""``nvidia-container-cli`` prints what the original prints."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hooks.errors import NvmlFailed, UnknownDevice
from hooks.node.inventory import Inventory, take_inventory
from integration import exits
from integration.cli import app
from integration.compat.container_cli import ListSelection, info_text, list_paths, log_lines
from tests.unit.cdi.conftest import Nvshim
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node, nvml_gpu, nvml_mig, uuid_of


@pytest.fixture
def inventory(node: Node) -> Inventory:
    """Return an inventory: GPU 0 whole, GPU 1 with a MIG device."""
    node.add_mig(1, 3, 0, (21, 22))
    return node.take_inventory(
        nvml_gpu(0, brand=2, compute_capability="9.0"),
        nvml_gpu(1, mig=True, mig_devices=[nvml_mig(0, 3, 0)], brand=14),
        cuda=12020,
    )


def test_info_is_a_block_for_the_driver_and_one_for_each_gpu(
    node: Node, inventory: Inventory
) -> None:
    first, second = inventory.gpus
    assert info_text(inventory) == (
        f"NVRM version:   {VERSION}\n"
        "CUDA version:   12.2\n"
        "\n"
        "Device Index:   0\n"
        "Device Minor:   0\n"
        f"Model:          {first.model}\n"
        "Brand:          Tesla\n"
        f"GPU UUID:       {uuid_of(0)}\n"
        f"Bus Location:   0000{first.bus_id.upper()}\n"
        "Architecture:   9.0\n"
        "\n"
        "Device Index:   1\n"
        "Device Minor:   1\n"
        f"Model:          {second.model}\n"
        "Brand:          Nvidia\n"
        f"GPU UUID:       {uuid_of(1)}\n"
        f"Bus Location:   0000{second.bus_id.upper()}\n"
        f"Architecture:   {second.compute_capability}\n"
    )


def test_info_as_tables_of_commas(node: Node, inventory: Inventory) -> None:
    lines = info_text(inventory, csv=True).splitlines()
    assert lines[:4] == [
        "NVRM version,CUDA version",
        f"{VERSION},12.2",
        "",
        "Device Index,Device Minor,Model,Brand,GPU UUID,Bus Location,Architecture",
    ]
    assert lines[4].startswith("0,0,")
    assert lines[4].endswith(f",Tesla,{uuid_of(0)},0000{inventory.gpus[0].bus_id.upper()},9.0")
    assert len(lines) == 6


def test_info_fails_if_nvml_does_not_answer(node: Node) -> None:
    with pytest.raises(NvmlFailed):
        info_text(take_inventory(node.config, None))


def test_list_of_devices_has_the_capabilities_of_mig_devices(
    node: Node, inventory: Inventory
) -> None:
    control = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"]
    mig = [
        "/proc/driver/nvidia/capabilities/gpu1/mig/gi3/access",
        "/proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0/access",
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-caps/nvidia-cap22",
    ]

    def listed(*devices: str) -> list[str]:
        return list_paths(inventory, ListSelection(devices=devices))

    assert listed("all") == [*control, "/dev/nvidia0", "/dev/nvidia1", *mig]
    assert listed("0") == [*control, "/dev/nvidia0"]
    assert listed(uuid_of(0)) == [*control, "/dev/nvidia0"]
    assert listed("1:0", "0") == [*control, "/dev/nvidia0", "/dev/nvidia1", *mig]
    with pytest.raises(UnknownDevice):
        listed("9")
    (node.dev / "nvidia-uvm").unlink()
    again = node.take_inventory(nvml_gpu(0), nvml_gpu(1), cuda=12020)
    assert "/dev/nvidia-uvm" not in list_paths(again, ListSelection(devices=("0",)))


def test_list_of_files_is_within_the_drivers_root_and_in_order(node: Node) -> None:
    for name in ("libnvidia-encode", "libnvidia-opencl", "libnvidia-egl-gbm"):
        version = "1.1.0" if "gbm" in name else VERSION
        node.add_library(f"{name}.so.{version}", f"{name}.so.1")
    node.add_library(f"libcuda.so.{VERSION}", "libcuda.so.1", "usr/lib32", bits=32)
    for path in ("usr/bin/nvidia-cuda-mps-server", "usr/bin/nvidia-smi", "usr/bin/nvidia-xconfig",
                 f"lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin"):  # fmt: skip
        node.write(node.driver / path, "x")
        (node.driver / path).chmod(0o755)
    node.write(node.driver / "run/nvidia-persistenced/keep", "")
    inventory = node.take_inventory(nvml_gpu(0), nvml_gpu(1), cuda=12020)
    programs = ["/usr/bin/nvidia-smi", "/usr/bin/nvidia-cuda-mps-server"]
    libraries = [
        f"/{MULTIARCH}/{name}.so.{VERSION}"
        for name in ("libnvidia-ml", "libcuda", "libnvidia-opencl", "libnvidia-encode")
    ]
    libraries.append(f"/{MULTIARCH}/libnvidia-egl-gbm.so.1.1.0")
    old = [f"/usr/lib32/libcuda.so.{VERSION}"]
    firmware = [f"/lib/firmware/nvidia/{VERSION}/gsp_tu10x.bin"]

    def listed(**wanted: Any) -> list[str]:
        return list_paths(inventory, ListSelection(**wanted))

    assert listed(binaries=True) == programs
    assert listed(libraries=True) == libraries
    assert listed(libraries=True, compat32=True) == libraries + old
    assert listed(firmwares=True) == firmware
    assert listed(binaries=True, libraries=True, firmwares=True) == programs + libraries + firmware
    every = list_paths(inventory, ListSelection.everything())
    assert every[-1] == firmware[0]
    assert [path for path in every if not path.startswith("/dev/")] == [
        *programs, *libraries, *old, *firmware,
    ]  # fmt: skip
    assert any("selecting" in line for line in log_lines(inventory))


# The command


@pytest.fixture
def cli(nvshim: Nvshim) -> Nvshim:
    return partial(nvshim, "compat", "nvidia-container-cli")


@pytest.mark.usefixtures("config_file", "node")
def test_flags_that_change_nothing_are_told_and_the_log_is_written(
    tmp_path: Path, cli: Nvshim
) -> None:
    log = tmp_path / "debug.log"
    idle = ["--user", "--ldcache", "/etc/ld.so.cache"]
    seen = cli("-d", str(log), *idle, "list", "--libraries", "-d", "0")
    assert "/dev/nvidia0" in seen.out
    told = [line.split()[1] for line in seen.err.splitlines() if "changes nothing" in line]
    assert sorted(told) == ["--ldcache", "--user"]
    assert f"selecting {tmp_path}/driver" in log.read_text()
    cli("--user", "list", "--binaries")
    seen = cli("-u", "-d", f"{tmp_path}/no/such/directory/x", "list", ends=exits.FAILED)
    assert "NVSHIM-E2543" in seen.err


@pytest.mark.usefixtures("config_file")
def test_load_kmods_makes_nodes_first(node: Node, cli: Nvshim) -> None:
    for module in ("nvidia", "nvidia_uvm", "nvidia_modeset"):
        (node.sys / "module" / module).mkdir(parents=True)
    (node.dev / "nvidia-uvm").unlink()
    assert "/dev/nvidia-uvm\n" not in cli("list", "-d", "0").out
    assert "/dev/nvidia-uvm\n" in cli("-k", "list", "-d", "0").out
    assert (node.dev / "nvidia-uvm").is_char_device()


@pytest.mark.usefixtures("config_file")
def test_root_is_where_the_driver_is(node: Node, tmp_path: Path, cli: Nvshim) -> None:
    node.driver.rename(tmp_path / "elsewhere")
    seen = cli(f"--root={tmp_path}/elsewhere", "list", "-l")
    assert f"/{MULTIARCH}/libcuda.so.{VERSION}\n" in seen.out


def test_what_has_no_counterpart_is_one_line(cli: Nvshim) -> None:
    seen = cli("configure", "--device=all", "--ldconfig=@/sbin/ldconfig", "/rootfs", ends=1)
    (line,) = seen.err.splitlines()
    assert line.startswith("NVSHIM-E2541")
    assert "nvshim cdi generate" in line
    cli("--nonsense", "list", ends=exits.USAGE)
    cli("nonsense", ends=exits.USAGE)


@pytest.mark.parametrize("words", [["--version"], ["-V"]])
def test_version_is_in_the_lines_that_scripts_look_for(words: list[str], cli: Nvshim) -> None:
    lines = dict(line.partition(":")[::2] for line in cli(*words).out.splitlines())
    assert list(lines)[:4] == ["cli-version", "lib-version", "build date", "build revision"]
    assert lines["cli-version"].strip()[0].isdigit()
    assert "nvshim" in lines["build revision"]


def test_a_link_of_that_name_acts_as_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("nvidia-container-cli", "cli-version: "), ("nvidia-ctk", "NVIDIA Cont")):
        monkeypatch.setattr("sys.argv", [os.path.join("/usr/bin", name), "--version"])
        assert app.main() == 0
        assert capsys.readouterr().out.startswith(said)
    monkeypatch.setattr("sys.argv", ["/usr/bin/nvshim", "--version"])
    assert app.main() == 0
    assert capsys.readouterr().out.startswith("nvshim ")
