"""What the agent knows at one moment, from which every metric is made.

Rules
- All is collected at once, in the event loop, while no service publishes anything.
- A GPU that only NVML knows, and the inventory does not, is called by its UUID alone.
- What NVML said at an earlier scrape is not repeated when it does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hooks.node.gpus import Gpu
    from integration.node.state.store import State
    from integration.nvml.values import GpuSample, Sample

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Moment:
    """What the agent knows at one moment."""

    state: State  # what its services have published
    boot: float  # when the node was booted, in seconds since the epoch
    sample: Sample | None = None  # what NVML said for this scrape; None if it was not asked
    waited: float = 0.0  # seconds until it did
    services: Labels = ()  # the names of the agent's services
    # what is known of the agent's own process, by the names of families
    process: Mapping[str, float] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether NVML did."""
        return self.sample is not None and not self.sample.failure

    @property
    def answering(self) -> tuple[GpuSample, ...]:
        """The GPUs that answered NVML for this scrape."""
        sample = self.sample
        if sample is None or sample.failure:
            return ()
        return tuple(gpu for gpu in sample.gpus if not gpu.lost)

    def at(self, since_boot: float | None) -> float | None:
        """A time in seconds since boot, as seconds since the epoch."""
        return None if since_boot is None else round(self.boot + since_boot, 3)

    @cached_property
    def names(self) -> Names:
        """What devices are called."""
        return Names(self)


class Names:
    """The labels of devices, by their UUIDs.

    Attributes:
        known: the inventory's GPUs; one whose UUID nobody knows goes by its PCI address.
        gpu: the labels of GPUs.
        mig: the labels of MIG devices, with their profile.
        device: the labels of both, in one form.
    """

    def __init__(self, moment: Moment) -> None:
        self.known: dict[str, Gpu] = {}
        self.gpu: dict[str, Labels] = {}
        self.mig: dict[str, Labels] = {}
        inventory = moment.state.node.value.inventory
        if inventory is not None:
            self.known = {gpu.uuid or gpu.bus_id: gpu for gpu in inventory.gpus}
            for key, gpu in self.known.items():
                self.gpu[key] = (str(gpu.index), gpu.uuid, gpu.bus_id, gpu.model)
            uuids = {gpu.index: gpu.uuid for gpu in inventory.gpus}
            for each in inventory.mig_devices:
                of = (str(each.gpu), uuids.get(each.gpu, ""), str(each.index), each.uuid)
                self.mig[each.uuid] = (*of, each.profile)
        for sample in moment.sample.gpus if moment.sample is not None else ():
            self.gpu.setdefault(sample.uuid, ("", sample.uuid, "", ""))
            for part in sample.mig:
                self.mig.setdefault(part.uuid, ("", sample.uuid, "", part.uuid, ""))
        self.device: dict[str, Labels] = {
            **{uuid: labels[:4] for uuid, labels in self.mig.items()},
            **{uuid: (*labels[:2], "", "") for uuid, labels in self.gpu.items()},
        }

    def of(self, uuid: str) -> Labels:
        """The labels of a GPU or MIG device, also of one that is gone."""
        gone = ("", "", "", uuid) if uuid.startswith("MIG-") else ("", uuid, "", "")
        return self.device.get(uuid, gone)
