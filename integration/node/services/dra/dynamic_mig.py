"""MIG devices that are made for claims: one after the other on each GPU, and what is left over.

Rules
- To make one takes seconds, and the whole limit if nvidia-smi hangs. Claims for other GPUs do not
  wait for it.
- What was made stays the claim's until it is undone. A claim that ends waits for that, and the
  kubelet asks again.
- What was made for a claim that is not prepared is undone as soon as that can be: an agent was
  killed, or something failed afterwards.
- MIG mode of a GPU that can be had whole, too, is switched on for the first device that is made,
  and off after the last; for a claim of the whole GPU, before that is given at the latest. That it
  cannot be switched off keeps no claim from ending.
- An agent that ends does not wait for nvidia-smi or NVML, which may hang: what they were about is
  found by the next one, as if it had been killed.
- A claim that an agent before this one has only begun is forgotten: nobody was told of it. Which
  those are NVML says, so it is found out once that has answered.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread

from api.errors import NvshimError
from integration.agent_errors import ClaimedDeviceMissing
from integration.detached import run_detached
from integration.node.services.dra.mig_create import Making, Modes, is_unmade
from integration.node.services.dra.mig_layout import parse_name
from integration.node.state.topic import version_of, wait_any
from integration.node.values.claims import uuid_of
from integration.node.values.service_name import ServiceName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping

    from hooks.node.gpus import Gpu
    from hooks.node.inventory import Inventory
    from integration.node.service import Context
    from integration.node.services.dra.devices import Device
    from integration.node.services.dra.mig_layout import Parts
    from integration.node.values.claims import Claim

__all__ = ["OnDemand"]

_TRY_AGAIN: Final = 30.0


class OnDemand:
    """Has devices made and undone.

    Args:
        look: has it known what the node has by now; an inventory, if NVML is to be asked, too.
    """

    def __init__(
        self,
        context: Context,
        claims: Callable[[], Mapping[str, Claim]],
        look: Callable[[Inventory | None], Awaitable[Any]],
        fault: Callable[[str, str], None],
    ) -> None:
        self._state = context.state
        self._claims = claims
        self._look = look
        self._fault = fault
        self.making = Making(context.config)
        self.modes = Modes(context.config)
        self._closing: set[str] = set()
        self._locks: dict[str, anyio.Lock] = {}
        self._unsettled: set[str] = set()

    async def begin(self) -> None:
        """Know what an agent before this one has made."""
        await anyio.to_thread.run_sync(self.making.load)
        await anyio.to_thread.run_sync(self.modes.load)
        self._unsettled = {
            claim.uid
            for claim in self._claims().values()
            if any(parse_name(device.device) for device in claim.devices)
        }

    def settle(self, parts: Parts) -> list[tuple[Claim, Claim | None]]:
        """What becomes of the claims of an agent before this one, once NVML has answered.

        Returns:
            Claims, each with what it is from now on; None if it is to be forgotten.
        """
        if parts.failure or not parts.gpus:
            return []
        old = [claim for uid, claim in self._claims().items() if uid in self._unsettled]
        self._unsettled = set()
        return [(claim, self.making.settled(claim, parts)) for claim in old]

    def gpus_for(self, found: Mapping[str, Any]) -> set[str]:
        """The UUIDs of the GPUs that are cut, or are to be whole again, for a claim."""
        allocation = ((found.get("status") or {}).get("allocation") or {}).get("devices") or {}
        names = [str(each.get("device")) for each in allocation.get("results") or ()]
        parts = (parse_name(name) for name in names)
        return {part.gpu for part in parts if part is not None} | self._cut_now(names)

    def is_ready(self, claim: Claim) -> bool:
        """Whether nothing is to be made, or switched, for a claim."""
        whole = self._cut_now(each.device for each in claim.devices if not each.admin)
        return not whole and not any(map(is_unmade, claim.devices))

    def _cut_now(self, names: Iterable[str]) -> set[str]:
        """Which of these devices are GPUs that are in MIG mode for claims, by UUID."""
        return {uuid for uuid in map(uuid_of, names) if uuid in self.modes.switched}

    @asynccontextmanager
    async def alone(self, gpus: Iterable[str]) -> AsyncIterator[None]:
        """Have nobody else make or undo anything on these GPUs."""
        async with AsyncExitStack() as stack:
            for gpu in sorted(gpus):
                await stack.enter_async_context(self._locks.setdefault(gpu, anyio.Lock()))
            yield

    async def make(self, claim: Claim, devices: Mapping[str, Device]) -> Claim:
        """Make what a claim is to have, and look at the node with it.

        Returns:
            The claim with the UUIDs of what was made.

        Raises:
            NvshimError: it cannot be made; what was made of it is undone soon.
        """
        for uuid in self._cut_now(each.device for each in claim.devices if not each.admin):
            await self._switch_off(uuid)
        inventory = self._state.node.value.inventory
        parts = {name: each.part for name, each in devices.items() if each.part is not None}
        if inventory is None or any(
            parse_name(each.device) and each.device not in parts for each in claim.devices
        ):
            raise ClaimedDeviceMissing(
                f"the devices of {claim}", found="the GPU cannot be cut so now",
                do="have the pod made anew, and see `nvidia-smi mig -lgi` on the node",
            )  # fmt: skip
        if any(map(is_unmade, claim.devices)):
            cut = {each.gpu for each in claim.devices if is_unmade(each) and not each.admin}
            for gpu in inventory.gpus:
                if gpu.uuid in cut and not gpu.mig:
                    await self._switch(gpu, partial(self.modes.on, gpu, inventory, str(claim)))
            make = partial(self.making.make, claim, parts, inventory)
            claim = await run_detached(make)
            await self._look_anew()
        return claim

    async def undo(self, claim: str) -> None:
        """Undo what was made for a claim, by its UID; nothing if nothing was.

        Raises:
            NvshimError: it cannot be undone now.
        """
        if not self.making.gpus_of(claim):
            return
        undo = partial(self.making.undo, claim, self._state.node.value.inventory)
        undone = await run_detached(undo)
        if undone:
            # Before it is forgotten: NVML is to be known to have it no more.
            await self._look_anew()
            await anyio.to_thread.run_sync(self.making.forget, undone)
            await self._look(None)
            with suppress(NvshimError):  # it is tried again, and said
                for gpu in self._idle().intersection(each.part.gpu for each in undone):
                    await self._switch_off(gpu)

    def _idle(self) -> frozenset[str]:
        """The UUIDs of the GPUs that are in MIG mode for claims that are no more."""
        return self.modes.switched - self.making.gpus()

    async def _switch_off(self, uuid: str) -> None:
        """Have a GPU be whole again."""
        inventory = self._state.node.value.inventory
        for gpu in () if inventory is None else inventory.gpus:
            if inventory is not None and gpu.uuid == uuid and not gpu.lost:
                await self._switch(gpu, partial(self.modes.off, gpu, inventory))
                await self._look_anew()  # before it is forgotten, as what was made
                await anyio.to_thread.run_sync(self.modes.forget, uuid)
                await self._look(None)

    async def _switch(self, gpu: Gpu, do: Callable[[], None]) -> None:
        """Switch MIG mode of a GPU, while nobody watches GPUs through NVML."""
        self._closing.add(gpu.uuid)
        self._tell_closing()
        try:
            await run_detached(do)
        finally:
            self._closing.discard(gpu.uuid)
            self._tell_closing()

    def _tell_closing(self) -> None:
        gpus = ", ".join(sorted(self._closing))
        self._state.nvml_closed.publisher(ServiceName.DRA).publish(
            gpus and f"MIG mode of {gpus} is switched"
        )

    async def _look_anew(self) -> None:
        await self._look(await run_detached(self.making.newest))
        self._state.look_requested.send()

    async def tidy(self) -> None:
        """Undo what was made or switched for claims that are not prepared, until cancelled."""
        while True:
            version = version_of(self._state.node, self._state.claimed_devices)
            wrong = ""
            for claim in self.making.orphans(self._claims()):
                async with self.alone(self.making.gpus_of(claim)):
                    if claim in self._claims():
                        continue
                    try:
                        await self.undo(claim)
                    except NvshimError as error:
                        wrong = str(error)
            for gpu in self._idle():
                async with self.alone({gpu}):
                    if gpu not in self._idle():
                        continue
                    try:
                        await self._switch_off(gpu)
                    except NvshimError as error:
                        wrong = str(error)
            self._fault("mig", wrong)
            await wait_any(
                self._state.node, self._state.claimed_devices, since=version, timeout=_TRY_AGAIN
            )
