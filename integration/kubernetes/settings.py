"""The installer's settings, and the variables and options that set them.

Rules
- A variable of NVIDIA's installer has the same meaning here, so that existing charts keep working,
  or no effect; its text then explains why. If several variables are set, our own and newer names
  win.
- Paths are host paths. NVIDIA's installer accepts paths of its own container ("/runtime/…"), which
  do not exist here. Such a value is an error, since it would put a file in the wrong place.

Source: nvidia-container-toolkit cmd/nvidia-ctk-installer (main.go, container/runtime,
container/toolkit).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hooks.schema import (
    BOOLEAN,
    IGNORED,
    PATH,
    Declarations,
    Kind,
    Setting,
    WrongValue,
    like,
    one_of,
    seconds,
)
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE
from integration.install_layout import NODE_LOCK

STATE: Final = "/run/containerd-shim-nvidia"
LOCAL: Final = "/run/nvshim"
"""The status directory for probes, in the container and not on the node."""

# Where NVIDIA's DaemonSet mounts host directories for its installer.
_THEIR_MOUNTS: Final = ("/runtime/", "/driver-root")


def _host_path(value: Any) -> Any:
    if str(value).startswith(_THEIR_MOUNTS):
        wanted = "a path on the node, not one in the container of NVIDIA's installer"
        raise WrongValue(wanted, value)
    return PATH.of_value(value)


_PATH: Final = Kind(_host_path, PATH.wanted, metavar="DIR")
_set: Final = Declarations()


@dataclass(frozen=True, slots=True)
class Settings:
    """The installer's settings. All paths except ``host`` and ``local`` are host paths."""

    # fmt: off
    # "/" if the installer runs on the node itself
    host: str = _set(_PATH, "where the node's root is mounted",
        "HOST_ROOT_MOUNT", options=["--host"], default="/host")
    engine: str = _set(one_of("containerd", "crio", "docker"),
        "the engine to configure: containerd, crio or docker",
        "RUNTIME", default="containerd")  # empty for none
    no_engine: bool = _set(BOOLEAN, "leave the engine's configuration as it is",
        "NO_RUNTIME_CONFIG", default=False)
    # the next three are empty for the engine's default
    config: str = _set(_PATH, "the engine's configuration file",
        "RUNTIME_CONFIG", "CONTAINERD_CONFIG", default="")
    drop_in: str = _set(_PATH, "the drop-in file to write",
        "RUNTIME_DROP_IN_CONFIG_HOST_PATH", "RUNTIME_DROP_IN_CONFIG", default="")
    socket: str = _set(_PATH, "the engine's CRI socket",
        "RUNTIME_SOCKET", "CONTAINERD_SOCKET", default="")
    runtime_name: str = _set(
        like(r"[A-Za-z0-9][-A-Za-z0-9_.]*", "the name of a handler"), "the handler's name",
        "NVIDIA_RUNTIME_NAME", "CONTAINERD_RUNTIME_CLASS", default="nvidia")
    # None: keep the node's setting
    set_default: bool | None = _set(BOOLEAN,
        "make the handler the default for pods without a RuntimeClass; off by default (NVIDIA's "
        "installer: on)",
        "NVIDIA_RUNTIME_SET_AS_DEFAULT", "CONTAINERD_SET_AS_DEFAULT", default=None)
    enable_cdi: bool | None = _set(BOOLEAN, "enable CDI in the engine",
        "RUNTIME_ENABLE_CDI", default=None)  # None: keep the node's setting
    restart: str = _set(one_of("none", "signal", "systemd"),
        "how to restart the engine: none, signal or systemd; none by default (NVIDIA's installer: "
        "signal)",
        "RUNTIME_RESTART_MODE", "CONTAINERD_RESTART_MODE", options=["--restart"], default="none")
    driver_root: str = _set(_PATH, "the driver root; detected by default",
        "NVIDIA_DRIVER_ROOT", default="")
    # only one of the installers works on a node
    pid_file: str = _set(_PATH, "the lock file, shared with NVIDIA's installer",
        "TOOLKIT_PID_FILE", default=NODE_LOCK)
    once: bool = _set(BOOLEAN,
        "exit when the installation is complete, instead of watching the node",
        "NO_DAEMON", options=["--once"], default=False)
    tree: str = _set(_PATH, "the tree to install; by default the image's own",
        "NVSHIM_TREE", options=["--tree"], default="")
    prefix: str = _set(_PATH, "the directory for installed trees",
        "NVSHIM_PREFIX", default="/opt/containerd-shim-nvidia")
    bindir: str = _set(_PATH, "the directory for links to the programs",
        "NVSHIM_BINDIR", default="/usr/local/bin")
    replace: bool = _set(BOOLEAN,
        "replace an existing handler of the same name, such as NVIDIA's",
        "NVSHIM_REPLACE", default=False)
    runtime_type: str = _set(one_of(RUNTIME_TYPE, RUNC_TYPE),
        "the handler's type in containerd; use runc's type for a containerd that queries only "
        "runc's features",
        "NVSHIM_RUNTIME_TYPE", default="")  # empty: keep the node's setting
    wait_for_driver: bool = _set(BOOLEAN,
        "wait for the GPU operator's driver-ready file and read it",
        "NVSHIM_WAIT_FOR_DRIVER", options=["--wait-for-driver"], default=False)
    driver_timeout: float = _set(seconds(least=0),
        "seconds to wait for the driver; 0 for no limit", "NVSHIM_DRIVER_TIMEOUT", default=0.0)
    toolkit_ready: bool = _set(BOOLEAN,
        "write toolkit-ready for the operator's other components when a container can get a GPU",
        "NVSHIM_TOOLKIT_READY", options=["--toolkit-ready"], default=False)
    validations: str = _set(_PATH, "the directory of the ready files",
        "NVSHIM_VALIDATIONS", default="/run/nvidia/validations")
    # needs a privileged installer that sees the node's processes
    self_test: bool = _set(BOOLEAN,
        "start a test container with a new tree before activating it",
        "NVSHIM_SELF_TEST", default=False)
    remove_on_exit: bool = _set(BOOLEAN, "uninstall everything on exit",
        "NVSHIM_REMOVE_ON_EXIT", options=["--remove-on-exit"], default=False)
    every_node: bool = _set(BOOLEAN, "set up nodes without an NVIDIA GPU too",
        "NVSHIM_EVERY_NODE", default=False)
    interval: float = _set(seconds(), "seconds between two checks of the node",
        "NVSHIM_INTERVAL", default=5.0)
    # fmt: on
    state: str = STATE  # directory of the status file for programs on the node
    local: str = LOCAL  # directory of the status file for probes; empty for none


