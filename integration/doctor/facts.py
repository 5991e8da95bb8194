"""The facts about a node: JSON values without secrets.

Each field of :class:`Node` is a group of facts that one function of
:mod:`integration.doctor.observing` gathers. A group that could not be gathered is :class:`Unseen`.
Paths are the node's own, also when the node is examined below another root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from integration.handlers import calls_our_shim
from integration.layer_usage import LayerUsage

NVIDIAS: Final = "nvidia-container-runtime"
"""The runtime of NVIDIA's toolkit."""


class CouldNotLook(Exception):
    """A fact could not be gathered; the text says why."""


class ProgramFailed(CouldNotLook):
    """A program failed; the text has the last line of its output."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A fact that could not be gathered."""

    why: str  # one clause


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a directory is on."""

    purpose: str  # what the directory is for, in words
    path: str  # the directory
    point: str
    options: tuple[str, ...]  # options of the mount and of its file system


@dataclass(frozen=True, slots=True)
class Machine:
    """The kernel and its settings."""

    kernel: str  # the release
    openat2: bool  # whether openat2(2) works here
    systemd: bool  # whether systemd is the init system
    cgroup: str  # "v1", "v2", "hybrid" or "none"
    selinux: str  # "off", "permissive" or "enforcing"
    container_use_devices: bool | None  # the SELinux boolean; None if it does not exist
    apparmor: bool  # whether the kernel enforces AppArmor
    apparmor_parser: bool  # whether the program that loads profiles is installed
    platform: str  # "nvml", "tegra" or "wsl"
    mounts: tuple[Mount, ...]  # the mounts of the directories that matter
    inotify_instances: int | None  # the limit per user; None if the kernel does not report it
    layers: LayerUsage  # what the shared layers take on disk


@dataclass(frozen=True, slots=True)
class Installed:
    """A version of the driver's libraries below a root."""

    root: str
    layout: str
    version: str


@dataclass(frozen=True, slots=True)
class PciGpu:
    """An NVIDIA GPU on the PCI bus, and the kernel driver that it is bound to ("" for none)."""

    bus_id: str
    driver: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that the driver shows."""

    index: int
    uuid: str
    bus_id: str
    minor: int
    model: str = ""  # from procfs


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver."""

    module: str | None  # the version of the loaded kernel module; None if not loaded
    modules: tuple[str, ...]  # the loaded kernel modules of interest, as in sysfs
    version: str  # of the user-space files in use; "" if none are usable
    root: str  # the driver root
    fault: str  # why no files are usable; "" if they are
    mismatch: bool  # whether the reason is a version other than the module's
    installed: tuple[Installed, ...]  # all installed versions
    pci: tuple[PciGpu, ...]  # GPUs on the PCI bus
    gpus: tuple[Gpu, ...]  # GPUs that the driver shows
    lost: tuple[tuple[str, str], ...]  # unusable GPUs, each with the reason
    # wrong device nodes, each with what is wrong
    wrong_nodes: tuple[tuple[str, str], ...]
    # missing device nodes whose module is loaded
    missing_nodes: tuple[str, ...]
    may_make_nodes: bool  # whether the module's parameters allow creating nodes
    # numbers ("195:0") of usable nodes whose link in /dev/char is missing or wrong
    char_links: tuple[str, ...]
    mps_pipe: str  # the directory of the MPS pipe; "" if it does not exist
    mps_runs: bool  # whether the MPS control daemon is running
    imex: bool  # whether the driver supports IMEX channels
    imex_channels: int  # the number of channel nodes
    platform_faults: tuple[str, ...]  # what a Tegra machine or WSL lacks
    # devices out of service, each with since when and why, and the last step of its reset
    drained: tuple[tuple[str, str, str], ...]
    # manifests that name libraries by path, each with the paths and, if containers cannot use it,
    # the reason; also the manifests that no loader understands
    manifests: tuple[tuple[str, tuple[str, ...], str], ...]
    others: tuple[str, ...]  # names of its libraries that belong to no known capability


