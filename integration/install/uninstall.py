"""Remove a version's state, and find engine configurations that still name the shim.

Source: shim/work/layers.py; containerd-config.toml(5), dockerd(8), crio.conf(5).
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from api.errors import NvshimError
from hooks.cdi import files
from hooks.config import DEFAULT_PATH, Config
from hooks.node import cache
from hooks.node.drained import path_of, read_drains
from integration.agent_status import status_path
from integration.containers.held_devices import LEDGER
from integration.engines import undo
from integration.engines.programs import PATH
from integration.engines.runtime_options import RECORDS
from integration.install.errors import PurgeFailed, StillNamed
from integration.install.survey import Survey
from integration.install_layout import SHIM
from integration.node.device_health import health_store, requests
from shim.causes import exit_store
from shim.causes.agent import agent_runs
from shim.work import driver_files, layers

ENGINES: Final = (
    "/etc/containerd/config.toml",
    "/etc/containerd/conf.d/*.toml",
    "/etc/containerd/config.d/*.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/*.toml*",
    "/var/lib/rancher/rke2/agent/etc/containerd/*.toml*",
    "/etc/k0s/containerd.d/*.toml",
    "/var/snap/microk8s/current/args/containerd*.toml",
    "/etc/docker/daemon.json",
    "/etc/crio/crio.conf",
    "/etc/crio/crio.conf.d/*",
)
"""The engines' configuration files, as patterns."""

_MARKS: Final = (b"io.containerd.nvidia.v1", b"containerd-shim-nvidia")
# The engines in /etc whose files nvshim configure writes.
_CONFIGURED: Final = ("containerd", "docker", "crio")
_LONGEST: Final = 4 << 20
_STATE: Final = (cache.NAME, files.KEPT, exit_store.DIRECTORY)
_OWN: Final = "containerd-shim-nvidia"


def mentions(root: str = "") -> list[str]:
    """Return the engine configuration files that name the shim. Without it their pods would fail.

    Args:
        root: the machine's root; empty for ``/``.
    """
    found = []
    recorded = [root + path for path in _remedies(root)]
    for pattern in (*(root + pattern for pattern in ENGINES), *map(glob.escape, recorded)):
        for path in sorted(glob.glob(pattern)):
            if path in found:
                continue
            with suppress(OSError), open(path, "rb") as file:
                lines = file.read(_LONGEST).splitlines()
                active = [line for line in lines if not line.lstrip().startswith(b"#")]
                if any(mark in line for mark in _MARKS for line in active):
                    found.append(path)
    return found


def check_unnamed(survey: Survey, root: str = "") -> None:
    """Check that no engine depends on an installation's shim.

    Args:
        survey: the installation.
        root: the machine's root; empty for ``/``.

    Raises:
        StillNamed: an engine does; the error has the command that removes the dependency.
    """
    links = [link.path for link in survey.links if link.ours and link.target]
    on_path = (f"{root}{directory}/{SHIM}" for directory in PATH.split(":"))
    found = next(filter(os.path.lexists, on_path), "")
    named = mentions(root)
    if found not in links and not _is_below(found, survey.layout.prefix):
        # A handler's type leads to another shim on the PATH; a handler's path may lead to this one.
        named = [path for path in named if _has(path, (f"{survey.layout.prefix}/", *links))]
    if named:
        raise StillNamed(
            f"to uninstall what is below {survey.layout.prefix}",
            found=f"{' and '.join(named)} would still name its shim, and pods would fail",
            do=f"first {remedy(named, root)} and restart the engine, or add --force",
        )


def remedy(paths: Iterable[str], root: str = "") -> str:
    """Return the instruction that removes the shim from engine configuration files.

    Args:
        paths: the files.
        root: the machine's root; empty for ``/``.
    """
    recorded = _remedies(root)
    ways = {_remedy_for(path, recorded.get(path.removeprefix(root), "")): None for path in paths}
    return ", then ".join(ways)


def _remedies(root: str) -> dict[str, str]:
    """Return the commands that undo ``nvshim configure``, by configuration file."""
    found: dict[str, str] = {}
    for path in glob.glob(f"{root}{RECORDS}/*.json"):
        with suppress(NvshimError):
            record = undo.read_record(path)
            found |= dict.fromkeys(record.files, record.remedy)
    return found


def _remedy_for(path: str, command: str) -> str:
    engine = next((name for name in _CONFIGURED if f"/etc/{name}/" in path), "")
    command = command or (f"nvshim configure {engine} --remove" if engine else "")
    return f"run {command}" if command else f"remove it from {path}"


def _is_below(path: str, prefix: str) -> bool:
    return bool(path) and os.path.realpath(path).startswith(f"{prefix}/")


def _has(path: str, words: Iterable[str]) -> bool:
    with suppress(OSError), open(path, "rb") as file:
        text = file.read(_LONGEST)
        return any(os.fsencode(word) in text for word in words)
    return False


def purge(config: Config, *, in_use: bool, config_path: str = DEFAULT_PATH) -> list[str]:
    """Remove this project's state, except what running containers use.

    The directories may be anywhere and may hold other files. So only files with names that this
    project uses are removed, and a directory only if that leaves it empty.

    Args:
        config: has the paths of the directories.
        in_use: whether shims run or may run. Then only unused layers are removed.
        config_path: the configuration file.

    Returns:
        The paths that were removed.

    Raises:
        PurgeFailed: something could not be removed.
    """
    before = [config.layers, config.drained, config.state, config_path]
    before = [path for path in before if os.path.lexists(path)]
    try:
        _purge_layers(config.layers)
        if not in_use:
            _purge_state(config)
            _purge_marks(config)
            if config_path in before:  # else a read-only file system fails
                os.unlink(config_path)
        for directory in (config.layers, config.drained, config.state):
            _remove_if_empty(directory)
        ours = (config.layers, config.drained, config_path)
        for directory in dict.fromkeys(map(os.path.dirname, ours)):
            if os.path.basename(directory) == _OWN:
                _remove_if_empty(directory)
    except OSError as error:
        raise PurgeFailed(
            f"to remove {error.filename}",
            found=os.strerror(error.errno or 0).lower(),
            do="make it removable, and run it again",
        ) from error
    except NvshimError as error:
        raise PurgeFailed("to remove the state", found=str(error), do="run it again") from error
    return [path for path in before if not os.path.lexists(path)]


def _purge_layers(directory: str) -> None:
    """Remove the layers that no container uses."""
    left = -1
    while os.path.isdir(directory) and (now := len(os.listdir(directory))) != left:
        left = now
        layers.collect(directory, most=0)
        driver_files.sweep(directory)


def _purge_marks(config: Config) -> None:
    """Remove the marks of devices that are out of service."""
    for drain in read_drains(config):
        os.unlink(path_of(config, drain.device))


def _remove_if_empty(directory: str) -> None:
    with suppress(OSError):  # it does not exist, or is not empty
        os.rmdir(directory)


def _purge_state(config: Config) -> None:
    paths = [os.path.join(config.state, name) for name in _STATE]
    if not agent_runs(config.state):
        # Not its record of claims, whose devices pods may have without a shim.
        paths += [
            status_path(config),
            os.path.join(config.state, LEDGER),
            health_store.path_of(config),
            requests.directory_of(config),
        ]
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            with suppress(FileNotFoundError):
                os.unlink(path)
