"""Who holds what is taken out of service: what a reset, or a new driver, has to wait for.

============  ==================================================================================
kind          what it is
============  ==================================================================================
container     a container that has the device by its record, its spec or a claim, from before its
              init process is made until that has ended; or a process of it that has the node open
mps           a control daemon or server of MPS
persistenced  nvidia-persistenced, which keeps GPUs awake by having them open
agent         the node agent, which watches GPUs through NVML; it lets go if the mark says so
process       any other process that has a node of the device open, or mapped
module        of the driver: a kernel module of somebody else's that uses NVIDIA's
kernel        of the driver: the kernel counts more users of its module than can be seen, as with
              persistence mode without its daemon
============  ==================================================================================

Rules
- A mark comes first, the list second (:mod:`hooks.node.drained`).
- A container whose shim is gone before it has made the init process will never have one.
- A process is known by the numbers of the nodes that it has open, whatever they are called where
  it is. A descriptor that only names a node (O_PATH) holds nothing. What may be no node of the
  driver, or is on a file system that needs another to answer, is not asked for its number. A
  privileged container has every node in its spec, so it holds what its processes have
  open, or what a claim or the kubelet's word gives it.
- Of the driver, every container that was given anything of it is a holder, since it may open the
  control node; so is every process that has any node of the driver open.

Source: proc(5); the kernel's Documentation/ABI/stable/sysfs-module (holders, refcnt).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hooks.config import Config
from hooks.node.capabilities import FRONTEND
from hooks.node.device_nodes import CAPS, read_majors
from hooks.node.fingerprint import read_text
from hooks.node.inventory import Inventory
from integration.containers.bundles import Container
from integration.containers.cgroups import Owners
from integration.containers.held_devices import Holders, nodes_of
from integration.containers.procfs import Procfs
from integration.containers.shims import all_containers
from shim.causes.agent import agent_of

if TYPE_CHECKING:
    from integration.devices.targets import Target

CONTAINER: Final = "container"
AGENT: Final = "agent"
MPS: Final = "mps"
_PERSISTENCED: Final = "persistenced"
_PROCESS: Final = "process"
_MODULE: Final = "module"
_KERNEL: Final = "kernel"

# The kernel cuts names of programs after 15 bytes.
_BY_NAME: Final = {"nvidia-cuda-mps": MPS, "nvidia-persiste": _PERSISTENCED}
_DO: Final = {
    CONTAINER: "delete its pod, end it, or have it ended by --force",
    AGENT: "have it close NVML by --let-go",
    MPS: "--let-go ends those of the node agent; else: echo quit | nvidia-cuda-mps-control",
    _PERSISTENCED: "systemctl stop nvidia-persistenced",
    _PROCESS: "end it",
    _MODULE: "rmmod it",
    _KERNEL: "nvidia-smi -pm 0; see lsmod",
}

_OURS: Final = "nvidia"  # what all of the driver's own modules are called
_NODES: Final = "/dev/nvidia"
_WITHOUT_NODES: Final = ("socket:", "pipe:", "anon_inode:", "/memfd:")
_ANSWER: Final = 1.0


@dataclass(frozen=True, slots=True)
class Holder:
    """One who holds something of what is taken out of service."""

    kind: str  # of the table above
    name: str  # what people call it
    pid: int = 0  # a process of it; 0 for none, or none yet
    devices: tuple[str, ...] = ()  # names of what it holds
    container: Container | None = None  # the container that it is, or is a process of

    @property
    def do(self) -> str:
        """How it lets go."""
        return _DO[self.kind]

    def to_json(self) -> dict[str, Any]:
        """What of it an answer has."""
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
    """Everyone who holds something of it now; containers first.

    Args:
        targets: what is taken out of service.
        inventory: what the node has; None if there is no driver.
        config: where devices, and what we keep, are.
        states: containerd's state directories; none for those that are known.
        proc: where the node's processes are shown.

    Raises:
        StateUnreadable: the caller is not root.
    """
    procfs = Procfs(proc)
    containers = all_containers(states, proc)
    found = list(_containers(containers, targets, inventory, config))
    known = {each.container.bundle for each in found if each.container is not None}
    owners = Owners(containers, procfs)
    agent = agent_of(config.state)  # one in another pid namespace has another number here
    for pid, devices in _processes(procfs, _numbers(targets, inventory, config)):
        owner = owners.of(pid)
        if owner is None:
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
        if not container.pid and not _is_being_made(container):
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
    """The names of the targets that a container holds."""
    devices = set(holders.devices_of(container))
    gpus = {} if inventory is None else {gpu.index: gpu.uuid for gpu in inventory.gpus}
    parts = () if inventory is None else inventory.mig_devices
    # Who has a MIG device holds its GPU.
    devices |= {gpus.get(part.gpu, "") for part in parts if part.uuid in devices}
    of_driver = any(t.gpu is None for t in targets) and bool(devices or _has_driver(container))
    return tuple(t.name for t in targets if t.device in devices or (t.gpu is None and of_driver))


def _has_driver(container: Container) -> bool:
    """Whether a container was given anything of the driver, if no GPU."""
    if container.record is not None and container.record.get("grant"):
        return True
    return any(path.startswith(_NODES) for path in nodes_of(container))


def _is_being_made(container: Container) -> bool:
    """Whether somebody may still make the init process of a container that has none."""
    if not container.address:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_ANSWER)
        try:
            probe.connect(container.address)
        except TimeoutError:
            return True  # it is busy
        except OSError:
            return False
    return True


def _title(container: Container) -> str:
    return container.title if container.pod else f"{container.namespace}/{container.title}"


# -- processes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The device numbers of what is taken out of service, each with its name."""

    nodes: dict[tuple[int, int], str]
    majors: dict[int, str]

    def name_of(self, number: int) -> str:
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


