"""What was seen of a node: values that JSON has, and nothing that anybody would keep secret.

Each field of :class:`Node` is a group of facts that is gathered by one function of
:mod:`integration.doctor.observing`; a group that could not be gathered is :class:`Unseen`. Paths
are those of the node, whatever root it was looked at below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Cdi",
    "CdiFile",
    "ConfigFile",
    "Container",
    "Containerd",
    "CouldNotLook",
    "Crio",
    "Device",
    "Docker",
    "DockerRuntime",
    "Driver",
    "Gpu",
    "Handler",
    "Injector",
    "Installation",
    "Installed",
    "Kubernetes",
    "Machine",
    "Mount",
    "Node",
    "NodeAgent",
    "Nvml",
    "PciGpu",
    "Plugins",
    "Policy",
    "Program",
    "ProgramFailed",
    "RuntimeClass",
    "Server",
    "Shim",
    "Unseen",
    "seen",
]

T = TypeVar("T")


class CouldNotLook(Exception):
    """A fact is not there because it could not be seen; the text says why."""


class ProgramFailed(CouldNotLook):
    """A program was run, and said no; the text has its last word."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A fact that could not be seen.

    Attributes:
        why: one clause.
    """

    why: str


def seen(fact: T | Unseen) -> T:
    """A fact, for a check that can do nothing without it.

    Args:
        fact: the value, or why there is none.

    Raises:
        CouldNotLook: there is none.
    """
    if isinstance(fact, Unseen):
        raise CouldNotLook(fact.why)
    return fact


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a directory is on.

    Attributes:
        purpose: what the directory is for, in words.
        path: the directory.
        point: where the mount is.
        options: of the mount and of its file system.
    """

    purpose: str
    path: str
    point: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The kernel and what it was told.

    Attributes:
        kernel: its release.
        openat2: whether openat2(2) works here.
        systemd: whether systemd is the init system.
        cgroup: "v1", "v2", "hybrid" or "none".
        selinux: "off", "permissive" or "enforcing".
        container_use_devices: SELinux's boolean; None if there is no such boolean.
        apparmor: whether the kernel enforces AppArmor.
        apparmor_parser: whether the program that loads profiles is there.
        platform: "nvml", "tegra" or "wsl".
        mounts: on which mounts the directories are that matter.
        inotify_instances: how many a user may have; None if the kernel does not say.
    """

    kernel: str
    openat2: bool
    systemd: bool
    cgroup: str
    selinux: str
    container_use_devices: bool | None
    apparmor: bool
    apparmor_parser: bool
    platform: str
    mounts: tuple[Mount, ...]
    inotify_instances: int | None


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


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver.

    Attributes:
        module: the version of the loaded kernel module; None if none is.
        modules: which kernel modules of interest are loaded, as sysfs writes them.
        version: of the user-space files that are used; "" if there are none that can be.
        root: where they are.
        fault: why there are none; "" if there are.
        mismatch: whether that is because they are of another version than the module.
        installed: all versions that were found.
        pci: GPUs on the bus.
        gpus: GPUs that the driver shows.
        lost: GPUs that cannot be used, each with why.
        wrong_nodes: device nodes that are not what they should be, each with what they are.
        missing_nodes: device nodes that are not there, though their module is loaded.
        may_make_nodes: whether the module lets nodes be made.
        char_links: numbers ("195:0") of usable nodes whose link in /dev/char is missing or wrong.
        mps_pipe: the directory of MPS's pipe; "" if it is not there.
        mps_runs: whether the MPS control daemon runs.
        imex: whether the driver has IMEX channels.
        imex_channels: how many nodes of channels there are.
        platform_faults: what a Tegra machine or WSL lacks.
    """

    module: str | None
    modules: tuple[str, ...]
    version: str
    root: str
    fault: str
    mismatch: bool
    installed: tuple[Installed, ...]
    pci: tuple[PciGpu, ...]
    gpus: tuple[Gpu, ...]
    lost: tuple[tuple[str, str], ...]
    wrong_nodes: tuple[tuple[str, str], ...]
    missing_nodes: tuple[str, ...]
    may_make_nodes: bool
    char_links: tuple[str, ...]
    mps_pipe: str
    mps_runs: bool
    imex: bool
    imex_channels: int
    platform_faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Nvml:
    """How NVML answers.

    Attributes:
        seconds: that it took.
        limit: seconds that it may take.
        failure: why there is no answer; "" if there is.
        uuids: the GPUs that answer it.
        lost: the GPUs that are lost by its word, each with why.
        conflicts: what it says otherwise than the kernel module does in procfs.
        notes: its functions that failed.
        persistence: whether the driver stays initialised: "daemon", "on", "off", or "unknown".
    """

    seconds: float
    limit: float
    failure: str
    uuids: tuple[str, ...]
    lost: tuple[str, ...]
    conflicts: tuple[str, ...]
    notes: tuple[str, ...]
    persistence: str


