"""The NVLink fabric of a node's GPUs, for commands that look once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from api.errors import NvshimError
from hooks.config import Config
from hooks.node.inventory import Inventory
from integration.nvml.query import ask_nvml
from integration.nvml.values import Fabric

_HOPPER: Final = 9


def fabrics_of(config: Config, inventory: Inventory) -> Mapping[str, Fabric]:
    """Return the place of each GPU in an NVLink fabric, by UUID.

    NVML is asked only if a GPU is a Hopper or newer; older ones have no fabric. If NVML does not
    answer, the result is empty.
    """
    capabilities = (gpu.compute_capability.partition(".")[0] for gpu in inventory.gpus)
    if not any(major.isdecimal() and int(major) >= _HOPPER for major in capabilities):
        return {}
    try:
        found = json.loads(ask_nvml(config, "fabric") or b"{}").get("gpus", {})
        return {uuid: Fabric(**fields) for uuid, fields in found.items() if fields is not None}
    except (NvshimError, ValueError):  # no driver any longer; NVML was killed
        return {}
    except (RecursionError, TypeError, AttributeError):  # its answer makes no sense
        return {}
