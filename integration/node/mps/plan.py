"""Plan the control daemon of a resource.

Rules
- Devices are named by UUID, in the order of their indices. So the daemon's number of a device is
  its position in that order, whatever other devices the node has.
- A GPU that NVML cannot open is left out, because CUDA sees no GPU after one that it cannot open. A
  GPU out of service is left out too. A daemon that already has such a GPU keeps running for the
  other GPUs.
- Each share has an equal part of the memory, in whole MiB, and of the threads, in whole percent. If
  NVML does not report the memory, it is not limited.
- :mod:`integration.node.services.plugin.resources` has checked how many clients may share a device.
  A GPU that has since disappeared, or has been switched to MIG mode, is not shared.
- The programs are the driver's. A driver root with a dynamic loader is a complete system, as in a
  driver container: its programs run with it as their root. Without a loader the programs run on the
  host, with the path of their libraries in the environment.

Source: nvidia-cuda-mps-control(1); k8s-device-plugin, cmd/mps-control-daemon/mps/daemon.go.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Final

from api.values import dataclass
from hooks.node.driver import Driver
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from integration.agent_errors import MpsImpossible, MpsProgramMissing
from integration.driver_launch import where_programs_run
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
    """The requirements of claims on a daemon."""

    limits: Mapping[str, int]  # MiB of each device that a client may use, by UUID; 0 for no limit
    threads: int  # percent of the threads that a client may use
    multi_user: bool  # whether clients of several users may compute at the same time


@dataclass(frozen=True, slots=True)
class Programs:
    """How to start the driver's programs."""

    root: str  # their root directory; "" for the host's
    control: str  # path of the control program, below that root
    search: str  # value of PATH, where the daemon looks for the server
    libraries: str  # value of LD_LIBRARY_PATH; "" for none

    def environment(self, pipe: str, log: str, devices: tuple[str, ...] = ()) -> dict[str, str]:
        """Return the complete environment of a program.

        Args:
            pipe: the value of CUDA_MPS_PIPE_DIRECTORY.
            log: the value of CUDA_MPS_LOG_DIRECTORY.
            devices: the value of CUDA_VISIBLE_DEVICES; empty for a program that only sends a
                command.
        """
        variables = {
            "PATH": self.search,
            "CUDA_MPS_PIPE_DIRECTORY": pipe,
            "CUDA_MPS_LOG_DIRECTORY": log,
        }
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if self.libraries:
            variables["LD_LIBRARY_PATH"] = self.libraries
        return variables


@dataclass(frozen=True, slots=True)
class Plan:
    """The desired control daemon of a resource."""

    resource: str
    devices: tuple[str, ...]  # UUIDs of its devices, in the daemon's order
    # MiB of each device that a client may use, by UUID; without those that have no limit
    limits: Mapping[str, int]
    # UUIDs of the node's other GPUs, which the daemon must not keep from other containers
    others: frozenset[str]
    percentage: int  # percent of the threads that a client may use
    driver: str  # version of the driver whose programs start it
    programs: Programs  # how to start it
    options: tuple[str, ...] = ()  # options of the control program
    stays: bool = False  # whether it keeps running without the agent, even without clients

    @property
    def gpus(self) -> tuple[str, ...]:
        """The devices that are whole GPUs; only those have a compute mode."""
        return tuple(uuid for uuid in self.devices if uuid.startswith("GPU-"))

    def commands(self, devices: tuple[str, ...]) -> tuple[str, ...]:
        """Return the commands that set a daemon's limits; they are safe to repeat.

        Args:
            devices: the daemon's devices, in its order; it may have more than the plan.
        """
        return (
            f"set_default_active_thread_percentage {self.percentage}",
            *(
                f"set_default_device_pinned_mem_limit {number} {self.limits[uuid]}M"
                for number, uuid in self.limited(devices)
            ),
        )

    def limited(self, devices: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
        """Return those of a daemon's devices whose memory is limited: number and UUID of each."""
        return tuple(each for each in enumerate(devices) if each[1] in self.limits)


def plan_of(resource: Resource, inventory: Inventory) -> Plan:
    """Return the plan for the control daemon of a resource.

    Args:
        resource: a resource shared by MPS.

    Raises:
        MpsImpossible: MPS cannot share one of its devices.
        MpsProgramMissing: the driver lacks a program of MPS.
    """
    gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
    memory = {device.uuid: device.memory_bytes or 0 for device in resource.devices}
    for uuid in memory:
        _check(resource, uuid, gpus)
    replicas = Counter(device.uuid for device in resource.devices)
    shares = {uuid: total // replicas[uuid] // _MIB for uuid, total in memory.items()}
    return Plan(
        resource=resource.name,
        devices=tuple(uuid for uuid in memory if not (gpus[uuid].lost or gpus[uuid].drained)),
        limits={uuid: share for uuid, share in shares.items() if share},
        others=frozenset(uuid for uuid, gpu in gpus.items() if uuid not in memory and not gpu.lost),
        percentage=100 // max(1, resource.replicas),  # one for all GPUs
        driver=inventory.driver.version,
        programs=programs_of(inventory.driver),
    )


def _check(resource: Resource, uuid: str, gpus: Mapping[str, Gpu]) -> None:
    gpu = gpus.get(uuid)
    if gpu is None or gpu.mig:
        raise MpsImpossible(
            f"to share {uuid} of {resource.name} by MPS",
            found="the node has no such GPU" if gpu is None else "the GPU is in MIG mode",
            do="share MIG devices by time-slicing, or turn MIG mode off",
        )


def programs_of(driver: Driver) -> Programs:
    """Return the command and environment with which to start the driver's programs.

    Raises:
        MpsProgramMissing: the driver lacks one of them.
    """
    sources = {file.row: file.source for file in driver.files}
    missing = [name for name in (_CONTROL, _SERVER) if name not in sources]
    if missing:
        raise MpsProgramMissing(
            "to share GPUs by MPS",
            found=f"no {missing[0]} among the files of driver {driver.version} below {driver.root}",
            do="install nvidia-cuda-mps (Debian) or nvidia-compute-utils (Ubuntu)",
        )
    root, libraries = where_programs_run(driver)
    return Programs(
        root=root,
        control=sources[_CONTROL].removeprefix(root),
        search=os.path.dirname(sources[_SERVER]).removeprefix(root),
        libraries=libraries,
    )
