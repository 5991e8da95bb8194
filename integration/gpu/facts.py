"""What the machine is: for whoever reads a report and cannot look at the machine."""

from __future__ import annotations

import glob
import os
import platform
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from hooks.edits.capabilities import Library, every_row
from integration import traces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hooks.config import Config
    from hooks.node.inventory import Inventory
    from integration.gpu.machine import Machine
    from integration.parts import Parts

Rows = list[tuple[str, str]]

_SMI_TIMEOUT: Final = 60.0
_MOST_NAMED: Final = 60


def of_machine(machine: Machine, parts: Parts) -> Rows:
    """Kernel, Python, cgroups, mounts, and what runs the containers."""
    rows = [
        ("kernel", f"{platform.release()} {platform.machine()}"),
        ("system", _os_release()),
        ("processors, memory", f"{os.cpu_count()}, {_memory()}"),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("root file system", _mount_of("/")),
        ("work directory", f"{machine.work}, {_mount_of(machine.work)}"),
        ("cgroups", ", ".join(traces.cgroup_hierarchies()) or "none mounted"),
        ("ours", _first_line("/proc/self/cgroup")),
        ("snapshots", "overlay" if machine.overlay else "copies"),
        *(("found and done", note) for note in machine.notes),
    ]
    if machine.cgroups:
        rows.append(("cgroups not usable", machine.cgroups))
    programs = (parts.containerd, parts.runc)
    return rows + [(os.path.basename(program), _version_of(program)) for program in programs]


def _version_of(program: str) -> str:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"does not run here: {error}"
    line = (said.stdout or said.stderr).partition("\n")[0]
    return line or f"it ends with {said.returncode}"


def of_kernel_module(config: Config) -> Rows:
    """What the driver's kernel module shows, and the nodes that are there."""
    proc = f"{config.proc}/driver/nvidia"
    listed = _names(f"{proc}/gpus")
    return [
        ("module", _first_line(f"{proc}/version") or "not loaded, or it says nothing"),
        ("GPUs in procfs", f"{len(listed)}: {', '.join(listed)}"),
        ("majors", ", ".join(_majors(config)) or "none of NVIDIA's"),
        ("nodes", "; ".join(_nodes(config.dev)) or "none"),
        ("parameters", ", ".join(_parameters(proc))),
        ("modules", ", ".join(_modules(config)) or "none of NVIDIA's"),
    ]


def of_inventory(inventory: Inventory, milliseconds: float) -> Rows:
    """What the engine found."""
    driver = inventory.driver
    rows = [
        ("taken in", f"{milliseconds:.0f} ms, without a cache, NVML included"),
        ("driver", f"{driver.version}, {driver.arch.value}"),
        ("its root", f"{driver.root}, {_mount_of(driver.root)}"),
        ("directories of libraries", ", ".join(driver.library_directories)),
        ("NVML", inventory.nvml_failure or "answered"),
    ]
    rows += [
        (
            f"GPU {gpu.index}",
            f"{gpu.model}, {gpu.uuid}, {gpu.bus_id}, minor {gpu.minor}"
            + (f", {gpu.memory >> 20} MiB" if gpu.memory else "")
            + (", MIG mode" if gpu.mig else "")
            + (f", {' '.join(gpu.drm)}" if gpu.drm else "")
            + ("" if gpu.path in inventory.nodes.usable else ", no usable node"),
        )
        for gpu in inventory.gpus
    ]
    rows += [
        (f"MIG {d.gpu}:{d.index}", f"{d.profile}, {d.uuid}, nodes {' '.join(d.paths) or 'none'}")
        for d in inventory.mig_devices
    ]
    rows += [("not usable", f"{path}: {why}") for path, why in inventory.nodes.faults.items()]
    rows += [("note", note) for note in inventory.notes]
    rows += [("socket", f"{path} from {host}") for path, host in inventory.sockets.items()]
    rows += [("libraries", _enumerate([f"{f.name} ({f.arch.value})" for f in driver.libraries]))]
    rows += [("other files", _enumerate([file.source for file in driver.files]))]
    present = {library.row for library in driver.libraries}
    absent = [row.name for row in every_row() if isinstance(row, Library)]
    rows += [("libraries it has not", _enumerate([row for row in absent if row not in present]))]
    return rows


def of_smi(inventory: Inventory) -> Rows:
    """What nvidia-smi says on the machine itself, outside of any container."""
    program = next((f.source for f in inventory.driver.files if f.row == "nvidia-smi"), None)
    if program is None:
        return [("nvidia-smi", "the driver has none")]
    # The machine's own loader may not know where the driver is.
    environment = {"LD_LIBRARY_PATH": ":".join(inventory.driver.library_directories)}
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, check=False, timeout=_SMI_TIMEOUT,
            env=environment,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [(f"{program} -L", str(error))]
    said = (done.stdout + done.stderr).strip().splitlines()
    return [(f"{program} -L", line) for line in said[:20]] or [(program, f"{done.returncode}")]


def _os_release() -> str:
    for line in _lines("/etc/os-release"):
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return "does not say"


def _memory() -> str:
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / (1 << 30):.1f} GiB"


def _mount_of(path: str) -> str:
    """The file system that a path is on, and its flags."""
    best: tuple[int, str] = (-1, "")
    for line in _lines("/proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()[:1]
        point = fields[4].rstrip("/")
        if path == point or path.startswith(f"{point}/"):
            # The last of several at one place is on top.
            best = max(best, (len(point), f"{''.join(kind)} {fields[5]}"), key=lambda b: b[0])
    return best[1]


def _majors(config: Config) -> Iterator[str]:
    return (" ".join(line.split()) for line in _lines(f"{config.proc}/devices") if "nvidia" in line)


def _nodes(dev: str) -> Iterator[str]:
    for pattern in ("nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*", "dri/*"):
        for path in sorted(glob.glob(f"{glob.escape(dev)}/{pattern}"))[:_MOST_NAMED]:
            seen = os.lstat(path)
            if stat.S_ISCHR(seen.st_mode):
                number = f"{os.major(seen.st_rdev)}:{os.minor(seen.st_rdev)}"
                owner = f"{stat.S_IMODE(seen.st_mode):o} {seen.st_uid}:{seen.st_gid}"
                yield f"{path} {number} {owner}"


def _parameters(proc: str) -> Iterator[str]:
    wanted = ("ModifyDeviceFiles", "DeviceFile", "EnableGpuFirmware", "OpenRmEnable")
    return (line for line in _lines(f"{proc}/params") if line.startswith(wanted))


def _modules(config: Config) -> Iterator[str]:
    return (
        line.split()[0]
        for line in _lines(f"{config.proc}/modules")
        if line.startswith(("nvidia", "gdrdrv"))
    )


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _first_line(path: str) -> str:
    return next(iter(_lines(path)), "")


def _enumerate(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "") or "none"
