"""The state that the agent's services share: one typed topic for each value, with one publisher.

No service calls another. Each publishes what it knows and waits for what it needs, so any of them
can be slow, fail, or be left out. :mod:`.topic` explains how topics are read, published and waited
for; docs/architecture.md has the table of topics with publishers and readers, which a test compares
with the code.

Besides the topics the state has objects that every service may change (:attr:`State.faults`,
:attr:`State.look_requested`, :attr:`State.counters`), GPU events (:attr:`State.gpu_events`,
:attr:`State.early_xids`), and two memories that outlive a restarted service
(:attr:`State.energy_meter`, :attr:`State.recent_holders`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from integration.node.delivery import DeliveryMode
from integration.node.device_health.device_state import Condition
from integration.node.faults.fault_log import Entry
from integration.node.faults.hits import Hit
from integration.node.holders.energy import Meter
from integration.node.holders.recent_holders import RecentHolders
from integration.node.holders.values import DeviceUse, Ledger
from integration.node.mps.clients import MpsDaemon
from integration.node.mps.plan import ClaimDaemon
from integration.node.state.broadcast import Broadcast
from integration.node.state.topic import FaultTable, Signal, Topic, Watched
from integration.node.values.claims import Claim, ClaimDevice, Health
from integration.node.values.counters import Counters
from integration.node.values.resources import Resource, Settings
from integration.node.values.service_name import ServiceName
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import GpuEvent, Sample, Sampler, now


class Unsampled:
    """The sampler while no monitor runs: every sample is a failure."""

    async def sample(self, *, max_age: float, profile: bool = False) -> Sample:
        """See :class:`~integration.nvml.values.Sampler`."""
        del max_age, profile
        return Sample(now(), failure="no monitor samples NVML")


class State:
    """The current state. Use it from one event loop only."""

    def __init__(self) -> None:
        # -- not topics: changed by any service, or kept while services restart ----------------
        self.counters = Counters()
        self.energy_meter = Meter()
        self.recent_holders = RecentHolders()
        self.gpu_events: Broadcast[GpuEvent] = Broadcast(on_send=self.counters.add_event)
        # serious Xids, sent before they are complete; the complete ones follow as gpu_events
        self.early_xids: Broadcast[GpuEvent] = Broadcast()
        self.faults = FaultTable("what is wrong with services now, a line each")
        self.look_requested = Signal("the node may have changed, read it again soon")

        # -- the agent -------------------------------------------------------------------------
        self.node: Topic[NodeSnapshot] = Topic(
            NodeSnapshot(), ServiceName.AGENT, "the node's inventory and faults, as last read"
        )
        self.reloads: Topic[int] = Topic(
            0, ServiceName.AGENT, "how often SIGHUP asked to read settings again"
        )
        self.usage: Topic[tuple[DeviceUse, ...]] = Topic(
            (), ServiceName.AGENT,
            "what each container uses of each device, published by `usage_by` with each sample",
            on_publish=lambda usage: self.recent_holders.used(usage, now()),
        )  # fmt: skip

        # -- monitor ---------------------------------------------------------------------------
        self.sampler: Topic[Sampler] = Topic(
            Unsampled(), ServiceName.MONITOR, "answers requests for a sample of NVML"
        )
        self.sample: Topic[Sample | None] = Topic(
            None, ServiceName.MONITOR, "the newest sample of NVML"
        )
        self.cliques: Topic[frozenset[str] | None] = Topic(
            None, ServiceName.MONITOR,
            "the NVLink cliques that GPUs of the node are in; none before the first sample",
        )  # fmt: skip
        self.unwatched: Topic[Mapping[str, str]] = Topic(
            {}, ServiceName.MONITOR,
            "why a GPU's events cannot be received, by UUID (empty string: all GPUs)",
        )  # fmt: skip
        self.lost_gpus: Topic[Mapping[str, str]] = Topic(
            {}, ServiceName.MONITOR, "why a GPU stopped answering, by UUID"
        )
        self.mig_modes: Topic[Mapping[str, bool]] = Topic(
            {}, ServiceName.MONITOR,
            "whether a GPU is in MIG mode, by UUID, as NVML reports it; absent if unknown",
        )  # fmt: skip
        self.nvml_pause: Topic[str] = Topic(
            "", ServiceName.MONITOR, "why NVML is closed for another process; empty if it is not"
        )
        self.resetting_gpus: Topic[frozenset[str]] = Topic(
            frozenset(), ServiceName.MONITOR,
            "the GPUs whose reset or MIG layout has NVML closed, by UUID; empty if none has",
        )  # fmt: skip

        # -- health, causes, memory guard, ledger ----------------------------------------------
        self.health: Topic[Mapping[str, Condition]] = Topic(
            {}, ServiceName.HEALTH, "the condition of each GPU and MIG device, by UUID"
        )
        self.xid_counts: Topic[Mapping[tuple[str, int, str], int]] = Topic(
            {}, ServiceName.HEALTH,
            "Xids since the agent started, by GPU, number and title of the container at fault",
        )  # fmt: skip
        self.causes: Topic[Mapping[tuple[str, str], Entry]] = Topic(
            {}, ServiceName.CAUSES, "the faults each container met, by namespace and id"
        )
        self.memory_excesses: Topic[Mapping[tuple[str, int, str], Hit]] = Topic(
            {}, ServiceName.MEMORY_GUARD,
            "containers over their GPU memory limit, by bundle, first process and device",
        )  # fmt: skip
        self.ledger: Topic[Ledger] = Topic(
            Ledger(), ServiceName.LEDGER, "which container holds which devices",
            on_publish=lambda ledger: self.recent_holders.saw(ledger, now()),
        )  # fmt: skip

        # -- device plugin ---------------------------------------------------------------------
        self.settings: Topic[Settings | None] = Topic(
            None, ServiceName.PLUGIN, "the device plugin's settings; none until they are read"
        )
        self.delivery: Topic[DeliveryMode | None] = Topic(
            None, ServiceName.PLUGIN, "the strategies by which containers learn of their devices"
        )
        self.resources: Topic[tuple[Resource, ...]] = Topic(
            (), ServiceName.PLUGIN, "the resources that the kubelet is offered"
        )
        self.announced: Topic[bool] = Topic(
            False, ServiceName.PLUGIN, "whether a kubelet got a list of devices, or none is due"
        )
        self.plugin_allocations: Topic[Mapping[str, float]] = Topic(
            {}, ServiceName.PLUGIN,
            "when a device was last allocated, by UUID, in seconds of CLOCK_MONOTONIC",
        )  # fmt: skip

        # -- dynamic resource allocation -------------------------------------------------------
        self.claimed_devices: Topic[tuple[ClaimDevice, ...] | None] = Topic(
            None, ServiceName.DRA, "the devices that resource claims hold; none while unknown"
        )
        self.claims: Topic[tuple[Claim, ...]] = Topic(
            (), ServiceName.DRA, "the prepared resource claims with their devices"
        )
        self.claim_daemons: Topic[Mapping[str, ClaimDaemon] | None] = Topic(
            None, ServiceName.DRA, "the MPS daemons that claims need, by name; none while unknown"
        )
        self.dra_health: Topic[tuple[Health, ...]] = Topic(
            (), ServiceName.DRA, "the health of each device, for the kubelet's health streams"
        )
        self.nvml_closed: Topic[str] = Topic(
            "", ServiceName.DRA, "why NVML is closed for a moment (MIG mode is switched)"
        )

        # -- MPS -------------------------------------------------------------------------------
        self.mps_daemons: Topic[Mapping[str, MpsDaemon]] = Topic(
            {}, ServiceName.MPS, "the MPS control daemons and whether they serve, by name"
        )

    @property
    def nvml_inputs(self) -> tuple[Watched, ...]:
        """The topics that say whether NVML can be used, and for which GPUs."""
        return self.node, self.nvml_pause, self.nvml_closed

    @property
    def nvml_unavailable(self) -> str:
        """Why NVML must stay closed now; "" if it may be used."""
        return self.nvml_pause.value or self.nvml_closed.value

    @property
    def mig_modes_differ(self) -> bool:
        """Whether NVML reports another MIG mode for a GPU than the inventory has."""
        inventory = self.node.value.inventory
        gpus = () if inventory is None else inventory.gpus
        modes = self.mig_modes.value
        return any(modes.get(gpu.uuid, gpu.mig) != gpu.mig for gpu in gpus)

    def watched(self) -> Mapping[str, Watched]:
        """Return the topics, the fault table and the signals, by attribute."""
        return {name: each for name, each in vars(self).items() if isinstance(each, Watched)}

    def topics(self) -> Mapping[str, Topic[Any]]:
        """Return the topics, by attribute."""
        return {name: each for name, each in vars(self).items() if isinstance(each, Topic)}

    def check_publishers(self, services: Collection[str]) -> None:
        """Check that each topic has a publisher.

        Args:
            services: the names of the agent's services.

        Raises:
            UnknownPublisherError: a topic's owner is not among them.
        """
        known = {ServiceName.AGENT.value, *services}
        if lost := [name for name, topic in self.topics().items() if topic.owner not in known]:
            raise UnknownPublisherError(f"topics without a publisher: {', '.join(lost)}")


class UnknownPublisherError(TypeError):
    """A topic's owner is not a service of the agent: an error in the code."""
