"""The installer's variables: NVIDIA's own, so that charts and habits keep working, and ours.

Rules
- A variable of NVIDIA's installer means here what it means there, or nothing; then the table says
  why. Where both are given, ours wins.
- A path is the node's. NVIDIA's installer is told paths of its own container ("/runtime/…"), which
  lead nowhere here; such a value is an error and not a file in the wrong place.
- A value that cannot be read is an error. A variable that is not in the table is not looked at.

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
# Where NVIDIA's DaemonSet mounts pieces of the node for its own installer.
_THEIR_MOUNTS: Final = ("/runtime/", "/driver-root")


@dataclass(frozen=True, slots=True)
class Variable:
    """What becomes of a variable."""

    field: str  # of Settings that it sets; empty if it means nothing here
    meaning: str  # in a few words, or why it means nothing
    # makes the field's value of the text; raises ValueError, saying what is wanted
    read: Callable[[str], Any] = str
    nvidia: bool = True  # whether NVIDIA's installer has it


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
        raise ValueError("a path of the node, and not of the container of NVIDIA's installer")
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
        raise ValueError("a number of seconds, and more than none")
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
    """NO_RUNTIME_CONFIG: no engine, or the one that is configured by default."""
    return "" if _boolean(text) else Settings().engine


def _means(field: str, meaning: str, read: Callable[[str], Any] = str) -> Variable:
    return Variable(field, meaning, read)


def _ours(field: str, meaning: str, read: Callable[[str], Any] = str) -> Variable:
    return Variable(field, meaning, read, nvidia=False)


def _nothing(why: str) -> Variable:
    return Variable("", why)


_OWN_TREE: Final = "programs of NVIDIA's toolkit; ours have a tree of their own (NVSHIM_PREFIX)"
_OWN_CONFIG: Final = (
    "a key of NVIDIA's config.toml; the node's own /etc/containerd-shim-nvidia/config.toml says it"
)
_NO_HOOK: Final = "nothing here is a hook or a wrapper"
_NO_NRI: Final = "GPUs are given by the shim and not by a plugin of the engine"
_BY_AGENT: Final = "`nvshim node` keeps the specification, the device nodes and their links"

# What is further down wins.
VARIABLES: Final[Mapping[str, Variable]] = {
    "HOST_ROOT_MOUNT": _means("host", "where the node's root is mounted", _path),
    "RUNTIME": _means("engine", "containerd, crio or docker", _one_of(ENGINES)),
    "NO_RUNTIME_CONFIG": _means("engine", "the engine is left as it is", _configured),
    "CONTAINERD_CONFIG": _means("config", "containerd's configuration", _path),
    "RUNTIME_CONFIG": _means("config", "the engine's configuration", _path),
    "RUNTIME_DROP_IN_CONFIG": _means("drop_in", "the file that is added to it", _path),
    "RUNTIME_DROP_IN_CONFIG_HOST_PATH": _means("drop_in", "likewise", _path),
    "CONTAINERD_SOCKET": _means("socket", "where containerd serves the CRI", _path),
    "RUNTIME_SOCKET": _means("socket", "where the engine serves the CRI", _path),
    "CONTAINERD_RUNTIME_CLASS": _means("runtime_name", "the handler's name", _name),
    "NVIDIA_RUNTIME_NAME": _means("runtime_name", "the handler's name", _name),
    "CONTAINERD_SET_AS_DEFAULT": _means("set_default", "as the next one", _boolean),
    "NVIDIA_RUNTIME_SET_AS_DEFAULT": _means(
        "set_default",
        "whether pods that name no handler get this one; not unless it is said (NVIDIA's "
        "installer: unless it is denied)",
        _boolean,
    ),
    "RUNTIME_ENABLE_CDI": _means("enable_cdi", "whether the engine is told to know CDI", _boolean),
    "CONTAINERD_RESTART_MODE": _means("restart", "as the next one", _one_of(RESTARTS)),
    "RUNTIME_RESTART_MODE": _means(
        "restart",
        "none, signal or systemd; none unless it is said (NVIDIA's installer: signal)",
        _one_of(RESTARTS),
    ),
    "NVIDIA_DRIVER_ROOT": _means(
        "driver_root", "where the driver is; found by looking unless it is said", _path
    ),
    "TOOLKIT_PID_FILE": _means("pid_file", "the lock, which NVIDIA's installer takes too", _path),
    "NO_DAEMON": _means("once", "ends when everything is done", _boolean),
    "NVSHIM_TREE": _ours("tree", "the tree to install; the image's own by default", _path),
    "NVSHIM_PREFIX": _ours("prefix", "where trees are put", _path),
    "NVSHIM_BINDIR": _ours("bindir", "where the programs are linked", _path),
    "NVSHIM_REPLACE": _ours(
        "replace", "the handler takes the place of one of that name, such as NVIDIA's", _boolean
    ),
    "NVSHIM_RUNTIME_TYPE": _ours(
        "runtime_type",
        "the handler's type in containerd; runc's is for one that asks no other what it can do",
        _one_of((RUNTIME_TYPE, RUNC_TYPE)),
    ),
    "NVSHIM_WAIT_FOR_DRIVER": _ours(
        "wait_for_driver", "the operator's driver-ready is awaited and read", _boolean
    ),
    "NVSHIM_DRIVER_TIMEOUT": _ours(
        "driver_timeout", "seconds that it may take; 0 for any", _seconds
    ),
    "NVSHIM_TOOLKIT_READY": _ours(
        "toolkit_ready", "toolkit-ready is written, for the operator's other parts", _boolean
    ),
    "NVSHIM_VALIDATIONS": _ours("validations", "where these files are", _path),
    "NVSHIM_SELF_TEST": _ours(
        "self_test", "a new tree starts a container before it is in effect", _boolean
    ),
    "NVSHIM_REMOVE_ON_EXIT": _ours(
        "remove_on_exit", "everything is taken back at the end", _boolean
    ),
    "NVSHIM_EVERY_NODE": _ours(
        "every_node", "nodes without an NVIDIA GPU are set up as well", _boolean
    ),
    "NVSHIM_INTERVAL": _ours("interval", "seconds between two looks at the node", _interval),
    "TOOLKIT_INSTALL_DIR": _nothing(_OWN_TREE),
    "ROOT": _nothing(_OWN_TREE),
    "TOOLKIT_SOURCE_ROOT": _nothing(_OWN_TREE),
    "TOOLKIT_PACKAGE_TYPE": _nothing(_OWN_TREE),
    "TOOLKIT_DEBUG": _nothing("the log is complete as it is"),
    "DRIVER_ROOT_CTR_PATH": _nothing("the driver is not looked at from the container"),
    "NVIDIA_DEV_ROOT": _nothing(_OWN_CONFIG),
    "DEV_ROOT_CTR_PATH": _nothing("the device nodes are not looked at from the container"),
    "NVIDIA_CONTAINER_RUNTIME_DEBUG": _nothing(_NO_HOOK),
    "NVIDIA_CONTAINER_RUNTIME_LOG_LEVEL": _nothing(_NO_HOOK),
    "NVIDIA_CONTAINER_RUNTIME_MODE": _nothing("there is one way, and it knows CDI"),
    "NVIDIA_CONTAINER_RUNTIME_MODES_CDI_DEFAULT_KIND": _nothing(_OWN_CONFIG),
    "NVIDIA_CONTAINER_RUNTIME_MODES_CDI_ANNOTATION_PREFIXES": _nothing(_OWN_CONFIG),
    "NVIDIA_CONTAINER_RUNTIME_RUNTIMES": _nothing("the handler's own options name the runtime"),
    "NVIDIA_CONTAINER_RUNTIME_HOOK_SKIP_MODE_DETECTION": _nothing(_NO_HOOK),
    "NVIDIA_CONTAINER_CLI_DEBUG": _nothing(_NO_HOOK),
    "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED": _nothing(_OWN_CONFIG),
    "ACCEPT_NVIDIA_VISIBLE_DEVICES_AS_VOLUME_MOUNTS": _nothing(_OWN_CONFIG),
    "CDI_ENABLED": _nothing(_BY_AGENT),
    "CDI_OUTPUT_DIR": _nothing(_BY_AGENT),
    "CDI_KIND": _nothing(_BY_AGENT),
    "CREATE_DEVICE_NODES": _nothing(_BY_AGENT),
    "NVIDIA_CONTAINER_TOOLKIT_OPT_IN_FEATURES": _nothing(_OWN_CONFIG),
    "RUNTIME_EXECUTABLE_PATH": _nothing("the node's own program, in its own root"),
    "RUNTIME_CONFIG_SOURCES": _nothing("only our own table is written, in a file of its own"),
    "RUNTIME_CONFIG_OVERRIDE": _nothing("likewise"),
    "CONTAINERD_USE_LEGACY_CONFIG": _nothing("the version of the node's file is kept"),
    "CONTAINERD_RUNTIME_TYPE": _nothing("NVSHIM_RUNTIME_TYPE says it"),
    "CRIO_HOOKS_DIR": _nothing(_NO_HOOK),
    "CRIO_HOOK_FILENAME": _nothing(_NO_HOOK),
    "CRIO_CONFIG_MODE": _nothing(_NO_HOOK),
    "ENABLE_NRI_PLUGIN": _nothing(_NO_NRI),
    "NRI_PLUGIN_INDEX": _nothing(_NO_NRI),
    "NRI_SOCKET": _nothing(_NO_NRI),
    "NRI_NAMESPACE": _nothing(_NO_NRI),
    "NRI_MANAGEMENT_CDI_DEVICE_NAMESPACES": _nothing(_NO_NRI),
}
"""Every variable that is known, and what becomes of it."""


def settings_from(environment: Mapping[str, str]) -> Settings:
    """What the variables ask for.

    Args:
        environment: of the installer; an empty value is one that was not given.

    Raises:
        VariableUnusable: a value means nothing, or not here.
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
                f"the installer with {name}",
                found=f"{text!r}",
                do=f"it has to be {error}",
            ) from None
    return Settings(**fields)


def ignored(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that were given and mean nothing here, each with the reason."""
    found = {
        name: variable.meaning
        for name, variable in VARIABLES.items()
        if not variable.field and environment.get(name)
    }
    if settings_from(environment).engine == "docker":
        names = (name for name, variable in VARIABLES.items() if variable.field == "drop_in")
        found |= {name: "Docker reads one file" for name in names if environment.get(name)}
    return found
