"""MPS: run the control daemons that resources and claims need.

Rules
- The service runs a daemon for each shared resource that the device plugin publishes, and for each
  claim that needs one. It starts and stops nothing while NVML does not answer or the settings are
  unknown. It leaves daemons of claims alone until the DRA service has published its own.
- It drains a daemon whose driver was removed or replaced, because the daemon keeps the old driver's
  files and the kernel module open.
- It drains all daemons while NVML is paused, because they use the GPUs, too.
- It adopts or removes what an earlier agent left below ``mpsRoot``. Until that directory answers,
  it starts no daemon there, and reports why. The same applies while it removes its own files.
- The shared memory exists while a daemon exists.
- The directories of a claim's daemon are removed with it, because each claim has its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

import anyio
from anyio.abc import TaskGroup

from api.errors import NvshimError
from hooks.node.inventory import Inventory
from integration.agent_errors import FilesSilent, MpsProgramMissing
from integration.backoff import Backoff
from integration.node.mps.claim_daemons import is_of_claim, is_of_claims, plan_of_claim
from integration.node.mps.clients import MpsDaemon
from integration.node.mps.paths import Places, places_in, shm
from integration.node.mps.plan import Plan, Programs, plan_of, programs_of
from integration.node.service import Context, settings_of
from integration.node.services.mps import compute_modes as modes
from integration.node.services.mps import host_setup
from integration.node.services.mps.daemon_supervisor import DaemonSupervisor
from integration.node.state.topic import call_on_change
from integration.node.values.resources import MPS, Settings
from integration.node.values.service_name import ServiceName

__all__ = ["run"]


async def run(context: Context) -> None:
    """Run the control daemons until cancelled; see :mod:`integration.node.service`."""
    await _Mps(context).run()


class _Mps:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._state = context.state
        self._daemons = context.state.mps_daemons.publisher(ServiceName.MPS)
        self._supervisors: dict[Places, DaemonSupervisor] = {}
        self._impossible: dict[str, str] = {}
        # The roots that were searched for files of an earlier agent, with separate entries for
        # daemons of claims (True) and of resources (False).
        self._roots: set[tuple[str, bool]] = set()
        # What an earlier agent left below each root; None while that is being searched.
        self._left: dict[str, tuple[Places, ...] | None] = {}
        self._silent = ""  # why the search, or removing files, takes so long
        self._cleaning = False

    async def run(self) -> None:
        state = self._state
        try:
            async with anyio.create_task_group() as tasks:
                await call_on_change(
                    partial(self._apply, tasks),
                    state.node, state.settings, state.resources, state.claim_daemons,
                    state.nvml_pause,
                    at_once=True,
                )  # fmt: skip
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for supervisor in self._supervisors.values():
                        tasks.start_soon(supervisor.release)
                await self._clean()
                self._daemons.publish({})

    def _apply(self, tasks: TaskGroup) -> None:
        """Apply the current state: set the plan of every supervisor."""
        settings, inventory = settings_of(self._context), self._state.node.value.inventory
        doubtful = (
            inventory is not None and inventory.nvml_failure and not self._state.nvml_pause.value
        )
        if settings is None or doubtful or self._cleaning:
            return
        root = settings.mps_root
        if root not in self._left:
            self._left[root] = None
            tasks.start_soon(self._search, root, tasks)
        if (left := self._left[root]) is None:
            self._publish()
            return
        plans = self._plans(settings)
        left_behind = self._left_behind(root, left)
        programs = self._programs()
        for places in dict.fromkeys((*left_behind, *plans)):
            if places not in self._supervisors:
                self._supervise(places, tasks)
        for places, supervisor in self._supervisors.items():
            supervisor.set_plan(plans.get(places), programs)
        self._publish()

    async def _search(self, root: str, tasks: TaskGroup) -> None:
        """Find what an earlier agent left below a root, and apply the state then."""
        asked, backoff = f"to look for MPS daemons below {root}", Backoff()
        while self._left[root] is None:
            try:
                self._left[root] = await self._context.files.run(
                    root, asked, lambda: tuple(places_in(root))
                )
                self._silent = ""
            except FilesSilent as error:
                self._silent = str(error)
                self._publish()
                await anyio.sleep(backoff.pause())
        self._apply(tasks)

    def _left_behind(self, root: str, left: Iterable[Places]) -> list[Places]:
        """Return what an earlier agent left below a root, once, when all plans for it are known."""
        known = {(root, False)}
        if not self._context.options.dra or self._state.claim_daemons.value is not None:
            known.add((root, True))
        new = known - self._roots
        self._roots |= new
        return [each for each in left if (root, is_of_claims(each.resource)) in new]

    def _plans(self, settings: Settings) -> dict[Places, Plan]:
        inventory = self._state.node.value.inventory
        plans: dict[Places, Plan] = {}
        impossible = {}
        for name, plan_for in self._wanted(inventory):
            try:
                places = Places(settings.mps_root, name)
                plan = plan_for()
                if plan.devices:  # empty if all are lost
                    plans[places] = plan
            except NvshimError as error:
                impossible[name] = str(error)
        for name, line in impossible.items():
            if line != self._impossible.get(name):
                self._context.say("error", line, part="mps")
        self._impossible = impossible
        return plans

    def _wanted(self, inventory: Inventory | None) -> Iterator[tuple[str, Callable[[], Plan]]]:
        """Yield the name of each daemon to run, and the function that makes its plan."""
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

    def _supervise(self, places: Places, tasks: TaskGroup) -> None:
        supervisor = DaemonSupervisor(
            places, self._context, self._in_use, self._publish, self._holder
        )
        self._supervisors[places] = supervisor

        async def keep() -> None:
            await supervisor.run()
            if self._has_ended(places.resource):
                asked = f"to remove {places.directory}"
                await self._until_done(
                    partial(self._in_root, places.root, asked, self._remove, places)
                )
            del self._supervisors[places]
            if not self._supervisors:
                self._cleaning = True  # start no daemon while its directories are being removed
                try:
                    await self._until_done(self._clean)
                finally:
                    self._cleaning = False
            self._publish()
            self._apply(tasks)  # a plan may need it again
            for each in self._supervisors.values():
                if each.status.unready:  # it may have waited for that daemon's GPUs
                    each.retry()

        tasks.start_soon(keep)

    def _has_ended(self, name: str) -> bool:
        """Whether the daemon's claim is gone; a claim can also lack devices for a while."""
        wanted = self._state.claim_daemons.value
        return is_of_claim(name) and wanted is not None and name not in wanted

    def _remove(self, places: Places) -> None:
        try:
            host_setup.remove(places)
        except OSError as error:
            path = error.filename or places.directory
            self._context.say("warning", f"{path}: {error.strerror}", part="mps")

    def _in_use(self) -> frozenset[str]:
        """Return the GPUs that some plan has; called in threads."""
        plans = [supervisor.plan for supervisor in tuple(self._supervisors.values())]
        return frozenset(uuid for plan in plans if plan is not None for uuid in plan.devices)

    def _holder(self, supervisor: DaemonSupervisor, uuids: Iterable[str]) -> str:
        """Return the other resource whose daemon holds one of these GPUs; called in threads."""
        wanted = set(uuids)
        for other in tuple(self._supervisors.values()):
            if other is not supervisor and not wanted.isdisjoint(modes.taken(other.places)):
                return other.places.resource
        return ""

    def _publish(self) -> None:
        daemons = {
            name: MpsDaemon(name, (), unready=line, has_failed=True)
            for name, line in self._impossible.items()
        }
        if self._silent:
            daemons |= {
                name: MpsDaemon(name, (), unready=self._silent, has_failed=True)
                for name, _ in self._wanted(self._state.node.value.inventory)
            }
        daemons |= {each.places.resource: each.status for each in self._supervisors.values()}
        self._daemons.publish(daemons)
        faults = (
            self._silent,
            *self._impossible.values(),
            *(each.fault for each in self._supervisors.values()),
        )
        line = "; ".join(fault for fault in faults if fault)
        self._state.faults.report("mps", line)

    async def _until_done(self, remove: Callable[[], Awaitable[str]]) -> None:
        """Remove files, again and again until their directory answers.

        What was given up may take place at any later moment, when a new daemon needs the files.
        """
        backoff = Backoff()
        while line := await remove():
            self._silent = line
            self._publish()
            await anyio.sleep(backoff.pause())
        self._silent = ""

    async def _clean(self) -> str:
        roots = sorted({root for root, _ in self._roots})
        asked = "to remove the shared memory of MPS"
        return await self._in_root(" or ".join(roots), asked, self._clean_host)

    async def _in_root(self, root: str, asked: str, do: Callable[..., None], *args: object) -> str:
        """Call a function as :meth:`.FileCalls.run` does; log and return why it takes too long."""
        try:
            await self._context.files.run(root, asked, do, *args)
        except FilesSilent as error:
            if str(error) != self._silent:
                self._context.say("warning", str(error), part="mps")
            return str(error)
        return ""

    def _clean_host(self) -> None:
        """Remove the cgroups and the shared memory if no daemon is left."""
        host_setup.remove_cgroups()
        for root in {root for root, _ in self._roots}:
            if next(places_in(root), None) is not None or host_setup.is_foreign(root):
                continue
            try:
                host_setup.remove_shm(root)
            except OSError as error:
                path = error.filename or shm(root)
                self._context.say("warning", f"{path}: {error.strerror}", part="mps")
