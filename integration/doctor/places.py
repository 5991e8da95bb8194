"""Resolve a node's paths, also for a node below another root.

A node that is examined from a container (``--root /host``), or a test's node, has its files below a
directory. Paths are always the node's; :meth:`Places.at` resolves them below the root and follows
links within it.

- If the shim's configuration is found below the root, its paths are also below the root. A
  configuration that is named explicitly is used as it is, because that of a simulated node has full
  paths.
- Programs from below the root run inside it (chroot) if possible, because they need its libraries.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Final

from hooks.config import DEFAULT_PATH, NVIDIA_PATH, Config, load_config
from hooks.config.nvidia import parse_nvidia_config
from hooks.named_files import read_named
from integration.doctor.errors import RootNotFound

# The kernel's limit.
_MOST_LINKS: Final = 40
_CONFIG_PATHS: Final = ("host_root", "dev", "proc", "sys", "state", "layers", "drained")


@dataclass(frozen=True, slots=True)
class Places:
    """The node's root, and paths that options can change."""

    root: str = "/"  # the directory that is the node's "/"
    config_path: str | None = None  # the shim's configuration; None for the node's
    containerd_config: str = ""  # containerd's root file; "" for the running containerd's
    prefix: str = "/opt/containerd-shim-nvidia"  # the directory of installed trees
    bindir: str = "/usr/local/bin"  # the directory of links to the programs
    manifest: str = ""  # a file of Kubernetes manifests with RuntimeClasses; "" for none
    kubeconfig: str = ""  # for reading RuntimeClasses from a cluster; "" for not at all
    patience: float = 30.0  # the time limit of each group of facts, in seconds

    def check(self) -> None:
        """Check that the root exists.

        Raises:
            RootNotFound: the root is not a directory, or not an absolute path.
        """
        if not os.path.isabs(self.root) or not os.path.isdir(self.root):
            raise RootNotFound(
                f"to examine the node below {self.root}",
                found="it is not the absolute path of a directory",
                do="name the directory where the node's / is mounted",
            )

    @property
    def is_below(self) -> bool:
        """Whether the node's root differs from this process's."""
        return os.path.realpath(self.root) != "/"

    def at(self, path: str) -> str:
        """Return where this process finds a path of the node.

        Args:
            path: an absolute path, which need not exist.
        """
        if not self.is_below:
            return path
        root = self.root.rstrip("/")
        here, ahead, links = "", path.split("/")[::-1], 0
        while ahead:
            name = ahead.pop()
            if name in {"", "."}:
                continue
            if name == "..":
                here = os.path.dirname(here)
                continue
            there = f"{here.rstrip('/')}/{name}"
            try:
                target = os.readlink(root + there)
            except OSError:
                here = there  # not a link, or missing
                continue
            links += 1
            if links > _MOST_LINKS:
                # Return a path that does not exist: the kernel would follow the link from our root.
                return f"{root}{there} (a loop of links)"
            here = "/" if target.startswith("/") else here
            ahead += target.split("/")[::-1]
        return root + here

    def within(self, path: str) -> str:
        """Return the node's name of a path below the root; other paths are returned unchanged."""
        root = self.root.rstrip("/")
        return path.removeprefix(root) or "/" if path.startswith(f"{root}/") else path

    def config(self) -> Config:
        """Load the shim's configuration as the node's shims do.

        Raises:
            ConfigError: the configuration is invalid.
        """
        if self.config_path is not None or not self.is_below:
            return load_config(self.config_path)
        ours, theirs = self.at(DEFAULT_PATH), self.at(NVIDIA_PATH)
        if os.path.exists(ours):
            return self.below(load_config(ours))
        if not os.path.exists(theirs):
            return self.below(Config())
        return self.below(parse_nvidia_config(read_named(theirs), NVIDIA_PATH))

    def below(self, config: Config) -> Config:
        """Return a node's configuration with its paths resolved for this process."""
        if not self.is_below:
            return config
        fields: dict[str, Any] = {name: self.at(getattr(config, name)) for name in _CONFIG_PATHS}
        driver, kubelet = config.driver_root, config.kubelet_root
        return replace(
            config,
            driver_root=None if driver is None else self.at(driver),
            kubelet_root=None if kubelet is None else self.at(kubelet),
            cdi_spec_dirs=tuple(self.at(path) for path in config.cdi_spec_dirs),
            source=self.within(config.source),
            **fields,
        )
