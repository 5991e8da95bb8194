"""Where the node keeps its driver, who may have which GPU, which loggers are allowed.

One TOML file, read when a container asks for a GPU or names a logger::

    [node]
    driver-root = "auto"     # or where the driver is: "/", "/run/nvidia/driver" (hooks.node.roots)
    host-root = "/"          # where the driver is searched for, if that is "auto"
    dev = "/dev"
    proc = "/proc"
    sys = "/sys"
    state = "/run/containerd-shim-nvidia"
    layers = "/var/lib/containerd-shim-nvidia/layers"  # of files that containers share
    drained = "/var/lib/containerd-shim-nvidia/drained"  # what is out of service
    nvml-timeout = 5         # seconds that NVML may take
    platform = "auto"        # or "nvml", "tegra", "wsl" (hooks.platforms)
    csv-directory = "/etc/nvidia-container-runtime/host-files-for-container.d"  # on Tegra
    kubelet-root = "auto"    # or where the kubelet's records are (hooks.node.kubelet)
    char-links = true        # make missing links DEV/char/MAJOR:MINOR (hooks.node.host_setup)
    cuda-compat = true       # an image's newer libcuda comes before the driver's
    fault-exit-code = 0      # or 1 to 255: of containers that a GPU's failure ended

    [devices]
    load-kernel-modules = true  # of the driver, that a container needs (hooks.node.host_setup)
    make-nodes = true        # of the driver, that a container needs (hooks.node.host_setup)

    [requests]               # where hooks.requests.request looks for what is asked
    swarm-resources = []     # variables that come before NVIDIA_VISIBLE_DEVICES
    annotation-prefixes = ["cdi.k8s.io/"]
    accept-mounts = "auto"   # /dev/null on /var/run/nvidia-container-devices/DEVICE; or true, false
    default-kind = "nvidia.com/gpu"  # of devices that are named without one

    [policy]                 # hooks.requests.policy has the rules
    mode = "default"         # or "nvidia", "privileged", "strict"
    denied = "start"         # without a GPU; or "fail"
    trusted-namespaces = []  # of Kubernetes: there the environment of an image is trusted
    exclude-gpus = []        # GPUs that no container gets, by UUID or PCI address
    supported-driver-capabilities = ["compute", …]  # the allowed ones; by default, every one
    service-sockets = ["persistenced", "fabricmanager", "mps"]  # of which services containers get
    disable-require = false  # true: NVIDIA_REQUIRE_* is not checked
    ignore-imex-channel-requests = false

    [sharing]                # hooks.sharing has the rules
    holders = "any"          # or "exclusive", or how many containers may have a device at once
    holders-of = []          # of single devices: "NAME=any", "NAME=exclusive", "NAME=4"
    exempt-namespaces = []   # of Kubernetes: their containers do not count, and have no limit
    exempt-utility = false   # true: the same for those with no driver capability but utility
    beyond = "fail"          # containers beyond the limit; or "start", without a GPU

    [cdi]                    # hooks.cdi has the rules
    spec-dirs = ["/etc/cdi", "/var/run/cdi"]  # the later wins
    allow-hooks = []         # programs that hooks of CDI specs may run; NVIDIA's never run
    other-hooks = "fail"     # or "leave-out": then the container starts without them

    [stdio]
    loggers = ["/usr/local/bin/logger"]  # programs that binary:// may name

    [sandbox]                # pods that the shim holds itself; shim.sandbox.sandbox has the rules
    namespaces = "process"   # how their containers find them: by a process; or by "paths"

    [health]                 # what the node agent thinks of devices;
    integration.node.services.health xids = []                # "31=suspect": what an error of the
    driver makes of a device suspects = 3             # so many errors in a while make a suspect
    device unhealthy window = 600             # seconds that the while lasts
    patience = 30            # seconds of NVML's silence after which devices are unhealthy
    quiet = 20               # seconds without an error before a device returns to service
    longest-quiet = 3600     # when it fails again and again, that doubles up to this

    [guard]                  # of the memory of shared GPUs; integration.node.services.memory_guard
    gpu-memory = "none"      # what one container may use of a device: "8GiB", or "25%" of it
    beyond = "tell"          # a container beyond that; or "kill"
    interval = 5             # seconds between two looks

    [doctor]
    skip = []                # codes of checks that nvshim doctor leaves out: "D042"

Rules
- If this file is not there and NVIDIA's own is, that one is read instead, so that an existing
  node behaves as before (:mod:`hooks.config.nvidia` lists its keys).
  With this file NVIDIA's is not read.
- A key that is not there has the default above. So does every key if the file is not there,
  unless the file was named: then its absence is an error.
- An unknown table or key is an error, because a misspelt one would be a setting ignored.
- Paths are absolute. They are all the engine knows of the node's layout, so that the same
  code runs on a simulated one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from api.values import dataclass, field
from hooks.config import values
from hooks.config.values import Kind
from hooks.errors import ConfigMalformed, UnknownConfigKey, WrongConfigValue
from hooks.words import CAPABILITIES, SERVICES


class Platform:
    """The words of ``platform`` in ``[node]``: what NVIDIA's driver is like."""

    AUTO: Final = "auto"
    NVML: Final = "nvml"
    TEGRA: Final = "tegra"
    WSL: Final = "wsl"


