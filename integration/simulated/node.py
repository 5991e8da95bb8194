"""Create, open and remove a simulated node."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from hooks.named_files import read_named
from integration.simulated.companion_drivers import COMPANION_DRIVERS
from integration.simulated.driver import (
    DriverFiles,
    add_companion,
    lay_out,
    write_loader_cache,
)
from integration.simulated.errors import NodeExists, NodeNotFound, NodeUnwritten
from integration.simulated.layouts import Layout
from integration.simulated.library import build_nvml
from integration.simulated.nvidia import add_nvidia
from integration.simulated.platforms import make_platform
from integration.simulated.scenario import Scenario
from integration.simulated.tree import NodeTree
from integration.simulated.vendors import add_vendors

# The node's directories, by their configuration key.
_ROOTS: Final = {
    "driver-root": "driver",
    "dev": "dev",
    "proc": "proc",
    "sys": "sys",
    "state": "state",
    "layers": "layers",
    "drained": "drained",
}
_BOOT_ID: Final = "proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class SimulatedNode:
    """A directory that looks like a node with GPUs.

    As a context manager it removes itself on exit.
    """

    directory: str  # absolute
    scenario: Scenario
    driver_version: str  # the full version of its driver

    @property
    def driver_root(self) -> str:
        """The directory that stands for / where the driver is installed."""
        return os.path.join(self.directory, "driver")

    @property
    def dev(self) -> str:
        """The directory that stands for /dev."""
        return os.path.join(self.directory, "dev")

    @property
    def proc(self) -> str:
        """The directory that stands for /proc."""
        return os.path.join(self.directory, "proc")

    @property
    def sys(self) -> str:
        """The directory that stands for /sys."""
        return os.path.join(self.directory, "sys")

    @property
    def state(self) -> str:
        """The directory for the shim's state, and for faults and events of NVML."""
        return os.path.join(self.directory, "state")

    @property
    def config_path(self) -> str:
        """The shim's configuration for this node."""
        return os.path.join(self.directory, "config.toml")

    @classmethod
    def create(
        cls,
        directory: str,
        scenario: Scenario,
        *,
        packages_cache: str | None = None,
        layout: Layout = Layout.INSTALLER,
        say: Callable[[str], None] | None = None,
    ) -> SimulatedNode:
        """Create a node.

        Args:
            directory: must not exist, or must be empty. Its file system must allow device nodes (no
                ``nodev``). Files are not copied if it is on the cache's file system.
            packages_cache: the cache of the driver's packages; by default
                :func:`integration.simulated.packages.default_cache`.
            say: receives progress messages.

        Raises:
            NodeExists: ``directory`` is not empty.
            PackagesError: the driver's packages are not available.
            NodeUnwritten: the directory cannot be created or filled.
            SimulatedError: there is no compiler, or device nodes cannot be created. The partial
                node was removed.
        """
        directory = os.path.abspath(directory)
        files, version = driver_of(scenario, packages_cache, say)
        node = cls(directory, scenario, version)
        if os.path.lexists(directory) and not (os.path.isdir(directory) and _empty(directory)):
            raise NodeExists(
                f"to create a simulated node in {directory}",
                found="it is not empty",
                do="remove it, or choose another directory",
            )
        try:
            directory.encode()  # its config.toml, which is UTF-8, has the path
            with suppress(FileNotFoundError):
                os.lstat(directory)  # makedirs recurses for each part, however many
            os.makedirs(directory, exist_ok=True)
            if say is not None:
                say("copying the driver's files and building its library")
            node.fill(files, layout)
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            found = ""
            if isinstance(error, OSError):
                found = os.strerror(error.errno or 0).lower()
            elif isinstance(error, UnicodeEncodeError):
                found = "its path is not UTF-8"
            if not found:
                raise
            raise NodeUnwritten(
                f"to create a simulated node in {directory}", found=found
            ) from error
        return node

    @classmethod
    def open(cls, directory: str) -> SimulatedNode:
        """Open an existing node.

        Raises:
            NodeNotFound: there is no node.
            ScenarioInvalid: the node's scenario was edited and is not valid.
        """
        directory = os.path.abspath(directory)
        module = os.path.join(directory, "sys/module/nvidia/version")
        try:
            content = read_named(os.path.join(directory, "config.toml"))
            roots = tomllib.loads(content.decode())["node"]
            ours = any(roots == _roots(directory, hosts=hosts) for hosts in (False, True))
            version = ""
            if os.path.exists(module):
                version = _read(module).strip()
        except (OSError, KeyError, tomllib.TOMLDecodeError):
            ours = False
        if not ours:
            raise NodeNotFound(
                f"to open a simulated node in {directory}",
                found="it has no config.toml of a node, or the node was moved",
                do="make it with `nvshim simulate create`",
            )
        return cls(directory, Scenario.load(os.path.join(directory, "scenario.toml")), version)

    def remove(self) -> None:
        """Remove the node. It is not an error if the node no longer exists."""
        if os.path.lexists(self.directory):
            shutil.rmtree(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def fill(self, files: DriverFiles | None, layout: Layout) -> None:
        """Create the node's contents, keeping the shim's files that exist.

        Args:
            files: the driver's files, from :func:`driver_of`.
            layout: their layout.
        """
        for name in _ROOTS.values():
            if name != _ROOTS["drained"]:  # missing, like on any node with all devices in service
                os.makedirs(os.path.join(self.directory, name), 0o755, exist_ok=True)
        tree = NodeTree(_read("/proc/devices"))
        tree.files[_BOOT_ID] = _read(f"/{_BOOT_ID}")
        if files is not None and self.scenario.nvidia:
            cpus = _read("/sys/devices/system/cpu/online").strip()
            add_nvidia(tree, self.scenario, driver=self.driver_version, cpus=cpus)
            self._add_libraries(files, layout)
        for key in self.scenario.companion_drivers:
            COMPANION_DRIVERS[key](tree)
        if files is not None and self.scenario.platform:
            make_platform(self.scenario.platform, self.directory, tree, files)
        if self.scenario.others:
            add_vendors(tree, self.scenario.others)
        tree.write(self.directory)
        with open(os.path.join(self.directory, "scenario.toml"), "w", encoding="utf-8") as file:
            file.write(self.scenario.to_toml())
        # Last, because config.toml makes the directory a node.
        with open(self.config_path, "w", encoding="utf-8") as file:
            roots = _roots(self.directory, hosts=layout.is_hosts).items()
            # A basic string of TOML is written like a JSON string.
            lines = [f"{key} = {json.dumps(path, ensure_ascii=False)}\n" for key, path in roots]
            file.writelines(["[node]\n", *lines])

    def _add_libraries(self, files: DriverFiles, layout: Layout) -> None:
        driver = self.driver_version
        nvml = lay_out(self.driver_root, files, version=driver, layout=layout)
        # Next to the other packages.
        cache = os.path.dirname(os.path.dirname(files.directory))
        build_nvml(
            nvml, self.scenario, driver=driver, real=files.nvml, node=self.directory, cache=cache
        )
        if self.scenario.compat32:
            add_companion(self.driver_root, version=driver, cache=cache)
        write_loader_cache(self.driver_root, files.triplet)


def driver_of(
    scenario: Scenario, cache: str | None = None, say: Callable[[str], None] | None = None
) -> tuple[DriverFiles | None, str]:
    """Return the driver's files for a scenario, and the version that they should have."""
    if not scenario.nvidia and not scenario.platform:
        return None, ""
    files = DriverFiles.fetch(cache, say=say)
    return files, scenario.driver_version(files.version) if scenario.nvidia else ""


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _empty(directory: str) -> bool:
    with os.scandir(directory) as entries:
        return next(entries, None) is None


def _roots(directory: str, *, hosts: bool) -> dict[str, str]:
    """Return the configuration; with ``hosts`` the driver has to be found in the host's root."""
    roots = {key: os.path.join(directory, name) for key, name in _ROOTS.items()}
    if hosts:
        roots["host-root"] = roots.pop("driver-root")
    return roots
