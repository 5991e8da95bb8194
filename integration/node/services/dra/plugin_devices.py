"""Find the devices that the device plugins of this node gave to pods.

A device belongs to a claim or to a device plugin's pod, never to both. The kubelet reports what
pods got from plugins, by its pod-resources API or, if that does not answer, in its checkpoint. It
may not have recorded the latest answers of this agent's own plugin, so these count for some
seconds.
"""

from __future__ import annotations

import time
from typing import Final

from hooks.node.kubelet import kubelet_root
from integration.agent_errors import FilesSilent
from integration.node.mps.claim_daemons import is_of_claims
from integration.node.service import Context
from integration.node.state import claims_file

__all__ = ["PluginDevices"]

# Seconds after which the kubelet has surely recorded an answer of the device plugin.
_RECORDED_AFTER: Final = 5.0

_RECORD: Final = "dra kubelet-record"
"""The subject of the fault that part of the kubelet's checkpoint cannot be read."""


class PluginDevices:
    """Knows which pods have devices of a device plugin, by the devices' UUIDs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def recent(self) -> dict[str, str]:
        """Return the devices that this agent's plugin gave in the last seconds."""
        now = time.monotonic()
        return {
            uuid: "a pod that the device plugin has just answered for"
            for uuid, when in self._context.state.plugin_allocations.value.items()
            if now - when < _RECORDED_AFTER
        }

    async def allocated(self) -> dict[str, str]:
        """Return all devices that pods have by a device plugin."""
        context = self._context
        allocated = await context.kubelet.allocated(context.options.pod_resources)
        found = {**self._shared_by_mps(), **self.recent()}
        if allocated is None:
            recorded, fault = await self._recorded()
            context.fault(_RECORD, fault, level="warning")
            return {**recorded, **found}
        context.fault(_RECORD, "")
        for (namespace, pod), containers in allocated.items():
            for names in containers.values():
                for _, name in names:
                    if name.startswith(claims_file.UUIDS):
                        found[name.partition("::")[0]] = f"pod {namespace}/{pod}"
        return found

    async def _recorded(self) -> tuple[dict[str, str], str]:
        """Return what the kubelet's checkpoint has, as :func:`.claims_file.plugin_allocated`."""
        config, read = self._context.config, claims_file.plugin_allocated
        root = kubelet_root(config)
        try:
            return await self._context.files.run(root, "to read its checkpoint", read, config)
        except FilesSilent as error:
            return {}, str(error)

    def _shared_by_mps(self) -> dict[str, str]:
        """Return the devices that only clients of the device plugin's MPS daemons can open."""
        return {
            uuid: f"the device plugin, which shares {name} by MPS,"
            for name, daemon in self._context.state.mps_daemons.value.items()
            if not is_of_claims(name)
            for uuid in daemon.devices
        }