class Mode:
    """The words of ``mode`` in ``[policy]``: when the environment is trusted."""

    DEFAULT: Final = "default"
    NVIDIA: Final = "nvidia"
    PRIVILEGED: Final = "privileged"
    STRICT: Final = "strict"


class Denied:
    """The words of ``denied`` in ``[policy]``: the result of a denied request."""

    START: Final = "start"
    FAIL: Final = "fail"


class Holders:
    """The words of ``holders`` in ``[sharing]``, besides a number."""

    ANY: Final = "any"
    EXCLUSIVE: Final = "exclusive"


class Namespaces:
    """The words of ``namespaces`` in ``[sandbox]``: how containers find those of their pod."""

    PROCESS: Final = "process"
    PATHS: Final = "paths"


class Beyond:
    """The words of ``beyond`` in ``[guard]``: the end of a container beyond its limit."""

    TELL: Final = "tell"
    KILL: Final = "kill"


_T = TypeVar("_T")
_CSV_DIRECTORY: Final = "/etc/nvidia-container-runtime/host-files-for-container.d"
_PLATFORMS: Final = values.one_of(Platform.AUTO, Platform.NVML, Platform.TEGRA, Platform.WSL)
_MODES: Final = values.one_of(Mode.DEFAULT, Mode.NVIDIA, Mode.PRIVILEGED, Mode.STRICT)
_DENIED: Final = values.one_of(Denied.START, Denied.FAIL)
_BEYOND: Final = values.one_of(Denied.FAIL, Denied.START)
_NAMESPACES: Final = values.one_of(Namespaces.PROCESS, Namespaces.PATHS)
_BEYOND_MEMORY: Final = values.one_of(Beyond.TELL, Beyond.KILL)


# Of each field of Config that a key of the file sets, in their order: table, key, kind of value.
_keys: Final[list[tuple[str, str, Kind]]] = []


