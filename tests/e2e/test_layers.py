"""Containers of one image with the same grant share a layer with the added files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from integration.simulated import Scenario, SimulatedNode
from tests.harness.nvshim import nvshim
from tests.harness.runtime import Container, Runtime
from tests.harness.waiting import eventually
from tools.images import BUSYBOX, GLIBC
from tools.nodes import changed_node

GPUS: Final = ("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=all")
BY_PATH: Final = "/dev/dri/by-path"
LOOK: Final = "grep ' / / ' /proc/self/mountinfo; nvidia-smi -L; ldconfig -p | grep libcuda.so.1"


@pytest.fixture
def gpus(
    ours: Runtime, two_gpus: SimulatedNode, configure: Callable[[str], None], tmp_path: Path
) -> Runtime:
    """Return the runtime on a node with two GPUs, and with the test's own layers."""
    configure(_settings(two_gpus, tmp_path))
    return ours


def test_second_container_uses_the_layer_of_the_first(gpus: Runtime, tmp_path: Path) -> None:
    seen = [gpus.run("sh", "-c", LOOK, image=GLIBC, flags=GPUS) for _ in range(2)]
    (layer,) = os.listdir(tmp_path / "layers")
    for done in seen:
        assert done.code == 0, done.stderr
        assert f"lowerdir={tmp_path}/layers/{layer}/fs:" in done.stdout
        assert done.stdout.count("UUID: GPU-") == 2
        assert "libcuda.so.1 (libc6,x86-64)" in done.stdout


def test_snapshot_holds_what_the_container_wrote_and_nothing_of_ours(
    gpus: Runtime, tmp_path: Path
) -> None:
    script = "test -e /mine || rm /etc/ld.so.cache; touch /mine; sleep 1000"
    container = gpus.start("sh", "-c", script, image=GLIBC, flags=GPUS)
    upper = _upper_of(container, gpus)
    eventually(lambda: os.path.exists(f"{upper}/mine"), "the container has written")
    assert sorted(os.listdir(upper)) == ["etc", "mine"]
    assert os.listdir(f"{upper}/etc") == ["ld.so.cache"]  # a whiteout
    # Another container still has the file that this one removed.
    done = gpus.run("sh", "-c", LOOK, image=GLIBC, flags=GPUS)
    assert "libcuda.so.1 (libc6,x86-64)" in done.stdout
    # A new task of this container has it again, although the snapshot has a whiteout.
    container.kill()
    container.exit_code()
    gpus.containerd.ctr("tasks", "start", "--detach", "--null-io", container.name)
    assert "libcuda.so.1 (libc6,x86-64)" in container.exec("sh", "-c", LOOK).stdout
    assert "layers/" not in container.exec("sh", "-c", LOOK).stdout
    assert len(os.listdir(tmp_path / "layers")) == 1


def test_layers_that_cannot_be_are_done_without(gpus: Runtime, tmp_path: Path) -> None:
    (tmp_path / "layers").mkdir()
    os.chown(tmp_path / "layers", 7, 7)
    done = gpus.run("sh", "-c", LOOK, image=GLIBC, flags=GPUS)
    assert done.code == 0, done.stderr
    assert done.stdout.count("UUID: GPU-") == 2
    assert "libcuda.so.1 (libc6,x86-64)" in done.stdout
    assert os.listdir(tmp_path / "layers") == []


def test_container_that_may_mount_spoils_nothing_for_others(gpus: Runtime, tmp_path: Path) -> None:
    """With CAP_SYS_ADMIN a container can make its mounts writable, and write to them."""
    tampering = (
        f"ls {BY_PATH}; mount -o remount,bind,rw none {BY_PATH}; touch {BY_PATH}/evil;"
        f" rm {BY_PATH}/pci-0000:18:00.0-card; echo evil > /usr/bin/nvidia-smi; ls {BY_PATH}"
    )
    may_mount = (*GPUS, "--cap-add", "CAP_SYS_ADMIN")
    first, second = (
        gpus.run("sh", "-c", tampering, image=BUSYBOX, flags=may_mount) for _ in range(2)
    )
    # It can write, but changes only its own files.
    assert first.stdout.count("evil") == 1, first.stderr
    assert second.stdout == first.stdout
    (layer,) = (tmp_path / "layers").iterdir()
    assert not list(layer.rglob("evil"))


