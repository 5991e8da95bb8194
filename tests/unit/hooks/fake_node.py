"""A node in a directory, with real ELF files, device nodes, and procfs and sysfs trees."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

from hooks.config import Config
from hooks.node.inventory import Inventory, take_inventory

VERSION = "535.261.03"
MULTIARCH = "usr/lib/x86_64-linux-gnu"
NVIDIA, UVM, CAPS, DRM = 195, 508, 234, 226
IMEX, FS, VERBS = 500, 501, 231

_DEVICES = f"""Character devices:
  1 mem
{NVIDIA} nvidia-frontend
{DRM} drm
{CAPS} nvidia-caps
{UVM} nvidia-uvm

Block devices:
{NVIDIA} sd
"""

_INFORMATION = """Model: \t\t {model}
IRQ:   \t\t {irq}
GPU UUID: \t {uuid}
Bus Type: \t PCIe
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Excluded:\t {excluded}
"""


def put_link(path: Path, target: str) -> None:
    """Replace a file with a link."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def put_directory(path: Path) -> None:
    """Replace a file with a directory."""
    path.unlink()
    path.mkdir()


def put_fifo(path: Path) -> None:
    """Replace a file with a FIFO."""
    path.unlink()
    os.mkfifo(path)


def uuid_of(number: int, kind: str = "GPU") -> str:
    return f"{kind}-{number:08x}-aaaa-bbbb-cccc-0123456789ab"


