"""What the control daemon of a resource is to be like.

Rules
- Devices are in the order of their indices, and named by UUID: so what number a device has for the
  daemon is its place in that order, whatever else the node has.
- A GPU that NVML cannot open is left out: CUDA sees none of those that come after one that it
  cannot see. So is one that is out of service. A daemon that has it already stays, for the sake of
  the others.
- Each share has an equal part of the memory, in whole MiB, and of the threads, in whole percent.
  Where NVML did not say how much memory there is, it is not limited.
- How many may share a device at all was seen to when the resource was made
  (:mod:`integration.node.services.plugin.resources`). A GPU that was given MIG mode since, or is
  gone, is not shared.
- The programs are the driver's. A driver root with a dynamic loader is a system of its own, as in a
  driver container, and its programs run with that as their root; in one without they are started
  like programs of the host, and told where their libraries are.

Source: nvidia-cuda-mps-control(1); k8s-device-plugin, cmd/mps-control-daemon/mps/daemon.go.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.agent_errors import MpsImpossible, MpsProgramMissing
from integration.driver_launch import where_programs_run

if TYPE_CHECKING:
    from hooks.node.driver import Driver
    from hooks.node.gpus import Gpu
    from hooks.node.inventory import Inventory
    from integration.node.values.resources import Resource

__all__ = [
    "ClaimDaemon",
    "Plan",
    "Programs",
    "plan_of",
    "programs_of",
]

_MIB: Final = 1 << 20

_CONTROL: Final = "nvidia-cuda-mps-control"
_SERVER: Final = "nvidia-cuda-mps-server"


@dataclass(frozen=True, slots=True)
class ClaimDaemon:
    """What claims need of a daemon."""

    limits: Mapping[str, int]  # MiB that a client may have of each device, by UUID; 0 for no limit
    threads: int  # percent of the threads that a client may have
    multi_user: bool  # whether clients of several users may work at the same time


@dataclass(frozen=True, slots=True)
class Programs:
    """How the driver's programs are started."""

    root: str  # the directory that is their root; "" for the host's
    control: str  # path of the control program, below that root
    search: str  # value of PATH, in which the daemon looks for the server
    libraries: str  # value of LD_LIBRARY_PATH; "" for none

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
    """What the control daemon of a resource is to be like."""

    resource: str  # the resource's name
    devices: tuple[str, ...]  # UUIDs of its GPUs, in the daemon's order
    # MiB of memory that a client may have of each, by UUID; one that is not limited is not in it
    limits: Mapping[str, int]
    # UUIDs of the node's other GPUs: whoever gets them is not to find them taken
    others: frozenset[str]
    percentage: int  # of the threads that a client may have
    driver: str  # version of the driver that it is started from
    programs: Programs  # how it is started
    options: tuple[str, ...] = ()  # of the control program
    stays: bool = False  # whether it stays when the agent ends, also if nobody has its pipes

    @property
    def gpus(self) -> tuple[str, ...]:
        """The devices that are whole GPUs: those have a compute mode."""
        return tuple(uuid for uuid in self.devices if uuid.startswith("GPU-"))

    def commands(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """What gives a daemon its limits; to give them again changes nothing.

        Args:
            devices: those of the daemon, in its order; it may have more than are wanted now.
        """
        return (
            f"set_default_active_thread_percentage {self.percentage}",
            *(
                f"set_default_device_pinned_mem_limit {number} {self.limits[uuid]}M"
                for number, uuid in enumerate(devices)
                if uuid in self.limits
            ),
        )


def plan_of(resource: Resource, inventory: Inventory) -> Plan:
    """What the control daemon of a resource is to be like.

    Args:
        resource: shared by MPS.

    Raises:
        MpsImpossible: its devices cannot be shared so.
        MpsProgramMissing: the driver has not all of MPS.
    """
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    memory = {device.uuid: device.memory_bytes or 0 for device in resource.devices}
    for uuid in memory:
        _check(resource, uuid, gpus)
    replicas = max(1, resource.replicas)
    shares = {uuid: total // replicas // _MIB for uuid, total in memory.items()}
    return Plan(
        resource=resource.name,
        devices=tuple(uuid for uuid in memory if not (gpus[uuid].lost or gpus[uuid].drained)),
        limits={uuid: share for uuid, share in shares.items() if share},
        others=frozenset(uuid for uuid, gpu in gpus.items() if uuid not in memory and not gpu.lost),
        percentage=100 // replicas,
        driver=inventory.driver.version,
        programs=programs_of(inventory.driver),
    )


def _check(resource: Resource, uuid: str, gpus: Mapping[str, Gpu]) -> None:
    gpu = gpus.get(uuid)
    if gpu is None or gpu.mig:
        raise MpsImpossible(
            f"to share {uuid} of {resource.name} by MPS",
            found="no GPU of the node" if gpu is None else "a GPU in MIG mode",
            do="share MIG devices by time-slicing, or turn MIG mode off",
        )


def programs_of(driver: Driver) -> Programs:
    """How the driver's programs are started.

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
    root, libraries = where_programs_run(driver)
    return Programs(
        root=root,
        control=sources[_CONTROL].removeprefix(root),
        search=os.path.dirname(sources[_SERVER]).removeprefix(root),
        libraries=libraries,
    )
