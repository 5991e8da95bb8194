"""Where the node keeps its driver, who may have which GPU, which loggers are allowed.

One TOML file, read when a container asks for a GPU or names a logger::

    [node]
    driver-root = "auto"     # or where the driver is: "/", "/run/nvidia/driver" (hooks.node.roots)
    host-root = "/"          # where the driver is looked for, if that is "auto"
    dev = "/dev"
    proc = "/proc"
    sys = "/sys"
    state = "/run/containerd-shim-nvidia"
    layers = "/var/lib/containerd-shim-nvidia/layers"  # of files that containers share
    nvml-timeout = 5         # seconds that NVML may take
    platform = "auto"        # or "nvml", "tegra", "wsl" (hooks.platforms)
    csv-directory = "/etc/nvidia-container-runtime/host-files-for-container.d"  # on Tegra
    char-links = true        # make missing links DEV/char/MAJOR:MINOR (hooks.node.char_links)
    cuda-compat = true       # an image's newer libcuda comes before the driver's

    [devices]
    load-kernel-modules = true  # of the driver, that a container needs (hooks.node.modules)
    make-nodes = true        # of the driver, that a container needs (hooks.node.nodes)

    [requests]               # where hooks.requests.request looks for what is asked
    swarm-resources = []     # variables that come before NVIDIA_VISIBLE_DEVICES
    annotation-prefixes = ["cdi.k8s.io/"]
    accept-mounts = true     # /dev/null on /var/run/nvidia-container-devices/DEVICE
    default-kind = "nvidia.com/gpu"  # of devices that are named without one

    [policy]                 # hooks.requests.policy has the rules
    mode = "default"         # or "nvidia", "privileged", "strict"
    denied = "start"         # without a GPU; or "fail"
    trusted-namespaces = []  # of Kubernetes: there the environment of an image is believed
    exclude-gpus = []        # GPUs that nobody gets, by UUID or PCI address
    supported-driver-capabilities = ["compute", …]  # all that may be had; by default, every one
    disable-require = false  # true: NVIDIA_REQUIRE_* is not looked at
    ignore-imex-channel-requests = false

    [sharing]                # hooks.requests.sharing has the rules
    holders = "any"          # or "exclusive", or how many containers may have a device at once
    holders-of = []          # of single devices: "NAME=any", "NAME=exclusive", "NAME=4"
    exempt-namespaces = []   # of Kubernetes: their containers do not count, and have no limit
    exempt-utility = false   # true: nor do those that have no driver capability but utility
    beyond = "fail"          # what becomes of one too many; or "start", without a GPU

    [cdi]                    # hooks.cdi has the rules
    spec-dirs = ["/etc/cdi", "/var/run/cdi"]  # the later wins
    allow-hooks = []         # programs that hooks of CDI specs may run; NVIDIA's never run
    other-hooks = "fail"     # or "leave-out": then the container starts without them

    [stdio]
    loggers = ["/usr/local/bin/logger"]  # programs that binary:// may name

    [health]                 # what the node agent thinks of devices; integration.node.health
    xids = []                # "31=suspect": what an error of the driver makes of a device
    suspects = 3             # so many errors in a while make a suspect device unhealthy
    window = 600             # seconds that the while lasts
    patience = 30            # seconds of NVML's silence after which devices are unhealthy
    quiet = 20               # seconds without an error before a device is given again
    longest-quiet = 3600     # when it fails again and again, that doubles up to this

Rules
- If this file is not there and NVIDIA's own is, that one is read instead, so that an existing
  node behaves as before (:mod:`hooks.nvidia_config` says what becomes of each of its keys).
  With this file NVIDIA's is not read.
- A key that is not there has the default above. So does every key if the file is not there,
  unless somebody named the file: then its absence is an error.
- An unknown table or key is an error, because a misspelt one would be a setting ignored.
- Paths are absolute. They are all the engine knows of the node's layout, so that the same
  code runs on a simulated one.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from api.values import changed, value
from hooks import config_values as values
from hooks.errors import ConfigMalformed, ConfigUnreadable, UnknownConfigKey, WrongConfigValue
from hooks.requests.request import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "DEFAULT_PATH",
    "ENVIRONMENT_VARIABLE",
    "TABLES",
    "Config",
    "Denied",
    "Holders",
    "Mode",
    "Platform",
    "find_files",
    "load_config",
]

DEFAULT_PATH: Final = "/etc/containerd-shim-nvidia/config.toml"
ENVIRONMENT_VARIABLE: Final = "NVSHIM_CONFIG"

NVIDIA_PATH: Final = "/etc/nvidia-container-runtime/config.toml"
"""The configuration of NVIDIA's container toolkit."""
NVIDIA_ENVIRONMENT_VARIABLE: Final = "NVIDIA_CTK_CONFIG_FILE_PATH"
"""Names it instead, in the environment of containerd (an image's environment is never ours)."""


