"""The devices that a GPU container gets in addition to its GPU, seen from inside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Callable
from typing import Any, Final

import pytest

from integration.simulated import SimulatedNode
from tests.harness.nvshim import nvshim
from tests.harness.runtime import Container, Runtime
from tools.containerd import Completed
from tools.images import GLIBC

PROFILE: Final = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"


@pytest.fixture
def gpus(ours: Runtime, full_gpus: SimulatedNode, configure: Callable[..., None]) -> Runtime:
    """Return the runtime on the node with every optional device."""
    configure(node=full_gpus)
    return ours


def run(gpus: Runtime, script: str, *flags: str, **environment: str) -> Completed:
    done = gpus.run("sh", "-c", f"{script}; true", image=GLIBC, flags=[*_env(environment), *flags])
    assert done.code == 0, done.stderr
    return done


def _env(variables: dict[str, str]) -> list[str]:
    named = {f"NVIDIA_{name}": value for name, value in variables.items()}
    return [word for name, value in named.items() for word in ("--env", f"{name}={value}")]


def record_of(gpus: Runtime, container: Container) -> Any:
    with open(os.path.join(gpus.containerd.bundle(container.name), "nvidia.json")) as file:
        return json.load(file)


@pytest.mark.parametrize("flags", [[], ["--read-only"]])
def test_drm_nodes_come_with_their_links_and_egl_with_its_mask(
    gpus: Runtime, full_gpus: SimulatedNode, flags: list[str]
) -> None:
    script = (
        f"cd /dev/dri/by-path && for l in *; do echo $l $(readlink $l); test -c $l; done; "
        f"touch new 2>/dev/null && echo writable; cat {PROFILE} 2>/dev/null; ls -l /dev/dri/card*"
    )
    done = run(gpus, script, *flags, VISIBLE_DEVICES="1", DRIVER_CAPABILITIES="graphics")
    pci = full_gpus.scenario.gpus[1].pci
    assert done.lines[:2] == [f"pci-{pci}-card ../card1", f"pci-{pci}-render ../renderD129"]
    assert "writable" not in done.lines
    assert "/dev/dri/card1" in done.lines[-1]
    assert '["EGLVisibleDGPUDevices", 0x2]' in done.stdout


def test_parameters_of_the_module_are_covered_if_procfs_has_them(gpus: Runtime) -> None:
    container = gpus.start_idle(image=GLIBC, flags=_env({"VISIBLE_DEVICES": "0"}))
    (file,) = record_of(gpus, container)["proc_files"]
    assert file["path"] == "/proc/driver/nvidia/params"
    with open(file["source"]) as staged:
        assert "ModifyDeviceFiles: 0\n" in staged.read()
    # The procfs is this machine's own, which may have a driver.
    shown = container.exec("cat", file["path"])
    if os.path.exists(file["path"]):
        assert file["state"] == "covered"
        assert "ModifyDeviceFiles: 0\n" in shown.stdout
    else:
        assert file["state"] == "its procfs does not have the file"
        assert shown.code != 0


def test_storage_network_and_fabric_come_by_their_variables(
    gpus: Runtime, full_gpus: SimulatedNode
) -> None:
    asked = dict.fromkeys(("GDS", "MOFED", "GDRCOPY", "NVSWITCH"), "enabled")
    script = (
        "ls -d /dev/nvidia-fs* /dev/gdrdrv /dev/nvidia-nvswitch* /dev/infiniband/* "
        "/etc/cufile.json /run/udev/data; "
        "probe open /dev/nvidia-fs15 /dev/nvidia-nvswitchctl /dev/infiniband/uverbs1"
    )
    done = run(gpus, script, VISIBLE_DEVICES="0", **asked)
    *names, first, second, third = done.lines
    expected = [
        name for name in os.listdir(full_gpus.dev) if name.startswith(("nvidia-fs", "nvidia-nv"))
    ]
    assert {f"/dev/{name}" for name in expected} <= set(names)
    assert len(expected) == 16 + 5
    assert {
        "/dev/gdrdrv", "/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm", "/etc/cufile.json",
        "/run/udev/data",
    } <= set(names)  # fmt: skip
    # No kernel module is behind the nodes: ENXIO shows that they may be opened.
    assert {line.split()[1] for line in (first, second, third)} <= {"ENXIO", "ENODEV"}


def test_nothing_beside_gpus_comes_unasked(gpus: Runtime) -> None:
    done = run(gpus, "ls /dev /etc", VISIBLE_DEVICES="all")
    names = set(done.lines)
    assert not names & {"gdrdrv", "infiniband", "nvidia-nvswitchctl", "nvidia-caps-imex-channels"}
    assert not names & {"nvidia-fs0", "cufile.json"}


def test_imex_channel_is_there_if_it_is_named_and_an_error_if_it_is_not_there(
    gpus: Runtime,
) -> None:
    script = "ls /dev/nvidia-caps-imex-channels; probe open /dev/nvidia-caps-imex-channels/channel3"
    done = run(gpus, script, VISIBLE_DEVICES="0", IMEX_CHANNELS="3")
    assert done.lines[0] == "channel3"
    assert done.lines[1].split()[1] in {"ENXIO", "ENODEV"}
    flags = _env({"VISIBLE_DEVICES": "0", "IMEX_CHANNELS": "0,5"})
    refused = gpus.run("true", image=GLIBC, flags=flags)
    assert refused.code == 1
    assert "NVSHIM-E0110" in refused.stderr
    assert "channel5" in refused.stderr


def test_mig_may_be_configured_by_who_is_privileged(gpus: Runtime) -> None:
    script = "ls /dev/nvidia-caps"
    asked = {"VISIBLE_DEVICES": "0", "MIG_CONFIG_DEVICES": "all", "MIG_MONITOR_DEVICES": "all"}
    done = run(gpus, script, "--cap-add", "CAP_SYS_ADMIN", **asked)
    assert done.lines == ["nvidia-cap1", "nvidia-cap2"]


def test_management_device_brings_every_node_of_the_driver(
    gpus: Runtime, full_gpus: SimulatedNode
) -> None:
    script = "ls /dev /dev/nvidia-caps /dev/nvidia-caps-imex-channels; probe dlopen libcuda.so.1"
    done = run(gpus, script, VISIBLE_DEVICES="management.nvidia.com/gpu=all")
    names = set(done.lines)
    assert {"nvidia0", "nvidia1", "nvidia-modeset", "channel0", "channel3"} <= names
    assert set(os.listdir(f"{full_gpus.dev}/nvidia-caps")) <= names
    assert not names & {"gdrdrv", "nvidia-fs0", "nvidia-nvswitchctl", "dri"}
    assert done.lines[-1].startswith("libcuda.so.1 /")


def test_missing_nodes_are_made_and_a_module_that_cannot_be_loaded_is_no_error(
    gpus: Runtime, full_gpus: SimulatedNode
) -> None:
    names = ("nvidia0", "nvidiactl", "nvidia-uvm")
    before = {name: os.lstat(f"{full_gpus.dev}/{name}").st_rdev for name in names}
    for name in names:
        os.unlink(f"{full_gpus.dev}/{name}")
    module = f"{full_gpus.sys}/module/nvidia_uvm"
    os.rename(module, f"{module}.aside")
    try:
        flags = _env({"VISIBLE_DEVICES": "0"})
        container = gpus.start_idle(image=GLIBC, flags=flags)
        done = container.exec("probe", "open", *(f"/dev/{name}" for name in names))
        record = record_of(gpus, container)
    finally:
        os.rename(f"{module}.aside", module)
    assert {line.split()[1] for line in done.lines} <= {"ENXIO", "ENODEV"}
    assert sorted(record["nodes"]["made"]) == sorted(f"{full_gpus.dev}/{name}" for name in names)
    assert {name: os.lstat(f"{full_gpus.dev}/{name}").st_rdev for name in names} == before


def test_32_bit_libraries_come_with_compat32_only(gpus: Runtime, full_gpus: SimulatedNode) -> None:
    flags = {"VISIBLE_DEVICES": "0", "DRIVER_CAPABILITIES": "compute,utility,compat32"}
    container = gpus.start_idle(image=GLIBC, flags=_env(flags))
    inside = f"/proc/{container.pid}/root/usr/lib32"
    libraries = [name for name in os.listdir(inside) if name.endswith(full_gpus.driver_version)]
    assert {name.partition(".so")[0] for name in libraries} == {
        "libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler",
    }  # fmt: skip
    for name in libraries:
        with open(f"{inside}/{name}", "rb") as file:
            assert file.read(5) == b"\x7fELF\x01"  # EI_CLASS of 32 bits
    assert os.readlink(f"{inside}/libcuda.so.1") == f"libcuda.so.{full_gpus.driver_version}"
    without = run(gpus, "ls /usr/lib32", VISIBLE_DEVICES="0", DRIVER_CAPABILITIES="compute,utility")
    assert without.lines == []


def test_sockets_of_the_drivers_services_are_there_and_pipes_of_mps_may_be_written(
    gpus: Runtime, full_gpus: SimulatedNode, configure: Callable[..., None], shim_config: str
) -> None:
    pipes = f"{full_gpus.driver_root}/tmp/nvidia-mps"
    os.makedirs(pipes)
    os.mkfifo(f"{pipes}/control")
    with contextlib.ExitStack() as stack:
        for service in ("persistenced", "fabricmanager"):
            directory = f"{full_gpus.driver_root}/run/nvidia-{service}"
            os.makedirs(directory)
            stack.callback(shutil.rmtree, directory)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            bind_below(listener, directory, "socket")
        stack.callback(shutil.rmtree, pipes)
        script = (
            "test -S /run/nvidia-persistenced/socket && echo persistenced; "
            "test -S /run/nvidia-fabricmanager/socket && echo fabricmanager; "
            "test -p /tmp/nvidia-mps/control && touch /tmp/nvidia-mps/client && echo mps"
        )
        done = run(gpus, script, VISIBLE_DEVICES="0")
        assert done.lines == ["persistenced", "fabricmanager", "mps"]
        assert os.path.exists(f"{pipes}/client")
        utility = run(
            gpus, "ls -d /tmp/nvidia-mps", VISIBLE_DEVICES="0", DRIVER_CAPABILITIES="utility"
        )
        assert utility.lines == []
        configure('[policy]\nservice-sockets = ["fabricmanager"]\n', node=full_gpus)
        assert run(gpus, script, VISIBLE_DEVICES="0").lines == ["fabricmanager"]
        spec = nvshim("cdi", "generate", "--config", shim_config).stdout
        assert "/run/nvidia-fabricmanager/socket" in spec
        assert "persistenced/socket" not in spec
        assert "nvidia-mps" not in spec


def bind_below(listener: socket.socket, directory: str, name: str) -> None:
    """Bind a socket in a directory whose path is longer than an address may be."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{fd}/{name}")
    finally:
        os.close(fd)
