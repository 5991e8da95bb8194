"""The files below a node's dev, proc and sys."""

from __future__ import annotations

import grp
import os
import re
import stat
from pathlib import Path

import pytest

from hooks.node.capabilities import FRONTEND
from integration.simulated import Scenario, SimulatedNode
from integration.simulated.capabilities import access_minor, mig_minors
from integration.simulated.nvidia import add_nvidia
from integration.simulated.tree import NodeTree, free_majors


def device(node: SimulatedNode, path: str) -> tuple[int, int, int]:
    """Return the major, the minor and the permission bits of a character device."""
    status = os.stat(os.path.join(node.dev, path))
    assert stat.S_ISCHR(status.st_mode), path
    return os.major(status.st_rdev), os.minor(status.st_rdev), stat.S_IMODE(status.st_mode)


def majors_of(node: SimulatedNode) -> dict[str, int]:
    """Return the character devices in the node's /proc/devices."""
    text = Path(node.proc, "devices").read_text().split("\n\n")[0]
    return {
        name: int(number) for number, name in re.findall(r"^ *(\d+) (\S+)$", text, re.MULTILINE)
    }


def tree_of(scenario: Scenario, driver: str = "535.104.05") -> NodeTree:
    """Return the files that NVIDIA's modules add on a machine with three drivers."""
    tree = NodeTree("Character devices:\n  1 mem\n226 drm\n\nBlock devices:\n  7 loop\n")
    add_nvidia(tree, scenario, driver=driver, cpus="0-1")
    return tree


# --- Capabilities


@pytest.mark.parametrize(
    ("gpu", "instance", "compute", "minor"),
    [(0, 0, None, 3), (0, 0, 0, 4), (0, 0, 7, 11), (0, 1, None, 12), (0, 14, 7, 137),
     (1, 0, None, 138), (6, 14, 7, 947)],
)  # fmt: skip
def test_capabilities_are_numbered_as_the_kernel_module_does(
    gpu: int, instance: int, compute: int | None, minor: int
) -> None:
    assert access_minor(gpu, instance, compute) == minor


def test_mig_minors_lists_every_capability_once() -> None:
    lines = mig_minors().splitlines()
    assert lines[:5] == [
        "config 1",
        "monitor 2",
        "gpu0/gi0/access 3",
        "gpu0/gi0/ci0/access 4",
        "gpu0/gi0/ci1/access 5",
    ]
    assert "gpu6/gi14/ci7/access 947" in lines
    assert sorted(int(line.split()[1]) for line in lines) == list(range(1, 3 + 32 * 15 * 9))


# --- dev


def test_majors_are_taken_that_no_driver_of_the_machine_has() -> None:
    taken = "Character devices:\n  1 mem\n254 ndctl\n253 dimmctl\n251 ptp\n\nBlock devices:\n"
    assert list(free_majors(taken))[:3] == [252, 250, 249]
    low = "".join(f"{major} x\n" for major in range(234, 255))
    assert list(free_majors(low))[:3] == [511, 510, 509]


def test_device_nodes_have_the_numbers_and_modes_of_real_ones(two: SimulatedNode) -> None:
    uvm, caps = majors_of(two)["nvidia-uvm"], majors_of(two)["nvidia-caps"]
    assert device(two, "nvidia0") == (195, 0, 0o666)
    assert device(two, "nvidia1") == (195, 1, 0o666)
    assert device(two, "nvidiactl") == (195, 255, 0o666)
    assert device(two, "nvidia-modeset") == (195, 254, 0o666)
    assert device(two, "nvidia-uvm") == (uvm, 0, 0o666)
    assert device(two, "nvidia-uvm-tools") == (uvm, 1, 0o666)
    assert device(two, "nvidia-caps/nvidia-cap1") == (caps, 1, 0o400)
    assert device(two, "nvidia-caps/nvidia-cap2") == (caps, 2, 0o400)
    assert device(two, "dri/card1") == (226, 1, 0o660)
    assert device(two, "dri/renderD129") == (226, 129, 0o660)
    assert os.stat(f"{two.dev}/dri/card0").st_gid == grp.getgrnam("video").gr_gid
    assert sorted(os.listdir(two.dev)) == [
        "dri", "nvidia-caps", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools",
        "nvidia0", "nvidia1", "nvidiactl",
    ]  # fmt: skip