class Platform:
    """The words of ``platform`` in ``[node]``: what NVIDIA's driver is like."""

    AUTO: Final = "auto"
    NVML: Final = "nvml"
    TEGRA: Final = "tegra"
    WSL: Final = "wsl"


class Mode:
    """The words of ``mode`` in ``[policy]``: when the environment is believed."""

    DEFAULT: Final = "default"
    NVIDIA: Final = "nvidia"
    PRIVILEGED: Final = "privileged"
    STRICT: Final = "strict"


class Denied:
    """The words of ``denied`` in ``[policy]``: what becomes of a container that may not."""

    START: Final = "start"
    FAIL: Final = "fail"


class Holders:
    """The words of ``holders`` in ``[sharing]``, besides a number."""

    ANY: Final = "any"
    EXCLUSIVE: Final = "exclusive"


@value
class Config:
    """The configuration, checked.

    Attributes:
        driver_root: the directory that is "/" for the driver's files; None if it is to be found
            by looking. What was found is :attr:`hooks.node.driver.Driver.root`.
        host_root: the directory that is "/" for the host.
        dev: the directory of the device nodes.
        proc: where procfs is.
        sys: where sysfs is.
        state: a directory of our own for what must not outlive a boot.
        layers: a directory of our own for layers of files that containers share; it is used
            where it is on the file system of their snapshots.
        platform: what NVIDIA's driver is like, of :class:`Platform`.
        csv_directory: the files that list what a Tegra machine has, within the driver root.
        nvml_timeout: how long NVML may take to answer, in seconds.
        loggers: the programs that may be loggers; None for any that is root's alone.
        char_links: whether missing links in ``dev/char`` are made for the nodes that are given.
        swarm_resources: names of variables that name devices as NVIDIA_VISIBLE_DEVICES does.
        annotation_prefixes: annotations whose names begin so hold CDI names.
        accept_mounts: whether mounts of /dev/null may name devices.
        default_kind: the CDI kind of a device that is named without one.
        mode: whose word is a grant, of :class:`Mode`.
        denied: what becomes of a container that may not have what it asks, of :class:`Denied`.
        trusted_namespaces: of Kubernetes; the environment of their containers is believed.
        excluded_gpus: UUIDs ("GPU-…") and PCI addresses ("0000:3b:00.0"), in lower case.
        supported_capabilities: the driver capabilities that may be had.
        disable_require: whether NVIDIA_REQUIRE_* is left unchecked.
        ignore_imex: whether requests of IMEX channels are ignored.
        cuda_compat: whether an image's own newer libcuda may come before the driver's.
        cdi_spec_dirs: the directories of CDI specs, by priority, the lowest first.
        cdi_allow_hooks: the programs that hooks of CDI specs may run.
        cdi_skip_hooks: whether other hooks are left out; otherwise their container is refused.
        load_modules: whether kernel modules that a container needs are loaded.
        make_nodes: whether device nodes that a container needs are made.
        holders: how many containers may have a GPU or MIG device at once: a number, or a word of
            :class:`Holders`.
        holders_of: the same of single devices, "NAME=HOLDERS"; names are UUIDs, PCI addresses, and
            indices ("0", "0:1" of a MIG device). What is said of a GPU holds for each of its MIG
            devices of which nothing is said.
        holders_exempt: of Kubernetes; containers in these namespaces neither count nor have a
            limit.
        holders_exempt_utility: whether that holds for those that have no driver capability but
            ``utility``, too; an image can bring a libcuda of its own.
        holders_beyond: what becomes of a container that would be one too many, of
            :class:`Denied`.
        health_xids: what errors of the driver make of a device, in place of what the agent has
            for them.
        health_suspects: how many errors in a while make a suspect device unhealthy.
        health_window: how long that while is, in seconds.
        health_patience: how long NVML may be silent before devices are unhealthy, in seconds.
        health_quiet: how long a device has to answer without an error before it is given again,
            in seconds.
        health_longest_quiet: up to how much that doubles, with each time that it fails again, in
            seconds.
        source: the file that this was read from; "" for none.
        notes: what of it means nothing here, for people.
    """

    driver_root: str | None = None
    dev: str = "/dev"
    proc: str = "/proc"
    sys: str = "/sys"
    state: str = "/run/containerd-shim-nvidia"
    nvml_timeout: float = 5.0
    loggers: tuple[str, ...] | None = None
    char_links: bool = True
    swarm_resources: tuple[str, ...] = ()
    annotation_prefixes: tuple[str, ...] = ("cdi.k8s.io/",)
    accept_mounts: bool = True
    default_kind: str = "nvidia.com/gpu"
    mode: str = Mode.DEFAULT
    denied: str = Denied.START
    trusted_namespaces: tuple[str, ...] = ()
    excluded_gpus: tuple[str, ...] = ()
    supported_capabilities: tuple[str, ...] = tuple(sorted(CAPABILITIES))
    disable_require: bool = False
    ignore_imex: bool = False
    host_root: str = "/"
    platform: str = Platform.AUTO
    csv_directory: str = "/etc/nvidia-container-runtime/host-files-for-container.d"
    cuda_compat: bool = True
    cdi_spec_dirs: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")
    cdi_allow_hooks: tuple[str, ...] = ()
    cdi_skip_hooks: bool = False
    load_modules: bool = True
    make_nodes: bool = True
    health_xids: tuple[str, ...] = ()
    health_suspects: int = 3
    health_window: float = 600.0
    health_patience: float = 30.0
    health_quiet: float = 20.0
    health_longest_quiet: float = 3600.0
    layers: str = "/var/lib/containerd-shim-nvidia/layers"
    holders: int | str = Holders.ANY
    holders_of: tuple[str, ...] = ()
    holders_exempt: tuple[str, ...] = ()
    holders_exempt_utility: bool = False
    holders_beyond: str = Denied.FAIL
    source: str = ""
    notes: tuple[str, ...] = ()
    _apart = ("source", "notes")


