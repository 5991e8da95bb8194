"""The installer's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ENGINES: Final = ("containerd", "crio", "docker")
RESTARTS: Final = ("none", "signal", "systemd")

PID_FILE: Final = "/run/nvidia/toolkit/toolkit.pid"
"""The lock file that NVIDIA's installer uses too, so that only one of them works on a node."""
VALIDATIONS: Final = "/run/nvidia/validations"
STATE: Final = "/run/containerd-shim-nvidia"
LOCAL: Final = "/run/nvshim"
"""The status directory for probes, in the container and not on the node."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The installer's settings. All paths except ``host`` and ``local`` are host paths."""

    # where the node's root is mounted; "/" if the installer runs on the node itself
    host: str = "/host"
    tree: str = ""  # the tree to install; empty for the one that this program runs from
    prefix: str = "/opt/containerd-shim-nvidia"  # directory of the installed trees
    bindir: str = "/usr/local/bin"  # directory of the links to the programs
    engine: str = "containerd"  # the engine to configure, of ENGINES; empty for none
    config: str = ""  # the engine's configuration file; empty for the default
    drop_in: str = ""  # the drop-in file to write; empty for the default
    socket: str = ""  # the engine's CRI socket; empty for the default
    runtime_name: str = "nvidia"  # the handler's name
    runtime_type: str = ""  # the handler's type in containerd; empty to keep the node's setting
    # replace an existing handler of the same name, such as NVIDIA's
    replace: bool = False
    # make the handler the default for pods without one; None to keep the node's setting
    set_default: bool | None = None
    enable_cdi: bool | None = None  # enable CDI in the engine; None to keep the node's setting
    restart: str = "none"  # how to restart the engine if needed, of RESTARTS
    driver_root: str = ""  # the driver root for config.toml; empty to detect it
    # wait for the operator's driver-ready file and use its driver root
    wait_for_driver: bool = False
    driver_timeout: float = 0.0  # seconds to wait for the driver; 0 for no limit
    # write toolkit-ready once a container can get a GPU
    toolkit_ready: bool = False
    validations: str = VALIDATIONS  # directory of the ready files
    pid_file: str = PID_FILE  # the lock file
    state: str = STATE  # directory of the status file for programs on the node
    local: str = LOCAL  # directory of the status file for probes; empty for none
    # start a test container with a new tree first; needs a privileged installer that sees the
    # node's processes
    self_test: bool = False
    # set up nodes without a visible GPU too
    every_node: bool = False
    once: bool = False  # exit when the installation is complete, instead of watching the node
    remove_on_exit: bool = False  # uninstall everything on a stop signal
    interval: float = 5.0  # seconds between two checks
