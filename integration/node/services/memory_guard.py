"""The memory guard: enforce GPU memory limits of containers, if any are configured.

::

    [guard] of config.toml, pod annotations, shares ──▶ limits
    NVML's processes, at an interval ──▶ containers over a limit ──▶ state.memory_excesses, the log
                                                            ╰──▶ Kill, with beyond = "kill"

Rules
- The guard acts after the fact: a container can allocate memory between two samples, and refused
  allocations are not visible. MPS and MIG enforce hard limits.
- The guard first reports a container over its limit. If the next sample still shows it over the
  limit, the guard kills it, provided that the configuration says so. It never kills because of a
  sample that failed.
- The container's own shim does the killing. If the shim fails, the guard tries again. Before each
  try it checks that the container still runs, because another one may have its id by now.
- Without a limit the guard does not sample NVML.
- A container cannot set its own share (:mod:`integration.node.faults.shares`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Final, NoReturn

import anyio

from api.errors import NvshimError, printable
from hooks.config import Beyond
from integration.agent_errors import ContainerNotKilled
from integration.containers.bundles import Container, read_container
from integration.containers.procfs import Procfs
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
from integration.node.service import Context
from integration.node.state.store import Unsampled
from integration.node.state.topic import version_of, wait_any
from integration.node.usage import usage_by
from integration.node.values.service_name import ServiceName
from integration.nvml.values import Sample
from shim.errors import BundleUnusable

_FAULT: Final = "memory-guard.shares"

_KILLED: Final = "killed by the memory guard"
_LONGEST: Final = 64  # characters of an annotation; no valid limit is longer
_KILL_TIMEOUT: Final = 10.0  # seconds for the shim's answer
_TO_WRITE: Final = 1.0  # seconds until the causes service has written the fault for the shim

_Which = tuple[str, int, str]
"""A container's bundle and first process, and a device."""


async def run(context: Context) -> None:
    """Watch GPU memory until cancelled."""
    try:
        await _Guard(context).keep()
    finally:
        context.state.memory_excesses.publisher(ServiceName.MEMORY_GUARD).publish({})
        context.state.faults.report(_FAULT, "")


class _Guard:
    """Compares the use of GPU memory with the limits."""

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
            is_needed = bool(state.ledger.value.holdings) and (
                self._limit is not None or own or shares
            )
            if not is_needed or isinstance(state.sampler.value, Unsampled):
                self._publish({})
                await wait_any(*inputs, since=version)
                continue
            sample = await state.sampler.value.sample(max_age=self._interval / 2)
            if not sample.failure:
                await self._judge(sample, own, shares)
            await anyio.sleep(self._interval)

    async def _limits(self, ledger: Ledger) -> dict[str, Limit]:
        """Return the limits of pods' annotations, by bundle; each is read once."""
        containers = {(h.container.bundle, h.container.pid): h.container for h in ledger.holdings}
        self._own = {key: limit for key, limit in self._own.items() if key in containers}
        for key, container in containers.items():
            if key not in self._own:
                text = await run_detached(_annotation, container)
                self._own[key] = limit = parse_limit(text)
                if text and limit is None:
                    self._context.say(
                        "warning", "ignoring an invalid GPU memory limit",
                        container=printable(container.title), annotation=printable(text),
                    )  # fmt: skip
        return {bundle: limit for (bundle, _), limit in self._own.items() if limit is not None}

    async def _shares(self) -> dict[str, dict[str, int]]:
        """Return the bytes of containers' shares by resource claims, by bundle and device."""
        state, context = self._state, self._context
        if not any(device.memory for claim in state.claims.value for device in claim.devices):
            context.fault(_FAULT, "")
            return {}
        of_pods, why = await run_detached(pod_claims, context.config)
        of_containers = await context.kubelet.claims(context.options.pod_resources)
        is_known = of_containers is not None or not why
        if why and of_containers is not None:
            of_pods = None  # entries that are missing from the record must not lift limits
        line = "" if is_known else f"cannot tell which pods have shares of GPUs: {why}"
        context.fault(_FAULT, line)
        return share_limits(
            state.ledger.value.containers, state.claims.value, of_pods, of_containers
        )

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
        self._publish(over)

    async def _kill(self, excess: Excess, reported: Hit) -> Hit:
        if reported.fault.name.endswith(_KILLED):
            return reported  # killed already, but it has not exited yet
        # The fault must be in the container's file before the shim handles the exit.
        hit = excess.hit(time.time(), _KILLED)
        self._publish({**self._over, _which(excess): hit})
        await anyio.sleep(_TO_WRITE)
        if not await run_detached(_runs, excess.container):
            return reported
        try:
            await _kill_container(excess.container)
        except ContainerNotKilled as error:
            line = str(error)
            if line != self._failed:
                self._context.say("error", line)
            self._failed = line
            return reported
        self._say(excess, "killed")
        return hit

    def _publish(self, over: dict[_Which, Hit]) -> None:
        self._over = over
        self._state.memory_excesses.publisher(ServiceName.MEMORY_GUARD).publish(over)

    def _say(self, excess: Excess, what: str) -> None:
        self._context.say(
            "warning",
            "a container exceeds its GPU memory limit",
            container=printable(excess.container.title),
            device=excess.device,
            used=gibibytes(excess.used),
            limit=gibibytes(excess.limit),
            done=what,
        )


def _runs(container: Container) -> bool:
    """Return whether a container still runs, and not another one with its id."""
    there = read_container(container.bundle, Procfs())
    return there is not None and there.pid == container.pid


async def _kill_container(container: Container) -> None:
    """Ask the container's shim to kill all its processes; the shim then reports the exit.

    Raises:
        ContainerNotKilled: the shim is unreachable, or the call fails.
    """
    asked = f"to kill the container {container.title}"
    if not container.address:
        raise ContainerNotKilled(asked, found="the address of its shim is unknown")
    # Half a megabyte, which few agents need.
    from integration.containers.shim_client import kill  # noqa: PLC0415

    try:
        await kill(container, signal.SIGKILL, timeout=_KILL_TIMEOUT)
    except (NvshimError, OSError) as error:
        raise ContainerNotKilled(asked, found=str(error) or "no answer") from error


def _which(excess: Excess) -> _Which:
    return excess.container.bundle, excess.container.pid, excess.device


def _annotation(container: Container) -> str:
    """Return the text of the pod's limit annotation; "" for none."""
    try:
        annotations = container.spec().get("annotations")
    except BundleUnusable:
        return ""
    text = annotations.get(ANNOTATION) if isinstance(annotations, dict) else None
    return text[:_LONGEST] if isinstance(text, str) else ""
