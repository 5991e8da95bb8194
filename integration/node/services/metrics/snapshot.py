"""A snapshot of the agent's state, from which all metrics of a scrape are computed.

Rules
- The event loop collects all values at once, so that no service publishes anything in between.
- A GPU that NVML knows but the inventory does not has only the label ``uuid``.
- If NVML does not answer, its values of an earlier scrape are not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hooks.node.gpus import Gpu
from integration.node.state.store import State
from integration.nvml.values import GpuSample, Sample

Labels = tuple[str, ...]


@dataclass(frozen=True)
class Snapshot:
    """The agent's state and NVML's answer at the time of a scrape."""

    state: State  # the topics of the agent's services
    boot: float  # when the node booted, in seconds since the epoch
    sample: Sample | None = None  # NVML's answer to this scrape; None without an answer
    waited: float = 0.0  # seconds that the scrape waited for NVML
    services: Labels = ()  # the names of the agent's services
    # values of the agent's own process, by the names of metrics
    process: Mapping[str, float] = field(default_factory=dict)
    earlier: Sample | None = None  # NVML's answer to the previous scrape, for rates

    @property
    def answered(self) -> bool:
        """Whether NVML answered."""
        return self.sample is not None and not self.sample.failure

    @property
    def answering(self) -> tuple[GpuSample, ...]:
        """The GPUs that answered NVML for this scrape."""
        sample = self.sample
        if sample is None or sample.failure:
            return ()
        return tuple(gpu for gpu in sample.gpus if not gpu.lost)

    def at(self, since_boot: float | None) -> float | None:
        """Convert seconds since boot to seconds since the epoch."""
        return None if since_boot is None else round(self.boot + since_boot, 3)

    @cached_property
    def names(self) -> Names:
        """The labels of the devices."""
        return Names(self)


class Attribution(NamedTuple):
    """Labels of pods, and jobs, for dcgm-exporter's series."""

    labels: Labels = ()  # labels of pods, by their names in metrics
    values: Mapping[str, Labels] = {}  # their values in that order, by the pod's UID
    jobs: Mapping[str, Labels] = {}  # jobs of a batch system, by "GPU" or "GPU.INSTANCE"


class Names:
    """The labels of devices, by UUID.

    Attributes:
        known: the inventory's GPUs; a GPU without a UUID has its PCI address as the key.
        gpu: the labels of GPUs.
        mig: the labels of MIG devices, with their profile.
        device: the labels of GPUs and MIG devices, in one form.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.known: dict[str, Gpu] = {}
        self.gpu: dict[str, Labels] = {}
        self.mig: dict[str, Labels] = {}
        inventory = snapshot.state.node.value.inventory
        if inventory is not None:
            self.known = {gpu.uuid or gpu.bus_id: gpu for gpu in inventory.gpus}
            for key, gpu in self.known.items():
                self.gpu[key] = (str(gpu.index), gpu.uuid, gpu.bus_id, gpu.model)
            uuids = {gpu.index: gpu.uuid for gpu in inventory.gpus}
            for each in inventory.mig_devices:
                of = (str(each.gpu), uuids.get(each.gpu, ""), str(each.index), each.uuid)
                self.mig[each.uuid] = (*of, each.profile)
        for sample in snapshot.sample.gpus if snapshot.sample is not None else ():
            self.gpu.setdefault(sample.uuid, ("", sample.uuid, "", ""))
            for part in sample.mig:
                self.mig.setdefault(part.uuid, ("", sample.uuid, "", part.uuid, ""))
        self.device: dict[str, Labels] = {
            **{uuid: labels[:4] for uuid, labels in self.mig.items()},
            **{uuid: (*labels[:2], "", "") for uuid, labels in self.gpu.items()},
        }

    def of(self, uuid: str) -> Labels:
        """Return the labels of a GPU or MIG device, even if it is gone."""
        gone = ("", "", "", uuid) if uuid.startswith("MIG-") else ("", uuid, "", "")
        return self.device.get(uuid, gone)
