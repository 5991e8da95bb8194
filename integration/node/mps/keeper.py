"""Keeps the control daemon of one resource as it is wanted, until it is not wanted any more.

::

    wanted ──▶ find ──┬─ nobody ───────────▶ start ─┐
                      ├─ as wanted ─────────────────┼─▶ limits ──▶ ready ──▶ it ends, or is to be
                      ├─ has other GPUs ───▶ drain  │              another ──▶ find
                      └─ dead, its servers live: wait for their clients
    not wanted ──▶ drain ──▶ compute modes, sockets

Rules
- To drain is to tell the daemon to quit: it takes no new clients and waits for those that it has.
  It is ended only if it does not do so although it has no clients, or does not say, and no
  container has its pipes, of whatever engine. Nor is one that is wanted, and silent, before.
- When the agent ends, its daemons go only if no container has their pipes and they have no
  clients. Those that stay are found by the next agent.
- A daemon that is not as wanted serves nobody new: what is said of it says why.
- What fails is tried again, after a while that grows.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import anyio.lowlevel
from anyio import to_thread

from api.errors import NvshimError
from integration.node.mps import ground
from integration.node.mps.control import TIMEOUT
from integration.node.mps.daemon import Daemon
from integration.node.mps.errors import MpsDaemonFailed
from integration.node.mps.users import users_of
from integration.node.mps.values import MpsDaemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from integration.node.mps.daemon import Found
    from integration.node.mps.places import Places
    from integration.node.mps.plan import Plan, Programs
    from integration.node.parts import Context

__all__ = ["Keeper"]

T = TypeVar("T")

_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
_AGAIN: Final = 20.0
"""Seconds between two requests to quit."""
_LOG_LOOK: Final = 900.0
_MOST_SILENT: Final = 2
_TO_LEAVE: Final = 12.0
_TO_END: Final = 1.0
_POLL: Final = 0.05


class Keeper:
    """The keeper of one resource's daemon.

    Args:
        places: of the resource.
        context: the part's.
        spared: tells the GPUs whose compute mode is to stay, when that of this resource's goes.
        posted: called when :attr:`says` or :attr:`fault` has changed.
        holder: tells which other resource's daemon has one of some GPUs; "" for none.

    Attributes:
        places: of the resource.
        says: what the board is told.
        fault: what is wrong, one line; "" if nothing is.
    """

    def __init__(
        self,
        places: Places,
        context: Context,
        spared: Callable[[], frozenset[str]],
        posted: Callable[[], None],
        holder: Callable[[Keeper, Iterable[str]], str],
    ) -> None:
        self.places = places
        self.says = MpsDaemon(
            places.resource, (), unready="its MPS control daemon is not started yet"
        )
        self.fault = ""
        self._context = context
        self._spared = spared
        self._posted = posted
        self._holder = holder
        self._daemon = Daemon(context.config, places)
        self._plan: Plan | None = None
        self._programs: Programs | None = None
        self._news = anyio.Event()
        self._silent = 0
        self._ending = threading.Event()

    @property
    def plan(self) -> Plan | None:
        """What is wanted."""
        return self._plan

    def want(self, plan: Plan | None, programs: Programs | None) -> None:
        """Say what the daemon is to be like.

        Args:
            plan: None if there is to be none.
            programs: the driver's, to speak to one that is there; None if it has none.
        """
        self._programs = programs or self._programs
        if plan != self._plan:
            self._plan = plan
            self._news.set()

    def try_again(self) -> None:
        """Wait no longer to do again what has failed."""
        self._news.set()

    async def run(self) -> None:
        """Keep it so; ends when none is wanted, and there is none any more."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell_of_end)
            await self._keep()
            tasks.cancel_scope.cancel()

    async def _tell_of_end(self) -> None:
        """Tell the thread that starts a daemon when this is cancelled."""
        try:
            await anyio.sleep_forever()
        finally:
            self._ending.set()

    async def _keep(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            self._news = anyio.Event()
            plan = self._plan
            begun = anyio.current_time()
            try:
                if plan is not None:
                    await self._serve(plan)
                elif await self._retire():
                    return
            except NvshimError as error:
                if self._ending.is_set():
                    await anyio.lowlevel.checkpoint()  # it is cancelled
                if anyio.current_time() - begun > _LONGEST_PAUSE:
                    pause = _FIRST_PAUSE
                self._post(unready=error.found, pid=0)
                self._say_fault(str(error), again_in=pause)
                with anyio.move_on_after(pause):
                    await self._news.wait()
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def leave(self) -> None:
        """Let go of the daemon, since the agent ends: it goes too, if nobody may need it."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_TO_LEAVE):
            try:
                await self._leave()
            except NvshimError as error:
                self._context.say("warning", str(error), part="mps")

    # -- one that is wanted -----------------------------------------------------------------------

    async def _serve(self, plan: Plan) -> None:
        """Have it, until it is to be another.

        Raises:
            NvshimError: it cannot be had, or has ended.
        """
        found = await self._living()
        if found is not None and not _serves(found, plan):
            await self._drain(found)
            found = await self._living()
        if found is None:
            await self._see_gpus_free(plan)
            pid = await _aside(lambda: self._daemon.start(plan, self._ending))
            self._context.say("info", "MPS control daemon started", resource=plan.resource, pid=pid)
        else:
            pid = found.pid
            await self._adopt(found, plan)
        devices = plan.devices if found is None else found.devices
        await _aside(lambda: self._daemon.configure(plan, devices))
        self._post(unready="", pid=pid, devices=plan.devices)
        self._say_fault("")
        how = await self._until_ended(pid)
        if how:
            self._post(unready=how, pid=0, restarts=self.says.restarts + 1)
            raise self._failed(how, f"see {self.places.log_file}; it is started again")

    async def _see_gpus_free(self, plan: Plan) -> None:
        """Two daemons on one GPU keep each other's servers from it.

        Raises:
            NvshimError: another resource's daemon has one still.
        """
        # Before the other is waited for, which may wait for this one.
        await _aside(lambda: self._daemon.give_back(plan.others))
        if holder := await _aside(lambda: self._holder(self, plan.devices)):
            raise self._failed(
                f"its GPUs are still those of {holder}",
                "it begins when that one's clients have ended",
            )

    async def _living(self) -> Found | None:
        """The daemon that lives, if there is one.

        Raises:
            NvshimError: one has died, and its servers may have clients; or it is not known.
        """
        found = await _aside(self._daemon.find)
        if found is None or found.pid:
            return found
        servers = await _aside(self._daemon.holders)
        users = await _aside(self._users)
        if users:
            raise self._failed(
                f"it has died, and its servers ({', '.join(map(str, servers))}) may have clients "
                f"in {', '.join(users)}",
                "end those containers: there can be no new daemon before",
            )
        for pid in servers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with anyio.move_on_after(TIMEOUT):
            while found is not None:
                await anyio.sleep(_POLL)
                found = await _aside(self._daemon.find)
        if found is not None:
            raise self._failed("servers of one that has died do not end", "reboot the node")
        return None

    async def _adopt(self, found: Found, plan: Plan) -> None:
        """See that one that lives answers. One that never does is ended, and started anew."""
        config = self._context.config
        await _aside(lambda: ground.lay(self.places, config.sys))
        try:
            await _aside(self._daemon.control(plan.programs).percentage)
        except MpsDaemonFailed as error:
            self._silent += 1
            if self._silent >= _MOST_SILENT:
                if users := await _aside(self._users):
                    raise self._failed(
                        f"it does not answer, and may have clients in {', '.join(users)}",
                        "end those containers: it is not ended before",
                    ) from error
                self._silent = 0
                await _aside(lambda: self._daemon.kill(found.pid))
            raise
        self._silent = 0
        await _aside(lambda: ground.note_devices(self.places, plan.devices))
        await _aside(
            lambda: ground.set_compute_mode(config, ground.EXCLUSIVE_PROCESS, plan.devices)
        )
        if found.pid != self.says.pid:
            self._context.say(
                "info", "MPS control daemon found", resource=plan.resource, pid=found.pid
            )

    async def _until_ended(self, pid: int) -> str:
        """How it ended; "" if it has not, and is to be another."""
        ended = ""

        async def watch() -> None:
            nonlocal ended
            ended = await self._end_of(pid)
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await self._news.wait()
            tasks.cancel_scope.cancel()
        return ended

    async def _end_of(self, pid: int, timeout: float = math.inf) -> str:
        """Wait until a daemon has ended; how it did, or "" if the time is up."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return await _aside(lambda: self._daemon.ended(pid)) or "it ended"
        try:
            with anyio.move_on_after(timeout):
                # One whose number was given to another in between is noticed here.
                while not (how := await _aside(lambda: self._daemon.ended(pid))):
                    self._daemon.trim_log()
                    with anyio.move_on_after(_LOG_LOOK):
                        await anyio.wait_readable(fd)
                return how
        finally:
            os.close(fd)
        return ""

    # -- one that is not --------------------------------------------------------------------------

    async def _retire(self) -> bool:
        """See that there is none, and that nothing is left of it; whether that is so."""
        # Once more after the daemon: it may have left servers.
        while (found := await self._living()) is not None:
            await self._drain(found)
        if self._plan is not None:
            return False
        await _aside(lambda: self._daemon.take_away(self._spared()))
        self._say_fault("")
        return True

    async def _drain(self, found: Found) -> None:
        """Let a daemon end as soon as it has no clients."""
        self._context.say(
            "info", "MPS control daemon is to quit", resource=self.places.resource, pid=found.pid
        )
        self._post(unready="its MPS control daemon is to quit", pid=found.pid)
        # Asked before, for one that quits answers nobody.
        try:
            clients = await self._clients()
        except MpsDaemonFailed:
            clients = ()
        while not await self._quit(found.pid, patient=bool(clients)):
            users = ", ".join(await _aside(self._users)) or "no container that is known"
            line = f"its MPS control daemon quits as soon as its clients have ended: {users}"
            self._post(unready=line, pid=found.pid)
            self._say_fault(f"{self.places.resource}: {line}")
            if await self._end_of(found.pid, _AGAIN):
                break
        self._say_fault("")

    async def _quit(self, pid: int, *, patient: bool = False) -> bool:
        """Tell it to quit; whether it has ended within the time of an answer.

        Args:
            pid: of it.
            patient: it is not ended even if no container has its pipes: it has had clients.
        """
        programs = self._programs
        with suppress(MpsDaemonFailed):  # the program is no more, with the driver
            if programs is not None:
                await _aside(self._daemon.control(programs).quit)
        if await self._end_of(pid, _TO_END):
            return True
        if patient or bool(await _aside(self._users)):
            return False
        await _aside(lambda: self._daemon.kill(pid))
        return bool(await self._end_of(pid, _TO_END))

    async def _clients(self) -> tuple[int, ...]:
        """The processes that use the daemon, by what that says.

        Raises:
            MpsDaemonFailed: it does not say.
        """
        programs = self._programs
        return await _aside(self._daemon.control(programs).clients) if programs else ()

    def _users(self) -> tuple[str, ...]:
        return users_of(self.places, self._context.options.states)

    # -- the agent ends ---------------------------------------------------------------------------

    async def _leave(self) -> None:
        found = await self._living()
        users = await _aside(self._users)
        clients = () if found is None else await self._clients()
        if users or clients or (found is not None and not await self._quit(found.pid)):
            # Also without a daemon: they have the shared memory, which the next one has to have.
            self._context.say(
                "info",
                "MPS stays for its clients",
                resource=self.places.resource,
                pid=0 if found is None else found.pid,
                containers=", ".join(users),
            )
            return
        if await self._living() is None:  # nor are its servers
            await _aside(lambda: self._daemon.take_away(frozenset()))

    # -- what is said -----------------------------------------------------------------------------

    def _failed(self, found: str, do: str) -> MpsDaemonFailed:
        return MpsDaemonFailed(
            f"the MPS control daemon of {self.places.resource}", found=found, do=do
        )

    def _post(
        self,
        *,
        unready: str,
        pid: int,
        devices: tuple[str, ...] = (),
        restarts: int | None = None,
    ) -> None:
        count = self.says.restarts if restarts is None else restarts
        says = MpsDaemon(self.places.resource, devices, unready, pid, count)
        if says != self.says:
            self.says = says
            self._posted()

    def _say_fault(self, line: str, **fields: float) -> None:
        if line == self.fault:
            return
        if line:
            self._context.say("warning", line, part="mps", **fields)
        else:
            self._context.say("info", "over", part="mps", fault=self.fault)
        self.fault = line
        self._posted()


def _serves(found: Found, plan: Plan) -> bool:
    """Whether it does what is wanted and has nobody else's GPU; one that is lost may stay."""
    return (
        found.driver == plan.driver
        and set(plan.devices) <= set(found.devices)
        and plan.others.isdisjoint(found.devices)
    )


async def _aside(work: Callable[[], T]) -> T:
    """Do what blocks for a while in a thread; it is waited for, also if this is cancelled."""
    return await to_thread.run_sync(work)
