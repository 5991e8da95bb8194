"""A place to install to, and commands on a machine with engines, for tests of installations."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from integration.install.effects import Installer
from integration.install.installing import InstallOptions, install, uninstall
from integration.install.status import status
from integration.install_layout import LINKED, InstallLayout
from integration.tree import Tree
from tests.harness.launcher import REPOSITORY

PROGRAMS: Final = ["containerd-shim-nvidia-v1", "nvshim"]


@dataclass(frozen=True, slots=True)
class Node:
    """A directory to install to, and two trees."""

    directory: str
    layout: InstallLayout
    old: Tree
    new: Tree

    def install(self, tree: Tree | None = None, **how: Any) -> dict[str, Any]:
        dry_run = how.pop("dry_run", False)
        source = tree.path if tree else ""
        wanted = {"source": source, "test": False, "installer": Installer(self.layout), **how}
        return install(InstallOptions(self.layout, **wanted), dry_run=dry_run)

    def uninstall(self, **how: Any) -> dict[str, Any]:
        return uninstall(
            self.layout, installer=Installer(self.layout), engines_root="/nowhere", **how
        )

    def status(self) -> dict[str, Any]:
        return status(self.layout, verify=True, engines_root="/nowhere")

    def said(self) -> list[str]:
        """Run the program to which the links lead; return its output."""
        link = f"{self.layout.bindir}/{PROGRAMS[0]}"
        return subprocess.run([link], capture_output=True, text=True, check=True).stdout.split()

    @property
    def names(self) -> list[str]:
        """Return what is below the prefix, besides the record of the links' directory."""
        with suppress(FileNotFoundError):
            return sorted({*os.listdir(self.layout.prefix)} - {LINKED})
        return []


def beside_engines(*words: str, **files: str) -> list[str]:
    """Return the command line of nvshim on a machine whose /etc has only files of engines."""
    # The command needs nothing else in /etc.
    lines = ["mount -t tmpfs -o mode=755 none /etc", f"cd {REPOSITORY}"]
    for name, text in files.items():
        path = {"containerd": "/etc/containerd/config.toml", "docker": "/etc/docker/daemon.json"}
        lines.append(f"mkdir -p {os.path.dirname(path[name])}; echo '{text}' >{path[name]}")
    script = "; ".join(["set -e", *lines, 'exec "$@"'])
    return [
        "unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh",
        sys.executable, "-m", "integration.cli", *words,
    ]  # fmt: skip
