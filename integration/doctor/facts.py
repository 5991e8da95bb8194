"""What was seen of a node: values that JSON has, and nothing that anybody would keep secret.

Each field of :class:`Node` is a group of facts that is gathered by one function of
:mod:`integration.doctor.observing`; a group that could not be gathered is :class:`Unseen`. Paths
are those of the node, whatever root it was looked at below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from integration.handlers import calls_our_shim

NVIDIAS: Final = "nvidia-container-runtime"
"""The runtime of NVIDIA's toolkit."""


class CouldNotLook(Exception):
    """A fact is not there because it could not be seen; the text says why."""


class ProgramFailed(CouldNotLook):
    """A program was run, and said no; the text has its last word."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A fact that could not be seen."""

    why: str  # one clause


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a directory is on."""

    purpose: str  # what the directory is for, in words
    path: str  # the directory
    point: str  # where the mount is
    options: tuple[str, ...]  # of the mount and of its file system


@dataclass(frozen=True, slots=True)
class Machine:
    """The kernel and what it was told."""

    kernel: str  # its release
    openat2: bool  # whether openat2(2) works here
    systemd: bool  # whether systemd is the init system
    cgroup: str  # "v1", "v2", "hybrid" or "none"
    selinux: str  # "off", "permissive" or "enforcing"
    container_use_devices: bool | None  # SELinux's boolean; None if there is no such boolean
    apparmor: bool  # whether the kernel enforces AppArmor
    apparmor_parser: bool  # whether the program that loads profiles is there
    platform: str  # "nvml", "tegra" or "wsl"
    mounts: tuple[Mount, ...]  # on which mounts the directories are that matter
    inotify_instances: int | None  # how many a user may have; None if the kernel does not say


@dataclass(frozen=True, slots=True)
class Installed:
    """A version of the driver's libraries below a root."""

    root: str
    layout: str
    version: str


@dataclass(frozen=True, slots=True)
class PciGpu:
    """A GPU of NVIDIA's on the PCI bus, and the kernel driver that it is bound to ("" for none)."""

    bus_id: str
    driver: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that the driver shows."""

    index: int
    uuid: str
    bus_id: str
    minor: int
    model: str = ""  # as procfs has it


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver."""

    module: str | None  # the version of the loaded kernel module; None if none is
    modules: tuple[str, ...]  # which kernel modules of interest are loaded, as sysfs writes them
    version: str  # of the user-space files that are used; "" if there are none that can be
    root: str  # where they are
    fault: str  # why there are none; "" if there are
    mismatch: bool  # whether that is because they are of another version than the module
    installed: tuple[Installed, ...]  # all versions that were found
    pci: tuple[PciGpu, ...]  # GPUs on the bus
    gpus: tuple[Gpu, ...]  # GPUs that the driver shows
    lost: tuple[tuple[str, str], ...]  # GPUs that cannot be used, each with why
    # device nodes that are not what they should be, each with what they are
    wrong_nodes: tuple[tuple[str, str], ...]
    # device nodes that are not there, though their module is loaded
    missing_nodes: tuple[str, ...]
    may_make_nodes: bool  # whether the module lets nodes be made
    # numbers ("195:0") of usable nodes whose link in /dev/char is missing or wrong
    char_links: tuple[str, ...]
    mps_pipe: str  # the directory of MPS's pipe; "" if it is not there
    mps_runs: bool  # whether the MPS control daemon runs
    imex: bool  # whether the driver has IMEX channels
    imex_channels: int  # how many nodes of channels there are
    platform_faults: tuple[str, ...]  # what a Tegra machine or WSL lacks
    # what is out of service, each with since when and why, and how far its reset is
    drained: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Nvml:
    """How NVML answers."""

    seconds: float  # that it took
    limit: float  # seconds that it may take
    failure: str  # why there is no answer; "" if there is
    uuids: tuple[str, ...]  # the GPUs that answer it
    lost: tuple[str, ...]  # the GPUs that are lost by its word, each with why
    conflicts: tuple[str, ...]  # what it says otherwise than the kernel module does in procfs
    notes: tuple[str, ...]  # its functions that failed
    persistence: str  # whether the driver stays initialised: "daemon", "on", "off", or "unknown"


