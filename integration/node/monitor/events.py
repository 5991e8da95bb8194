"""Keeping the child that waits for NVML's events, and telling what it says.

Rules
- A child that hangs, crashes or fails is ended, and another is begun after a while. Meanwhile all
  GPUs are *unwatched*, and that is logged and posted, with the reason; what happens is then known
  from the kernel's log only. So is a GPU that alone cannot be watched.
- The child waits as long as :data:`BEAT` before it says that it is there; one that is silent for
  longer, by NVML's time-out, hangs.
- A GPU that could not be watched is tried again now and then, by a new child: NVML takes no notice
  of one that was reset. One that was lost is tried as soon as it answers those who sample it.
- A GPU that the child finds lost is posted at once; that it is back, samples prove.
- When the driver or the GPUs change, the child is ended at once and a new one begun with what there
  is then: NVML does not see GPUs that come later, and keeps the kernel module in use.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from integration.node.errors import ChildFailed
from integration.node.monitor import words
from integration.node.monitor.child import EVENTS
from integration.node.monitor.children import identity_of, library_of
from integration.node.monitor.values import GpuEvent
from integration.node.watcher import first_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from integration.node.board import Board
    from integration.node.monitor.children import Child, Children
    from integration.node.refresh import Seen

__all__ = ["BEAT", "Watch", "event_of", "failures_of", "lost_of"]

BEAT: Final = 60.0
"""Seconds after which a child that has nothing to say says so."""

# Seconds until another child is begun: the first time, and at most; and until what could not be
# watched is tried again, the first time.
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 300.0
_RETRY: Final = 60.0

# Seconds besides NVML's time-out: without persistence mode it takes one or two for each GPU to
# begin, and nobody waits for that here.
_TO_BEGIN: Final = 30.0

_LATE: Final = 5.0  # on a busy node

# After so many lines a storm is left to itself for a while: the pipe is full then, and waits.
_BATCH: Final = 256
_PAUSE: Final = 0.1

_FAULT: Final = "monitor.events"
_NO_EVENTS: Final = "of no GPU events can be had"

_GPUS: Final = 256
_KINDS: Final[Mapping[int, str]] = {2: "ecc-double", 8: "xid"}
_XIDS: Final = 100_000
_INSTANCE: Final = 1 << 8  # 0xffffffff says that there is none


class Watch:
    """Who keeps the child.

    Args:
        board: what was seen, and where is posted who is not watched.
        to_answer: seconds that NVML may take.
        beat: seconds of silence.
    """

    def __init__(
        self,
        board: Board,
        children: Children,
        tell: Callable[[GpuEvent], None],
        say: Callable[..., None],
        *,
        to_answer: float,
        beat: float = BEAT,
    ) -> None:
        self._board, self._children, self._tell, self._say = board, children, tell, say
        self._to_answer, self._beat, self._retry = to_answer, beat, _RETRY
        self._said_lost = math.inf  # when the child did so last

    async def keep(self) -> None:
        """Keep a child as long as there is something to watch, until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            version, seen = self._board.version("seen", "let_go"), self._board.seen
            if self._board.let_go or not library_of(seen):
                self._board.post(lost={})
                self._post({"": self._board.let_go} if self._board.let_go else {}, "")
                await self._board.change("seen", "let_go", since=version)
                continue
            begun = time.monotonic()
            try:
                await self._one(seen)
            except ChildFailed as error:
                unwatched = self._board.unwatched
                if not seen.gpus or not unwatched.keys() >= set(seen.gpus):
                    unwatched = {"": error.found}
                self._post(unwatched, str(error))  # what is known of each says more
                if time.monotonic() - begun > _LONGEST_PAUSE:
                    pause = _FIRST_PAUSE
                version = self._board.version("seen", "let_go")
                await self._board.change("seen", "let_go", since=version, timeout=pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                pause = _FIRST_PAUSE

    async def _one(self, seen: Seen) -> None:
        """Hear one child, until there is another driver, or other GPUs, or it is time to try again.

        Raises:
            ChildFailed: there is nothing more to hear from it.
        """
        child = self._children.start(EVENTS, library_of(seen), self._beat)
        self._said_lost = math.inf
        try:
            await first_of(
                partial(self._until_other, seen), self._until_back, partial(self._hear, child, seen)
            )
        finally:
            await self._children.end(child)

    async def _until_other(self, seen: Seen) -> None:
        version = self._board.version("seen", "let_go")
        while not self._board.let_go and identity_of(self._board.seen) == identity_of(seen):
            version = await self._board.change("seen", "let_go", since=version)

    async def _until_back(self) -> None:
        """End it when a GPU that was lost answers others, of which the child takes no notice."""
        version = self._board.version("sample")
        while True:
            sample = self._board.sample
            if sample is not None and sample.when > self._said_lost:
                there = {gpu.uuid for gpu in sample.gpus if not gpu.lost}
                if not there.isdisjoint(self._board.lost):
                    return
            version = await self._board.change("sample", since=version)

    async def _hear(self, child: Child, seen: Seen) -> None:
        patience = self._to_answer + _TO_BEGIN
        begun, count = time.monotonic(), 0
        while not (self._board.unwatched and time.monotonic() - begun > self._retry):
            line = await child.line(patience)
            patience = self._beat + self._to_answer + _LATE
            said = words.parse(line)
            if "lost" in said:
                self._said_lost = _now()
                self._board.post(lost=lost_of(said, seen))
            elif "watching" in said:
                unwatched = failures_of(said, seen)
                in_vain = bool(seen.gpus) and unwatched.keys() >= set(seen.gpus)
                self._post(unwatched, str(_failed(_NO_EVENTS)) if in_vain else "")
            elif "event" in said:
                event = event_of(said["event"], seen, _now())
                if event is not None:
                    self._tell(event)
            elif "beat" not in said:
                raise _failed(words.text(said.get("error")) or "an answer that makes no sense")
            count += 1
            if count % _BATCH == 0:
                await anyio.sleep(_PAUSE)
        self._retry = min(2 * self._retry, _LONGEST_PAUSE)

    def _post(self, unwatched: Mapping[str, str], fault: str) -> None:
        """Say which GPUs are not watched, and log those where that has changed."""
        before = self._board.unwatched
        if not unwatched:
            self._retry = _RETRY
        if unwatched.keys() - before.keys() and not self._board.let_go:
            self._board.want_look()
        if fault and self._board.faults.get(_FAULT) != fault:
            self._say("error", fault)
        self._board.post(unwatched=unwatched)
        self._board.fault(_FAULT, fault)
        for gpu in sorted(before.keys() - unwatched.keys()):
            self._say("info", "events of it are heard again", gpu=gpu or "all")
        for gpu, why in sorted(unwatched.items()):
            if gpu not in before:
                self._say("warning", "its events cannot be heard", gpu=gpu or "all", reason=why)


def failures_of(said: Mapping[str, Any], seen: Seen) -> dict[str, str]:
    """Which of the node's GPUs are not watched, and why.

    Args:
        said: the child's word: who is watched, and who could not be.

    Returns:
        The reason by the GPU's UUID.
    """
    watching = {words.uuid(each, "GPU") for each in words.entries(said.get("watching"), _GPUS)}
    why = _reasons(said.get("failed"), seen)
    return {
        uuid: why.get(uuid) or "NVML does not tell of it"
        for uuid in seen.gpus
        if uuid and uuid not in watching
    }


def lost_of(said: Mapping[str, Any], seen: Seen) -> dict[str, str]:
    """Which of the node's GPUs do not answer any more, and why.

    Returns:
        The reason by the GPU's UUID.
    """
    why = _reasons(said.get("lost"), seen)
    return {uuid: why[uuid] for uuid in seen.gpus if uuid and uuid in why}


def _reasons(said: Any, seen: Seen) -> dict[str, str]:
    """What the child says of single GPUs, by their UUIDs."""
    by_index = {gpu.index: gpu.uuid for gpu in seen.inventory.gpus} if seen.inventory else {}
    why: dict[str, str] = {}
    for each in words.entries(said, _GPUS):
        index, uuid, text = [*words.entries(each, 3), None, None, None][:3]
        # A lost one does not say its name; then its number tells, which is the inventory's too.
        known = words.uuid(uuid, "GPU") or by_index.get(words.number(index, _GPUS), "")
        why[known] = words.text(text)
    return why


def _failed(found: str) -> ChildFailed:
    return ChildFailed("events of NVML", found=found, do="see that nvidia-smi works on the node")


def event_of(said: Any, seen: Seen, when: float) -> GpuEvent | None:
    """The event that the child tells of.

    Args:
        seen: what the node has. An event of another GPU is one that is not known whose it is.
        when: it was heard, in seconds since boot.

    Returns:
        It; None if it makes no sense.
    """
    if not isinstance(said, dict):
        return None
    kind = _KINDS.get(words.number(said.get("type"), max(_KINDS)) or 0)
    xid = words.number(said.get("data"), _XIDS) if kind == "xid" else 0
    if kind is None or xid is None:
        return None
    gpu = words.uuid(said.get("gpu"), "GPU")
    known = not seen.gpus or gpu in seen.gpus
    return GpuEvent(
        when,
        kind,
        gpu if known else "",
        bus_id=_bus_id(gpu, seen),
        xid=xid,
        gpu_instance=words.number(said.get("gi"), _INSTANCE),
        compute_instance=words.number(said.get("ci"), _INSTANCE),
        text="" if known else f"of {gpu or 'a GPU without a name'}, which the node does not have",
    )


def _bus_id(uuid: str, seen: Seen) -> str:
    gpus = seen.inventory.gpus if seen.inventory is not None else ()
    return next((gpu.bus_id for gpu in gpus if gpu.uuid == uuid), "")


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
