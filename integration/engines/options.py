"""What is wanted of containerd, and the names that all who look for it have to agree on.

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
"""The plugin that has the handlers, by the version of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RuntimeOptions):
    """What is wanted."""

    engine = ENGINE
    named_by = ("--config", "config", DEFAULT_CONFIG)

    config: str = DEFAULT_CONFIG  # the root file
    # where the drop-in is to be; None for the place that the root file imports
    drop_in: str | None = None
    # the handler's type, ours or runc's; if it was never said, ours
    runtime_type: str | None = None
    # whether systemd makes the cgroups; None for what the node's pods have now
    systemd_cgroup: bool | None = None
    enable_cdi: bool | None = None  # whether containerd applies CDI specs itself
    # patterns of the annotations that containerd hands on
    container_annotations: tuple[str, ...] = ("cdi.k8s.io/*",)
    # likewise, of the pod; if it was never said, none
    pod_annotations: tuple[str, ...] | None = None
    # the directory of the file that containerd 1.6 needs for options
    handler_options: str = "/etc/containerd-shim-nvidia/handlers"
    socket: str = ""  # where it listens, if it runs; "" if it is not to be asked which it is


def default_drop_in(options: Options) -> str:
    """Where the drop-in is if nothing says otherwise."""
    return os.path.join(os.path.dirname(options.config), "conf.d", DROP_IN)


def drop_in_place(options: Options, root: File) -> str | None:
    """A place for the drop-in that the root file imports already; None if there is none."""
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
    """The path of the table of handlers in a file of a version."""
    return ("plugins", PLUGINS[version], "containerd", "runtimes")
