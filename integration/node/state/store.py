"""What the parts of the agent tell each other.

Each part posts what it knows, and waits for what it needs of others; no part calls another. So each
can be slow, fail, or be left out. What is posted is immutable, and replaced as a whole.

=============  ==============  ==================================================================
what           posted by       who goes by it
=============  ==============  ==================================================================
seen           the look        all
sample         monitor         health, usage, metrics
sampler        monitor         health, usage, metrics: they ask it for a sample
unwatched      monitor         health, metrics
lost           monitor         health
let_go         monitor         itself, mps: NVML is not to be asked now
nvml_closed    dra             monitor, health: nor is it for a moment; daemons of MPS go on
health         health          plugin, metrics, ``nvshim list``
xids           health          metrics
causes         causes          pod events
exceeded       memory guard    causes: who uses more GPU memory than it may
ledger         ledger          health (who is to blame), metrics
usage          ledger          metrics, ``nvshim top``, the memory guard
settings       plugin          mps, metrics
told           plugin          the status file: how containers are told what they have
resources      plugin          mps, metrics
claimed        dra             plugin: what claims have it does not give
claims         dra             the status file: which claim has what; the memory guard
claim_daemons  dra             mps: the control daemons that claims need
plugin_gave    plugin          dra: likewise
dra            dra             its health streams
mps            mps             plugin: a device whose daemon does not serve is not healthy; metrics
faults         every part      metrics, the status file
wanted         every part      the look: it is to be soon, since the node may have changed
hangups        the agent       the plugin, which reads its settings again
=============  ==============  ==================================================================

What happens, in contrast to what is, is told by :meth:`Board.tell` to all who listen then.
What was done and heard since the agent began is counted in :attr:`Board.counters`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import anyio

from integration.node.holders.energy import Meter
from integration.node.holders.recent_holders import Lately
from integration.node.holders.values import DeviceUse, Ledger
from integration.node.values.counters import Counters
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import GpuEvent, Sample, Sampler, now

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from integration.node.delivery import Told
    from integration.node.device_health.device_state import Condition
    from integration.node.faults.fault_log import Entry
    from integration.node.faults.hits import Hit
    from integration.node.mps.clients import MpsDaemon
    from integration.node.mps.plan import ClaimDaemon
    from integration.node.values.claims import Claim, ClaimDevice, Health
    from integration.node.values.resources import Resource, Settings
    from integration.nvml.values import GpuEvent, Sampler

# Events that one who listens may be behind; more of them are not kept for it.
_BEHIND: Final = 1024


class Unsampled:
    """Nobody asks NVML: the monitor has not begun, or has just failed."""

    async def sample(self, *, max_age: float) -> Sample:
        """See :class:`~integration.nvml.values.Sampler`."""
        del max_age
        return Sample(now(), failure="nobody asks NVML")


class Board:
    """What is known now. For one event loop."""

    def __init__(self) -> None:
        self.seen: NodeSnapshot = NodeSnapshot()
        self.sample: Sample | None = None
        self.sampler: Sampler = Unsampled()
        # Why events of a GPU cannot be had now, by its UUID; "" stands for all of them.
        self.unwatched: Mapping[str, str] = {}
        # Why a GPU does not answer any more, by its UUID.
        self.lost: Mapping[str, str] = {}
        # Whether a GPU is in MIG mode by the word of NVML, by its UUID; nothing where that is not
        # known, or may be another by now.
        self.mig_modes: Mapping[str, bool] = {}
        # Why nobody is to ask NVML now; "" if one may.
        self.let_go: str = ""
        # Likewise, for a moment.
        self.nvml_closed: str = ""
        self.health: Mapping[str, Condition] = {}
        # How often, by UUID of the GPU ("" where it is not known), number, and title of the
        # container that it is attributed to ("" for nobody); since the agent began.
        self.xids: Mapping[tuple[str, int, str], int] = {}
        # What faults each container had to do with, by namespace and id.
        self.causes: Mapping[tuple[str, str], Entry] = {}
        # By bundle, first process and device.
        self.exceeded: Mapping[tuple[str, int, str], Hit] = {}
        self.ledger: Ledger = Ledger()
        self.usage: tuple[DeviceUse, ...] = ()
        # What usage is counted by, so that sums outlive the part that asks.
        self.energy = Meter()
        # Who held and used devices a moment ago, by what was posted of ledger and usage.
        self.lately = Lately()
        self.settings: Settings | None = None
        self.told: Told | None = None
        self.resources: tuple[Resource, ...] = ()
        self.mps: Mapping[str, MpsDaemon] = {}
        # The devices that resource claims have for themselves; None if that is not known.
        self.claimed: tuple[ClaimDevice, ...] | None = None
        self.claims: tuple[Claim, ...] = ()
        # By what they are called; None if that is not known.
        self.claim_daemons: Mapping[str, ClaimDaemon] | None = None
        # When the device plugin has given a device, by its UUID, in seconds of CLOCK_MONOTONIC.
        self.plugin_gave: Mapping[str, float] = {}
        # What the driver of dynamic resource allocation thinks of each of its devices.
        self.dra: tuple[Health, ...] = ()
        self.faults: Mapping[str, str] = {}
        self.counters = Counters()
        self.wanted: int = 0
        self.hangups: int = 0
        self._posted: dict[str, int] = {}
        # Who waits for which of these to change.
        self._waiting: dict[str, set[anyio.Event]] = {}
        self._listening: set[MemoryObjectSendStream[GpuEvent]] = set()

    def post(self, **known: Any) -> None:
        """Put up what is known now, by the names of the table above.

        Args:
            known: the new values. One that equals the old wakes nobody.
        """
        for name, value in known.items():
            before = getattr(self, name)
            setattr(self, name, value)
            if before is not value and before != value:
                self._posted[name] = self._posted.get(name, 0) + 1
                for waiter in self._waiting.pop(name, ()):
                    waiter.set()
        if "ledger" in known:
            self.lately.saw(self.ledger, now())
        if "usage" in known:
            self.lately.used(self.usage, now())

    def fault(self, part: str, line: str) -> None:
        """Say what is wrong with a part of the agent.

        Args:
            part: which ("plugin").
            line: what; "" if nothing is any more.
        """
        if self.faults.get(part, "") == line:
            return
        others = {name: said for name, said in self.faults.items() if name != part}
        self.post(faults={**others, part: line} if line else others)

    @property
    def unasked(self) -> str:
        """Why nobody is to watch GPUs through NVML now; "" if one may."""
        return self.let_go or self.nvml_closed

    @property
    def doubts_mig(self) -> bool:
        """Whether NVML has said of a GPU's MIG mode what the inventory does not."""
        inventory = self.seen.inventory
        gpus = () if inventory is None else inventory.gpus
        return any(self.mig_modes.get(gpu.uuid, gpu.mig) != gpu.mig for gpu in gpus)

    def want_look(self) -> None:
        """Have the node looked at anew, since something of it may have changed."""
        self.post(wanted=self.wanted + 1)

    def version(self, *names: str) -> int:
        """How often any of these has changed, to be given to :meth:`change` later."""
        return sum(self._posted.get(name, 0) for name in names)

    async def change(self, *names: str, since: int, timeout: float = math.inf) -> int:
        """Wait until one of these has changed.

        Args:
            names: of the table above.
            since: what :meth:`version` or this said the last time.
            timeout: seconds to wait at most.

        Returns:
            The version now; the same if the time is up.
        """
        if self.version(*names) == since:
            news = anyio.Event()
            for name in names:
                self._waiting.setdefault(name, set()).add(news)
            try:
                with anyio.move_on_after(timeout):
                    await news.wait()
            finally:
                for name in names:
                    self._waiting.get(name, set()).discard(news)
        return self.version(*names)

    async def follow(
        self, do: Callable[[], object], *names: str, at_once: bool = False
    ) -> NoReturn:
        """Do something whenever one of these has changed, until cancelled.

        Args:
            names: of the table above.
        """
        version = -1 if at_once else self.version(*names)
        while True:
            version = await self.change(*names, since=version)
            do()

    def tell(self, event: GpuEvent) -> None:
        """Tell all who listen that something has happened."""
        self.counters.happened(event)
        for stream in self._listening:
            try:
                stream.send_nowait(event)
            except anyio.WouldBlock:
                continue  # it is told again by the next look at what is

    @contextmanager
    def listen(self) -> Iterator[MemoryObjectReceiveStream[GpuEvent]]:
        """Hear what happens from now on, in order."""
        send, receive = anyio.create_memory_object_stream[Any](_BEHIND)
        self._listening.add(send)
        try:
            yield receive
        finally:
            self._listening.discard(send)
            send.close()
            receive.close()
