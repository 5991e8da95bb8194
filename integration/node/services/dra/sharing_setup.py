"""Set up how claims share devices: time slices of GPUs, and MPS control daemons.

Rules
- The agent's MPS service runs the daemons (:mod:`integration.node.mps`); this module says which
  ones claims need. A claim is ready once its daemons serve its devices. If one cannot, the error
  says why.
- Releasing a claim waits until the daemons that no other claim needs have ended, since only then
  the compute modes of their GPUs are reset. Clients that keep a daemon alive are named.
- A time slice applies to the whole GPU. It is set for the first claim and reset after the last one
  that asks for it. A failed reset is retried with the next claim: it only changes the slice length.
  A GPU that is gone or does not answer is left out until it is back.
- A driver that is loaded again has forgotten the time slices, and a reset may clear them. So the
  agent sets them again when it starts, after NVML was closed for another process, and when a GPU is
  back. Until then it cannot know which are set.

Source: nvidia-smi(1), "compute-policy"; NVIDIA's open kernel modules, gpu_db.c.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

import anyio

from integration.agent_errors import MpsDaemonFailed, MpsNotReady, TimeSliceFailed
from integration.detached import run_detached
from integration.node.mps.clients import unready
from integration.node.service import Context, settings_of
from integration.node.services.dra.sharing import daemons_of
from integration.node.state.topic import version_of, wait_any
from integration.node.values.claims import INTERVALS, Claim
from integration.node.values.service_name import ServiceName
from integration.nvml.nvidia_smi import SmiFailed, run_nvidia_smi
from integration.timeouts import PATIENCE

__all__ = ["SharingSetup"]

_DEFAULT: Final = INTERVALS[0]

# Seconds; in sum below the 45 s that a kubelet waits for an answer.
_TO_SERVE: Final = 20.0 * PATIENCE
_TO_END: Final = 15.0 * PATIENCE
_TO_SET: Final = 10.0 * PATIENCE
_RETRY_AFTER: Final = 30.0


class SharingSetup:
    """Sets up and releases sharing, for several claims at a time."""

    def __init__(self, context: Context, fault: Callable[[str, str], None]) -> None:
        self._context = context
        self._state = context.state
        self._fault = fault
        self._claims: dict[str, Claim] = {}
        # Time slices that differ from the default, by the GPU's UUID.
        self._slices: dict[str, str] = {}
        self._unsure: set[str] = set()  # GPUs whose time slice may be lost
        self._slicing = anyio.Lock()

    @property
    def mps_root(self) -> str:
        """The host's directory of MPS; "" if it is unknown so far."""
        settings = settings_of(self._context)
        return "" if settings is None else settings.mps_root

    def load(self, claims: Iterable[Claim]) -> None:
        """Take over what an earlier agent set up."""
        self._claims = {claim.uid: claim for claim in claims}
        # An agent that was killed while it prepared a claim may not have set its slices.
        before = (claim.before for claim in self._claims.values())
        self._slices = _slices(claim for claim in before if claim is not None)
        self._unsure = set(self._slices)
        self._post()

    async def apply(self, claim: Claim, before: Claim | None) -> None:
        """Set time slices for a claim, and wait until its MPS daemons serve.

        Args:
            before: the claim before the change; its other devices get the default time slice.

        Raises:
            TimeSliceFailed: a time slice cannot be set.
            MpsNotReady: a daemon does not serve its devices.
        """
        self._claims[claim.uid] = claim
        await self._set_slices(claim)
        if before is not None and _slices([before]).keys() - _slices([claim]).keys():
            await self._reset_slices()
        self._post()
        for name, daemon in daemons_of([claim]).items():
            await self._await_daemon(claim, name, tuple(daemon.limits))

    async def release(self, uid: str) -> None:
        """Release what only this claim uses; do nothing if it shares nothing.

        Raises:
            MpsDaemonFailed: a daemon has not exited; the claim keeps everything it had.
        """
        claim = self._claims.get(uid)
        try:
            await self._replace(uid, None)
        except MpsDaemonFailed:
            if claim is not None:
                self._claims[uid] = claim
            self._post()
            raise

    async def put_back(self, uid: str, before: Claim | None) -> None:
        """Return a claim to what it had before a transaction that failed.

        Args:
            before: the claim at that time; None if it had nothing.
        """
        with suppress(MpsDaemonFailed):  # the daemon ends with its last client
            await self._replace(uid, before)
        if before is not None:
            with suppress(TimeSliceFailed):  # it only changes the slice length
                await self._set_slices(before)

    async def _replace(self, uid: str, now: Claim | None) -> None:
        """Replace what a claim asks for; None for nothing."""
        claim = self._claims.pop(uid, None)
        if now is not None:
            self._claims[uid] = now
        if claim is None:
            return
        self._post()
        for name in daemons_of([claim]).keys() - daemons_of(self._claims.values()).keys():
            await self._await_end(claim, name)
        await self._reset_slices()

    def _post(self) -> None:
        self._state.claim_daemons.publisher(ServiceName.DRA).publish(
            daemons_of(self._claims.values())
        )

    # MPS

    async def _await_daemon(self, claim: Claim, name: str, uuids: tuple[str, ...]) -> None:
        why = ""
        with anyio.move_on_after(_TO_SERVE):
            async for daemons in self._state.mps_daemons.changes():
                why, known = unready(name, uuids, daemons), daemons.get(name)
                if not why:
                    return
                if known is not None and known.has_failed:
                    break
        raise MpsNotReady(
            f"to share {', '.join(uuids)} by MPS for {claim}",
            found=why,
            do="see `mps` in the node agent's faults; the kubelet retries",
        )

    async def _await_end(self, claim: Claim, name: str) -> None:
        state = self._state
        with anyio.move_on_after(_TO_END):
            while True:
                version = version_of(state.mps_daemons, state.claim_daemons)
                if name not in state.mps_daemons.value or name in daemons_of(self._claims.values()):
                    return
                await wait_any(state.mps_daemons, state.claim_daemons, since=version)
        if (daemon := state.mps_daemons.value.get(name)) is not None:  # else it has just ended
            raise MpsDaemonFailed(
                f"to end the MPS control daemon of {claim}",
                found=daemon.unready or "it has not ended yet",
                do="stop its clients; the kubelet retries",
            )

    # Time slices

    async def keep_slices(self) -> NoReturn:
        """Set the time slices of claims again whenever the driver may have lost them."""
        node, pause = self._state.node, self._state.nvml_pause
        paused = pause.version
        while True:
            version = version_of(node, pause)
            there = self._gpus()
            self._unsure |= self._slices.keys() - there
            if pause.version != paused:
                paused = pause.version
                self._unsure |= self._slices.keys()
            failed = "" if pause.value else await self._set_again(there)
            self._fault("lost time slices", failed)
            await wait_any(node, pause, since=version, timeout=_RETRY_AFTER if failed else math.inf)

    async def _set_again(self, gpus: frozenset[str]) -> str:
        """Set what may be lost on these GPUs; return why that failed, "" if it did not."""
        failed = ""
        for uuid in sorted(self._unsure & gpus):
            async with self._slicing:
                interval = _slices(self._claims.values()).get(uuid)
                if interval is None or uuid not in self._unsure:
                    continue  # no claim asks for it now, or it was just set
                try:
                    await self._set(uuid, interval, "the claims that have it")
                except TimeSliceFailed as error:
                    failed = str(error)
        return failed

    def _gpus(self) -> frozenset[str]:
        """Return the GPUs that answer."""
        inventory = self._state.node.value.inventory
        gpus = () if inventory is None else inventory.gpus
        return frozenset(gpu.uuid for gpu in gpus if not gpu.lost)

    async def _set_slices(self, claim: Claim) -> None:
        async with self._slicing:
            for uuid, interval in _slices([claim]).items():
                if self._slices.get(uuid, _DEFAULT) != interval or uuid in self._unsure:
                    await self._set(uuid, interval, str(claim))

    async def _reset_slices(self) -> None:
        failed = ""
        async with self._slicing:
            due = self._gpus() - _slices(self._claims.values()).keys()
            for uuid in [uuid for uuid in self._slices if uuid in due]:
                try:
                    await self._set(uuid, _DEFAULT, "no claim")
                except TimeSliceFailed as error:
                    failed = str(error)
        self._fault("time slices", failed)

    async def _set(self, uuid: str, interval: str, whom: str) -> None:
        inventory = self._state.node.value.inventory
        asked = f"the time slice {interval} of {uuid} for {whom}"
        if inventory is None:
            raise TimeSliceFailed(asked, found="there is no driver")
        number = INTERVALS.index(interval)
        arguments = ("compute-policy", "-i", uuid, f"--set-timeslice={number}")
        run = partial(run_nvidia_smi, timeout=_TO_SET, ends_with_us=True)
        try:
            await run_detached(run, inventory.driver, self._context.config, arguments)
        except SmiFailed as error:
            raise TimeSliceFailed(asked, found=error.found, do=error.do) from error
        self._unsure.discard(uuid)
        if interval == _DEFAULT:
            self._slices.pop(uuid, None)
        else:
            self._slices[uuid] = interval


def _slices(claims: Iterable[Claim]) -> dict[str, str]:
    """Return the time slices that claims ask for, except the default, by the GPU's UUID."""
    return {
        device.gpu: device.sharing.time_slice
        for claim in claims
        for device in claim.devices
        if device.sharing.time_slice not in {"", _DEFAULT}
    }