def _key(table: str, name: str, kind: Kind, default: _T) -> _T:
    """A field that a key of the file sets."""
    _keys.append((table, name, kind))
    return default


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration, checked.

    Attributes:
        driver_root: the directory that is "/" for the driver's files; None if the engine searches
            for it. What was found is :attr:`hooks.node.driver.Driver.root`.
        host_root: the directory that is "/" for the host.
        dev: the directory of the device nodes.
        proc: where procfs is.
        sys: where sysfs is.
        state: a directory of our own for what must not outlive a boot.
        layers: a directory of our own for layers of files that containers share; it is used
            where it is on the file system of their snapshots.
        drained: a directory that outlives a boot, with a file for each device that is out of
            service.
        platform: what NVIDIA's driver is like, of :class:`Platform`.
        csv_directory: the files that list what a Tegra machine has, within the driver root.
        kubelet_root: the directory of the kubelet's state, in which it records its
            allocations; None if the engine searches for it.
        nvml_timeout: how long NVML may take to answer, in seconds.
        loggers: the programs that may be loggers; None for any that is root's alone.
        char_links: whether missing links in ``dev/char`` are made for the nodes of containers.
        swarm_resources: names of variables that name devices as NVIDIA_VISIBLE_DEVICES does.
        annotation_prefixes: annotations with these prefixes hold CDI names.
        accept_mounts: whether mounts of /dev/null may name devices, whoever made them; with "auto",
            in unprivileged containers of pods only those that the kubelet has recorded.
        default_kind: the CDI kind of a device that is named without one.
        mode: when the environment is trusted, of :class:`Mode`.
        denied: what happens to a container whose request is denied, of :class:`Denied`.
        trusted_namespaces: of Kubernetes; what their containers request is trusted.
        excluded_gpus: UUIDs ("GPU-…") and PCI addresses ("0000:3b:00.0"), in lower case.
        supported_capabilities: the driver capabilities that containers may get.
        service_sockets: the services of the driver whose sockets containers and CDI specs may have.
        disable_require: whether NVIDIA_REQUIRE_* is left unchecked.
        ignore_imex: whether requests of IMEX channels are ignored.
        cuda_compat: whether an image's own newer libcuda may take precedence over the driver's.
        fault_exit_code: the exit code that engines get for a container that a GPU failure ended; 0
            for the container's own.
        cdi_spec_dirs: the directories of CDI specs, by priority, the lowest first.
        cdi_allow_hooks: the programs that hooks of CDI specs may run.
        cdi_skip_hooks: whether other hooks are left out; otherwise their container is refused.
        load_modules: whether kernel modules that a container needs are loaded.
        make_nodes: whether device nodes that a container needs are made.
        holders: how many containers may have a GPU or MIG device at once: a number, or a word of
            :class:`Holders`.
        holders_of: the same of single devices, "NAME=HOLDERS"; names are UUIDs, PCI addresses, and
            indices ("0", "0:1" of a MIG device). The limit of a GPU holds for each of its MIG
            devices without a limit of its own.
        holders_exempt: of Kubernetes; containers in these namespaces do not count and have no
            limit.
        holders_exempt_utility: whether that holds for those that have no driver capability but
            ``utility``, too; an image can bring a libcuda of its own.
        holders_beyond: what happens to a container beyond the limit, of
            :class:`Denied`.
        sandbox_namespaces: with ``sandboxer = "shim"``, whether the containers of a pod find its
            namespaces by a process, as every containerd knows it, or by paths, which no release
            of containerd is known to read yet; of :class:`Namespaces`.
        health_xids: the severity of errors of the driver, in place of the agent's own.
        health_suspects: how many errors in a while make a suspect device unhealthy.
        health_window: how long that while is, in seconds.
        health_patience: how long NVML may be silent before devices are unhealthy, in seconds.
        health_quiet: how long a device has to answer without an error before it returns to
            service, in seconds.
        health_longest_quiet: the most that this grows to, as it doubles with each new failure, in
            seconds.
        guard_memory: how much of a device's memory one of several containers on it may use; "none"
            for any amount.
        guard_beyond: what happens to one that uses more, of :class:`Beyond`.
        guard_interval: how often that is looked for, in seconds.
        doctor_skip: codes of the checks that `nvshim doctor` leaves out, "D042".
        source: the file that this was read from; "" for none.
        notes: settings without effect here, for display.
    """

    # Each key of the file, in the order of the documentation: table, key, kind of value, default.
    driver_root: str | None = _key("node", "driver-root", values.PATH_OR_LOOK, None)
    host_root: str = _key("node", "host-root", values.PATH, "/")
    dev: str = _key("node", "dev", values.PATH, "/dev")
    proc: str = _key("node", "proc", values.PATH, "/proc")
    sys: str = _key("node", "sys", values.PATH, "/sys")
    state: str = _key("node", "state", values.PATH, "/run/containerd-shim-nvidia")
    layers: str = _key("node", "layers", values.PATH, "/var/lib/containerd-shim-nvidia/layers")
    drained: str = _key("node", "drained", values.PATH, "/var/lib/containerd-shim-nvidia/drained")
    platform: str = _key("node", "platform", _PLATFORMS, Platform.AUTO)
    csv_directory: str = _key("node", "csv-directory", values.PATH, _CSV_DIRECTORY)
    kubelet_root: str | None = _key("node", "kubelet-root", values.PATH_OR_LOOK, None)
    char_links: bool = _key("node", "char-links", values.YES_OR_NO, default=True)
    cuda_compat: bool = _key("node", "cuda-compat", values.YES_OR_NO, default=True)
    fault_exit_code: int = _key("node", "fault-exit-code", values.EXIT_CODE, 0)
    nvml_timeout: float = _key("node", "nvml-timeout", values.SECONDS, 5.0)
    load_modules: bool = _key("devices", "load-kernel-modules", values.YES_OR_NO, default=True)
    make_nodes: bool = _key("devices", "make-nodes", values.YES_OR_NO, default=True)
    swarm_resources: tuple[str, ...] = _key("requests", "swarm-resources", values.VARIABLES, ())
    annotation_prefixes: tuple[str, ...] = _key(
        "requests", "annotation-prefixes", values.PREFIXES, ("cdi.k8s.io/",)
    )
    accept_mounts: bool | str = _key(
        "requests", "accept-mounts", values.YES_NO_OR_LOOK, values.LOOK
    )
    default_kind: str = _key("requests", "default-kind", values.KIND, "nvidia.com/gpu")
    mode: str = _key("policy", "mode", _MODES, Mode.DEFAULT)
    denied: str = _key("policy", "denied", _DENIED, Denied.START)
    trusted_namespaces: tuple[str, ...] = _key(
        "policy", "trusted-namespaces", values.NAMESPACES, ()
    )
    excluded_gpus: tuple[str, ...] = _key("policy", "exclude-gpus", values.GPUS, ())
    supported_capabilities: tuple[str, ...] = _key(
        "policy", "supported-driver-capabilities", values.DRIVER_CAPABILITIES,
        tuple(sorted(CAPABILITIES)),
    )  # fmt: skip
    service_sockets: tuple[str, ...] = _key(
        "policy", "service-sockets", values.SERVICE_SOCKETS, SERVICES
    )
    disable_require: bool = _key("policy", "disable-require", values.YES_OR_NO, default=False)
    ignore_imex: bool = _key(
        "policy", "ignore-imex-channel-requests", values.YES_OR_NO, default=False
    )
    holders: int | str = _key("sharing", "holders", values.HOLDERS, Holders.ANY)
    holders_of: tuple[str, ...] = _key("sharing", "holders-of", values.HOLDERS_OF, ())
    holders_exempt: tuple[str, ...] = _key("sharing", "exempt-namespaces", values.NAMESPACES, ())
    holders_exempt_utility: bool = _key(
        "sharing", "exempt-utility", values.YES_OR_NO, default=False
    )
    holders_beyond: str = _key("sharing", "beyond", _BEYOND, Denied.FAIL)
    cdi_spec_dirs: tuple[str, ...] = _key(
        "cdi", "spec-dirs", values.PATHS, ("/etc/cdi", "/var/run/cdi")
    )
    cdi_allow_hooks: tuple[str, ...] = _key("cdi", "allow-hooks", values.PATHS, ())
    cdi_skip_hooks: bool = _key("cdi", "other-hooks", values.FAIL_OR_LEAVE_OUT, default=False)
    loggers: tuple[str, ...] | None = _key("stdio", "loggers", values.PATHS, None)
    sandbox_namespaces: str = _key("sandbox", "namespaces", _NAMESPACES, Namespaces.PROCESS)
    health_xids: tuple[str, ...] = _key("health", "xids", values.XIDS, ())
    health_suspects: int = _key("health", "suspects", values.COUNT, 3)
    health_window: float = _key("health", "window", values.LONG_SECONDS, 600.0)
    health_patience: float = _key("health", "patience", values.LONG_SECONDS, 30.0)
    health_quiet: float = _key("health", "quiet", values.LONG_SECONDS, 20.0)
    health_longest_quiet: float = _key("health", "longest-quiet", values.LONG_SECONDS, 3600.0)
    guard_memory: str = _key("guard", "gpu-memory", values.MEMORY, "none")
    guard_beyond: str = _key("guard", "beyond", _BEYOND_MEMORY, Beyond.TELL)
    guard_interval: float = _key("guard", "interval", values.SECONDS, 5.0)
    doctor_skip: tuple[str, ...] = _key("doctor", "skip", values.FINDINGS, ())
    source: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


TABLES: Final[dict[str, dict[str, tuple[str, Callable[[object], Any], str]]]] = {}
"""By table and key: the field of :class:`Config`, the check of a value, and the allowed ones."""
for _field, (_table, _name, _kind) in zip(Config.__match_args__, _keys, strict=False):
    TABLES.setdefault(_table, {})[_name] = (_field, *_kind)


def parse_config(content: bytes, file: str) -> Config:
    """The configuration from a file's content.

    Raises:
        ConfigMalformed: it is not valid TOML.
        UnknownConfigKey: it has a table or key that means nothing.
        WrongConfigValue: a value has the wrong type or is out of range.
    """
    tables = parse_toml(content, file)
    found: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in TABLES:
            raise UnknownConfigKey(
                f"configuration {file}",
                found=f"unknown table or key {name}",
                do=f"use {', '.join(f'[{known}]' for known in TABLES)}",
            )
        if not isinstance(table, dict):
            raise WrongConfigValue(
                f"{name} in configuration {file}",
                found=f"{table!r}",
                do=f"write a table, [{name}]",
            )
        found |= _read_table(name, table, file)
    return Config(**found, source=file)


def parse_toml(content: bytes, file: str) -> dict[str, Any]:
    """The tables of a configuration file.

    Raises:
        ConfigMalformed: it is not valid TOML.
    """
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8; arrays in arrays in …
        raise ConfigMalformed(f"configuration {file}", found=f"not valid TOML: {error}") from error


def _read_table(name: str, table: Mapping[str, Any], file: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    keys = TABLES[name]
    for key, given in table.items():
        if key not in keys:
            raise UnknownConfigKey(
                f"configuration {file}",
                found=f"unknown key {key} in [{name}]",
                do=f"use {', '.join(keys)}",
            )
        attribute, check, wanted = keys[key]
        checked = check(given)
        if checked is None:
            raise WrongConfigValue(
                f"{key} in [{name}] of configuration {file}",
                found=f"{given!r}",
                do=f"write {wanted}",
            )
        is_found = checked == values.LOOK and key in {"driver-root", "kubelet-root"}
        found[attribute] = None if is_found else checked
    return found
