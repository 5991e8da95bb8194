"""Find the holders of devices that are out of service: a reset or a new driver waits for them.

============  ==================================================================================
kind          what it is
============  ==================================================================================
container     a container that has the device by its record, its spec or a claim, from before its
              init process is created until that exits; or one of its processes has the node open
mps           a control daemon or server of MPS
persistenced  nvidia-persistenced, which keeps GPUs awake by having them open
agent         the node agent, which watches GPUs through NVML; it closes NVML if the mark says so
claim         a resource claim that has the GPU or a part of it, which only a change of MIG devices
              waits for: its containers may start at any moment
process       any other process that has a node of the device open or mapped
module        of the driver: another vendor's kernel module that uses NVIDIA's
kernel        of the driver: the kernel counts more users of its module than are visible, as with
              persistence mode without its daemon
============  ==================================================================================

Rules
- The mark is written first, the holders are listed second (:mod:`hooks.node.drained`).
- If the shim of a container exits before it creates the init process, the container never gets one.
- A process holds a device if it has one of the device's nodes open or mapped
  (:mod:`integration.containers.device_users`). A privileged container has every node in its spec,
  so it holds what its processes have open, or what a claim or the kubelet assigns to it.
- A process in the node agent's own container counts as one outside of containers, so that this
  container is not stopped.
- Every container with any part of the driver holds the driver, since it may open the control node.
  So does every process with any node of the driver open.

Source: the kernel's Documentation/ABI/stable/sysfs-module (holders, refcnt).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hooks.config import Config
from hooks.node.capabilities import FRONTEND
from hooks.node.device_nodes import CAPS, read_majors
from hooks.node.fingerprint import read_text
from hooks.node.inventory import Inventory
from integration.containers.bundles import Container
from integration.containers.device_users import device_users
from integration.containers.held_devices import Holders, nodes_of
from integration.containers.owners import Owners
from integration.containers.procfs import Procfs
from integration.containers.shims import all_containers, has_listener
from integration.devices.targets import Target
from shim.causes.agent import agent_of

CONTAINER: Final = "container"
AGENT: Final = "agent"
MPS: Final = "mps"
CLAIM: Final = "claim"
_PERSISTENCED: Final = "persistenced"
_PROCESS: Final = "process"
_MODULE: Final = "module"
_KERNEL: Final = "kernel"

# The kernel truncates names of programs to 15 bytes.
_BY_NAME: Final = {"nvidia-cuda-mps": MPS, "nvidia-persiste": _PERSISTENCED}
_DO: Final = {
    CONTAINER: "delete its pod, stop it, or let `nvshim drain --force` stop it",
    AGENT: "let `nvshim drain --let-go` make it close NVML",
    MPS: "`nvshim drain --let-go` ends those of the node agent; else: "
    "echo quit | nvidia-cuda-mps-control",
    CLAIM: "delete its pod; the node agent then destroys what it made for the claim",
    _PERSISTENCED: "systemctl stop nvidia-persistenced",
    _PROCESS: "end it",
    _MODULE: "rmmod it",
    _KERNEL: "nvidia-smi -pm 0; see lsmod",
}

_OURS: Final = "nvidia"  # the prefix of the driver's own modules
_NODES: Final = "/dev/nvidia"


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of a device that is out of service."""

    kind: str  # of the table above
    name: str  # for display
    pid: int = 0  # one of its processes; 0 for none, or none yet
    devices: tuple[str, ...] = ()  # names of the devices
    container: Container | None = None  # the container, also for one of its processes

    @property
    def do(self) -> str:
        """The way to release the devices."""
        return _DO[self.kind]

    def to_json(self) -> dict[str, Any]:
        """Return what answers show of it."""
        return {
            "kind": self.kind,
            "name": self.name,
            "pid": self.pid or None,
            "devices": list(self.devices),
            "container": None if self.container is None else self.container.to_json(),
            "do": self.do,
        }


def find_holders(
    targets: Sequence[Target],
    inventory: Inventory | None,
    config: Config,
    states: Sequence[str] = (),
    proc: str = "/proc",
) -> tuple[Holder, ...]:
    """Return the current holders, containers first.

    Args:
        targets: the devices that are out of service.
        inventory: the node's devices; None without a driver.
        config: names the directories of devices and of our state.
        states: containerd's state directories; empty for the known ones.
        proc: the mount point of procfs.

    Raises:
        StateUnreadable: the caller is not root.
    """
    procfs = Procfs(proc)
    containers = all_containers(states, proc)
    found = list(_containers(containers, targets, inventory, config))
    known = {each.container.bundle for each in found if each.container is not None}
    owners = Owners(containers, procfs)
    agent = agent_of(config.state)  # in another pid namespace, the agent has another pid
    of_agent = owners.of(agent) if agent else None
    for pid, devices in device_users(procfs, _numbers(targets, inventory, config).name_of):
        owner = owners.of(pid)
        if owner is None or owner == of_agent:
            found.append(Holder(*_named(pid, procfs, agent), pid=pid, devices=devices))
        elif owner.bundle not in known:
            known.add(owner.bundle)
            found.append(Holder(CONTAINER, _title(owner), pid, devices, owner))
    if any(target.gpu is None for target in targets):
        found += (Holder(_MODULE, name) for name in _modules(config))
        if not any(holder.pid for holder in found) and _uses(config) > 0:
            found.append(Holder(_KERNEL, f"{_uses(config)} uses of the module nvidia"))
    return tuple(found)


