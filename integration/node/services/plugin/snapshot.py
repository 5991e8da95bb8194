"""The snapshot: everything that an answer to the kubelet needs, as one immutable value. Pure.

Rules
- :mod:`integration.node.services.plugin.service` replaces it as a whole, once its parts are
  consistent: a resource is included only when its CDI specs are written.
- Reasons for a refusal that may arise at any moment are not included: which devices exist, are
  claimed, are drained, or have no MPS daemon. :mod:`integration.node.services.plugin.answers` reads
  these when it answers.
- Until the engine has reported its capabilities, and while it restarts, containers also receive
  their devices in the way that needs no support from the engine (:mod:`integration.node.delivery`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hooks.node.inventory import Inventory
from integration.agent_errors import ChannelsMissing
from integration.node.delivery import DeliveryMode, delivery_mode
from integration.node.services.plugin.allocation import (
    cdi_name,
    refuse_channels,
    required_channel_names,
)
from integration.node.services.plugin.cdi import Specs
from integration.node.services.plugin.engine_watch import EngineAnswer
from integration.node.services.plugin.resources import unhealthy
from integration.node.values.resources import CDI, Resource, Settings
from integration.nvml.topology import Topology


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that the plugins serve."""

    version: int = -1  # of the inputs that it comes from
    settings: Settings | None = None  # as configured; None until they are read
    inventory: Inventory | None = None
    resources: tuple[Resource, ...] = ()  # with the health of their devices
    specs: Specs = Specs()  # noqa: RUF009 - it is immutable
    channels: tuple[int, ...] = ()  # the IMEX channels that the node has
    topology: Topology = Topology()  # noqa: RUF009 - the same
    engine: EngineAnswer | None = None  # None until it was asked

    # derived from the others
    by_name: Mapping[str, Resource] = field(init=False, repr=False, compare=False)
    mode: DeliveryMode = field(init=False, repr=False, compare=False)
    # the settings with the strategies in effect, and with those that need no engine
    in_effect: Settings = field(init=False, repr=False, compare=False)
    cautious: Settings = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive what every answer uses, once."""
        settings = self.settings or Settings()
        mode = delivery_mode(settings, None if self.engine is None else self.engine.engine)
        strategies = delivery_mode(settings, None).strategies
        derived = {
            "by_name": {each.name: each for each in self.resources},
            "mode": mode,
            "in_effect": replace(settings, device_list_strategies=mode.strategies),
            "cautious": replace(settings, device_list_strategies=strategies),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def uses_specs(self) -> bool:
        """Whether containers receive their devices by CDI names."""
        return self.settings is not None and not CDI.isdisjoint(
            self.settings.device_list_strategies
        )

    @property
    def channels_fault(self) -> str:
        """Why no container can start: a required IMEX channel is missing; "" if none is."""
        try:
            if self.settings is not None:
                refuse_channels(self.settings, self.channels)
        except ChannelsMissing as error:
            return str(error)
        return ""

    @property
    def offered(self) -> tuple[Resource, ...]:
        """The resources for the kubelet: devices that Allocate would refuse are unhealthy."""
        if self.channels_fault:
            return unhealthy(self.resources)
        return tuple(map(self._described, self.resources)) if self.uses_specs else self.resources

    def _described(self, resource: Resource) -> Resource:
        """Return a resource in which the devices that no spec contains are unhealthy.

        If a required IMEX channel is in no spec, all of them are unhealthy.
        """
        if not self.specs.devices.issuperset(required_channel_names(self.in_effect)):
            return unhealthy((resource,))[0]
        devices = {each.uuid: each for each in resource.devices}  # of many shares, one each
        names = {uuid: cdi_name(each, self.in_effect) for uuid, each in devices.items()}
        described = {uuid for uuid, name in names.items() if name in self.specs.devices}
        if len(described) == len(names):
            return resource
        return unhealthy((resource,), but=described)[0]