@dataclass(frozen=True, slots=True)
class Nvml:
    """NVML's answer."""

    seconds: float
    limit: float  # the time limit in seconds
    failure: str  # why NVML failed; "" if it answered
    uuids: tuple[str, ...]  # the GPUs that NVML reports
    lost: tuple[str, ...]  # the GPUs that NVML reports as lost, each with the reason
    conflicts: tuple[str, ...]  # differences between NVML and procfs
    notes: tuple[str, ...]  # NVML functions that failed
    persistence: str  # whether the driver stays initialised: "daemon", "on", "off", or "unknown"


@dataclass(frozen=True, slots=True)
class Program:
    """A runtime, an engine or NVIDIA's toolkit."""

    name: str  # such as "runc"
    path: str
    version: str  # the version it prints; "" if it prints none
    fault: str = ""  # why it prints none
    package: str = ""  # the distribution's package; "" if it comes from none
    package_version: str = ""
    fixed: tuple[str, ...] = ()  # the CVEs that the package's changelog names


@dataclass(frozen=True, slots=True)
class Handler:
    """A runtime handler of containerd's CRI."""

    name: str
    runtime_type: str  # "" if missing
    runtime_path: str = ""  # the shim's path, if set
    shim: str = ""  # where the shim was found; "" if nowhere
    binary_name: str = ""  # the low-level runtime; "" for the shim's default
    binary: str = ""  # where that was found; "" if nowhere or not set
    systemd_cgroup: bool | None = None  # the option; None if not set
    # keys that the shim refuses or containerd drops; only for the shim's handlers
    unknown_options: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()  # patterns of the container annotations passed to the shim
    sandboxer: str = ""  # what creates its pods' sandboxes; "" for containerd itself

    @property
    def is_ours(self) -> bool:
        """Whether the handler runs the shim."""
        return calls_our_shim(self.runtime_type, self.runtime_path)

    @property
    def calls_nvidias(self) -> bool:
        """Whether the handler calls the runtime of NVIDIA's toolkit."""
        return NVIDIAS in self.binary_name


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file of containerd's configuration."""

    path: str
    version: int  # the format's version; 1 if not set
    # the handlers in this file, and whether each runs the shim
    handlers: tuple[tuple[str, bool], ...]
    imported: bool  # whether the root file imports it
    root: bool  # whether it is the root file
    fault: str = ""  # why it cannot be read; "" if it can


@dataclass(frozen=True, slots=True)
class Containerd:
    """containerd's configuration and process."""

    path: str  # the root file of the configuration
    exists: bool  # whether the root file exists
    distribution: str  # "", "k3s", "rke2", "k0s" or "microk8s"
    # that distribution's template with the shim's handler; "" if it has none or needs none
    template: str
    pid: int  # the process with this configuration; 0 if not running
    newer: tuple[str, ...]  # configuration files that changed after the start
    descriptors: int | None  # the limit of open files; None if not running
    search_path: tuple[str, ...]  # the directories searched for shims
    # all files of the configuration, and files next to them that are not imported
    files: tuple[ConfigFile, ...]
    dump_fault: str  # the error of `containerd config dump`; "" if none
    handlers: tuple[Handler, ...]  # of the merged configuration
    default_handler: str  # the handler of pods without a RuntimeClass
    cri: bool  # whether the CRI plugin is enabled
    enable_cdi: bool  # whether it injects CDI devices itself
    cdi_dirs: tuple[str, ...]  # its directories of CDI specs
    state: str  # the state directory
    root: str  # the data directory
    version: str = ""  # "" if the program prints none
    # where it finds the shim by name, without a handler; "" if nowhere
    by_name: str = ""


