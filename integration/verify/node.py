"""The node under test, as the checks see it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from hooks.config import Config
from hooks.node.inventory import Inventory
from integration.cri.engine import Engine
from integration.verify.kubelet import Kubelet
from integration.verify.pods import Pods
from integration.verify.visibility import ExpectedDevice, expected_devices

_SCENARIO: Final = "scenario.toml"
_FAULTS: Final = "nvml-faults"


@dataclass(frozen=True, slots=True)
class Node:
    """The node's configuration, inventory, engine, pods and kubelet."""

    config: Config
    inventory: Inventory  # read at the start
    engine: Engine  # its description at the start
    pods: Pods
    kubelet: Kubelet
    restart_agent: bool = False  # whether a check may restart the node agent

    @property
    def handler(self) -> str:
        """The engine's handler under test."""
        return self.pods.settings.handler

    @property
    def devices(self) -> tuple[ExpectedDevice, ...]:
        """The devices that containers can request."""
        return expected_devices(self.inventory)

    def opened_here(self) -> dict[str, int]:
        """Open each GPU's device node on the host and return the errno by path; 0: it opened."""
        paths = {path for device in self.devices for path in device.nodes}
        usable = self.inventory.nodes.usable
        return {path: _open(usable[path].host) for path in paths if path in usable}


def nvml_faults_path(config: Config) -> str:
    """Return the file that injects NVML faults on a simulated node; "" on a real node.

    A simulated node is a directory with its configuration, scenario and state.
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
