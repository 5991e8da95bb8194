"""Settings: where the node's driver is, who may have which GPU, which loggers are allowed.

They are in one TOML file, read when a container requests a GPU or names a logger. Its keys are the
fields of :class:`Config`; docs/reference/configuration.md lists them.

Rules
- NVIDIA's file is read only if this one does not exist, so that an existing node behaves as before
  (:mod:`hooks.config.nvidia` lists its keys).
- A missing key has its default. Without a file, every key has its default, but the absence of a
  file that was named is an error.
- An unknown table or key is an error, because a misspelt setting would otherwise be ignored.
- Paths are absolute. The engine assumes nothing else about the layout of the node, so the same code
  runs on a simulated node.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from api.values import dataclass, field
from hooks.config import values
from hooks.errors import ConfigMalformed, UnknownConfigKey, WrongConfigValue
from hooks.schema import (
    BOOLEAN,
    PATH,
    Declarations,
    Kind,
    Setting,
    WrongValue,
    number,
    one_of,
    seconds,
)
from hooks.words import CAPABILITIES, SERVICES


class Platform:
    """The words of ``platform`` in ``[node]``: the kind of NVIDIA's driver."""

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
    """The words of ``denied`` in ``[policy]``: the effect of a denied request."""

    START: Final = "start"
    FAIL: Final = "fail"


class Holders:
    """The words of ``holders`` in ``[sharing]``, besides a number."""

    ANY: Final = "any"
    EXCLUSIVE: Final = "exclusive"


class Namespaces:
    """The words of ``namespaces`` in ``[sandbox]``: how containers find their pod's namespaces."""

    PROCESS: Final = "process"
    PATHS: Final = "paths"


class Beyond:
    """The words of ``beyond`` in ``[guard]``: what happens to a container beyond its limit."""

    TELL: Final = "tell"
    KILL: Final = "kill"


_T = TypeVar("_T")
_declared: Final = Declarations()


