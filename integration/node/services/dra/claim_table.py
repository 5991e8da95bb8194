"""The claims of this node: in memory, in the checkpoint, and in the agent's state.

Rules
- A claim's devices are first reserved in memory, without waiting for anything, so two claims cannot
  both find a device free. The checkpoint and the other services are updated afterwards.
- Each write of the checkpoint contains all claims. Callers that wait at the same time share one
  write.
- An unprepared claim is removed from the checkpoint before it is removed from memory. So if the
  write fails, no other claim gets its devices.
- A write that fails, or is given up (:mod:`integration.node.file_calls`), leaves the file doubtful:
  it may have, or get at any moment, claims that memory has not, or lack some. It is written again
  when the directory answers (:meth:`ClaimTable.catch_up`). If the agent exits before, the file has
  each claim as it is or as a step was about to make it, as after a kill at that step.
- Other services learn which devices claims hold, and the device plugin does not allocate these.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import anyio

from integration.agent_errors import DraStateUnwritten, FilesSilent
from integration.node.service import Context
from integration.node.state import claims_file
from integration.node.values.claims import Claim, ClaimPhase
from integration.node.values.service_name import ServiceName

__all__ = ["ClaimLocks", "ClaimTable"]


class ClaimLocks:
    """A lock for each claim, and for each GPU whose MIG devices change.

    A transaction holds its claim from the first step to the last: the kubelet's calls for one claim
    run in the order in which they arrived. It then holds the GPUs on which it creates or deletes
    MIG devices; claims on other GPUs run at the same time. A transaction that holds a GPU never
    takes a claim, and several GPUs are taken in the order of their UUIDs, so no deadlock is
    possible.
    """

    def __init__(self) -> None:
        self._locks: dict[str, anyio.Lock] = {}

    @asynccontextmanager
    async def hold(self, *names: str) -> AsyncIterator[None]:
        """Hold the locks of claims or GPUs, by their UIDs or UUIDs; wait until all are free."""
        async with AsyncExitStack() as stack:
            for name in sorted(names):
                await stack.enter_async_context(self._hold(name))
            yield

    def is_held(self, name: str) -> bool:
        """Return whether a transaction holds a claim or a GPU."""
        return name in self._locks

    @asynccontextmanager
    async def _hold(self, name: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, anyio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():  # no other task waits for it
                self._locks.pop(name, None)


class ClaimTable:
    """All claims for which devices are reserved or prepared, by UID.

    Args:
        driver: the name of the driver.
    """

    def __init__(self, context: Context, driver: str) -> None:
        self._context = context
        self._driver = driver
        self._claims: dict[str, Claim] = {}
        self._leaving: set[str] = set()
        # Counts changes; the second is the count at the last write.
        self._version = self._written = 0
        self._is_doubtful = False
        self._writing = anyio.Lock()

    @property
    def claims(self) -> Mapping[str, Claim]:
        """The claims now."""
        return self._claims

    @property
    def is_doubtful(self) -> bool:
        """Whether the checkpoint may differ from the claims, since a write failed."""
        return self._is_doubtful

    async def load(self) -> bool:
        """Read the claims that an earlier agent prepared.

        Returns:
            Whether there is a checkpoint; if not, the claims come from the kubelet's record.

        Raises:
            FilesSilent: the file system does not answer.
        """
        config = self._context.config
        faults: list[str] = []

        def load() -> tuple[bool, dict[str, Claim]]:
            is_written = claims_file.is_written(config)
            return is_written, claims_file.load(config, self._driver, faults.append)

        asked = f"to read {claims_file.path_of(config)}"
        is_written, self._claims = await self._context.files.run(config.state, asked, load)
        for line in faults:
            self._context.say("warning", line)
        self._changed()
        return is_written

    def put(self, claim: Claim) -> None:
        """Reserve a claim's devices, or change them."""
        self._claims[claim.uid] = claim
        self._changed()

    def reserve(self, claim: Claim, before: Claim | None) -> None:
        """Reserve the devices of a claim, as the first step of a transaction."""
        kept = before or replace(claim, devices=(), has_metadata=False)
        begun = replace(claim, phase=ClaimPhase.PREPARING, has_metadata=kept.has_metadata)
        self.put(replace(begun, previous=kept.devices))

    def restore(self, uid: str, before: Claim | None) -> None:
        """Restore what a claim had before; None if it had nothing."""
        if before is not None:
            self._claims[uid] = before
        else:
            self._claims.pop(uid, None)
        self._changed()

    async def settle(self, settled: Iterable[tuple[Claim, Claim | None]]) -> None:
        """Replace claims of an earlier agent; None drops one.

        A claim that has been prepared again in the meantime is not changed.
        """
        for claim, now in settled:
            if self._claims.get(claim.uid) is claim:
                self.restore(claim.uid, now)
        try:
            await self.write()
        except (DraStateUnwritten, FilesSilent) as error:  # written later, or settled again
            self._context.say("warning", str(error))

    async def complete(self, claim: Claim, write_spec: Callable[[], Awaitable[None]]) -> Claim:
        """Write a claim's spec, then that it is prepared, as the last step of a transaction.

        Raises:
            NvshimError: writing failed; the phase has not changed.
        """
        # Not under the lock: a directory of specs that hangs must not delay the checkpoint.
        await write_spec()
        known = self._claims.get(claim.uid)
        if known is not None and known.is_prepared:
            return known
        prepared = replace(claim, phase=ClaimPhase.PREPARED, previous=())
        async with self._writing:
            await self._save({**self._claims, claim.uid: prepared})
            self._claims[claim.uid] = prepared
        self._publish()
        return prepared

    async def remove(self, uid: str, remove_spec: Callable[[], Awaitable[None]]) -> None:
        """Remove a claim's spec, then the claim from the checkpoint, then from memory.

        Raises:
            DraStateUnwritten: removing failed; the claim keeps its devices.
            FilesSilent: the same.
        """
        await remove_spec()
        if uid not in self._claims:
            return
        async with self._writing:
            self._leaving.add(uid)
            try:
                await self._save(self._claims)
            finally:
                self._leaving.discard(uid)
                self._version += 1  # an error, or another write, may leave the claim in the file
        self._claims.pop(uid, None)
        self._publish()

    async def write(self) -> None:
        """Write the checkpoint, unless another caller's write has just included this change.

        Raises:
            DraStateUnwritten: writing failed. The file has not changed.
            FilesSilent: the file system does not answer. The file may change later.
        """
        changed = self._version
        async with self._writing:
            if self._written < changed:
                await self._save(self._claims)

    async def catch_up(self) -> None:
        """Write the checkpoint again if it is doubtful, and try again later if that fails."""
        async with self._writing:
            if self._is_doubtful:
                with suppress(DraStateUnwritten, FilesSilent):
                    await self._save(self._claims)

    async def _save(self, claims: Mapping[str, Claim]) -> None:
        version = self._version
        kept = [each for uid, each in claims.items() if uid not in self._leaving]
        config, self._is_doubtful = self._context.config, True
        asked = f"to write {claims_file.path_of(config)}"
        await self._context.files.run(config.state, asked, claims_file.save, config, kept)
        self._is_doubtful = False
        self._written = version

    def _changed(self) -> None:
        self._version += 1
        self._publish()

    def _publish(self) -> None:
        claims = tuple(self._claims.values())
        held = (device for claim in claims for device in claim.held)
        state = self._context.state
        state.claimed_devices.publisher(ServiceName.DRA).publish(
            tuple(device for device in held if not device.admin)
        )
        state.claims.publisher(ServiceName.DRA).publish(claims)
