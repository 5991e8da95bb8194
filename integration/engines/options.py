"""Options of containerd's configuration, and the names that several modules share.

Source: containerd docs/PLUGINS.md, docs/containerd-2.0.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from integration.engines.imports import File, covers
from integration.engines.runtime_options import RuntimeOptions

ENGINE: Final = "containerd"
DEFAULT_CONFIG: Final = "/etc/containerd/config.toml"
DROP_IN: Final = "99-nvshim.toml"

PLUGINS: Final = {
    1: "cri",
    2: "io.containerd.grpc.v1.cri",
    3: "io.containerd.cri.v1.runtime",
    4: "io.containerd.cri.v1.runtime",
}
"""The plugin that holds the handlers, by the version of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RuntimeOptions):
    """The desired configuration of containerd."""

    engine = ENGINE
    named_by = ("--config", "config", DEFAULT_CONFIG)

    config: str = DEFAULT_CONFIG  # the root file
    # the drop-in's path; None for a directory that the root file imports
    drop_in: str | None = None
    # the handler's type, ours or runc's; None keeps the earlier choice, by default ours
    runtime_type: str | None = None
    # whether systemd creates the cgroups; None follows the node's other handlers
    systemd_cgroup: bool | None = None
    enable_cdi: bool | None = None  # whether containerd applies CDI specs itself
    # patterns of the annotations that containerd passes to the shim: of containers,
    container_annotations: tuple[str, ...] = ("cdi.k8s.io/*",)
    # and of pods; None keeps the earlier choice, by default none
    pod_annotations: tuple[str, ...] | None = None
    # the directory for the options file that containerd 1.6 needs
    handler_options: str = "/etc/containerd-shim-nvidia/handlers"
    socket: str = ""  # containerd's socket, to find the running program; "" does not look


def default_drop_in(options: Options) -> str:
    """Return the default path of the drop-in."""
    return os.path.join(os.path.dirname(options.config), "conf.d", DROP_IN)


def drop_in_place(options: Options, root: File) -> str | None:
    """Return a path for the drop-in that the root file already imports; None if there is none."""
    if options.drop_in is not None:
        return options.drop_in if covers(root, options.drop_in) else None
    if covers(root, default_drop_in(options)):
        return default_drop_in(options)
    for pattern, _ in root.imports:
        directory, name = os.path.split(pattern)
        if name == "*.toml" and "*" not in directory:
            return os.path.join(directory, DROP_IN)
    return None


def handlers_path(version: int) -> tuple[str, ...]:
    """Return the path of the handlers' table in a file of a version."""
    return ("plugins", PLUGINS[version], "containerd", "runtimes")