@dataclass(frozen=True, slots=True)
class Program:
    """A program of others.

    Attributes:
        name: by which it is known ("runc").
        path: where it is.
        version: what it says; "" if it could not say.
        fault: why it could not; "" if it could.
        package: the distribution's package that it is of; "" if of none.
        package_version: of that package.
        fixed: the CVEs that the package's changelog names.
    """

    name: str
    path: str
    version: str
    fault: str = ""
    package: str = ""
    package_version: str = ""
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Handler:
    """A runtime handler of containerd's CRI.

    Attributes:
        name: by which a RuntimeClass names it.
        runtime_type: "" if it is missing.
        runtime_path: of the shim, if it is named by path.
        shim: where the shim is found; "" if nowhere.
        binary_name: of the low-level runtime; "" for the shim's default.
        binary: where that is found; "" if nowhere or if it is not named.
        systemd_cgroup: the option; None if it is not given.
        unknown_options: keys that our shim would refuse; only of a handler of ours.
        annotations: patterns of those of a container that its shim gets.
    """

    name: str
    runtime_type: str
    runtime_path: str = ""
    shim: str = ""
    binary_name: str = ""
    binary: str = ""
    systemd_cgroup: bool | None = None
    unknown_options: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file of containerd's configuration.

    Attributes:
        path: where it is.
        version: of its format; 1 if it does not say.
        handlers: that it has, with the type of each ("" if it gives none).
        imported: whether the root file's imports cover it.
        root: whether it is the root file.
        fault: why it could not be read; "" if it could.
    """

    path: str
    version: int
    handlers: tuple[tuple[str, str], ...]
    imported: bool
    root: bool
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Containerd:
    """containerd, as it is configured.

    Attributes:
        path: the root file of its configuration.
        exists: whether that is there.
        distribution: "", "k3s", "rke2" or "microk8s".
        template: the template of that distribution that would keep our handler; "" if it has none
            of ours in it, or needs none.
        pid: of the process that has this configuration; 0 if none runs.
        newer: files of the configuration that were changed after it was started.
        descriptors: its limit of open files; None if it does not run.
        search_path: the directories in which it looks for shims.
        files: all files of the configuration, and those beside them that are not imported.
        dump_fault: what `containerd config dump` says against it; "" if nothing.
        handlers: of the merged configuration.
        default_handler: which one pods get that name none.
        cri: whether it serves kubelets: its CRI plugin is not disabled.
        enable_cdi: whether it injects CDI devices itself.
        cdi_dirs: where it finds their specs.
        state: its state directory.
        root: where its data is.
    """

    path: str
    exists: bool
    distribution: str
    template: str
    pid: int
    newer: tuple[str, ...]
    descriptors: int | None
    search_path: tuple[str, ...]
    files: tuple[ConfigFile, ...]
    dump_fault: str
    handlers: tuple[Handler, ...]
    default_handler: str
    cri: bool
    enable_cdi: bool
    cdi_dirs: tuple[str, ...]
    state: str
    root: str


@dataclass(frozen=True, slots=True)
class DockerRuntime:
    """A runtime of Docker's: its name, and the shim's type or the program that it is."""

    name: str
    runtime_type: str
    path: str


@dataclass(frozen=True, slots=True)
class Docker:
    """Docker, as it is configured.

    Attributes:
        path: of daemon.json.
        fault: why it could not be read; "" if it could, or is not there.
        runtimes: that it has.
        default_runtime: the one of containers that name none.
        cdi: features.cdi; None if not given.
        runs: whether dockerd runs.
        hook: the program that dockerd needs to see for ``--gpus``; "" if there is none.
    """

    path: str
    fault: str
    runtimes: tuple[DockerRuntime, ...]
    default_runtime: str
    cdi: bool | None
    runs: bool
    hook: str


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
    """What Kubernetes expects of this node.

    Attributes:
        cgroup_driver: of kubelet: "systemd", "cgroupfs"; "" if there is no kubelet here.
        classes: RuntimeClasses; None if nobody said where to ask.
    """

    cgroup_driver: str
    classes: tuple[RuntimeClass, ...] | None


@dataclass(frozen=True, slots=True)
class CdiFile:
    """A CDI spec.

    Attributes:
        path: of the file.
        priority: that of its directory; the higher wins.
        kind: vendor and class.
        devices: their names.
        gone: host paths that it names and that are not there.
        wrong_nodes: device nodes that are not what it says, each with what is.
        drivers: versions of NVIDIA's driver in the names of its files.
        fault: why it cannot be used; "" if it can.
    """

    path: str
    priority: int
    kind: str
    devices: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    wrong_nodes: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Cdi:
    """The CDI specs of the node; its directories by priority, the lowest first."""

    directories: tuple[str, ...]
    files: tuple[CdiFile, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """Our configuration.

    Attributes:
        source: the file that it is of; "" for the defaults.
        fault: why it cannot be used; "" if it can.
        mode: whose word is a grant.
        notes: what of it means nothing here.
        load_modules: whether missing kernel modules are loaded.
        make_nodes: whether missing device nodes are made.
        char_links: whether missing links are made.
        hooks: the programs that hooks of CDI specs may run, each with what is wrong with it.
    """

    source: str
    fault: str
    mode: str
    notes: tuple[str, ...]
    load_modules: bool
    make_nodes: bool
    char_links: bool
    hooks: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Shim:
    """A shim of ours that runs.

    Attributes:
        pid: its process.
        namespace: of containerd.
        tree: the directory that its program is in; "" if that is not known.
        gone: whether its program is not there any more.
        memory: bytes of its own (proportional share); None if the kernel does not say.
    """

    pid: int
    namespace: str
    tree: str
    gone: bool
    memory: int | None


@dataclass(frozen=True, slots=True)
class Server:
    """A fork server of ours: whether it answers, and the tree that it is of."""

    pid: int
    address: str
    answers: bool
    tree: str


@dataclass(frozen=True, slots=True)
class Installation:
    """What of ours is installed.

    Attributes:
        prefix: where trees are.
        trees: their names.
        current: the tree that is current; "" if none is.
        dangling: links of ours that lead nowhere.
        programs: where ``containerd-shim-nvidia-v1`` is found on the search path, with where each
            leads.
        interpreter_fault: what is wrong with the interpreter that the program names; "" if nothing.
        shims: that run.
        servers: fork servers that run.
    """

    prefix: str
    trees: tuple[str, ...]
    current: str
    dangling: tuple[str, ...]
    programs: tuple[tuple[str, str], ...]
    interpreter_fault: str
    shims: tuple[Shim, ...]
    servers: tuple[Server, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a container was given."""

    path: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Container:
    """A container that has GPUs of ours.

    Attributes:
        id: containerd's.
        namespace: containerd's.
        driver: the driver's version when it was made.
        changed: what of the driver is not any more what it was made with; "" if nothing is.
        gpus: UUIDs that it was given.
        devices: that it was given.
        unit: systemd's unit that it is in; "" if in none.
        denied: devices that its cgroup does not let it open, or would not after a reload.
        denied_by: who denies them.
        unseen: why that could not be seen; "" if it could.
    """

    id: str
    namespace: str
    driver: str
    changed: str
    gpus: tuple[str, ...]
    devices: tuple[Device, ...]
    unit: str = ""
    denied: tuple[str, ...] = ()
    denied_by: str = ""
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class NodeAgent:
    """The node agent.

    Attributes:
        unit: whether systemd is to start it.
        pod: the kubelet's directory of the logs of its pod; "" if it has none here.
        runs: whether an agent has the node.
        age: seconds since it has looked at the node; None if it never has.
        poll: seconds after which it looks again.
        ready: whether it has looked not long ago.
        faults: what it says is wrong.
        resources: that it tells the kubelet of: name, devices, and how many of them are healthy.
        kernel_log: why the kernel's log cannot be read; "" if it can.
        strategies: how containers are told what they have; none if it does not say.
        unheard: why that is not as its settings ask for; "" if it is.
        missing: what containers run without that the kubelet has given them, a line each.
    """

    unit: bool = False
    pod: str = ""
    runs: bool = False
    age: float | None = None
    poll: float = 0.0
    ready: bool = False
    faults: tuple[str, ...] = ()
    resources: tuple[tuple[str, int, int], ...] = ()
    kernel_log: str = ""
    strategies: tuple[str, ...] = ()
    unheard: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plugins:
    """Device plugins, as the kubelet of this node has them.

    Attributes:
        directory: where they register.
        registered: resources of NVIDIA's devices that it knows, each with how many devices of it it
            takes for healthy; None if it has not written down what it knows.
        sockets: of plugins for NVIDIA's devices.
        nvidias: pids of NVIDIA's own plugin.
        dra: whether a driver for dynamic resource allocation of NVIDIA's devices has registered.
    """

    directory: str
    registered: tuple[tuple[str, int], ...] | None
    sockets: tuple[str, ...] = ()
    nvidias: tuple[int, ...] = ()
    dra: bool = False