class Elves:
    """Shared libraries, compiled once per soname and then copied."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, path: Path, soname: str | None, bits: int = 64) -> None:
        made = self._directory / f"{bits}-{soname}"
        if not made.exists():
            option = [f"-Wl,-soname,{soname}"] if soname else []
            command = [
                "gcc",
                f"-m{bits}",
                "-shared",
                "-nostdlib",
                "-x",
                "c",
                "/dev/null",
                "-o",
                str(made),
            ]
            subprocess.run([*command, *option], check=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, path)


class Node:
    """A directory with the files that the engine reads; change them as a node would change."""

    def __init__(self, base: Path, elves: Elves) -> None:
        self.base = base
        self.elves = elves
        self.driver, self.dev, self.proc, self.sys = (
            base / name for name in ("driver", "dev", "proc", "sys")
        )
        self.config = Config(
            driver_root=str(self.driver),
            dev=str(self.dev),
            proc=str(self.proc),
            sys=str(self.sys),
            state=str(base / "state"),
            layers=str(base / "layers"),
            drained=str(base / "drained"),
            nvml_timeout=5.0,
        )
        for directory in (self.driver, self.dev, self.proc, self.sys):
            directory.mkdir()

    def write(self, path: Path, content: str = "") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def add_kernel_version(self, version: str) -> None:
        banner = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Aug 21"
        self.write(self.proc / "driver/nvidia/version", f"{banner}\nGCC version:  12.2.0\n")

    def add_kernel(self, version: str = VERSION) -> None:
        self.add_kernel_version(version)
        self.write(self.proc / "devices", _DEVICES)
        self.write(self.proc / "sys/kernel/random/boot_id", "first-boot\n")
        self.add_node("nvidiactl", NVIDIA, 255)
        self.add_node("nvidia-modeset", NVIDIA, 254)
        self.add_node("nvidia-uvm", UVM, 0)
        self.add_node("nvidia-uvm-tools", UVM, 1)

    def add_node(self, name: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> Path:
        path = self.dev / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
        path.chmod(mode)
        os.chown(path, 0, gid)
        return path

    def add_library(
        self, name: str, soname: str | None, directory: str = MULTIARCH, bits: int = 64
    ) -> Path:
        path = self.driver / directory / name
        self.elves.write(path, soname, bits)
        return path

    def add_driver(self, version: str = VERSION, directory: str = MULTIARCH) -> None:
        for stem in ("libcuda", "libnvidia-ml"):
            self.add_library(f"{stem}.so.{version}", f"{stem}.so.1", directory)

    def add_gpu(
        self,
        minor: int,
        bus: str | None = None,
        *,
        uuid: str | None = None,
        excluded: str = "No",
        drm: bool = False,
    ) -> None:
        bus = bus or f"0000:{0x10 + minor:02x}:00.0"
        self.write(
            self.proc / f"driver/nvidia/gpus/{bus}/information",
            _INFORMATION.format(
                model="NVIDIA H100",
                irq=30 + minor,
                uuid=uuid or uuid_of(minor),
                bus=bus,
                minor=minor,
                excluded=excluded,
            ),
        )
        self.add_node(f"nvidia{minor}", NVIDIA, minor)
        (self.sys / f"bus/pci/devices/{bus}").mkdir(parents=True, exist_ok=True)
        if drm:
            for name, number, mode in (
                (f"card{minor}", minor, 0o660),
                (f"renderD{128 + minor}", 128 + minor, 0o660),
            ):
                (self.sys / f"bus/pci/devices/{bus}/drm/{name}").mkdir(parents=True)
                self.add_node(f"dri/{name}", DRM, number, mode, gid=44)

    def add_mig(self, minor: int, instance: int, compute: int, caps: tuple[int, int]) -> None:
        below = self.proc / f"driver/nvidia/capabilities/gpu{minor}/mig/gi{instance}"
        self.write(below / "access")
        self.write(below / f"ci{compute}/access")
        minors = self.proc / "driver/nvidia-caps/mig-minors"
        known = minors.read_text() if minors.exists() else "config 1\nmonitor 2\n"
        line = f"gpu{minor}/gi{instance}"
        known += f"{line}/access {caps[0]}\n{line}/ci{compute}/access {caps[1]}\n"
        self.write(minors, known)
        for cap in caps:
            if not (self.dev / f"nvidia-caps/nvidia-cap{cap}").exists():
                self.add_node(f"nvidia-caps/nvidia-cap{cap}", CAPS, cap, 0o444)

    def add_features(self) -> None:
        """Add the device nodes of features such as IMEX, each with an invalid one next to it."""
        imex, fs, switch, gdr, verbs, misc = IMEX, FS, 502, 503, VERBS, 10
        devices = self.proc / "devices"
        more = {
            imex: "nvidia-caps-imex-channels", fs: "nvidia-fs", switch: "nvidia-nvswitch",
            gdr: "gdrdrv", verbs: "infiniband_verbs", misc: "misc",
        }  # fmt: skip
        lines = "".join(f"{major} {name}\n" for major, name in more.items())
        devices.write_text(devices.read_text().replace("\nBlock", f"{lines}\nBlock"))
        self.write(self.proc / "misc", " 63 vga_arbiter\n 58 rdma_cm\n")
        for name, major, minor in (
            ("nvidia-fs0", fs, 0), ("nvidia-fs10", fs, 10), ("nvidia-fs2", fs, 2),
            ("nvidia-fs3", 8, 3),  # of another driver
            ("infiniband/uverbs0", verbs, 192), ("infiniband/rdma_cm", misc, 58),
            ("infiniband/issm0", verbs, 64), ("gdrdrv", gdr, 0), ("nvidia-nvlink", 504, 0),
            ("nvidia-nvswitchctl", switch, 255), ("nvidia-nvswitch0", switch, 0),
            ("nvidia-caps/nvidia-cap1", CAPS, 1), ("nvidia-caps/nvidia-cap2", CAPS, 2),
            ("nvidia-caps-imex-channels/channel0", imex, 0),
            ("nvidia-caps-imex-channels/channel7", imex, 7),
            ("nvidia-caps-imex-channels/channel8", imex, 9),  # of another number
            # The driver's nodes are recognized by number, not by name.
            ("mine", NVIDIA, 9), ("nvidia-nvlink9", NVIDIA, 9),
        ):  # fmt: skip
            self.add_node(name, major, minor, 0o660 if "verbs" in name else 0o666, gid=9)

    def take_inventory(self, *gpus: dict[str, Any], **report: Any) -> Inventory:
        """Take the inventory with NVML's report of these GPUs, and cache it."""
        return take_inventory(self.config, nvml_report(*gpus, **report))


def nvml_report(*gpus: dict[str, Any], **fields: Any) -> bytes:
    """Build a report of the NVML child."""
    return json.dumps({"driver": VERSION, "gpus": gpus, **fields}).encode()


def nvml_gpu(minor: int, bus: str | None = None, **fields: Any) -> dict[str, Any]:
    """Build a GPU of the NVML child's report."""
    return {
        "index": minor,
        "uuid": uuid_of(minor),
        "minor": minor,
        "bus_id": f"0000{bus or f'0000:{0x10 + minor:02x}:00.0'}",
        "name": "NVIDIA H100",
        "memory": 80 << 30,
        "mig": False,
        "mig_devices": [],
        "compute_capability": "9.0",
        "brand": 14,
        **fields,
    }


def nvml_mig(index: int, instance: int, compute: int, profile: str = "1g.10gb") -> dict[str, Any]:
    return {
        "index": index,
        "uuid": uuid_of(0x100 + instance * 16 + compute, "MIG"),
        "gpu_instance": instance,
        "compute_instance": compute,
        "profile": profile,
    }
