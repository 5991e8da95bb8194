"""The memory guard: watch the memory of shared GPUs, if the configuration asks for it.

::

    [guard] of config.toml, annotations of pods ──▶ limits
    NVML's processes, every so many seconds ──────▶ who uses more ──▶ state.memory_excesses, the log
                                                                 ╰──▶ Kill, if so configured

Rules
- It is after the fact: a container can take memory faster than anybody looks, and what it was
  refused before is not known. Hard limits are those of MPS and MIG.
- Who uses more is told so first. Who still does at the next look is killed, if the configuration
  says so; never at the first, and never by what NVML did not say just then.
- A container is killed by its own shim. One whose shim does not do it is tried again.
- Without a limit nothing is asked.
- What a container may use is never what it says itself (:mod:`.shares`).
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Final, NoReturn

import anyio

from api.errors import NvshimError, printable
from hooks.config import Beyond
from integration.agent_errors import ContainerNotKilled
from integration.containers.bundles import Container
from integration.containers.shim_client import kill
from integration.detached import run_detached
from integration.node.faults.hits import Hit
from integration.node.faults.limits import (
    ANNOTATION,
    Excess,
    Limit,
    excesses,
    gibibytes,
    parse_limit,
)
from integration.node.faults.shares import pod_claims, share_limits
from integration.node.holders.values import Ledger
from integration.node.state.store import Unsampled
from integration.node.state.topic import version_of, wait_any
from integration.node.usage import usage_by
from integration.node.values.service_name import ServiceName
from integration.nvml.values import Sample
from shim.errors import BundleUnusable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from integration.node.service import Context

_FAULT: Final = "memory-guard.shares"

_KILLED: Final = "ended by the memory guard"
_LONGEST: Final = 64  # characters of an annotation: no limit is longer
_TO_END: Final = 10.0  # seconds for the shim's answer
_TO_WRITE: Final = 1.0  # seconds for the cause to be where the shim finds it

_Which = tuple[str, int, str]
"""A container's bundle and first process, and a device."""


async def run(context: Context) -> None:
    """Watch over GPU memory, until cancelled."""
    try:
        await _Guard(context).keep()
    finally:
        context.state.memory_excesses.publisher(ServiceName.MEMORY_GUARD).publish({})
        context.state.faults.report(_FAULT, "")


class _Guard:
    """Who watches."""

    def __init__(self, context: Context) -> None:
        self._context, self._state = context, context.state
        config = context.config
        self._limit = parse_limit(config.guard_memory)
        self._kills = config.guard_beyond == Beyond.KILL
        self._interval = config.guard_interval
        self._own: dict[tuple[str, int], Limit | None] = {}
        self._over: dict[_Which, Hit] = {}
        self._failed = ""

    async def keep(self) -> NoReturn:
        state = self._state
        inputs = (state.ledger, state.sampler, state.claims)
        while True:
            version = version_of(*inputs)
            own = await self._limits(state.ledger.value)
            shares = await self._shares()
            is_wanted = bool(state.ledger.value.holdings) and (
                self._limit is not None or own or shares
            )
            if not is_wanted or isinstance(state.sampler.value, Unsampled):
                self._post({})
                await wait_any(*inputs, since=version)
                continue
            sample = await state.sampler.value.sample(max_age=self._interval / 2)
            if not sample.failure:
                await self._judge(sample, own, shares)
            await anyio.sleep(self._interval)

    async def _limits(self, ledger: Ledger) -> dict[str, Limit]:
        """Pods' own limits, by the bundle; each is read once."""
        containers = {(h.container.bundle, h.container.pid): h.container for h in ledger.holdings}
        self._own = {key: limit for key, limit in self._own.items() if key in containers}
        for key, container in containers.items():
            if key not in self._own:
                text = await run_detached(_annotation, container)
                self._own[key] = limit = parse_limit(text)
                if text and limit is None:
                    self._context.say(
                        "warning", "a limit of GPU memory that is none",
                        container=printable(container.title), annotation=printable(text),
                    )  # fmt: skip
        return {bundle: limit for (bundle, _), limit in self._own.items() if limit is not None}

    async def _shares(self) -> dict[str, dict[str, int]]:
        """Bytes of the shares that containers have by resource claims, by bundle and device."""
        state, context = self._state, self._context
        if not any(device.memory for claim in state.claims.value for device in claim.devices):
            context.fault(_FAULT, "")
            return {}
        of_pods, why = await run_detached(pod_claims, context.config)
        named = await context.kubelet.claims(context.options.pod_resources)
        is_known = of_pods is not None or named is not None
        line = "" if is_known else f"which pods have shares of GPUs is not known: {why}"
        context.fault(_FAULT, line)
        return share_limits(state.ledger.value.containers, state.claims.value, of_pods, named)

    async def _judge(
        self, sample: Sample, own: dict[str, Limit], shares: Mapping[str, Mapping[str, int]]
    ) -> None:
        uses = await usage_by(self._context, sample)
        over: dict[_Which, Hit] = {}
        for each in excesses(
            sample, uses, self._state.ledger.value, self._limit, own, shares=shares
        ):
            container = each.container
            which = (container.bundle, container.pid, each.device)
            before = self._over.get(which)
            if before is None:
                over[which] = each.hit(time.time())
                self._say(each, "told")
            elif self._kills and container.pid:
                over[which] = await self._kill(each, before)
            else:
                over[which] = before
        self._post(over)

    async def _kill(self, excess: Excess, told: Hit) -> Hit:
        if told.fault.name.endswith(_KILLED):
            return told  # it has not ended yet
        # It has to be written before the end that it is the cause of.
        hit = excess.hit(time.time(), _KILLED)
        self._post({**self._over, _which(excess): hit})
        await anyio.sleep(_TO_WRITE)
        try:
            await _end(excess.container)
        except ContainerNotKilled as error:
            line = str(error)
            if line != self._failed:
                self._context.say("error", line)
            self._failed = line
            return told
        self._say(excess, "killed")
        return hit

    def _post(self, over: dict[_Which, Hit]) -> None:
        self._over = over
        self._state.memory_excesses.publisher(ServiceName.MEMORY_GUARD).publish(over)

    def _say(self, excess: Excess, what: str) -> None:
        self._context.say(
            "warning",
            "a container uses more GPU memory than it may",
            container=printable(excess.container.title),
            device=excess.device,
            used=gibibytes(excess.used),
            limit=gibibytes(excess.limit),
            done=what,
        )


async def _end(container: Container) -> None:
    """Have its shim kill all processes of a container, which tells of the exit.

    Raises:
        ContainerNotKilled: the shim cannot be asked, or does not do it.
    """
    asked = f"to end the container {container.title}"
    if not container.address:
        raise ContainerNotKilled(asked, found="the address of its shim is not known")
    try:
        await kill(container, signal.SIGKILL, timeout=_TO_END)
    except (NvshimError, OSError) as error:
        raise ContainerNotKilled(asked, found=str(error) or "no answer") from error


def _which(excess: Excess) -> _Which:
    return excess.container.bundle, excess.container.pid, excess.device


def _annotation(container: Container) -> str:
    """A pod's own limit, as its author has written it; "" for none."""
    try:
        annotations = container.spec().get("annotations")
    except BundleUnusable:
        return ""
    text = annotations.get(ANNOTATION) if isinstance(annotations, dict) else None
    return text[:_LONGEST] if isinstance(text, str) else ""