@dataclass(frozen=True, slots=True)
class Program:
    """A program of others."""

    name: str  # by which it is known ("runc")
    path: str  # where it is
    version: str  # what it says; "" if it could not say
    fault: str = ""  # why it could not; "" if it could
    package: str = ""  # the distribution's package that it is of; "" if of none
    package_version: str = ""  # of that package
    fixed: tuple[str, ...] = ()  # the CVEs that the package's changelog names


@dataclass(frozen=True, slots=True)
class Handler:
    """A runtime handler of containerd's CRI."""

    name: str  # by which a RuntimeClass names it
    runtime_type: str  # "" if it is missing
    runtime_path: str = ""  # of the shim, if it is named by path
    shim: str = ""  # where the shim is found; "" if nowhere
    binary_name: str = ""  # of the low-level runtime; "" for the shim's default
    binary: str = ""  # where that is found; "" if nowhere or if it is not named
    systemd_cgroup: bool | None = None  # the option; None if it is not given
    # keys that our shim refuses, or containerd drops; only of a handler of ours
    unknown_options: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()  # patterns of those of a container that its shim gets
    sandboxer: str = ""  # who makes its pods' sandboxes; "" for containerd itself

    @property
    def is_ours(self) -> bool:
        """Whether it is this project's."""
        return calls_our_shim(self.runtime_type, self.runtime_path)

    @property
    def calls_nvidias(self) -> bool:
        """Whether it calls the runtime of NVIDIA's toolkit."""
        return NVIDIAS in self.binary_name


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file of containerd's configuration."""

    path: str  # where it is
    version: int  # of its format; 1 if it does not say
    # that it has, and whether each calls our shim
    handlers: tuple[tuple[str, bool], ...]
    imported: bool  # whether the root file's imports cover it
    root: bool  # whether it is the root file
    fault: str = ""  # why it could not be read; "" if it could


@dataclass(frozen=True, slots=True)
class Containerd:
    """containerd, as it is configured."""

    path: str  # the root file of its configuration
    exists: bool  # whether that is there
    distribution: str  # "", "k3s", "rke2", "k0s" or "microk8s"
    # the template of that distribution that would keep our handler; "" if it has none of ours in
    # it, or needs none
    template: str
    pid: int  # of the process that has this configuration; 0 if none runs
    newer: tuple[str, ...]  # files of the configuration that were changed after it was started
    descriptors: int | None  # its limit of open files; None if it does not run
    search_path: tuple[str, ...]  # the directories in which it looks for shims
    # all files of the configuration, and those beside them that are not imported
    files: tuple[ConfigFile, ...]
    dump_fault: str  # what `containerd config dump` says against it; "" if nothing
    handlers: tuple[Handler, ...]  # of the merged configuration
    default_handler: str  # which one pods get that name none
    cri: bool  # whether it serves kubelets: its CRI plugin is not disabled
    enable_cdi: bool  # whether it injects CDI devices itself
    cdi_dirs: tuple[str, ...]  # where it finds their specs
    state: str  # its state directory
    root: str  # where its data is
    version: str = ""  # that the program says; "" if it could not
    # where it finds our shim by its name, without a handler; "" if nowhere
    by_name: str = ""


@dataclass(frozen=True, slots=True)
class DockerRuntime:
    """A runtime of Docker's: its name, and the shim's type or the program that it is."""

    name: str
    runtime_type: str
    path: str

    @property
    def is_ours(self) -> bool:
        """Whether it is this project's."""
        return calls_our_shim(self.runtime_type)