def load_config(path: str | None = None) -> Config:
    """The configuration from its file.

    Args:
        path: the file; None for the one that NVSHIM_CONFIG names, else :data:`DEFAULT_PATH`,
            else NVIDIA's own.

    Returns:
        The configuration; the defaults if nobody named a file and there is none.

    Raises:
        ConfigUnreadable: the file cannot be read, or was named and is not there.
        ConfigMalformed: it is no TOML.
        UnknownConfigKey: it has a table or key that means nothing.
        WrongConfigValue: a value has the wrong type or is out of range.
    """
    (file, named), (nvidias, nvidias_named) = find_files(path)
    content = _read(file, ENVIRONMENT_VARIABLE, needed=named)
    if content is not None:
        return _parse_once(content, file)
    file = nvidias
    content = _read(file, NVIDIA_ENVIRONMENT_VARIABLE, needed=nvidias_named)
    if content is None:
        return Config()
    from hooks.nvidia_config import parse_nvidia_config  # noqa: PLC0415 - few nodes have it

    return parse_nvidia_config(content, file)


def find_files(path: str | None = None) -> tuple[tuple[str, bool], tuple[str, bool]]:
    """The files that :func:`load_config` looks for, in its order: ours, then NVIDIA's.

    Args:
        path: as for that.

    Returns:
        Each with whether somebody named it, so that it is an error if it is not there.
    """
    ours = path or os.environ.get(ENVIRONMENT_VARIABLE)
    nvidias = os.environ.get(NVIDIA_ENVIRONMENT_VARIABLE)
    return (ours or DEFAULT_PATH, bool(ours)), (nvidias or NVIDIA_PATH, bool(nvidias))