def _processes(procfs: Procfs, numbers: _Numbers) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The processes that have a node open or mapped, with what of it."""
    own = os.getpid()
    known: dict[tuple[int, int], str] = {}
    for pid in procfs.pids():
        if pid == own:
            continue
        names = dict.fromkeys(_open_in(procfs, pid, numbers, known))
        if names:
            yield pid, tuple(names)


def _open_in(
    procfs: Procfs, pid: int, numbers: _Numbers, known: dict[tuple[int, int], str]
) -> Iterator[str]:
    """The names of what a process has open or mapped.

    Args:
        known: those of files by their mount and inode; this adds to it, so that nobody asks twice.
    """
    for number, path in procfs.descriptors(pid).items():
        if path.startswith(_WITHOUT_NODES) or not _may_be_node(path):
            continue
        file = procfs.open_file(pid, number)
        if file is not None and (file.is_place_only or procfs.is_on_served(pid, file.mount)):
            continue
        place = (0, 0) if file is None else (file.mount, file.inode)
        if not place[1] or place not in known:
            known[place] = numbers.name_of(procfs.node(f"{pid}/fd/{number}"))
        if known[place]:
            yield known[place]
    mapped = {
        (each.device, each.inode): each.addresses
        for each in procfs.mappings(pid)
        if each.path.startswith((_NODES, "/dev/dri/"))
    }
    for (device, _), addresses in mapped.items():
        if procfs.is_on_served(pid, device):
            continue
        if name := numbers.name_of(procfs.node(f"{pid}/map_files/{addresses}")):
            yield name


def _may_be_node(path: str) -> bool:
    return path.startswith("/dev/") or _OURS in os.path.basename(path) or "/dev/" in path


def _named(pid: int, procfs: Procfs, agent: int) -> tuple[str, str]:
    """Kind and name of a process that is in no container."""
    name = procfs.text(pid, "comm").rstrip("\n")
    kind = next((kind for start, kind in _BY_NAME.items() if name.startswith(start)), _PROCESS)
    if kind == _PROCESS and agent and agent in _ancestors(pid, procfs):
        return AGENT, "the node agent"
    return kind, name or str(pid)


def _ancestors(pid: int, procfs: Procfs) -> Iterator[int]:
    while pid > 1:
        yield pid
        status = procfs.status(pid)
        pid = 0 if status is None else status.parent


# -- modules -----------------------------------------------------------------------------------


_OWN: Final = ("nvidia_uvm", "nvidia_modeset", "nvidia_drm")


def _modules(config: Config) -> list[str]:
    """The modules of others that keep the driver's loaded: gdrdrv, nvidia_fs."""
    users = (user for module in (_OURS, *_OWN) for user in _users(config, module))
    return sorted(set(users).difference(_OWN))


def _users(config: Config, module: str) -> list[str]:
    try:
        return os.listdir(f"{config.sys}/module/{module}/holders")
    except OSError:
        return []


def _uses(config: Config) -> int:
    """How often the driver's module is used, but for other modules; 0 if that is not told."""
    text = read_text(f"{config.sys}/module/{_OURS}/refcnt") or ""
    return int(text) - len(_users(config, _OURS)) if text.strip().isdecimal() else 0