def _key(key: str, kind: Kind, text: str, *, default: _T) -> _T:
    """Declare the next field, which a key of the file sets."""
    return _declared(kind, text, default=default, key=key)


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration, checked. The text of each field says what it does."""

    # fmt: off
    # None: the engine searches for it. The result is hooks.node.driver.Driver.root.
    driver_root: str | None = _key("node.driver-root", values.PATH_OR_AUTO,
        "the directory that is \"/\" for the driver's files; or the engine searches for it",
        default=None)
    host_root: str = _key("node.host-root", PATH,
        'the directory that is "/" for the host', default="/")
    dev: str = _key("node.dev", PATH, "the directory of the device nodes", default="/dev")
    proc: str = _key("node.proc", PATH, "where procfs is", default="/proc")
    sys: str = _key("node.sys", PATH, "where sysfs is", default="/sys")
    state: str = _key("node.state", PATH,
        "a directory of our own for what must not outlive a boot",
        default="/run/containerd-shim-nvidia")
    layers: str = _key("node.layers", PATH,
        "a directory of our own for layers of files that containers share; it is used where it is"
        " on the file system of their snapshots", default="/var/lib/containerd-shim-nvidia/layers")
    driver_layer: bool = _key("node.driver-layer", BOOLEAN,
        "whether the driver's files are part of these layers; otherwise, and where a container has"
        " no layer, each of them is mounted", default=True)
    drained: str = _key("node.drained", PATH,
        "a directory that outlives a boot, with a file for each device that is out of service",
        default="/var/lib/containerd-shim-nvidia/drained")
    platform: str = _key(
        "node.platform", one_of(Platform.AUTO, Platform.NVML, Platform.TEGRA, Platform.WSL),
        "what NVIDIA's driver is like", default=Platform.AUTO)
    csv_directory: str = _key("node.csv-directory", PATH,
        "the files that list what a Tegra machine has, within the driver root",
        default="/etc/nvidia-container-runtime/host-files-for-container.d")
    kubelet_root: str | None = _key("node.kubelet-root", values.PATH_OR_AUTO,
        "the directory of the kubelet's state, in which it records its allocations; or the engine"
        " searches for it", default=None)
    char_links: bool = _key("node.char-links", BOOLEAN,
        "whether missing links in ``dev/char`` are made for the nodes of containers", default=True)
    cuda_compat: bool = _key("node.cuda-compat", BOOLEAN,
        "whether an image's own newer libcuda may take precedence over the driver's", default=True)
    fault_exit_code: int = _key("node.fault-exit-code", values.EXIT_CODE,
        "the exit code that engines get for a container that a GPU failure ended; 0 for the "
        "container's own", default=0)
    nvml_timeout: float = _key("node.nvml-timeout", seconds(600),
        "how long NVML may take to answer, in seconds", default=5.0)
    # setting up the driver before a container starts; hooks.node.host_setup has the rules
    load_modules: bool = _key("devices.load-kernel-modules", BOOLEAN,
        "whether kernel modules that a container needs are loaded", default=True)
    make_nodes: bool = _key("devices.make-nodes", BOOLEAN,
        "whether device nodes that a container needs are made", default=True)
    # where hooks.requests.request looks for requests
    swarm_resources: tuple[str, ...] = _key("requests.swarm-resources", values.VARIABLES,
        "names of variables that name devices as NVIDIA_VISIBLE_DEVICES does", default=())
    annotation_prefixes: tuple[str, ...] = _key("requests.annotation-prefixes", values.PREFIXES,
        "annotations with these prefixes hold CDI names", default=("cdi.k8s.io/",))
    accept_mounts: bool | str = _key("requests.accept-mounts", values.BOOLEAN_OR_AUTO,
        'whether mounts of /dev/null may name devices, whoever made them; with "auto", in '
        "unprivileged containers of pods only those that the kubelet has recorded", default="auto")
    default_kind: str = _key("requests.default-kind", values.KIND,
        "the CDI kind of a device that is named without one", default="nvidia.com/gpu")
    # hooks.requests.policy has the rules
    mode: str = _key("policy.mode", one_of(Mode.DEFAULT, Mode.NVIDIA, Mode.PRIVILEGED, Mode.STRICT),
        "when the environment is trusted", default=Mode.DEFAULT)
    denied: str = _key("policy.denied", one_of(Denied.START, Denied.FAIL),
        "what happens to a container whose request is denied", default=Denied.START)
    trusted_namespaces: tuple[str, ...] = _key("policy.trusted-namespaces", values.NAMESPACES,
        "of Kubernetes; what their containers request is trusted", default=())
    excluded_gpus: tuple[str, ...] = _key("policy.exclude-gpus", values.GPUS,
        'UUIDs ("GPU-…") and PCI addresses ("0000:3b:00.0"), in lower case', default=())
    supported_capabilities: tuple[str, ...] = _key(
        "policy.supported-driver-capabilities", values.DRIVER_CAPABILITIES,
        "the driver capabilities that containers may get", default=tuple(sorted(CAPABILITIES)))
    service_sockets: tuple[str, ...] = _key("policy.service-sockets", values.SERVICE_SOCKETS,
        "the services of the driver whose sockets containers and CDI specs may have",
        default=SERVICES)
    disable_require: bool = _key("policy.disable-require", BOOLEAN,
        "whether NVIDIA_REQUIRE_* is left unchecked", default=False)
    ignore_imex: bool = _key("policy.ignore-imex-channel-requests", BOOLEAN,
        "whether requests of IMEX channels are ignored", default=False)
    # hooks.sharing has the rules
    holders: int | str = _key("sharing.holders", values.HOLDERS,
        "how many containers may have a GPU or MIG device at once: a number, or a word",
        default=Holders.ANY)
    holders_of: tuple[str, ...] = _key("sharing.holders-of", values.HOLDERS_OF,
        'the same of single devices, "NAME=HOLDERS"; names are UUIDs, PCI addresses, and indices '
        '("0", "0:1" of a MIG device). The limit of a GPU holds for each of its MIG devices '
        "without a limit of its own", default=())
    holders_exempt: tuple[str, ...] = _key("sharing.exempt-namespaces", values.NAMESPACES,
        "of Kubernetes; containers in these namespaces do not count and have no limit", default=())
    holders_exempt_utility: bool = _key("sharing.exempt-utility", BOOLEAN,
        "whether that holds for those that have no driver capability but ``utility``, too; an "
        "image can bring a libcuda of its own", default=False)
    holders_beyond: str = _key("sharing.beyond", one_of(Denied.FAIL, Denied.START),
        "what happens to a container beyond the limit", default=Denied.FAIL)
    # hooks.cdi has the rules
    cdi_spec_dirs: tuple[str, ...] = _key("cdi.spec-dirs", values.PATHS,
        "the directories of CDI specs, by priority, the lowest first",
        default=("/etc/cdi", "/var/run/cdi"))
    cdi_allow_hooks: tuple[str, ...] = _key("cdi.allow-hooks", values.PATHS,
        "the programs that hooks of CDI specs may run", default=())
    cdi_skip_hooks: bool = _key("cdi.other-hooks", values.FAIL_OR_LEAVE_OUT,
        "whether other hooks are left out; otherwise their container is refused", default=False)
    loggers: tuple[str, ...] | None = _key("stdio.loggers", values.PATHS,
        "the programs that may be loggers; without it, any that is root's alone", default=None)
    # shim.sandbox.sandbox has the rules
    sandbox_namespaces: str = _key(
        "sandbox.namespaces", one_of(Namespaces.PROCESS, Namespaces.PATHS),
        'with ``sandboxer = "shim"``, whether the containers of a pod find its namespaces by a '
        "process, as every containerd knows it, or by paths, which no release of containerd is "
        "known to read yet", default=Namespaces.PROCESS)
    # integration.node.services.health has the rules
    health_xids: tuple[str, ...] = _key("health.xids", values.XIDS,
        "the severity of errors of the driver, in place of the agent's own", default=())
    health_suspects: int = _key("health.suspects", number(1, 1000),
        "how many errors in a while make a suspect device unhealthy", default=3)
    health_window: float = _key("health.window", seconds(86400),
        "how long that while is, in seconds", default=600.0)
    health_patience: float = _key("health.patience", seconds(86400),
        "how long NVML may be silent before devices are unhealthy, in seconds", default=30.0)
    health_quiet: float = _key("health.quiet", seconds(86400),
        "how long a device has to answer without an error before it returns to service, in "
        "seconds", default=20.0)
    health_longest_quiet: float = _key("health.longest-quiet", seconds(86400),
        "the most that this grows to, as it doubles with each new failure, in seconds",
        default=3600.0)
    # integration.node.services.memory_guard has the rules
    guard_memory: str = _key("guard.gpu-memory", values.MEMORY,
        "how much of a device's memory one of several containers on it may use; \"none\" for any "
        "amount", default="none")
    guard_beyond: str = _key("guard.beyond", one_of(Beyond.TELL, Beyond.KILL),
        "what happens to one that uses more", default=Beyond.TELL)
    guard_interval: float = _key("guard.interval", seconds(600),
        "how often that is looked for, in seconds", default=5.0)
    doctor_skip: tuple[str, ...] = _key("doctor.skip", values.FINDINGS,
        'codes of the checks that `nvshim doctor` leaves out, "D042"', default=())
    # fmt: on
    # the file that this was read from; "" for none
    source: str = field(default="", compare=False)
    # settings without effect here, for display
    notes: tuple[str, ...] = field(default=(), compare=False)


TABLES: Final[dict[str, dict[str, Setting]]] = {}
"""The settings by table and key, in the order of the documentation."""
for _setting in _declared.of(Config):
    _table, _, _name = _setting.key.partition(".")
    TABLES.setdefault(_table, {})[_name] = _setting


def parse_config(content: bytes, file: str) -> Config:
    """Parse the configuration from the content of a file.

    Raises:
        ConfigMalformed: it is not valid TOML.
        UnknownConfigKey: it has an unknown table or key.
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
    """Parse the tables of a configuration file.

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
        try:
            found[keys[key].field] = keys[key].kind.check(given)
        except WrongValue as error:
            raise WrongConfigValue(
                f"{key} in [{name}] of configuration {file}",
                found=f"{given!r}",
                do=f"write {error.wanted}",
            ) from None
    return found