def test_drm_nodes_are_found_by_the_address_of_their_gpu(two: SimulatedNode) -> None:
    by_path = f"{two.dev}/dri/by-path"
    assert sorted(os.listdir(by_path)) == [
        f"pci-{gpu.pci}-{kind}" for gpu in two.scenario.gpus for kind in ("card", "render")
    ]
    assert os.path.realpath(f"{by_path}/pci-0000:2a:00.0-render") == f"{two.dev}/dri/renderD129"


def test_every_mig_device_has_the_nodes_of_its_two_capabilities(mig: SimulatedNode) -> None:
    caps = majors_of(mig)["nvidia-caps"]
    expected = {1, 2}
    for gpu in mig.scenario.gpus:
        for instance in gpu.mig or ():
            expected.add(access_minor(gpu.index, instance.id))
            expected |= {access_minor(gpu.index, instance.id, c.id) for c in instance.compute}
    assert len(expected) == 2 + 7 * 2 + 2 + 3
    assert set(os.listdir(f"{mig.dev}/nvidia-caps")) == {f"nvidia-cap{n}" for n in expected}
    for minor in expected - {1, 2}:
        assert device(mig, f"nvidia-caps/nvidia-cap{minor}") == (caps, minor, 0o444)


@pytest.mark.parametrize(
    ("scenario", "absent", "present"),
    [
        (Scenario.of(1, drm=False), "dri/", "nvidia0"),
        (Scenario.of(1, "t4"), "nvidia-caps", "dri/card0"),
        (Scenario.of(0), "nvidia0", "nvidiactl"),
        (Scenario.of(1), "imex", "nvidia-caps/nvidia-cap1"),
        (Scenario.of(1, imex_channels=[0, 7]), "?", "nvidia-caps-imex-channels/channel7"),
    ],
)
def test_a_node_has_the_devices_of_its_scenario_only(
    scenario: Scenario, absent: str, present: str
) -> None:
    paths = [device.path for device in tree_of(scenario).devices]
    assert present in paths
    assert not [path for path in paths if absent in path]
    assert len(paths) == len(set(paths))


# --- proc


def test_proc_devices_is_the_machines_own_and_the_drivers(two: SimulatedNode) -> None:
    own = Path("/proc/devices").read_text()
    simulated = Path(two.proc, "devices").read_text()
    assert set(own.splitlines()) < set(simulated.splitlines())
    assert simulated.split("\n\n")[1] == own.split("\n\n")[1]
    assert {"nvidia-uvm", "nvidia-caps", "drm"} <= set(majors_of(two))
    frontends = set(FRONTEND) & set(majors_of(two))
    assert {majors_of(two)[name] for name in frontends} == {195}
    numbers = [int(n) for n in re.findall(r"^ *(\d+) ", simulated.split("\n\n")[0], re.MULTILINE)]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("driver", "names"),
    [
        ("535.104.05", ["nvidia-frontend"]),
        ("550.54.15", ["nvidia", "nvidia-modeset", "nvidiactl"]),
    ],
)
def test_the_name_of_major_195_is_that_of_the_branch(driver: str, names: list[str]) -> None:
    text = tree_of(Scenario.of(), driver).proc_devices()
    lines = text.splitlines()
    assert sorted(line.split()[1] for line in lines if line.startswith("195 ")) == names
    assert lines.count("226 drm") == 1
    assert text.endswith("\n\nBlock devices:\n  7 loop\n")


def test_the_boot_id_is_the_machines_own(two: SimulatedNode) -> None:
    path = "sys/kernel/random/boot_id"
    assert Path(two.proc, path).read_text() == Path("/proc", path).read_text()


