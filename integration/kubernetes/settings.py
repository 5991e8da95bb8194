"""What an installer is asked to do, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ENGINES: Final = ("containerd", "crio", "docker")
RESTARTS: Final = ("none", "signal", "systemd")

PID_FILE: Final = "/run/nvidia/toolkit/toolkit.pid"
"""NVIDIA's installer locks this one, so that neither works on a node beside the other."""
VALIDATIONS: Final = "/run/nvidia/validations"
STATE: Final = "/run/containerd-shim-nvidia"
LOCAL: Final = "/run/nvshim"
"""Where the probes look: of the container, and not of the node."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an installer is asked to do. All paths but ``host`` and ``local`` are the node's."""

    # where the node's root is mounted; "/" for a node that is worked on from within
    host: str = "/host"
    tree: str = ""  # what is to be installed; empty for the tree that this program is of
    prefix: str = "/opt/containerd-shim-nvidia"  # where trees are put
    bindir: str = "/usr/local/bin"  # where the programs are linked
    engine: str = "containerd"  # whose configuration is changed, of ENGINES; empty for none
    config: str = ""  # the engine's configuration; empty for its usual place
    drop_in: str = ""  # the file that is added to it; likewise
    socket: str = ""  # where the engine serves the CRI; empty for its usual place
    runtime_name: str = "nvidia"  # the handler's
    runtime_type: str = ""  # its type, in containerd; empty for what was configured on the node
    # whether the handler takes the place of one of that name, such as NVIDIA's
    replace: bool = False
    # whether pods that name no handler get this one; None for what was configured on the node
    set_default: bool | None = None
    enable_cdi: bool | None = None  # whether the engine is told to know CDI; likewise
    restart: str = "none"  # how the engine is restarted if it has to be, of RESTARTS
    driver_root: str = ""  # where the driver is, for config.toml; empty to let it be found
    # whether the operator's driver-ready is awaited, and its roots are taken
    wait_for_driver: bool = False
    driver_timeout: float = 0.0  # seconds it may take; 0 for as long as it takes
    # whether toolkit-ready is written once a container could have a GPU
    toolkit_ready: bool = False
    validations: str = VALIDATIONS  # where these files are
    pid_file: str = PID_FILE  # the lock
    state: str = STATE  # where programs on the node see what the installer is doing
    local: str = LOCAL  # where its probes see it; empty for nowhere
    # whether a new tree has to start a container first, which takes a privileged installer that
    # sees the node's processes
    self_test: bool = False
    # whether a node is set up though it has no GPU that can be seen
    every_node: bool = False
    once: bool = False  # whether it ends when everything is done, and does not stay to watch
    remove_on_exit: bool = False  # whether it takes everything back when it is told to end
    interval: float = 5.0  # seconds between two looks
