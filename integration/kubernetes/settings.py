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
    """What an installer is asked to do. All paths but ``host`` and ``local`` are the node's.

    Attributes:
        host: where the node's root is mounted; "/" for a node that is worked on from within.
        tree: what is to be installed; empty for the tree that this program is of.
        prefix: where trees are put.
        bindir: where the programs are linked.
        engine: whose configuration is changed, of :data:`ENGINES`; empty for none.
        config: the engine's configuration; empty for its usual place.
        drop_in: the file that is added to it; likewise.
        socket: where the engine serves the CRI; empty for its usual place.
        runtime_name: the handler's.
        runtime_type: its type, in containerd; empty for what was configured on the node.
        replace: whether the handler takes the place of one of that name, such as NVIDIA's.
        set_default: whether pods that name no handler get this one; None for what was configured
            on the node.
        enable_cdi: whether the engine is told to know CDI; likewise.
        restart: how the engine is restarted if it has to be, of :data:`RESTARTS`.
        driver_root: where the driver is, for config.toml; empty to let it be found.
        wait_for_driver: whether the operator's driver-ready is awaited, and its roots are taken.
        driver_timeout: seconds it may take; 0 for as long as it takes.
        toolkit_ready: whether toolkit-ready is written once a container could have a GPU.
        validations: where these files are.
        pid_file: the lock.
        state: where programs on the node see what the installer is doing.
        local: where its probes see it; empty for nowhere.
        self_test: whether a new tree has to start a container first, which takes a privileged
            installer that sees the node's processes.
        once: whether it ends when everything is done, and does not stay to watch.
        remove_on_exit: whether it takes everything back when it is told to end.
        interval: seconds between two looks.
    """

    host: str = "/host"
    tree: str = ""
    prefix: str = "/opt/containerd-shim-nvidia"
    bindir: str = "/usr/local/bin"
    engine: str = "containerd"
    config: str = ""
    drop_in: str = ""
    socket: str = ""
    runtime_name: str = "nvidia"
    runtime_type: str = ""
    set_default: bool | None = None
    replace: bool = False
    enable_cdi: bool | None = None
    restart: str = "none"
    driver_root: str = ""
    wait_for_driver: bool = False
    driver_timeout: float = 0.0
    toolkit_ready: bool = False
    validations: str = VALIDATIONS
    pid_file: str = PID_FILE
    state: str = STATE
    local: str = LOCAL
    self_test: bool = False
    once: bool = False
    remove_on_exit: bool = False
    interval: float = 5.0
