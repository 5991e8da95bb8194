"""Where things are on a node, which may be a tree below another root.

A node that is looked at from a container (``--root /host``) or that was made for a test has its
files below a directory. Paths are always those of the node; :meth:`Places.at` says where that is
for us, with the links on the way followed within the root.

- Our configuration that is found below the root has its paths below it as well. One that somebody
  names is taken as it is: a simulated node says where its parts are.
- Programs of the root are run in it (chroot) if they can be, because they need its libraries.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Final

from hooks.config import DEFAULT_PATH, NVIDIA_PATH, Config, load_config
from hooks.config.nvidia import parse_nvidia_config
from integration.doctor.errors import RootNotFound

# As many as the kernel follows.
_MOST_LINKS: Final = 40
_OF_CONFIG: Final = ("host_root", "dev", "proc", "sys", "state", "layers", "drained")


@dataclass(frozen=True, slots=True)
class Places:
    """Where to look."""

    root: str = "/"  # the directory that is "/" for the node
    config_path: str | None = None  # our configuration; None for that of the node
    containerd_config: str = ""  # the root file of containerd's; "" for that of the running one
    prefix: str = "/opt/containerd-shim-nvidia"  # where our trees are
    bindir: str = "/usr/local/bin"  # where links to our programs are
    manifest: str = ""  # a file of Kubernetes manifests with RuntimeClasses; "" for none
    kubeconfig: str = ""  # by which a cluster is asked for them; "" for not at all
    patience: float = 30.0  # seconds that each group of facts may take

    def check(self) -> None:
        """See that the root is there.

        Raises:
            RootNotFound: it is no directory, or no absolute path.
        """
        if not os.path.isabs(self.root) or not os.path.isdir(self.root):
            raise RootNotFound(
                f"to examine the node below {self.root}",
                found="no directory of that absolute path",
                do="name the directory that is the node's /",
            )

    @property
    def is_below(self) -> bool:
        """Whether the node's root is not ours."""
        return os.path.realpath(self.root) != "/"

    def at(self, path: str) -> str:
        """Where a path of the node is for us.

        Args:
            path: absolute. If nothing is there, nothing is at the result either.
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
                here = there  # no link; or nothing, and then what follows is missing below it
                continue
            links += 1
            if links > _MOST_LINKS:
                # The kernel would follow the last one from our root, and not from the node's.
                return f"{root}{there} (a loop of links)"
            here = "/" if target.startswith("/") else here
            ahead += target.split("/")[::-1]
        return root + here

    def within(self, path: str) -> str:
        """What the node calls a path of ours; the path itself if it is not below the root."""
        root = self.root.rstrip("/")
        return path.removeprefix(root) or "/" if path.startswith(f"{root}/") else path

    def config(self) -> Config:
        """Our configuration, as the node's shims read it.

        Raises:
            ConfigError: it cannot be used.
        """
        if self.config_path is not None or not self.is_below:
            return load_config(self.config_path)
        ours, theirs = self.at(DEFAULT_PATH), self.at(NVIDIA_PATH)
        if os.path.exists(ours):
            return self.below(load_config(ours))
        if not os.path.exists(theirs):
            return self.below(Config())
        with open(theirs, "rb") as file:
            return self.below(parse_nvidia_config(file.read(), NVIDIA_PATH))

    def below(self, config: Config) -> Config:
        """A configuration of the node, with its paths as they are for us."""
        if not self.is_below:
            return config
        fields: dict[str, Any] = {name: self.at(getattr(config, name)) for name in _OF_CONFIG}
        driver, kubelet = config.driver_root, config.kubelet_root
        return replace(
            config,
            driver_root=None if driver is None else self.at(driver),
            kubelet_root=None if kubelet is None else self.at(kubelet),
            cdi_spec_dirs=tuple(self.at(path) for path in config.cdi_spec_dirs),
            source=self.within(config.source),
            **fields,
        )
