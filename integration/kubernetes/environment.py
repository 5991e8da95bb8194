"""Parse the installer's variables: NVIDIA's, so that existing charts keep working, and our own.

Rules
- A variable of NVIDIA's installer has the same meaning here, or no effect; the table says why. If
  NVIDIA's and our own variable set the same thing, our own wins.
- Paths are host paths. NVIDIA's installer takes paths of its own container ("/runtime/…"), which
  do not exist here; such a value is an error instead of a file in the wrong place.
- An invalid value is an error. Variables outside the table are ignored.

Source: nvidia-container-toolkit cmd/nvidia-ctk-installer (main.go, container/runtime,
container/toolkit); strconv.ParseBool.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from integration.handlers import RUNC_TYPE, RUNTIME_TYPE
from integration.kubernetes.errors import VariableUnusable
from integration.kubernetes.settings import ENGINES, RESTARTS, Settings

_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_NAME: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*")
# Where NVIDIA's DaemonSet mounts host directories for its installer.
_THEIR_MOUNTS: Final = ("/runtime/", "/driver-root")


@dataclass(frozen=True, slots=True)
class Variable:
    """How the installer handles a variable."""

    field: str  # the field of Settings that it sets; empty if it has no effect here
    meaning: str  # what it does, or why it has no effect
    # parses the text; its ValueError names the expected kind of value
    read: Callable[[str], Any] = str
    nvidia: bool = True  # whether NVIDIA's installer has it too


def _boolean(text: str) -> bool:
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("true or false")


def _path(text: str) -> str:
    if not text:
        return text
    if text.startswith(_THEIR_MOUNTS):
        raise ValueError("a path on the node, not one in the container of NVIDIA's installer")
    if not os.path.isabs(text) or "\0" in text:
        raise ValueError("an absolute path")
    return os.path.normpath(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError("a number of seconds")
    return seconds


def _interval(text: str) -> float:
    if not _seconds(text):
        raise ValueError("a number of seconds above 0")
    return _seconds(text)


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ValueError("the name of a handler")
    return text


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(" or ".join(words))
        return text

    return read


def _configured(text: str) -> str:
    """Parse NO_RUNTIME_CONFIG: "" for no engine, or the default engine."""
    return "" if _boolean(text) else Settings().engine


def _shared(field: str, meaning: str, read: Callable[[str], Any] = str) -> Variable:
    return Variable(field, meaning, read)


def _own(field: str, meaning: str, read: Callable[[str], Any] = str) -> Variable:
    return Variable(field, meaning, read, nvidia=False)


def _no_effect(why: str) -> Variable:
    return Variable("", why)


_OWN_TREE: Final = "for the programs of NVIDIA's toolkit; NVSHIM_PREFIX places the shim's tree"
_OWN_CONFIG: Final = (
    "a key of NVIDIA's config.toml; set it in the node's /etc/containerd-shim-nvidia/config.toml"
)
_NO_HOOK: Final = "the shim uses no hook and no wrapper"
_NO_NRI: Final = "the shim adds GPUs, not an NRI plugin of the engine"
_BY_AGENT: Final = "`nvshim node` maintains the CDI spec, the device nodes and their links"

# If several variables set a field, the last one in this table wins.
VARIABLES: Final[Mapping[str, Variable]] = {
    "HOST_ROOT_MOUNT": _shared("host", "where the node's root is mounted", _path),
    "RUNTIME": _shared("engine", "containerd, crio or docker", _one_of(ENGINES)),
    "NO_RUNTIME_CONFIG": _shared(
        "engine", "leave the engine's configuration as it is", _configured
    ),
    "CONTAINERD_CONFIG": _shared("config", "containerd's configuration file", _path),
    "RUNTIME_CONFIG": _shared("config", "the engine's configuration file", _path),
    "RUNTIME_DROP_IN_CONFIG": _shared("drop_in", "the drop-in file to write", _path),
    "RUNTIME_DROP_IN_CONFIG_HOST_PATH": _shared("drop_in", "the drop-in file to write", _path),
    "CONTAINERD_SOCKET": _shared("socket", "containerd's CRI socket", _path),
    "RUNTIME_SOCKET": _shared("socket", "the engine's CRI socket", _path),
    "CONTAINERD_RUNTIME_CLASS": _shared("runtime_name", "the handler's name", _name),
    "NVIDIA_RUNTIME_NAME": _shared("runtime_name", "the handler's name", _name),
    "CONTAINERD_SET_AS_DEFAULT": _shared(
        "set_default", "older name of NVIDIA_RUNTIME_SET_AS_DEFAULT", _boolean
    ),
    "NVIDIA_RUNTIME_SET_AS_DEFAULT": _shared(
        "set_default",
        "make the handler the default for pods without a RuntimeClass; off by default (NVIDIA's "
        "installer: on)",
        _boolean,
    ),
    "RUNTIME_ENABLE_CDI": _shared("enable_cdi", "enable CDI in the engine", _boolean),
    "CONTAINERD_RESTART_MODE": _shared(
        "restart", "older name of RUNTIME_RESTART_MODE", _one_of(RESTARTS)
    ),
    "RUNTIME_RESTART_MODE": _shared(
        "restart",
        "how to restart the engine: none, signal or systemd; none by default (NVIDIA's installer: "
        "signal)",
        _one_of(RESTARTS),
    ),
    "NVIDIA_DRIVER_ROOT": _shared("driver_root", "the driver root; detected by default", _path),
    "TOOLKIT_PID_FILE": _shared("pid_file", "the lock file, shared with NVIDIA's installer", _path),
    "NO_DAEMON": _shared("once", "exit when the installation is complete", _boolean),
    "NVSHIM_TREE": _own("tree", "the tree to install; by default the image's own", _path),
    "NVSHIM_PREFIX": _own("prefix", "the directory for installed trees", _path),
    "NVSHIM_BINDIR": _own("bindir", "the directory for links to the programs", _path),
    "NVSHIM_REPLACE": _own(
        "replace", "replace an existing handler of the same name, such as NVIDIA's", _boolean
    ),
    "NVSHIM_RUNTIME_TYPE": _own(
        "runtime_type",
        "the handler's type in containerd; use runc's type for a containerd that queries only "
        "runc's features",
        _one_of((RUNTIME_TYPE, RUNC_TYPE)),
    ),
    "NVSHIM_WAIT_FOR_DRIVER": _own(
        "wait_for_driver", "wait for the GPU operator's driver-ready file and read it", _boolean
    ),
    "NVSHIM_DRIVER_TIMEOUT": _own(
        "driver_timeout", "seconds to wait for the driver; 0 for no limit", _seconds
    ),
    "NVSHIM_TOOLKIT_READY": _own(
        "toolkit_ready", "write toolkit-ready for the operator's other components", _boolean
    ),
    "NVSHIM_VALIDATIONS": _own("validations", "the directory of the ready files", _path),
    "NVSHIM_SELF_TEST": _own(
        "self_test", "start a test container with a new tree before activating it", _boolean
    ),
    "NVSHIM_REMOVE_ON_EXIT": _own("remove_on_exit", "uninstall everything on exit", _boolean),
    "NVSHIM_EVERY_NODE": _own("every_node", "set up nodes without an NVIDIA GPU too", _boolean),
    "NVSHIM_INTERVAL": _own("interval", "seconds between two checks of the node", _interval),
    "TOOLKIT_INSTALL_DIR": _no_effect(_OWN_TREE),
    "ROOT": _no_effect(_OWN_TREE),
    "TOOLKIT_SOURCE_ROOT": _no_effect(_OWN_TREE),
    "TOOLKIT_PACKAGE_TYPE": _no_effect(_OWN_TREE),
    "TOOLKIT_DEBUG": _no_effect("the log always has all details"),
    "DRIVER_ROOT_CTR_PATH": _no_effect("the driver is accessed in the node's root"),
    "NVIDIA_DEV_ROOT": _no_effect(_OWN_CONFIG),
    "DEV_ROOT_CTR_PATH": _no_effect("device nodes are accessed in the node's root"),
    "NVIDIA_CONTAINER_RUNTIME_DEBUG": _no_effect(_NO_HOOK),
    "NVIDIA_CONTAINER_RUNTIME_LOG_LEVEL": _no_effect(_NO_HOOK),
    "NVIDIA_CONTAINER_RUNTIME_MODE": _no_effect("the shim has one mode, which supports CDI"),
    "NVIDIA_CONTAINER_RUNTIME_MODES_CDI_DEFAULT_KIND": _no_effect(_OWN_CONFIG),
    "NVIDIA_CONTAINER_RUNTIME_MODES_CDI_ANNOTATION_PREFIXES": _no_effect(_OWN_CONFIG),
    "NVIDIA_CONTAINER_RUNTIME_RUNTIMES": _no_effect(
        "the handler's options name the low-level runtime"
    ),
    "NVIDIA_CONTAINER_RUNTIME_HOOK_SKIP_MODE_DETECTION": _no_effect(_NO_HOOK),
    "NVIDIA_CONTAINER_CLI_DEBUG": _no_effect(_NO_HOOK),
    "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED": _no_effect(_OWN_CONFIG),
    "ACCEPT_NVIDIA_VISIBLE_DEVICES_AS_VOLUME_MOUNTS": _no_effect(_OWN_CONFIG),
    "CDI_ENABLED": _no_effect(_BY_AGENT),
    "CDI_OUTPUT_DIR": _no_effect(_BY_AGENT),
    "CDI_KIND": _no_effect(_BY_AGENT),
    "CREATE_DEVICE_NODES": _no_effect(_BY_AGENT),
    "NVIDIA_CONTAINER_TOOLKIT_OPT_IN_FEATURES": _no_effect(_OWN_CONFIG),
    "RUNTIME_EXECUTABLE_PATH": _no_effect("the node's own program runs, in the node's root"),
    "RUNTIME_CONFIG_SOURCES": _no_effect("only the shim's table is written, in its own file"),
    "RUNTIME_CONFIG_OVERRIDE": _no_effect("only the shim's table is written, in its own file"),
    "CONTAINERD_USE_LEGACY_CONFIG": _no_effect("the version of the node's file is kept"),
    "CONTAINERD_RUNTIME_TYPE": _no_effect("use NVSHIM_RUNTIME_TYPE"),
    "CRIO_HOOKS_DIR": _no_effect(_NO_HOOK),
    "CRIO_HOOK_FILENAME": _no_effect(_NO_HOOK),
    "CRIO_CONFIG_MODE": _no_effect(_NO_HOOK),
    "ENABLE_NRI_PLUGIN": _no_effect(_NO_NRI),
    "NRI_PLUGIN_INDEX": _no_effect(_NO_NRI),
    "NRI_SOCKET": _no_effect(_NO_NRI),
    "NRI_NAMESPACE": _no_effect(_NO_NRI),
    "NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES": _no_effect(_NO_NRI),
}
"""Every known variable and how it is handled."""


def settings_from(environment: Mapping[str, str]) -> Settings:
    """Parse the installer's environment.

    Args:
        environment: the installer's environment; an empty value counts as unset.

    Raises:
        VariableUnusable: a value is invalid, or invalid here.
    """
    fields: dict[str, Any] = {}
    for name, variable in VARIABLES.items():
        text = environment.get(name, "")
        if not text or not variable.field:
            continue
        try:
            fields[variable.field] = variable.read(text)
        except ValueError as error:
            raise VariableUnusable(
                f"{name}={text}",
                found="is not a valid value",
                do=f"set it to {error}",
            ) from None
    return Settings(**fields)


def ignored(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are set but have no effect, each with the reason."""
    found = {
        name: variable.meaning
        for name, variable in VARIABLES.items()
        if not variable.field and environment.get(name)
    }
    if settings_from(environment).engine == "docker":
        names = (name for name, variable in VARIABLES.items() if variable.field == "drop_in")
        found |= {name: "Docker has no drop-in files" for name in names if environment.get(name)}
    return found
