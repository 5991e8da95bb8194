"""Dynamic MIG: create and delete MIG devices for claims, and switch MIG mode.

Rules
- Creating a device takes seconds, or even the whole time limit if nvidia-smi hangs. So the caller
  holds the GPU (:class:`.claim_table.ClaimLocks`), and claims on other GPUs do not wait.
- A device belongs to its claim until it is deleted. Unpreparing a claim waits for that; if deleting
  fails, the kubelet calls again.
- Devices that belong to no claim of the table are deleted as soon as possible: the agent was
  killed, or a later step failed.
- If a GPU may be used whole or in parts, its MIG mode is switched on for the first device. It is
  switched off after the last one, or at the latest for a claim of the whole GPU. If it cannot be
  switched off, claims can still end.
- When the agent exits, it does not wait for nvidia-smi or NVML, which may hang. The next agent
  finds what they did, as after a kill.
- If the devices of an earlier agent's claim were not all created, the claim is dropped: the kubelet
  got no answer for it. Deciding this needs NVML's first answer and, if there is no note of the
  claim, one that includes its GPU.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio

from api.errors import NvshimError
from hooks.node.gpus import Gpu
from hooks.node.inventory import Inventory
from integration.agent_errors import ClaimedDeviceMissing
from integration.detached import run_detached
from integration.node.service import Context
from integration.node.services.dra.claim_table import ClaimLocks, ClaimTable
from integration.node.services.dra.devices import Device
from integration.node.services.dra.mig_create import MigCreator, MigModes, MigNote, is_unmade
from integration.node.services.dra.mig_layout import parse_name
from integration.node.state.topic import version_of, wait_any
from integration.node.values.claims import Claim, gpu_of, uuid_of
from integration.node.values.service_name import ServiceName
from integration.nvml.mig_parts import Parts

__all__ = ["DynamicMig"]

_RETRY_AFTER: Final = 30.0


class DynamicMig:
    """Creates and deletes MIG devices.

    Args:
        discover: discovers the node's devices again; if given an inventory, it asks NVML, too.
        fault: reports or clears a fault of a part of the driver.
    """

    def __init__(
        self,
        context: Context,
        table: ClaimTable,
        locks: ClaimLocks,
        discover: Callable[[Inventory | None], Awaitable[Any]],
        fault: Callable[[str, str], None],
    ) -> None:
        self._context = context
        self._state = context.state
        self._table = table
        self._locks = locks
        self._discover = discover
        self._fault = fault
        self.creator = MigCreator(context.config)
        self.modes = MigModes(context.config)
        self._closing: set[str] = set()
        # UIDs of claims of an earlier agent whose devices NVML has not confirmed yet.
        self._unsettled: set[str] = set()
        self._settled = anyio.Event()

    async def load(self) -> None:
        """Read what an earlier agent created.

        Raises:
            FilesSilent: the file system does not answer.
        """
        await self._of_notes("to read", self.creator.load)
        await self._of_notes("to read", self.modes.load)
        self._unsettled = {
            claim.uid
            for claim in self._table.claims.values()
            if any(parse_name(device.device) for device in claim.devices)
        }

    async def _of_notes(self, verb: str, do: Callable[..., None], *arguments: object) -> None:
        """Call a function about the notes of MIG devices, as :meth:`.FileCalls.run` does."""
        asked = f"{verb} the notes of MIG devices"
        await self._context.files.run(self._context.config.state, asked, do, *arguments)

    async def settle(self, parts: Parts) -> bool:
        """Decide about the claims of an earlier agent, once NVML has answered about their GPUs.

        The claims get the UUIDs of their devices. If the devices of a claim were not all created,
        it gets back those that it had before, or is dropped.

        Returns:
            Whether it has decided about any claim.
        """
        if parts.failure or not parts.gpus or not self._unsettled:
            return False
        inventory = self._state.node.value.inventory
        out = "" if inventory is None else parts.left_out(inventory.gpus)
        claims = self._table.claims
        waiting = {
            uid for uid in self._unsettled & claims.keys() if self._is_unknown(claims[uid], out)
        }
        old = [claims[uid] for uid in claims if uid in self._unsettled - waiting]
        self._unsettled = waiting
        await self._table.settle([(claim, self._settled_claim(claim, parts)) for claim in old])
        self._settled.set()
        self._settled = anyio.Event()
        return bool(old)

    def _is_unknown(self, claim: Claim, left_out: str) -> bool:
        """Return whether only NVML can say what a claim has, and its answer leaves out the GPU."""
        gpus = {gpu_of(device.device) for device in claim.devices} - {""}
        return not self.creator.notes_of(claim.uid) and any(gpu in left_out for gpu in gpus)

    def _settled_claim(self, claim: Claim, parts: Parts) -> Claim | None:
        settled = self.creator.settled(claim, parts)
        return claim.before if settled is None and claim.previous else settled

    async def wait_settled(self, uid: str) -> None:
        """Wait until NVML has confirmed the devices of a claim of an earlier agent."""
        while uid in self._unsettled:
            await self._settled.wait()

    def gpus_for(self, names: Iterable[str]) -> set[str]:
        """Return the UUIDs of the GPUs to hold for a claim of these devices.

        They are the GPUs on which MIG devices are created, or whose MIG mode is switched off.
        """
        names = tuple(names)
        parts = (parse_name(name) for name in names)
        return {part.gpu for part in parts if part is not None} | self._whole_in_mig_mode(names)

    def gpus_of(self, uid: str) -> set[str]:
        """Return the UUIDs of the GPUs on which devices were created for a claim."""
        return self.creator.gpus_of(uid)

    def is_ready(self, claim: Claim) -> bool:
        """Return whether nothing has to be created or switched for a claim."""
        whole = self._whole_in_mig_mode(each.device for each in claim.devices if not each.admin)
        return not whole and not any(map(is_unmade, claim.devices))

    def _whole_in_mig_mode(self, names: Iterable[str]) -> set[str]:
        """Return the UUIDs of whole GPUs among these that the driver switched to MIG mode."""
        return {uuid for uuid in map(uuid_of, names) if uuid in self.modes.switched}

    async def create(self, claim: Claim, devices: Mapping[str, Device]) -> Claim:
        """Create the MIG devices of a claim, and discover them.

        Returns:
            The claim with the UUIDs of the new devices.

        Raises:
            NvshimError: a device cannot be created; :meth:`tidy` deletes those that were created.
        """
        for uuid in self._whole_in_mig_mode(
            each.device for each in claim.devices if not each.admin
        ):
            await self._switch_off(uuid)
        inventory = self._state.node.value.inventory
        parts = {name: each.part for name, each in devices.items() if each.part is not None}
        if inventory is None or any(
            parse_name(each.device) and each.device not in parts for each in claim.devices
        ):
            raise ClaimedDeviceMissing(
                f"the devices of {claim}", found="the GPU cannot be partitioned like this now",
                do="see `nvidia-smi mig -lgi` on the node, and delete the pod",
            )  # fmt: skip
        if any(map(is_unmade, claim.devices)):
            cut = {each.gpu for each in claim.devices if is_unmade(each) and not each.admin}
            for gpu in inventory.gpus:
                if gpu.uuid in cut and not await self._is_in_mig_mode(gpu):
                    await self._switch(gpu, partial(self.modes.on, gpu, inventory, str(claim)))
            create = partial(self.creator.create, claim, parts, inventory)
            claim = await run_detached(create)
            await self._rediscover()
        return claim

    async def _is_in_mig_mode(self, gpu: Gpu) -> bool:
        """Return whether MIG mode of a GPU is on.

        The inventory may be older than a switch by an administrator or by this driver.
        """
        if gpu.mig and gpu.uuid not in self.modes.switched:
            return await run_detached(partial(self.modes.is_on, gpu))
        return gpu.mig

    async def delete(self, uid: str) -> None:
        """Delete the MIG devices that were created for a claim, by its UID.

        Raises:
            NvshimError: they cannot be deleted at present.
        """
        await self._delete(self.creator.notes_of(uid))

    async def _delete(self, notes: Collection[MigNote]) -> None:
        if not notes:
            return
        delete = partial(self.creator.delete, notes, self._state.node.value.inventory)
        deleted = await run_detached(delete)
        if deleted:
            # While the notes exist: without them the devices would look like an administrator's.
            await self._rediscover()
            await self._of_notes("to change", self.creator.forget, deleted)
            await self._discover(None)
            with suppress(NvshimError):  # tidy tries again, and reports it
                for gpu in self._idle().intersection(each.part.gpu for each in deleted):
                    await self._switch_off(gpu)

    def _idle(self) -> frozenset[str]:
        """Return the UUIDs of GPUs that the driver switched to MIG mode and no claim uses."""
        return self.modes.switched - self.creator.gpus()

    async def _switch_off(self, uuid: str) -> None:
        """Switch MIG mode of a GPU off."""
        inventory = self._state.node.value.inventory
        for gpu in () if inventory is None else inventory.gpus:
            if inventory is not None and gpu.uuid == uuid and not gpu.lost:
                await self._switch(gpu, partial(self.modes.off, gpu, inventory))
                await self._rediscover()  # while the note exists, as in delete
                await self._of_notes("to change", self.modes.forget, uuid)
                await self._discover(None)

    async def _switch(self, gpu: Gpu, do: Callable[[], None]) -> None:
        """Switch MIG mode of a GPU, while the agent has NVML closed."""
        self._closing.add(gpu.uuid)
        self._publish_closing()
        try:
            await run_detached(do)
        finally:
            self._closing.discard(gpu.uuid)
            self._publish_closing()

    def _publish_closing(self) -> None:
        gpus = ", ".join(sorted(self._closing))
        self._state.nvml_closed.publisher(ServiceName.DRA).publish(
            gpus and f"MIG mode of {gpus} is switched"
        )

    async def _rediscover(self) -> None:
        await self._discover(await run_detached(self.creator.newest))
        self._state.look_requested.send()

    async def tidy(self) -> None:
        """Delete devices and reset modes that no claim needs, until cancelled."""
        while True:
            version = version_of(self._state.node, self._state.claimed_devices)
            failed = ""
            for note in self.creator.orphans(self._table.claims):
                async with self._locks.hold(note.part.gpu):
                    if note not in self.creator.orphans(self._table.claims):
                        continue
                    try:
                        await self._delete([note])
                    except NvshimError as error:
                        failed = str(error)
            for gpu in self._idle():
                async with self._locks.hold(gpu):
                    if gpu not in self._idle():
                        continue
                    try:
                        await self._switch_off(gpu)
                    except NvshimError as error:
                        failed = str(error)
            self._fault("mig", failed)
            await wait_any(
                self._state.node, self._state.claimed_devices, since=version, timeout=_RETRY_AFTER
            )
