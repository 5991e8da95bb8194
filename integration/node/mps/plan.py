"""What the control daemon of a resource is to be like.

Rules
- Devices are in the order of their indices, and named by UUID: so what number a device has for the
  daemon is its place in that order, whatever else the node has.
- Each share has an equal part of the memory, in whole MiB, and of the threads, in whole percent.
  Where NVML did not say how much memory there is, it is not limited.
- Up to 48 clients can use a GPU from Volta on (compute capability 7.0), 16 an older one. NVIDIA's
  plugin counts Volta among the older ones; its manual does not.
- MIG devices are not shared so, nor are GPUs in MIG mode.
- The programs are the driver's. A driver root with a dynamic loader is a system of its own, as in a
  driver container, and its programs run with that as their root; in one without they are started
  like programs of the host, and told where their libraries are.

Source: nvidia-cuda-mps-control(1); k8s-device-plugin, cmd/mps-control-daemon/mps/daemon.go.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hooks.edits.plan import Arch
from hooks.node.witness import Witness
from integration.node.mps.errors import MpsImpossible, MpsProgramMissing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hooks.node.driver import Driver
    from hooks.node.gpus import Gpu
    from hooks.node.inventory import Inventory
    from integration.node.plugin.values import Resource

__all__ = [
    "MOST_CLIENTS",
    "MOST_CLIENTS_BEFORE_VOLTA",
    "Plan",
    "Programs",
    "plan_of",
    "programs_of",
]

MOST_CLIENTS: Final = 48
MOST_CLIENTS_BEFORE_VOLTA: Final = 16
_VOLTA: Final = (7, 0)
_MIB: Final = 1 << 20

_CONTROL: Final = "nvidia-cuda-mps-control"
_SERVER: Final = "nvidia-cuda-mps-server"
_LIBCUDA: Final = "libcuda.so.{v}"
_LOADERS: Final = {
    Arch.X86_64: "/lib64/ld-linux-x86-64.so.2",
    Arch.AARCH64: "/lib/ld-linux-aarch64.so.1",
}


@dataclass(frozen=True, slots=True)
class Programs:
    """How the driver's programs are started.

    Attributes:
        root: the directory that is their root; "" for the host's.
        control: path of the control program, below that root.
        search: value of PATH, in which the daemon looks for the server.
        libraries: value of LD_LIBRARY_PATH; "" for none.
    """

    root: str
    control: str
    search: str
    libraries: str

    def environment(self, pipe: str, log: str, devices: tuple[str, ...] = ()) -> dict[str, str]:
        """All of the environment that one of them is started with.

        Args:
            pipe: CUDA_MPS_PIPE_DIRECTORY.
            log: CUDA_MPS_LOG_DIRECTORY.
            devices: CUDA_VISIBLE_DEVICES; none for one that only speaks to a daemon.
        """
        words = {
            "PATH": self.search,
            "CUDA_MPS_PIPE_DIRECTORY": pipe,
            "CUDA_MPS_LOG_DIRECTORY": log,
        }
        if devices:
            words["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if self.libraries:
            words["LD_LIBRARY_PATH"] = self.libraries
        return words


@dataclass(frozen=True, slots=True)
class Plan:
    """What the control daemon of a resource is to be like.

    Attributes:
        resource: the resource's name.
        devices: UUIDs of its GPUs, in the daemon's order.
        limits: MiB of memory that a client may have of each; None for no limit.
        percentage: of the threads that a client may have.
        driver: version of the driver that it is started from.
        programs: how it is started.
    """

    resource: str
    devices: tuple[str, ...]
    limits: tuple[int | None, ...]
    percentage: int
    driver: str
    programs: Programs

    @property
    def settings(self) -> tuple[str, ...]:
        """The commands that give a daemon its limits; to give them again changes nothing."""
        return (
            f"set_default_active_thread_percentage {self.percentage}",
            *(
                f"set_default_device_pinned_mem_limit {number} {limit}M"
                for number, limit in enumerate(self.limits)
                if limit is not None
            ),
        )


def plan_of(resource: Resource, inventory: Inventory) -> Plan:
    """What the control daemon of a resource is to be like.

    Args:
        resource: shared by MPS.
        inventory: of the node.

    Returns:
        The plan.

    Raises:
        MpsImpossible: its devices cannot be shared so.
        MpsProgramMissing: the driver has not all of MPS.
    """
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    devices = tuple(dict.fromkeys(device.uuid for device in resource.devices))
    memory = {device.uuid: device.memory_bytes for device in resource.devices}
    for uuid in devices:
        _check(resource, uuid, gpus)
    replicas = max(1, resource.replicas)
    return Plan(
        resource=resource.name,
        devices=devices,
        limits=tuple(_share(memory[uuid], replicas) for uuid in devices),
        percentage=100 // replicas,
        driver=inventory.driver.version,
        programs=programs_of(inventory.driver),
    )


def _share(memory: int | None, replicas: int) -> int | None:
    return None if memory is None else memory // replicas // _MIB or None


def _check(resource: Resource, uuid: str, gpus: Mapping[str, Gpu]) -> None:
    gpu = gpus.get(uuid)
    if gpu is None or gpu.mig:
        raise MpsImpossible(
            f"to share {uuid} of {resource.name} by MPS",
            found="a MIG device" if gpu is None else "a GPU in MIG mode",
            do="share MIG devices by time-slicing, or turn MIG mode off",
        )
    most = most_clients(gpu.compute_capability)
    if resource.replicas > most:
        raise MpsImpossible(
            f"{resource.replicas} shares of {uuid} of {resource.name} by MPS",
            found=f"a GPU of compute capability {gpu.compute_capability or 'unknown'}, which "
            f"{most} clients can use",
            do=f"set replicas to {most} or less in sharing.mps.resources",
        )


def most_clients(compute_capability: str) -> int:
    """How many clients of MPS can use a GPU.

    Args:
        compute_capability: "9.0"; "" if that is not known.
    """
    major, _, minor = compute_capability.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        return MOST_CLIENTS
    older = (int(major), int(minor)) < _VOLTA
    return MOST_CLIENTS_BEFORE_VOLTA if older else MOST_CLIENTS


def programs_of(driver: Driver) -> Programs:
    """How the driver's programs are started.

    Args:
        driver: whose.

    Raises:
        MpsProgramMissing: it has not all of MPS.
    """
    sources = {file.row: file.source for file in driver.files}
    missing = [name for name in (_CONTROL, _SERVER) if name not in sources]
    if missing:
        raise MpsProgramMissing(
            "to share GPUs by MPS",
            found=f"no {missing[0]} among the files of driver {driver.version} below {driver.root}",
            do="install it: Debian has it in nvidia-cuda-mps, Ubuntu in nvidia-compute-utils",
        )
    loader = _LOADERS.get(driver.arch, "")
    apart = driver.root != "/" and bool(loader) and Witness(driver.root).file(loader) is not None
    root = driver.root if apart else ""
    libraries = {
        os.path.dirname(library.source)
        for library in driver.libraries
        if library.row == _LIBCUDA and library.arch is driver.arch
    }
    return Programs(
        root=root,
        control=sources[_CONTROL].removeprefix(root),
        search=os.path.dirname(sources[_SERVER]).removeprefix(root),
        # The host's own loader knows where the host has its driver.
        libraries=""
        if driver.root == "/"
        else ":".join(sorted(path.removeprefix(root) for path in libraries)),
    )