# What was parsed last. A process that is forked has it, and the file seldom changes.
_parsed: tuple[bytes, str, Config] | None = None


def _parse_once(content: bytes, file: str) -> Config:
    global _parsed  # noqa: PLW0603 - of a pure function's results, the last
    if _parsed is None or _parsed[:2] != (content, file):
        _parsed = (content, file, parse_config(content, file))
    return _parsed[2]


def _read(file: str, variable: str, *, needed: bool) -> bytes | None:
    """A file's content; None if it is not there and need not be."""
    try:
        with open(file, "rb") as stream:
            return stream.read()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not needed:
            return None
        raise ConfigUnreadable(
            f"configuration {file}",
            found=error.strerror or str(error),
            do=f"make the file readable, or name another in {variable}",
        ) from error


def parse_config(content: bytes, file: str) -> Config:
    """The configuration from a file's content.

    Args:
        content: the TOML.
        file: its name, for messages.

    Returns:
        The configuration.

    Raises:
        ConfigMalformed: it is no TOML.
        UnknownConfigKey: it has a table or key that means nothing.
        WrongConfigValue: a value has the wrong type or is out of range.
    """
    tables = parse_toml(content, file)
    fields: dict[str, Any] = {}
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
        fields |= _fields(name, table, file)
    return changed(Config(), **fields, source=file)


def parse_toml(content: bytes, file: str) -> dict[str, Any]:
    """The tables of a configuration file.

    Args:
        content: the TOML.
        file: its name, for messages.

    Returns:
        The tables and keys, as TOML has them.

    Raises:
        ConfigMalformed: it is no TOML.
    """
    import tomllib  # noqa: PLC0415 - 15 ms that a node without the file does not pay

    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8; arrays in arrays in …
        raise ConfigMalformed(f"configuration {file}", found=f"no TOML: {error}") from error