def test_proc_says_what_each_gpu_is(two: SimulatedNode) -> None:
    gpus = Path(two.proc, "driver/nvidia/gpus")
    assert sorted(os.listdir(gpus)) == ["0000:18:00.0", "0000:2a:00.0"]
    text = (gpus / "0000:2a:00.0/information").read_text()
    fields = {key: value.strip() for key, _, value in (x.partition(":") for x in text.splitlines())}
    assert fields == {
        "Model": "NVIDIA H100 80GB HBM3",
        "IRQ": "33",
        "GPU UUID": two.scenario.gpus[1].uuid,
        "Video BIOS": "96.00.01.00.01",
        "Bus Type": "PCIe",
        "DMA Size": "47 bits",
        "DMA Mask": "0x7fffffffffff",
        "Bus Location": "0000:2a:00.0",
        "Device Minor": "1",
        "GPU Firmware": two.driver_version,
        "GPU Excluded": "No",
    }


def test_proc_says_the_drivers_version_and_parameters(two: SimulatedNode) -> None:
    nvidia = Path(two.proc, "driver/nvidia")
    match = re.match(
        r"NVRM version: NVIDIA UNIX \w+ Kernel Module  (\S+)  \w{3} ",
        (nvidia / "version").read_text(),
    )
    assert match is not None
    assert match[1] == two.driver_version
    params = (nvidia / "params").read_text().splitlines()
    assert "ModifyDeviceFiles: 1" in params
    assert "DeviceFileMode: 438" in params
    assert (nvidia / "registry").read_text() == 'Binary: ""\n'


def test_proc_has_a_file_for_each_capability(mig: SimulatedNode) -> None:
    capabilities = Path(mig.proc, "driver/nvidia/capabilities")
    assert (capabilities / "mig/config").read_text() == (
        "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
    )
    found = {
        path.relative_to(capabilities).as_posix()
        for path in capabilities.rglob("access")
        if "gpu1" in path.parts
    }
    assert found == {
        "gpu1/mig/gi1/access", "gpu1/mig/gi1/ci0/access",
        "gpu1/mig/gi2/access", "gpu1/mig/gi2/ci0/access", "gpu1/mig/gi2/ci1/access",
    }  # fmt: skip
    minors = Path(mig.proc, "driver/nvidia-caps/mig-minors").read_text()
    for path in found:
        match = re.match(
            r"DeviceFileMinor: (\d+)\nDeviceFileMode: 292\n", (capabilities / path).read_text()
        )
        assert match is not None
        assert f"{path.replace('/mig/', '/')} {match[1]}\n" in minors


# --- sys


def test_a_gpu_is_found_on_the_pci_bus(two: SimulatedNode) -> None:
    gpu = Path(two.sys, "bus/pci/devices/0000:18:00.0")
    values = {
        name: (gpu / name).read_text().strip()
        for name in ("vendor", "device", "subsystem_vendor", "class", "numa_node")
    }
    assert values == {
        "vendor": "0x10de", "device": "0x2330", "subsystem_vendor": "0x10de",
        "class": "0x030200", "numa_node": "0",
    }  # fmt: skip
    assert sorted(os.listdir(gpu / "drm")) == ["card0", "renderD128"]
    assert os.path.basename(os.path.realpath(gpu / "driver")) == "nvidia"


def test_every_link_of_sys_is_relative_and_stays_within(two: SimulatedNode) -> None:
    links = [
        os.path.join(parent, name)
        for parent, directories, files in os.walk(two.sys)
        for name in (*directories, *files)
        if os.path.islink(os.path.join(parent, name))
    ]
    assert len(links) > 10
    for link in links:
        assert not os.path.isabs(os.readlink(link))
        assert os.path.exists(link), link
        assert os.path.realpath(link).startswith(two.sys + "/")


def test_sys_and_dev_agree_on_drm_devices(two: SimulatedNode) -> None:
    for name in ("card0", "card1", "renderD128", "renderD129"):
        numbers = Path(two.sys, "class/drm", name, "dev").read_text().strip()
        assert "{}:{}".format(*device(two, f"dri/{name}")) == numbers
        assert Path(two.sys, "dev/char", numbers).resolve().name == name


def test_sys_says_the_drivers_version(two: SimulatedNode) -> None:
    for module in ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"):
        version = Path(two.sys, "module", module, "version").read_text()
        assert version == f"{two.driver_version}\n"