def test_package_manager_does_what_it_does_without_a_layer(gpus: Runtime, tmp_path: Path) -> None:
    """It replaces and removes files that only the layer has, and rebuilds the cache."""
    script = (
        "set -e; cd /usr/lib/*-linux-gnu;"
        " target=$(readlink libcuda.so.1); rm libcuda.so.1; ldconfig -X;"
        " ln -s $target libcuda.so.new; mv libcuda.so.new libcuda.so.1;"
        " rm /etc/ld.so.cache; ldconfig; test -s /etc/ld.so.cache; ldconfig;"
        f" {LOOK}; readlink libcuda.so.1; ls"
    )
    seen = [gpus.run("sh", "-c", script, image=GLIBC, flags=GPUS)]
    assert seen[0].code == 0, seen[0].stderr
    assert "libcuda.so.1 (libc6,x86-64)" in seen[0].stdout
    assert seen[0].stdout.count("UUID: GPU-") == 2
    # The same without a layer.
    (tmp_path / "layers").rename(tmp_path / "away")
    (tmp_path / "layers").touch()
    seen.append(gpus.run("sh", "-c", script, image=GLIBC, flags=GPUS))
    assert "/layers/" not in seen[1].stdout
    assert seen[1].stdout.splitlines()[1:] == seen[0].stdout.splitlines()[1:]
    assert seen[1].stderr == seen[0].stderr


WHEEL: Final = "site-packages/torchcodec-0.17.0.dist-info"
MOUNTED: Final = "grep . /proc/self/mountinfo"


def test_drivers_files_are_in_the_layer_and_not_mounted(
    gpus: Runtime, two_gpus: SimulatedNode, configure: Callable[[str], None], tmp_path: Path
) -> None:
    containers = [gpus.start_idle(image=GLIBC, flags=GPUS)]
    without = _settings(two_gpus, tmp_path).replace("[node]\n", "[node]\ndriver-layer = false\n")
    configure(without)
    containers.append(gpus.start_idle(image=GLIBC, flags=GPUS))
    assert len(os.listdir(tmp_path / "layers")) == 2
    seen = [each.exec("sh", "-c", LOOK).stdout.splitlines()[1:] for each in containers]
    assert seen[0] == seen[1]
    assert len(seen[0]) > 2
    layered, mounted = (_mounted(each.exec("sh", "-c", MOUNTED).stdout) for each in containers)
    assert set(layered) < set(mounted)
    gone = set(mounted) - set(layered)
    assert "/usr/bin/nvidia-smi" in gone
    assert len([path for path in gone if ".so." in path]) > 20
    assert not [path for path in layered if path.startswith(("/usr/", "/lib/"))]
    state = f"{gpus.containerd.directory}/state"
    where = ("--config", two_gpus.config_path, "--containerd-state", state)
    told = [nvshim("explain", each.name, *where).stdout for each in containers]
    assert f"{len(gone)} files from the driver layer" in " ".join(told[0].split())
    assert "driver layer" not in told[1]
    assert "/usr/bin/nvidia-smi from" in nvshim("explain", "-v", containers[0].name, *where).stdout


