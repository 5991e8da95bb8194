"""Keeps the control daemon of one resource as it is wanted, until it is not wanted any more.

What is found decides, together with what is wanted, and each turn looks anew:

========================================  ===============  =====================================
found                                     wanted           done
========================================  ===============  =====================================
no daemon                                 a daemon         it is started, and gets its limits
no daemon                                 none             compute modes and sockets are taken
                                                           away, and that is the end
a daemon that serves what is wanted       a daemon         it is adopted, and gets its limits
any other daemon                          either           it is drained
servers of a dead one, maybe with         either           nothing before their clients have
clients                                                    ended, which is a fault
servers of a dead one, without clients    either           they are ended
========================================  ===============  =====================================

Rules
- To drain is to tell the daemon to quit: it takes no new clients and waits for those that it has.
  It is ended only if it does not do so although it has no clients, or does not say, and no
  container has its pipes, of whatever engine. Nor is one that is wanted, and silent, before.
- When the agent ends, its daemons go only if no container has their pipes and they have no
  clients; that of a claim stays, since the kubelet starts containers of it without an agent. Those
  that stay are found by the next agent.
- A daemon that is not as wanted serves nobody new: what is said of it says why.
- What fails is tried again, after a while that grows.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import anyio.lowlevel
from anyio import to_thread

from api.errors import NvshimError
from integration.agent_errors import MpsDaemonFailed
from integration.backoff import Backoff
from integration.node.mps.clients import MpsDaemon
from integration.node.mps.paths import Places
from integration.node.mps.plan import Plan, Programs
from integration.node.services.mps import compute_modes as modes
from integration.node.services.mps import host_setup
from integration.node.services.mps.daemon import TIMEOUT, Daemon, Found
from integration.node.services.mps.pipe_users import users_of
from integration.watcher import first_of

if TYPE_CHECKING:
    from integration.node.service import Context

__all__ = ["Keeper"]

T = TypeVar("T")

_AGAIN: Final = 20.0
"""Seconds between two requests to quit."""
_LOG_LOOK: Final = 900.0
_MOST_SILENT: Final = 2
_TO_START: Final = 10.0
_TO_LEAVE: Final = 12.0
_TO_END: Final = 1.0
_POLL: Final = 0.05


class Keeper:
    """The keeper of one resource's daemon.

    Args:
        spared: tells the GPUs whose compute mode is to stay, when that of this resource's goes.
        posted: called when :attr:`says` or :attr:`fault` has changed.
        holder: tells which other resource's daemon has one of some GPUs; "" for none.

    Attributes:
        places: of the resource.
        plan: what is wanted; None for no daemon.
        says: what the state says of the daemon.
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
        self.plan: Plan | None = None
        self._programs: Programs | None = None
        self._news = anyio.Event()
        self._silent = 0
        self._restarts = 0

    def want(self, plan: Plan | None, programs: Programs | None) -> None:
        """Say what the daemon is to be like.

        Args:
            plan: None if there is to be none.
            programs: the driver's, to speak to one that is there; None if it has none.
        """
        self._programs = programs or self._programs
        if plan != self.plan:
            self.plan = plan
            self._news.set()

    def try_again(self) -> None:
        """Wait no longer to do again what has failed."""
        self._news.set()

    async def run(self) -> None:
        """Keep it so; ends when none is wanted, and there is none any more."""
        backoff = Backoff()
        while True:
            self._news = anyio.Event()
            begun = anyio.current_time()
            try:
                if await self._turn(self.plan):
                    return
            except NvshimError as error:
                await anyio.lowlevel.checkpoint()  # what fails at the agent's end is not said
                pause = backoff.pause(anyio.current_time() - begun)
                self._tell(error.found, fault=str(error), has_failed=True, again_in=pause)
                with anyio.move_on_after(pause):
                    await self._news.wait()

    async def leave(self) -> None:
        """Let go of the daemon, since the agent ends: it goes too, if nobody may need it."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_TO_LEAVE):
            try:
                await self._leave()
            except NvshimError as error:
                self._context.say("warning", str(error), part="mps")

    async def _turn(self, plan: Plan | None) -> bool:
        """Do what the table above says; whether that was the end.

        Raises:
            NvshimError: it cannot be done, or the daemon has ended by itself.
        """
        found = await self._living()
        if found is None and plan is None:
            await _aside(lambda: self._daemon.take_away(self._spared()))
            self._tell(self.says.unready, fault="")
            return True
        if found is not None and (plan is None or not _serves(found, plan)):
            await self._drain(found)
        elif plan is not None:
            await self._serve(found, plan)
        return False

    # -- one that is wanted -----------------------------------------------------------------------

    async def _serve(self, found: Found | None, plan: Plan) -> None:
        """Have it, until it is to be another.

        Raises:
            NvshimError: it cannot be had, or has ended.
        """
        if found is None:
            pid, devices = await self._start(plan), plan.devices
        else:
            pid, devices = found.pid, found.devices
            await self._adopt(found, plan)
        await _aside(self._daemon.configure, plan, devices)
        self._tell("", pid, plan.devices, fault="")
        which, how = await first_of(partial(self._end_of, pid), self._news.wait)
        if not which:
            self._restarts += 1
            raise self._failed(how, f"see {self.places.log_file}; it is started again")

    async def _start(self, plan: Plan) -> int:
        """Start it; its pid. Two daemons on one GPU would keep each other's servers from it.

        Raises:
            NvshimError: another resource's daemon has a GPU still, or it does not start.
        """
        # Before the other is waited for, which may wait for this one.
        await _aside(modes.give_back, self._context.config, self.places, plan.others)
        if holder := await _aside(self._holder, self, plan.devices):
            raise self._failed(
                f"its GPUs are still those of {holder}",
                "it begins when that one's clients have ended",
            )
        pid = await _aside(self._daemon.start, plan)
        try:
            await self._until_it_answers(pid, plan)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _aside(self._daemon.kill, pid)
            raise
        self._context.say("info", "MPS control daemon started", resource=plan.resource, pid=pid)
        return pid

    async def _until_it_answers(self, pid: int, plan: Plan) -> None:
        deadline = anyio.current_time() + _TO_START
        while not await _aside(self._daemon.answers, pid, plan):
            if anyio.current_time() > deadline:
                found = f"no answer within {_TO_START:g} s"
                raise self._failed(found, f"see {self.places.log_file}")
            await anyio.sleep(_POLL)

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
        await _aside(host_setup.lay, self.places, config.sys)
        try:
            await _aside(self._daemon.percentage, plan.programs)
        except MpsDaemonFailed as error:
            self._silent += 1
            if self._silent >= _MOST_SILENT:
                if users := await _aside(self._users):
                    raise self._failed(
                        f"it does not answer, and may have clients in {', '.join(users)}",
                        "end those containers: it is not ended before",
                    ) from error
                self._silent = 0
                await _aside(self._daemon.kill, found.pid)
            raise
        self._silent = 0
        await _aside(modes.take, config, self.places, plan.gpus)
        if found.pid != self.says.pid:
            self._context.say(
                "info", "MPS control daemon found", resource=plan.resource, pid=found.pid
            )

    async def _end_of(self, pid: int, timeout: float = math.inf) -> str:
        """Wait until a daemon has ended; how it did, or "" if the time is up."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return await _aside(self._daemon.ended, pid) or "it ended"
        try:
            with anyio.move_on_after(timeout):
                # One whose number was given to another in between is noticed here.
                while not (how := await _aside(self._daemon.ended, pid)):
                    self._daemon.trim_log()
                    with anyio.move_on_after(_LOG_LOOK):
                        await anyio.wait_readable(fd)
                return how
        finally:
            os.close(fd)
        return ""

    # -- one that is not --------------------------------------------------------------------------

    async def _drain(self, found: Found) -> None:
        """Let a daemon end as soon as it has no clients."""
        self._context.say(
            "info", "MPS control daemon is to quit", resource=self.places.resource, pid=found.pid
        )
        self._tell("its MPS control daemon is to quit", found.pid)
        clients: tuple[int, ...] = ()
        with suppress(MpsDaemonFailed):  # asked before, for one that quits answers nobody
            clients = await self._clients()
        while not await self._quit(found.pid, patient=bool(clients)):
            users = ", ".join(await _aside(self._users)) or "no container that is known"
            line = f"its MPS control daemon quits as soon as its clients have ended: {users}"
            self._tell(line, found.pid, fault=f"{self.places.resource}: {line}")
            if await self._end_of(found.pid, _AGAIN):
                break
        self._tell("its MPS control daemon is to quit", fault="")

    async def _quit(self, pid: int, *, patient: bool = False) -> bool:
        """Tell it to quit; whether it has ended within the time of an answer.

        Args:
            patient: it is not ended even if no container has its pipes: it has had clients.
        """
        with suppress(MpsDaemonFailed):  # the program is no more, with the driver
            if self._programs is not None:
                await _aside(self._daemon.quit, self._programs)
        if await self._end_of(pid, _TO_END):
            return True
        if patient or bool(await _aside(self._users)):
            return False
        await _aside(self._daemon.kill, pid)
        return bool(await self._end_of(pid, _TO_END))

    async def _clients(self) -> tuple[int, ...]:
        """The processes that use the daemon, by what that says.

        Raises:
            MpsDaemonFailed: it does not say.
        """
        if self._programs is None:
            return ()
        return await _aside(self._daemon.clients, self._programs)

    def _users(self) -> tuple[str, ...]:
        return users_of(self.places, self._context.options.states)

    # -- the agent ends ---------------------------------------------------------------------------

    async def _leave(self) -> None:
        if self.plan is not None and self.plan.stays:
            return
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

    def _tell(
        self,
        unready: str,
        pid: int = 0,
        devices: tuple[str, ...] = (),
        *,
        fault: str | None = None,
        has_failed: bool = False,
        **fields: float,
    ) -> None:
        """Have others know how it is.

        Args:
            unready: and so on, as of :class:`MpsDaemon`.
            fault: what is wrong; "" if nothing is any more, None if what was still is.
            fields: more for the log's line.
        """
        before, name = (self.says, self.fault), self.places.resource
        self.says = MpsDaemon(name, devices, unready, pid, self._restarts, has_failed)
        if fault is not None and fault != self.fault:
            if fault:
                self._context.say("warning", fault, part="mps", **fields)
            else:
                self._context.say("info", "over", part="mps", fault=self.fault)
            self.fault = fault
        if before != (self.says, self.fault):
            self._posted()


def _serves(found: Found, plan: Plan) -> bool:
    """Whether it does what is wanted and has nobody else's GPU; one that is lost may stay."""
    return (
        found.driver == plan.driver
        and set(plan.devices) <= set(found.devices)
        and plan.others.isdisjoint(found.devices)
    )


async def _aside(work: Callable[..., T], *args: object) -> T:
    """Do what blocks for a while in a thread; it is waited for, also if this is cancelled."""
    return await to_thread.run_sync(partial(work, *args))