def _fields(name: str, table: Mapping[str, Any], file: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    keys = TABLES[name]
    for key, given in table.items():
        if key not in keys:
            raise UnknownConfigKey(
                f"configuration {file}",
                found=f"unknown key {key} in [{name}]",
                do=f"use {', '.join(keys)}",
            )
        field, check, wanted = keys[key]
        checked = check(given)
        if checked is None:
            raise WrongConfigValue(
                f"{key} in [{name}] of configuration {file}",
                found=f"{given!r}",
                do=f"write {wanted}",
            )
        fields[field] = None if (key, checked) == ("driver-root", values.LOOK) else checked
    return fields


_A_PATH: Final = 'an absolute path ("/…")'
_LONG: Final = "seconds, more than 0 and at most 86400"
TABLES: Final[dict[str, dict[str, tuple[str, Callable[[object], object], str]]]] = {
    "node": {
        "driver-root": ("driver_root", values.path_or_look, f'{_A_PATH} or "{values.LOOK}"'),
        "host-root": ("host_root", values.path, _A_PATH),
        "dev": ("dev", values.path, _A_PATH),
        "proc": ("proc", values.path, _A_PATH),
        "sys": ("sys", values.path, _A_PATH),
        "state": ("state", values.path, _A_PATH),
        "layers": ("layers", values.path, _A_PATH),
        "platform": (
            "platform",
            values.one_of(Platform.AUTO, Platform.NVML, Platform.TEGRA, Platform.WSL),
            '"auto", "nvml", "tegra" or "wsl"',
        ),
        "csv-directory": ("csv_directory", values.path, _A_PATH),
        "char-links": ("char_links", values.yes_or_no, "true or false"),
        "cuda-compat": ("cuda_compat", values.yes_or_no, "true or false"),
        "nvml-timeout": ("nvml_timeout", values.seconds, "seconds, more than 0 and at most 600"),
    },
    "devices": {
        "load-kernel-modules": ("load_modules", values.yes_or_no, "true or false"),
        "make-nodes": ("make_nodes", values.yes_or_no, "true or false"),
    },
    "requests": {
        "swarm-resources": (
            "swarm_resources",
            values.texts_like(values.VARIABLE),
            "a list of names of variables",
        ),
        "annotation-prefixes": (
            "annotation_prefixes",
            values.texts_like(values.PREFIX),
            'a list of prefixes ("cdi.k8s.io/")',
        ),
        "accept-mounts": ("accept_mounts", values.yes_or_no, "true or false"),
        "default-kind": (
            "default_kind",
            values.text_like(values.KIND),
            'a kind ("nvidia.com/gpu")',
        ),
    },
    "policy": {
        "mode": (
            "mode",
            values.one_of(Mode.DEFAULT, Mode.NVIDIA, Mode.PRIVILEGED, Mode.STRICT),
            '"default", "nvidia", "privileged" or "strict"',
        ),
        "denied": ("denied", values.one_of(Denied.START, Denied.FAIL), '"start" or "fail"'),
        "trusted-namespaces": ("trusted_namespaces", values.words, "a list of namespaces"),
        "exclude-gpus": (
            "excluded_gpus",
            values.gpu_names,
            'a list of UUIDs ("GPU-…", in full) and PCI addresses ("0000:3b:00.0")',
        ),
        "supported-driver-capabilities": (
            "supported_capabilities",
            values.capabilities,
            f"a list of {', '.join(sorted(CAPABILITIES))}",
        ),
        "disable-require": ("disable_require", values.yes_or_no, "true or false"),
        "ignore-imex-channel-requests": ("ignore_imex", values.yes_or_no, "true or false"),
    },
    "sharing": {
        "holders": ("holders", values.holders, '"any", "exclusive" or a number, at least 1'),
        "holders-of": (
            "holders_of",
            values.holders_of,
            'a list of "NAME=any", "NAME=exclusive" and "NAME=4", by UUID, PCI address or index',
        ),
        "exempt-namespaces": ("holders_exempt", values.words, "a list of namespaces"),
        "exempt-utility": ("holders_exempt_utility", values.yes_or_no, "true or false"),
        "beyond": (
            "holders_beyond",
            values.one_of(Denied.START, Denied.FAIL),
            '"fail" or "start"',
        ),
    },
    "cdi": {
        "spec-dirs": ("cdi_spec_dirs", values.paths, "a list of absolute paths"),
        "allow-hooks": ("cdi_allow_hooks", values.paths, "a list of absolute paths"),
        "other-hooks": (
            "cdi_skip_hooks",
            values.either("fail", "leave-out"),
            '"fail" or "leave-out"',
        ),
    },
    "stdio": {"loggers": ("loggers", values.paths, "a list of absolute paths")},
    "health": {
        "xids": (
            "health_xids",
            values.texts_like(values.XID),
            'a list of "NUMBER=SEVERITY", which is ignore, suspect, unhealthy or fatal',
        ),
        "suspects": ("health_suspects", values.count, "a number, 1 to 1000"),
        "window": ("health_window", values.long_seconds, _LONG),
        "patience": ("health_patience", values.long_seconds, _LONG),
        "quiet": ("health_quiet", values.long_seconds, _LONG),
        "longest-quiet": ("health_longest_quiet", values.long_seconds, _LONG),
    },
}
"""By table and key: the field of :class:`Config`, the check of a value, and what one is."""