# -- containers --------------------------------------------------------------------------------


def _containers(
    containers: Iterable[Container],
    targets: Sequence[Target],
    inventory: Inventory | None,
    config: Config,
) -> Iterator[Holder]:
    holders = Holders(config, inventory)
    for container in containers:
        if container.sandbox or container.has_stopped:
            continue
        if not container.pid and not has_listener(container):
            continue
        held = _held(container, targets, holders, inventory)
        if held:
            yield Holder(CONTAINER, _title(container), container.pid, held, container)


def _held(
    container: Container,
    targets: Sequence[Target],
    holders: Holders,
    inventory: Inventory | None,
) -> tuple[str, ...]:
    """Return the names of the targets that a container holds."""
    devices = set(holders.devices_of(container))
    gpus = {} if inventory is None else {gpu.index: gpu.uuid for gpu in inventory.gpus}
    parts = () if inventory is None else inventory.mig_devices
    # A container with a MIG device holds its GPU.
    devices |= {gpus.get(part.gpu, "") for part in parts if part.uuid in devices}
    of_driver = any(t.gpu is None for t in targets) and bool(devices or _has_driver(container))
    return tuple(t.name for t in targets if t.device in devices or (t.gpu is None and of_driver))


def _has_driver(container: Container) -> bool:
    """Whether a container has any part of the driver, even without a GPU."""
    if container.record is not None and container.record.get("grant"):
        return True
    return any(path.startswith(_NODES) for path in nodes_of(container))


def _title(container: Container) -> str:
    return container.title if container.pod else f"{container.namespace}/{container.title}"


# -- processes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The device numbers of the targets, each with the name of its target."""

    nodes: dict[tuple[int, int], str]
    majors: dict[int, str]

    def name_of(self, number: int) -> str:
        """Return the name of a target; "" if the number belongs to none."""
        major, minor = os.major(number), os.minor(number)
        return self.nodes.get((major, minor)) or self.majors.get(major, "")


def _numbers(targets: Iterable[Target], inventory: Inventory | None, config: Config) -> _Numbers:
    majors = read_majors(config)
    nodes: dict[tuple[int, int], str] = {}
    every: dict[int, str] = {}
    gpus = () if inventory is None else inventory.gpus
    for target in targets:
        if target.mig is not None:
            its = ((driver, minor) for driver in CAPS for minor in target.mig.caps)
        elif target.gpu is not None:
            its = ((driver, target.gpu.minor) for driver in FRONTEND)
            nodes |= dict.fromkeys(_drm(target.gpu.drm_paths, config), target.name)
        else:
            ours = (major for name, major in majors.items() if name.startswith(_OURS))
            every |= dict.fromkeys(ours, target.name)
            for gpu in gpus:
                nodes |= dict.fromkeys(_drm(gpu.drm_paths, config), target.name)
            continue
        nodes |= {(majors[name], minor): target.name for name, minor in its if name in majors}
    return _Numbers(nodes, every)


def _drm(paths: Iterable[str], config: Config) -> Iterator[tuple[int, int]]:
    for path in paths:
        try:
            number = os.stat(config.dev + path.removeprefix("/dev")).st_rdev
        except OSError:
            continue
        yield os.major(number), os.minor(number)


def _named(pid: int, procfs: Procfs, agent: int) -> tuple[str, str]:
    """Return the kind and name of a process outside of containers, or in the node agent's."""
    name = procfs.name(pid)
    kind = next((kind for start, kind in _BY_NAME.items() if name.startswith(start)), _PROCESS)
    if kind == _PROCESS and agent and agent in procfs.ancestors(pid):
        return AGENT, "the node agent"
    return kind, name or str(pid)


# -- modules -----------------------------------------------------------------------------------


_OWN: Final = ("nvidia_uvm", "nvidia_modeset", "nvidia_drm")


def _modules(config: Config) -> list[str]:
    """Return other vendors' modules that use the driver's, such as gdrdrv and nvidia_fs."""
    users = (user for module in (_OURS, *_OWN) for user in _users(config, module))
    return sorted(set(users).difference(_OWN))


def _users(config: Config, module: str) -> list[str]:
    try:
        return os.listdir(f"{config.sys}/module/{module}/holders")
    except OSError:
        return []


def _uses(config: Config) -> int:
    """Return the use count of the driver's module without other modules; 0 if unknown."""
    text = read_text(f"{config.sys}/module/{_OURS}/refcnt") or ""
    return int(text) - len(_users(config, _OURS)) if text.strip().isdecimal() else 0