@dataclass(frozen=True, slots=True)
class DockerRuntime:
    """A runtime of Docker: its name, and the shim's type or the program."""

    name: str
    runtime_type: str
    path: str

    @property
    def is_ours(self) -> bool:
        """Whether the runtime is the shim."""
        return calls_our_shim(self.runtime_type)


@dataclass(frozen=True, slots=True)
class Docker:
    """Docker's configuration."""

    path: str  # of daemon.json
    fault: str  # why it cannot be read; "" if it can or does not exist
    runtimes: tuple[DockerRuntime, ...]
    default_runtime: str
    cdi: bool | None  # features.cdi; None if not set
    runs: bool  # whether dockerd is running
    hook: str  # the program that dockerd needs for ``--gpus``; "" if not installed


@dataclass(frozen=True, slots=True)
class Crio:
    """CRI-O's configuration: its handlers by name, each with its program."""

    files: tuple[str, ...]
    handlers: tuple[tuple[str, str], ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Injector:
    """Another component that adds GPUs to containers: its kind, and where it was found."""

    kind: str
    where: str


@dataclass(frozen=True, slots=True)
class RuntimeClass:
    """A Kubernetes RuntimeClass."""

    name: str
    handler: str
    source: str


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """What Kubernetes expects of this node."""

    cgroup_driver: str  # the kubelet's: "systemd" or "cgroupfs"; "" without a kubelet
    systemd: bool  # whether systemd is the init system
    classes: tuple[RuntimeClass, ...] | None  # None without a manifest or kubeconfig


@dataclass(frozen=True, slots=True)
class CdiFile:
    """A CDI spec."""

    path: str
    priority: int  # of its directory; the higher wins
    kind: str  # vendor and class
    devices: tuple[str, ...] = ()  # device names
    gone: tuple[str, ...] = ()  # host paths in the spec that do not exist
    wrong_nodes: tuple[str, ...] = ()  # device nodes that differ from the spec, and how
    drivers: tuple[str, ...] = ()  # versions of NVIDIA's driver in its file names
    fault: str = ""  # why it cannot be used; "" if it can


@dataclass(frozen=True, slots=True)
class Cdi:
    """The node's CDI specs; directories by priority, the lowest first."""

    directories: tuple[str, ...]
    files: tuple[CdiFile, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """The shim's configuration."""

    source: str  # the file; "" for the defaults
    fault: str  # why it cannot be used; "" if it can
    mode: str  # policy.mode: which requests are trusted
    notes: tuple[str, ...]  # keys without effect here
    load_modules: bool  # whether missing kernel modules are loaded
    make_nodes: bool  # whether missing device nodes are created
    char_links: bool  # whether missing links are created
    # programs that CDI hooks may run, each with its fault
    hooks: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shim:
    """A running shim."""

    pid: int
    namespace: str  # containerd's
    tree: str  # the directory of its program; "" if unknown
    gone: bool  # whether its program was removed
    memory: int | None  # private memory in bytes (proportional share); None if unknown


@dataclass(frozen=True, slots=True)
class Server:
    """A running fork server."""

    pid: int
    address: str  # its containerd's address
    # whether it accepts connections, or started so recently that it may not be ready yet
    works: bool
    tree: str  # the directory of its program


@dataclass(frozen=True, slots=True)
class Installation:
    """The shim's installation and running processes."""

    prefix: str  # the directory of the trees
    trees: tuple[str, ...]  # names of the installed trees
    current: str  # the current tree; "" if none
    dangling: tuple[str, ...]  # broken links of the installation
    # each ``containerd-shim-nvidia-v1`` in the PATH, with its link target
    programs: tuple[tuple[str, str], ...]
    # what is wrong with the program's interpreter; "" if nothing
    interpreter_fault: str
    shims: tuple[Shim, ...]
    servers: tuple[Server, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a container was granted."""

    path: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Container:
    """A container with GPUs from the shim."""

    id: str  # containerd's
    namespace: str  # containerd's
    driver: str  # the driver's version at its creation
    changed: str  # what has changed in the driver since; "" if nothing
    gpus: tuple[str, ...]  # UUIDs of the granted GPUs
    devices: tuple[Device, ...]  # the granted devices
    unit: str = ""  # its systemd unit; "" if none
    # devices that its cgroup denies, or would deny after a reload of systemd
    denied: tuple[str, ...] = ()
    denied_by: str = ""  # what denies them
    unseen: str = ""  # why this could not be checked; "" if it could
    # whether it has the default driver capabilities only because it names none
    has_default_capabilities: bool = False
    image: str = ""  # the image's name; "" if unknown


@dataclass(frozen=True, slots=True)
class NodeAgent:
    """The node agent."""

    unit: bool = False  # whether its systemd unit is enabled
    pod: str = ""  # the log directory of its pod; "" if the node has no such pod
    runs: bool = False  # whether an agent runs on the node
    age: float | None = None  # seconds since its last check of the node; None if never
    poll: float = 0.0  # the interval of its checks in seconds
    ready: bool = False  # whether its last check is recent
    faults: tuple[str, ...] = ()  # the faults that it reports
    # resources it serves to the kubelet: name, devices, healthy devices
    resources: tuple[tuple[str, int, int], ...] = ()
    kernel_log: str = ""  # why the kernel log cannot be read; "" if it can
    # how devices are passed to containers; empty if unknown
    strategies: tuple[str, ...] = ()
    unheard: str = ""  # why that differs from its settings; "" if it does not
    # a line per container that runs without its allocated devices
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plugins:
    """The kubelet's device plugins."""

    directory: str  # where they register
    # the kubelet's nvidia.com/ resources, each with its healthy devices; None if the kubelet has
    # not written a checkpoint
    registered: tuple[tuple[str, int], ...] | None
    sockets: tuple[str, ...] = ()  # of plugins for NVIDIA's devices
    nvidias: tuple[int, ...] = ()  # pids of NVIDIA's device plugin
    # whether a DRA driver for NVIDIA's devices has registered
    dra: bool = False
    unread: str = ""  # why shims do not use the kubelet's record; "" if they do


_NOT_ASKED = Unseen("it was not requested")


@dataclass(frozen=True, slots=True)
class Node:
    """All facts. A group that was not requested is Unseen; None means that the node has none."""

    machine: Machine | Unseen = _NOT_ASKED  # the kernel and its settings
    driver: Driver | Unseen = _NOT_ASKED
    nvml: Nvml | Unseen | None = _NOT_ASKED  # NVML's answer; None without a driver
    # low-level runtimes, engines and NVIDIA's toolkit
    programs: tuple[Program, ...] | Unseen = _NOT_ASKED
    # None without containerd
    containerd: Containerd | Unseen | None = _NOT_ASKED
    docker: Docker | Unseen | None = _NOT_ASKED  # None without Docker
    crio: Crio | Unseen | None = _NOT_ASKED  # None without CRI-O
    injectors: tuple[Injector, ...] | Unseen = _NOT_ASKED  # other components that add GPUs
    kubernetes: Kubernetes | Unseen = _NOT_ASKED  # what Kubernetes expects of this node
    cdi: Cdi | Unseen = _NOT_ASKED
    policy: Policy | Unseen = _NOT_ASKED  # the shim's configuration
    installation: Installation | Unseen = _NOT_ASKED  # the shim's installation and processes
    containers: tuple[Container, ...] | Unseen = _NOT_ASKED  # containers with GPUs from the shim
    # pods that a killed nvshim verify has left, as NAMESPACE/NAME
    verify_pods: tuple[str, ...] | Unseen = _NOT_ASKED
    agent: NodeAgent | Unseen = _NOT_ASKED
    # the kubelet's device plugins; None without a kubelet
    plugins: Plugins | Unseen | None = _NOT_ASKED
