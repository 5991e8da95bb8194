"""The node that is verified, as its checks have it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integration.verify.visibility import Wanted, wanted_of

if TYPE_CHECKING:
    from hooks.config import Config
    from hooks.node.inventory import Inventory
    from integration.cri.engine import Engine
    from integration.verify.kubelet import Kubelet
    from integration.verify.pods import Pods

_SCENARIO: Final = "scenario.toml"
_FAULTS: Final = "nvml-faults"


@dataclass(frozen=True, slots=True)
class Node:
    """What checks look at."""

    config: Config
    inventory: Inventory  # taken at the beginning
    engine: Engine  # as it described itself then
    pods: Pods
    kubelet: Kubelet
    restart_agent: bool = False  # whether a check may restart the node agent

    @property
    def handler(self) -> str:
        """The engine's handler that is verified."""
        return self.pods.place.handler

    @property
    def devices(self) -> tuple[Wanted, ...]:
        """What containers can have."""
        return wanted_of(self.inventory)

    def opened_here(self) -> dict[str, int]:
        """What opening the GPUs' nodes on the node itself says, as errno; 0 for success."""
        paths = {path for device in self.devices for path in device.nodes}
        usable = self.inventory.nodes.usable
        return {path: _open(usable[path].host) for path in paths if path in usable}


def faults_of(config: Config) -> str:
    """Where NVML of a simulated node is told to fail; "" for a node that is none.

    Such a node is a directory that has its configuration, its scenario and its state.
    """
    directory = os.path.dirname(config.source)
    is_simulated = config.state == os.path.join(directory, "state") and os.path.exists(
        os.path.join(directory, _SCENARIO)
    )
    return os.path.join(config.state, _FAULTS) if is_simulated else ""


def _open(path: str) -> int:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or 0
    return 0