def test_package_in_the_image_that_needs_more_is_named(
    gpus: Runtime, two_gpus: SimulatedNode
) -> None:
    """A user installs it in the running container to try it."""
    state = f"{gpus.containerd.directory}/state"
    where = ("--config", two_gpus.config_path, "--containerd-state", state)
    flags = (*GPUS[:2], "--env", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    container = gpus.start_idle(image=GLIBC, flags=flags)
    assert nvshim("explain", container.name, *where, "-o", "json").document["packages"] == []
    done = container.exec("mkdir", "-p", f"/usr/local/lib/python3.12/{WHEEL}")
    assert done.code == 0, done.stderr
    told = nvshim("explain", container.name, *where).stdout
    advice = "packages torchcodec uses video, which was not granted: request NVIDIA_DRIVER_"
    assert advice in " ".join(told.split())
    document = nvshim("explain", container.name, *where, "-o", "json").document
    assert document["packages"] == [{"name": "torchcodec", "lacks": ["video"]}]
    everything = gpus.start_idle(image=GLIBC, flags=GPUS)
    everything.exec("mkdir", "-p", f"/usr/local/lib/python3.12/{WHEEL}")
    assert nvshim("explain", everything.name, *where, "-o", "json").document["packages"] == []


def _mounted(mountinfo: str) -> list[str]:
    """Return the mount points."""
    return [line.split(" ")[4] for line in mountinfo.splitlines() if " - " in line]


def test_running_container_keeps_the_driver_that_the_host_has_replaced(
    ours: Runtime, configure: Callable[[str], None], workshop: str, tmp_path: Path
) -> None:
    look = "ls /usr/lib/*-linux-gnu; grep -c . /usr/lib/*-linux-gnu/libcuda.so.1"
    with SimulatedNode.create(f"{workshop}/updated", Scenario.load("two")) as node:
        configure(_settings(node, tmp_path))
        running = ours.start_idle(image=GLIBC, flags=GPUS)
        before = running.exec("sh", "-c", look)
        changed_node(node, replace(node.scenario, driver="550.54.14"))
        assert running.exec("sh", "-c", look).stdout == before.stdout
        updated = ours.run("sh", "-c", f"{look}; {LOOK}", image=GLIBC, flags=GPUS)
        assert updated.code == 0, updated.stderr
        assert "libcuda.so.550.54.14" in updated.stdout
        assert f"libcuda.so.{node.driver_version}" not in updated.stdout
        assert len(os.listdir(tmp_path / "layers")) == 2
        # The host's space is freed when the last container with the old files is removed.
        running.remove()
        (layer,) = os.listdir(tmp_path / "layers")
        assert f"/{layer}/" in updated.stdout
        # Removing the driver does not affect containers either.
        running = ours.start_idle(image=GLIBC, flags=GPUS)
        shutil.rmtree(f"{node.directory}/driver")
        assert "libcuda.so.550.54.14" in running.exec("sh", "-c", look).stdout
        running.remove()
        assert os.listdir(tmp_path / "layers") == []


@pytest.mark.parametrize("way", ["native", "read-only", "long"])
def test_where_files_cannot_be_in_a_layer_they_are_mounted(
    gpus: Runtime,
    two_gpus: SimulatedNode,
    configure: Callable[[str], None],
    tmp_path: Path,
    way: str,
) -> None:
    flags = {
        "native": ("--snapshotter", "native"),
        "read-only": ("--read-only", "--mount", "type=tmpfs,src=tmpfs,dst=/run,options=rw"),
        # The mount options must fit one page, and with this layer they do not.
        "long": (),
    }[way]
    if way == "long":
        directory = "/".join([str(tmp_path / "layers"), *["x" * 200] * 19])
        configure(_settings(two_gpus, tmp_path).replace(f"{tmp_path}/layers", directory))
    script = f"nvidia-smi -L; {MOUNTED}"
    done = gpus.run("sh", "-c", script, image=GLIBC, flags=(*GPUS, *flags))
    assert done.code == 0, done.stderr
    assert done.stdout.count("UUID: GPU-") == 2
    # If the root is read-only only for the container, it has a layer as usual.
    is_mounted = any("libcuda.so." in path for path in _mounted(done.stdout))
    assert is_mounted == (way != "read-only")


def test_container_that_may_mount_cannot_write_the_drivers_files(
    gpus: Runtime, two_gpus: SimulatedNode
) -> None:
    smi, may_mount = "/usr/bin/nvidia-smi", (*GPUS, "--cap-add", "CAP_SYS_ADMIN")
    script = (
        f"mount -o remount,bind,rw {smi} && echo remounted; mount -o remount,rw / ;"
        f" echo evil > {smi}; chmod 0 {smi}; cat {smi}"
    )
    with open(f"{two_gpus.directory}/driver/usr/bin/nvidia-smi", "rb") as file:
        before, mode = file.read(), os.fstat(file.fileno()).st_mode
        done = gpus.run("sh", "-c", script, image=BUSYBOX, flags=may_mount)
        assert done.stdout.splitlines() == ["evil"], done.stderr
        assert os.pread(file.fileno(), len(before) + 1, 0) == before
        assert os.fstat(file.fileno()).st_mode == mode
    again = gpus.run("sh", "-c", "nvidia-smi -L", image=GLIBC, flags=may_mount)
    assert again.stdout.count("UUID: GPU-") == 2


def _settings(node: SimulatedNode, tmp_path: Path) -> str:
    """Return the node's configuration, with the test's own layers."""
    with open(node.config_path) as file:
        lines = [line for line in file if not line.startswith("layers =")]
    at = lines.index("[node]\n") + 1
    return "".join([*lines[:at], f'layers = "{tmp_path}/layers"\n', *lines[at:]])


def _upper_of(container: Container, runtime: Runtime) -> str:
    with open(f"/proc/{container.pid}/mountinfo") as file:
        (root,) = (line for line in file if " / / " in line)
    (upper,) = (
        option.removeprefix("upperdir=")
        for option in root.split()[-1].split(",")
        if option.startswith("upperdir=")
    )
    assert upper.startswith(runtime.containerd.directory)
    return upper