_NOT_ASKED = Unseen("nobody asked for it")


@dataclass(frozen=True, slots=True)
class Node:
    """All facts; a group that nobody asked for is unseen. A group of what the node has not is None.

    Attributes:
        machine: the kernel and what it was told.
        driver: NVIDIA's driver.
        nvml: how NVML answers; None without a driver.
        programs: low-level runtimes, engines and NVIDIA's toolkit.
        containerd: its configuration; None if there is no containerd.
        docker: its configuration; None if there is no Docker.
        crio: its configuration; None if there is no CRI-O.
        injectors: others who put GPUs into containers.
        kubernetes: what it expects of this node.
        cdi: the CDI specs.
        policy: our configuration.
        installation: what of ours is installed and runs.
        containers: that have GPUs of ours.
        agent: the node agent.
        plugins: the kubelet's device plugins; None if there is no kubelet.
    """

    machine: Machine | Unseen = _NOT_ASKED
    driver: Driver | Unseen = _NOT_ASKED
    nvml: Nvml | Unseen | None = _NOT_ASKED
    programs: tuple[Program, ...] | Unseen = _NOT_ASKED
    containerd: Containerd | Unseen | None = _NOT_ASKED
    docker: Docker | Unseen | None = _NOT_ASKED
    crio: Crio | Unseen | None = _NOT_ASKED
    injectors: tuple[Injector, ...] | Unseen = _NOT_ASKED
    kubernetes: Kubernetes | Unseen = _NOT_ASKED
    cdi: Cdi | Unseen = _NOT_ASKED
    policy: Policy | Unseen = _NOT_ASKED
    installation: Installation | Unseen = _NOT_ASKED
    containers: tuple[Container, ...] | Unseen = _NOT_ASKED
    agent: NodeAgent | Unseen = _NOT_ASKED
    plugins: Plugins | Unseen | None = _NOT_ASKED