@dataclass(frozen=True, slots=True)
class Docker:
    """Docker, as it is configured."""

    path: str  # of daemon.json
    fault: str  # why it could not be read; "" if it could, or is not there
    runtimes: tuple[DockerRuntime, ...]  # that it has
    default_runtime: str  # the one of containers that name none
    cdi: bool | None  # features.cdi; None if not given
    runs: bool  # whether dockerd runs
    hook: str  # the program that dockerd needs to see for ``--gpus``; "" if there is none


@dataclass(frozen=True, slots=True)
class Crio:
    """CRI-O: its handlers by name, with the program that each is."""

    files: tuple[str, ...]
    handlers: tuple[tuple[str, str], ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Injector:
    """Somebody else who puts GPUs into containers: what it is, and where it was seen."""

    kind: str
    where: str


@dataclass(frozen=True, slots=True)
class RuntimeClass:
    """A RuntimeClass of Kubernetes."""

    name: str
    handler: str
    source: str


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """What Kubernetes expects of this node."""

    cgroup_driver: str  # of kubelet: "systemd", "cgroupfs"; "" if there is no kubelet here
    systemd: bool  # whether systemd is the init system
    classes: tuple[RuntimeClass, ...] | None  # RuntimeClasses; None if nobody said where to ask


@dataclass(frozen=True, slots=True)
class CdiFile:
    """A CDI spec."""

    path: str  # of the file
    priority: int  # that of its directory; the higher wins
    kind: str  # vendor and class
    devices: tuple[str, ...] = ()  # their names
    gone: tuple[str, ...] = ()  # host paths that it names and that are not there
    wrong_nodes: tuple[str, ...] = ()  # device nodes that are not what it says, each with what is
    drivers: tuple[str, ...] = ()  # versions of NVIDIA's driver in the names of its files
    fault: str = ""  # why it cannot be used; "" if it can


@dataclass(frozen=True, slots=True)
class Cdi:
    """The CDI specs of the node; its directories by priority, the lowest first."""

    directories: tuple[str, ...]
    files: tuple[CdiFile, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """Our configuration."""

    source: str  # the file that it is of; "" for the defaults
    fault: str  # why it cannot be used; "" if it can
    mode: str  # whose word is a grant
    notes: tuple[str, ...]  # what of it means nothing here
    load_modules: bool  # whether missing kernel modules are loaded
    make_nodes: bool  # whether missing device nodes are made
    char_links: bool  # whether missing links are made
    # the programs that hooks of CDI specs may run, each with what is wrong with it
    hooks: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shim:
    """A shim of ours that runs."""

    pid: int  # its process
    namespace: str  # of containerd
    tree: str  # the directory that its program is in; "" if that is not known
    gone: bool  # whether its program is not there any more
    memory: int | None  # bytes of its own (proportional share); None if the kernel does not say


@dataclass(frozen=True, slots=True)
class Server:
    """A fork server of ours."""

    pid: int  # its process
    address: str  # of its containerd
    # whether it accepts somebody, or has begun so late that it may still prepare itself
    works: bool
    tree: str  # that it is of


@dataclass(frozen=True, slots=True)
class Installation:
    """What of ours is installed."""

    prefix: str  # where trees are
    trees: tuple[str, ...]  # their names
    current: str  # the tree that is current; "" if none is
    dangling: tuple[str, ...]  # links of ours that lead nowhere
    # where ``containerd-shim-nvidia-v1`` is found on the search path, with where each leads
    programs: tuple[tuple[str, str], ...]
    # what is wrong with the interpreter that the program names; "" if nothing
    interpreter_fault: str
    shims: tuple[Shim, ...]  # that run
    servers: tuple[Server, ...]  # fork servers that run


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a container was given."""

    path: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Container:
    """A container that has GPUs of ours."""

    id: str  # containerd's
    namespace: str  # containerd's
    driver: str  # the driver's version when it was made
    changed: str  # what of the driver is not any more what it was made with; "" if nothing is
    gpus: tuple[str, ...]  # UUIDs that it was given
    devices: tuple[Device, ...]  # that it was given
    unit: str = ""  # systemd's unit that it is in; "" if in none
    # devices that its cgroup does not let it open, or would not after a reload
    denied: tuple[str, ...] = ()
    denied_by: str = ""  # who denies them
    unseen: str = ""  # why that could not be seen; "" if it could
    # whether it has the default driver capabilities only because it names none
    has_default_capabilities: bool = False
    image: str = ""  # its image's name; "" if the engine does not say


@dataclass(frozen=True, slots=True)
class NodeAgent:
    """The node agent."""

    unit: bool = False  # whether systemd is to start it
    pod: str = ""  # the kubelet's directory of the logs of its pod; "" if it has none here
    runs: bool = False  # whether an agent has the node
    age: float | None = None  # seconds since it has looked at the node; None if it never has
    poll: float = 0.0  # seconds after which it looks again
    ready: bool = False  # whether it has looked not long ago
    faults: tuple[str, ...] = ()  # what it says is wrong
    # that it tells the kubelet of: name, devices, and how many of them are healthy
    resources: tuple[tuple[str, int, int], ...] = ()
    kernel_log: str = ""  # why the kernel's log cannot be read; "" if it can
    # how containers are told what they have; none if it does not say
    strategies: tuple[str, ...] = ()
    unheard: str = ""  # why that is not as its settings ask for; "" if it is
    # what containers run without that the kubelet has given them, a line each
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plugins:
    """Device plugins, as the kubelet of this node has them."""

    directory: str  # where they register
    # resources of NVIDIA's devices that it knows, each with how many devices of it it takes for
    # healthy; None if it has not written down what it knows
    registered: tuple[tuple[str, int], ...] | None
    sockets: tuple[str, ...] = ()  # of plugins for NVIDIA's devices
    nvidias: tuple[int, ...] = ()  # pids of NVIDIA's own plugin
    # whether a driver for dynamic resource allocation of NVIDIA's devices has registered
    dra: bool = False
    unread: str = ""  # why a shim does not go by what the kubelet has recorded; "" if it does


_NOT_ASKED = Unseen("nobody asked for it")


@dataclass(frozen=True, slots=True)
class Node:
    """All facts. What nobody asked for is unseen; what the node does not have is None."""

    machine: Machine | Unseen = _NOT_ASKED  # the kernel and what it was told
    driver: Driver | Unseen = _NOT_ASKED  # NVIDIA's driver
    nvml: Nvml | Unseen | None = _NOT_ASKED  # how NVML answers; None without a driver
    # low-level runtimes, engines and NVIDIA's toolkit
    programs: tuple[Program, ...] | Unseen = _NOT_ASKED
    # its configuration; None if there is no containerd
    containerd: Containerd | Unseen | None = _NOT_ASKED
    docker: Docker | Unseen | None = _NOT_ASKED  # its configuration; None if there is no Docker
    crio: Crio | Unseen | None = _NOT_ASKED  # its configuration; None if there is no CRI-O
    injectors: tuple[Injector, ...] | Unseen = _NOT_ASKED  # others who put GPUs into containers
    kubernetes: Kubernetes | Unseen = _NOT_ASKED  # what it expects of this node
    cdi: Cdi | Unseen = _NOT_ASKED  # the CDI specs
    policy: Policy | Unseen = _NOT_ASKED  # our configuration
    installation: Installation | Unseen = _NOT_ASKED  # what of ours is installed and runs
    containers: tuple[Container, ...] | Unseen = _NOT_ASKED  # that have GPUs of ours
    agent: NodeAgent | Unseen = _NOT_ASKED  # the node agent
    # the kubelet's device plugins; None if there is no kubelet
    plugins: Plugins | Unseen | None = _NOT_ASKED