SETTINGS: Final = _set.of(Settings)
"""The settings that variables set."""

_OWN_TREE: Final = "for the programs of NVIDIA's toolkit; NVSHIM_PREFIX places the shim's tree"
_OWN_CONFIG: Final = (
    "a key of NVIDIA's config.toml; set it in the node's /etc/containerd-shim-nvidia/config.toml"
)
_NO_HOOK: Final = "the shim uses no hook and no wrapper"
_NO_NRI: Final = "the shim adds GPUs, not an NRI plugin of the engine"
_BY_AGENT: Final = "`nvshim node` maintains the CDI spec, the device nodes and their links"
_OWN_FILE: Final = "only the shim's table is written, in its own file"

_WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "TOOLKIT_INSTALL_DIR": _OWN_TREE,
    "ROOT": _OWN_TREE,
    "TOOLKIT_SOURCE_ROOT": _OWN_TREE,
    "TOOLKIT_PACKAGE_TYPE": _OWN_TREE,
    "TOOLKIT_DEBUG": "the log always has all details",
    "DRIVER_ROOT_CTR_PATH": "the driver is accessed in the node's root",
    "NVIDIA_DEV_ROOT": _OWN_CONFIG,
    "DEV_ROOT_CTR_PATH": "device nodes are accessed in the node's root",
    "NVIDIA_CONTAINER_RUNTIME_DEBUG": _NO_HOOK,
    "NVIDIA_CONTAINER_RUNTIME_LOG_LEVEL": _NO_HOOK,
    "NVIDIA_CONTAINER_RUNTIME_MODE": "the shim has one mode, which supports CDI",
    "NVIDIA_CONTAINER_RUNTIME_MODES_CDI_DEFAULT_KIND": _OWN_CONFIG,
    "NVIDIA_CONTAINER_RUNTIME_MODES_CDI_ANNOTATION_PREFIXES": _OWN_CONFIG,
    "NVIDIA_CONTAINER_RUNTIME_RUNTIMES": "the handler's options name the low-level runtime",
    "NVIDIA_CONTAINER_RUNTIME_HOOK_SKIP_MODE_DETECTION": _NO_HOOK,
    "NVIDIA_CONTAINER_CLI_DEBUG": _NO_HOOK,
    "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED": _OWN_CONFIG,
    "ACCEPT_NVIDIA_VISIBLE_DEVICES_AS_VOLUME_MOUNTS": _OWN_CONFIG,
    "CDI_ENABLED": _BY_AGENT,
    "CDI_OUTPUT_DIR": _BY_AGENT,
    "CDI_KIND": _BY_AGENT,
    "CREATE_DEVICE_NODES": _BY_AGENT,
    "NVIDIA_CONTAINER_TOOLKIT_OPT_IN_FEATURES": _OWN_CONFIG,
    "RUNTIME_EXECUTABLE_PATH": "the node's own program runs, in the node's root",
    "RUNTIME_CONFIG_SOURCES": _OWN_FILE,
    "RUNTIME_CONFIG_OVERRIDE": _OWN_FILE,
    "CONTAINERD_USE_LEGACY_CONFIG": "the version of the node's file is kept",
    "CONTAINERD_RUNTIME_TYPE": "use NVSHIM_RUNTIME_TYPE",
    "CRIO_HOOKS_DIR": _NO_HOOK,
    "CRIO_HOOK_FILENAME": _NO_HOOK,
    "CRIO_CONFIG_MODE": _NO_HOOK,
    "ENABLE_NRI_PLUGIN": _NO_NRI,
    "NRI_PLUGIN_INDEX": _NO_NRI,
    "NRI_SOCKET": _NO_NRI,
    "NRI_NAMESPACE": _NO_NRI,
    "NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES": _NO_NRI,
}

VARIABLES: Final[Mapping[str, Setting]] = {
    **{name: setting for setting in SETTINGS for name in setting.variables},
    **{n: Setting("", IGNORED, None, why, variables=(n,)) for n, why in _WITHOUT_EFFECT.items()},
}
"""Every known variable, with what it sets; the others set nothing."""
