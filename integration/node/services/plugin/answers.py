"""Answer the kubelet from the snapshot.

Rules
- An answer uses one snapshot, and waits for nothing but one write: if someone changed or removed a
  CDI spec, it is first written again.
- The snapshot may be a moment old. So an answer also reads the latest inventory, claims, MPS
  daemons and drains, and refuses a device that one of them excludes.
- If the engine's socket is not the one in the snapshot, the engine may be a new one. Then the
  answer also names the devices in the way that needs no support from the engine.
- A preference also leaves out the devices that claims hold, of which the kubelet may not know yet.
- Nothing is awaited between the check of the claimed devices and the publication of the allocation.
  So no claim can take a device in between.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Final, Protocol

from api.errors import NvshimError
from api.proto import deviceplugin_pb2 as pb
from integration.agent_errors import CdiDeviceUnwritten, DeviceUnknown
from integration.detached import SlowCall
from integration.node.mps.clients import add_client, refuse_unready
from integration.node.service import Context
from integration.node.services.plugin.allocation import AllocationContext, allocate
from integration.node.services.plugin.cdi import directory_of
from integration.node.services.plugin.claimed import (
    claimed_on,
    refuse_claimed,
    without_claimed,
)
from integration.node.services.plugin.preferred import preferred
from integration.node.services.plugin.snapshot import Snapshot
from integration.node.values.counters import FAILED, OK, REFUSED
from integration.node.values.resources import MPS, Device, Resource, Settings
from integration.node.values.service_name import ServiceName
from integration.timeouts import PATIENCE

_TO_CHECK: Final = 5.0 * PATIENCE
"""Seconds for a check of a few files."""


class Reconciling(Protocol):
    """Publishes the snapshot."""

    snapshot: Snapshot

    async def repair_specs(self) -> None:
        """Write the CDI specs again, and publish that.

        Raises:
            CdiDeviceUnwritten: it took too long.
        """

    def doubt_engine(self) -> None:
        """Ask the engine again: it may have restarted."""

    def find_topology(self) -> None:
        """Ask NVML for the topology again."""


class SnapshotAnswers:
    """The answers of all plugins (:class:`integration.node.services.plugin.server.Answers`)."""

    def __init__(self, context: Context, reconciling: Reconciling) -> None:
        self._config = context.config
        self._say = context.say
        self._state = context.state
        self._serves_claims = context.options.dra
        self._allocations = context.state.plugin_allocations.publisher(ServiceName.PLUGIN)
        self._reconciling = reconciling
        self._checking = SlowCall()

    async def allocate(self, name: str, ids: Sequence[str]) -> pb.ContainerAllocateResponse:
        """See :class:`~integration.node.services.plugin.server.Answers`."""
        result, started = FAILED, time.monotonic()
        try:
            snapshot = self._reconciling.snapshot
            if snapshot.uses_specs and not await self._has_specs(snapshot):
                await self._reconciling.repair_specs()
            answer = self._allocate(self._reconciling.snapshot, name, ids)
            result = OK
        except NvshimError as error:
            result = REFUSED
            self._say("warning", str(error), resource=name)
            raise
        finally:
            self._state.counters.allocated(name, time.monotonic() - started, result)
        self._say("info", "allocated", resource=name, devices=",".join(ids))
        return answer

    def prefer(
        self, name: str, available: Sequence[str], required: Sequence[str], size: int
    ) -> Sequence[str]:
        """See :class:`~integration.node.services.plugin.server.Answers`."""
        snapshot = self._reconciling.snapshot
        if snapshot.topology.failure:
            self._reconciling.find_topology()
        claimed = claimed_on(self._state, self._config)
        return preferred(
            without_claimed(_resource(snapshot, name), claimed),
            available,
            required,
            size,
            topology=snapshot.topology,
            policy=snapshot.in_effect.shared_devices_allocation_policy,
            beside_claims=self._serves_claims,
        )

    async def _has_specs(self, snapshot: Snapshot) -> bool:
        """Return whether the specs are in place.

        Raises:
            CdiDeviceUnwritten: the file system of their directory does not answer.
        """
        try:
            return await self._checking.run(lambda: snapshot.specs.are_in_place, _TO_CHECK)
        except TimeoutError as error:
            directory = directory_of(self._config)
            raise CdiDeviceUnwritten(
                "the device plugin's CDI specs",
                found=f"the file system of {directory} does not answer",
                do="check the disk",
            ) from error

    def _allocate(
        self, snapshot: Snapshot, name: str, ids: Sequence[str]
    ) -> pb.ContainerAllocateResponse:
        resource, settings = _resource(snapshot, name), self._settings(snapshot)
        chosen = [resource.by_id[each] for each in ids if each in resource.by_id]
        refuse_claimed(chosen, claimed_on(self._state, self._config))
        if resource.sharing == MPS:
            uuids = dict.fromkeys(each.uuid for each in chosen)
            refuse_unready(name, uuids, self._state.mps_daemons.value)
        context = AllocationContext(
            settings,
            self._state.node.value.inventory,  # the newest: a device that is gone is refused
            self._config,
            cdi_devices=snapshot.specs.devices,
            channels=snapshot.channels,
        )
        answer = allocate(resource, ids, context, token=str(uuid.uuid4()))
        if resource.sharing == MPS:
            add_client(answer, settings, resource)
        # No await since the check of the claimed devices, so no claim can have taken one.
        now = dict.fromkeys((each.uuid for each in chosen), time.monotonic())
        self._allocations.publish({**self._state.plugin_allocations.value, **now})
        if sick := sorted({each.uuid for each in chosen if not self._is_healthy(each)}):
            self._say("warning", "allocated unhealthy devices", devices=",".join(sick))
        return answer

    def _settings(self, snapshot: Snapshot) -> Settings:
        """Return the settings that apply to an answer."""
        if snapshot.engine is None or snapshot.engine.holds:
            return snapshot.in_effect
        self._reconciling.doubt_engine()
        return snapshot.cautious

    def _is_healthy(self, device: Device) -> bool:
        condition = self._state.health.value.get(device.uuid)
        return device.is_healthy and (condition is None or condition.state.is_allocatable)


def _resource(snapshot: Snapshot, name: str) -> Resource:
    resource = snapshot.by_name.get(name)
    if resource is None:
        raise DeviceUnknown(
            f"devices of {name}", found="the node has no such resource now", do="see nvshim list"
        )
    return resource
