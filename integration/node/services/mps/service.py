"""MPS: run the control daemons that resources and claims need.

Rules
- It goes by the resources that the device plugin tells of, and by what claims ask for. Before the
  one has told any, and for what is of claims the other, and while NVML does not answer, nothing is
  started and nothing is stopped.
- A daemon of a driver that is gone, or was replaced, is drained: it keeps the driver's old files
  open, and the kernel module.
- While NVML is paused, daemons are drained as well: they use the GPUs, too.
- What a predecessor has left below ``mpsRoot`` is taken over, or taken away.
- The shared memory is there as long as there is a daemon.
- The directories of a claim's daemon are removed with it: each claim has others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from api.errors import NvshimError
from hooks.node.inventory import Inventory
from integration.agent_errors import MpsProgramMissing
from integration.node.mps.claim_daemons import is_of_claim, is_of_claims, plan_of_claim
from integration.node.mps.clients import MpsDaemon
from integration.node.mps.paths import Places, places_in, shm
from integration.node.mps.plan import Plan, Programs, plan_of, programs_of
from integration.node.service import Context, settings_of
from integration.node.services.mps import compute_modes as modes
from integration.node.services.mps import host_setup
from integration.node.services.mps.daemon_supervisor import Keeper
from integration.node.state.topic import call_on_change
from integration.node.values.resources import MPS, Settings
from integration.node.values.service_name import ServiceName

if TYPE_CHECKING:
    from anyio.abc import TaskGroup


__all__ = ["run"]


async def run(context: Context) -> None:
    """Keep the control daemons; see :mod:`integration.node.service`."""
    await _Mps(context).run()


class _Mps:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = context.state
        self._daemons = context.state.mps_daemons.publisher(ServiceName.MPS)
        self._keepers: dict[Places, Keeper] = {}
        self._impossible: dict[str, str] = {}
        # The directories that were looked through for what a predecessor has left; each for what
        # is of claims (True), and for what is not.
        self._roots: set[tuple[str, bool]] = set()
        self._leaving = False

    async def run(self) -> None:
        state = self._state
        try:
            async with anyio.create_task_group() as tasks:
                await call_on_change(
                    partial(self._look, tasks),
                    state.node, state.settings, state.resources, state.claim_daemons,
                    state.nvml_pause,
                    at_once=True,
                )  # fmt: skip
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for keeper in self._keepers.values():
                        tasks.start_soon(keeper.leave)
                await to_thread.run_sync(self._leave_ground)
                self._daemons.publish({})

    def _look(self, tasks: TaskGroup) -> None:
        """Go by what is known now."""
        settings, inventory = settings_of(self._context), self._state.node.value.inventory
        doubtful = (
            inventory is not None and inventory.nvml_failure and not self._state.nvml_pause.value
        )
        if settings is None or doubtful or self._leaving:
            return
        plans = self._plans(settings)
        left = self._left(settings.mps_root)
        programs = self._programs()
        for places in dict.fromkeys((*left, *plans)):
            if places not in self._keepers:
                self._begin(places, tasks)
        for places, keeper in self._keepers.items():
            keeper.want(plans.get(places), programs)
        self._post()

    def _left(self, root: str) -> list[Places]:
        """What a predecessor has left, once it is known whether it is wanted; each root's once."""
        known = {(root, False)}
        if not self._context.options.dra or self._state.claim_daemons.value is not None:
            known.add((root, True))
        new = known - self._roots
        self._roots |= new
        found = places_in(root) if new else ()
        return [each for each in found if (root, is_of_claims(each.resource)) in new]

    def _plans(self, settings: Settings) -> dict[Places, Plan]:
        inventory = self._state.node.value.inventory
        plans: dict[Places, Plan] = {}
        impossible = {}
        for name, plan_for in self._wanted(inventory):
            try:
                places = Places(settings.mps_root, name)
                plan = plan_for()
                if plan.devices:  # not all of them are lost
                    plans[places] = plan
            except NvshimError as error:
                impossible[name] = str(error)
        for name, line in impossible.items():
            if line != self._impossible.get(name):
                self._context.say("error", line, part="mps")
        self._impossible = impossible
        return plans

    def _wanted(self, inventory: Inventory | None) -> Iterator[tuple[str, Callable[[], Plan]]]:
        """What each daemon that is wanted is called, and what makes its plan."""
        if self._state.nvml_pause.value or inventory is None:
            return
        for resource in self._state.resources.value:
            if resource.sharing == MPS and resource.devices:
                yield resource.name, partial(plan_of, resource, inventory)
        for name, daemon in (self._state.claim_daemons.value or {}).items():
            yield name, partial(plan_of_claim, name, daemon, inventory)

    def _programs(self) -> Programs | None:
        inventory = self._state.node.value.inventory
        with suppress(MpsProgramMissing):
            return None if inventory is None else programs_of(inventory.driver)
        return None

    def _begin(self, places: Places, tasks: TaskGroup) -> None:
        keeper = Keeper(places, self._context, self._in_use, self._post, self._holder)
        self._keepers[places] = keeper

        async def keep() -> None:
            await keeper.run()
            if self._has_ended(places.resource):
                await to_thread.run_sync(self._remove, places)
            del self._keepers[places]
            if not self._keepers:
                self._leaving = True  # nobody is to begin on what is just taken away
                try:
                    await to_thread.run_sync(self._leave_ground)
                finally:
                    self._leaving = False
            self._post()
            self._look(tasks)  # it may be wanted again
            for each in self._keepers.values():
                if each.says.unready:  # perhaps for the sake of that one
                    each.try_again()

        tasks.start_soon(keep)

    def _has_ended(self, name: str) -> bool:
        """Whether a daemon is of a claim that is no more, and not only without devices for now."""
        wanted = self._state.claim_daemons.value
        return is_of_claim(name) and wanted is not None and name not in wanted

    def _remove(self, places: Places) -> None:
        try:
            host_setup.remove(places)
        except OSError as error:
            path = error.filename or places.directory
            self._context.say("warning", f"{path}: {error.strerror}", part="mps")

    def _in_use(self) -> frozenset[str]:
        plans = (keeper.plan for keeper in self._keepers.values())
        return frozenset(uuid for plan in plans if plan is not None for uuid in plan.devices)

    def _holder(self, keeper: Keeper, uuids: Iterable[str]) -> str:
        """Which other resource's daemon has one of some GPUs; called in threads."""
        wanted = set(uuids)
        for other in tuple(self._keepers.values()):
            if other is not keeper and not wanted.isdisjoint(modes.taken(other.places)):
                return other.places.resource
        return ""

    def _post(self) -> None:
        says = {
            name: MpsDaemon(name, (), unready=line, has_failed=True)
            for name, line in self._impossible.items()
        }
        says |= {each.places.resource: each.says for each in self._keepers.values()}
        self._daemons.publish(says)
        faults = (*self._impossible.values(), *(each.fault for each in self._keepers.values()))
        line = "; ".join(fault for fault in faults if fault)
        self._state.faults.report("mps", line)

    def _leave_ground(self) -> None:
        """Take away what all daemons stand on, if there is none left."""
        host_setup.take_cgroups()
        for root in {root for root, _ in self._roots}:
            if next(places_in(root), None) is not None or host_setup.is_anothers(root):
                continue
            try:
                host_setup.take_shm(root)
            except OSError as error:
                path = error.filename or shm(root)
                self._context.say("warning", f"{path}: {error.strerror}", part="mps")
