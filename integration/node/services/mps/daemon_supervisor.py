"""Supervise the control daemon of one resource, until the plan has none.

The running daemon and the plan decide; each turn checks both again:

========================================  ===============  =====================================
running                                   plan             action
========================================  ===============  =====================================
no daemon                                 a daemon         start it and set its limits
no daemon                                 none             restore compute modes, remove sockets
                                                           and stop supervising
a daemon that fits the plan               a daemon         adopt it and set its limits
any other daemon                          either           drain it
servers of a dead daemon that may have    either           report a fault and wait until the
clients                                                    clients exit
servers of a dead daemon, no clients      either           kill them
========================================  ===============  =====================================

Rules
- To drain a daemon, the agent makes it quit: it accepts no new clients and waits for the present
  ones. The agent kills a draining daemon only if it does not exit, has no clients or does not list
  them, and no container of any engine has its pipes. It kills a wanted daemon that does not answer
  only under the same conditions.
- When the agent stops, it stops a daemon only if the daemon has no clients and no container has its
  pipes. The daemon of a claim keeps running, because the kubelet starts containers of the claim
  without the agent. The next agent finds the daemons that kept running.
- A daemon that does not fit the plan accepts no new containers; its status gives the reason.
- A failed action is tried again, with growing pauses.
- An action whose file system hangs has failed. It continues in its thread, and no other action is
  started before it ends. The next turn then finds what it did, as after a kill of the agent.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import anyio
import anyio.lowlevel

from api.errors import NvshimError
from integration.agent_errors import MpsDaemonFailed
from integration.backoff import Backoff
from integration.detached import SlowCall
from integration.node.file_calls import LONGEST, TO_FINISH
from integration.node.mps.clients import MpsDaemon
from integration.node.mps.paths import Places
from integration.node.mps.plan import Plan, Programs
from integration.node.service import Context
from integration.node.services.mps import compute_modes as modes
from integration.node.services.mps import host_setup
from integration.node.services.mps.daemon import TIMEOUT, Daemon, RunningDaemon
from integration.node.services.mps.pipe_users import users_of
from integration.timeouts import PATIENCE
from integration.watcher import first_of

__all__ = ["DaemonSupervisor"]

T = TypeVar("T")

_QUIT_INTERVAL: Final = 20.0
"""Seconds between two requests to quit."""
_LOG_CHECK: Final = 900.0
_MOST_SILENT: Final = 2
_TO_CALL: Final = 20.0 * PATIENCE
"""Seconds that a blocking call may take: some wait for NVML, or for several answers."""
_TO_START: Final = 10.0
_TO_RELEASE: Final = 12.0
_TO_END: Final = 1.0
_POLL: Final = 0.05


class DaemonSupervisor:
    """The supervisor of one resource's daemon.

    Args:
        in_use: returns the GPUs in any plan, whose compute modes must stay.
        on_change: called when :attr:`status` or :attr:`fault` has changed.
        holder: returns another resource whose daemon holds one of these GPUs; "" for none.

    Attributes:
        places: the paths of the resource.
        plan: the desired daemon; None for no daemon.
        status: the daemon as the agent's state shows it.
        fault: what is wrong, in one line; "" if nothing is wrong.
    """

    def __init__(
        self,
        places: Places,
        context: Context,
        in_use: Callable[[], frozenset[str]],
        on_change: Callable[[], None],
        holder: Callable[[DaemonSupervisor, Iterable[str]], str],
    ) -> None:
        self.places = places
        self.status = MpsDaemon(
            places.resource, (), unready="its MPS control daemon has not started yet"
        )
        self.fault = ""
        self._context = context
        self._in_use = in_use
        self._on_change = on_change
        self._holder = holder
        self._daemon = Daemon(context.config, places)
        self.plan: Plan | None = None
        self._programs: Programs | None = None
        self._news = anyio.Event()
        self._silent = 0
        self._restarts = 0
        self._calls = SlowCall(TO_FINISH)
        self._to_call = _TO_CALL

    def set_plan(self, plan: Plan | None, programs: Programs | None) -> None:
        """Change the plan.

        Args:
            plan: the desired daemon; None for no daemon.
            programs: the driver's programs, used to send commands to a running daemon; None if the
                driver has none.
        """
        self._programs = programs or self._programs
        if plan != self.plan:
            self.plan = plan
            self._news.set()

    def retry(self) -> None:
        """Try a failed action again at once."""
        self._news.set()

    async def run(self) -> None:
        """Follow the plan; return when the plan has no daemon and none is left."""
        backoff = Backoff()
        while True:
            self._news = anyio.Event()
            started = anyio.current_time()
            try:
                if await self._turn(self.plan):
                    return
            except NvshimError as error:
                await anyio.lowlevel.checkpoint()  # report no failure once cancelled
                pause = backoff.pause(anyio.current_time() - started)
                self._report(error.found, fault=str(error), has_failed=True, again_in=pause)
                with anyio.move_on_after(pause):
                    await self._news.wait()

    async def release(self) -> None:
        """Stop the daemon as the agent stops, unless a container may need it."""
        self._to_call = LONGEST
        with anyio.CancelScope(shield=True), anyio.move_on_after(_TO_RELEASE):
            try:
                await self._release()
            except NvshimError as error:
                self._context.say("warning", str(error), part="mps")

    async def _turn(self, plan: Plan | None) -> bool:
        """Take the action of the table above; return whether supervision is over.

        Raises:
            NvshimError: the action failed, or the daemon stopped on its own.
        """
        running = await self._running()
        if running is None and plan is None:
            await self._in_thread(lambda: self._daemon.clean_up(self._in_use()))
            self._report(self.status.unready, fault="")
            return True
        if running is not None and (plan is None or not _fits(running, plan)):
            await self._drain(running)
        elif plan is not None:
            await self._serve(running, plan)
        return False

    # -- a daemon in the plan ---------------------------------------------------------------------

    async def _serve(self, running: RunningDaemon | None, plan: Plan) -> None:
        """Run the daemon until the plan changes.

        Raises:
            NvshimError: it does not start or answer, or it has stopped.
        """
        if running is None:
            pid, devices = await self._start(plan), plan.devices
        else:
            pid, devices = running.pid, running.devices
            await self._adopt(running, plan)
        await self._in_thread(self._daemon.configure, plan, devices)
        self._report("", pid, plan.devices, fault="")
        which, how = await first_of(partial(self._end_of, pid), self._news.wait)
        if not which:
            self._restarts += 1
            raise self._failed(how, f"read {self.places.log_file}; the agent starts it again")

    async def _start(self, plan: Plan) -> int:
        """Start the daemon, and return its pid.

        Raises:
            NvshimError: another resource's daemon still holds a GPU, or the daemon does not start.
                With two daemons on one GPU, neither could start a server there.
        """
        # Restore the modes first: the other daemon may be waiting for GPUs of this one.
        await self._in_thread(modes.give_back, self._context.config, self.places, plan.others)
        if holder := await self._in_thread(self._holder, self, plan.devices):
            raise self._failed(
                f"the daemon of {holder} still holds its GPUs",
                "wait until the clients of that daemon exit; this one starts then",
            )
        pid = await self._in_thread(self._daemon.start, plan)
        try:
            await self._until_it_answers(pid, plan)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._in_thread(self._daemon.kill, pid)
            raise
        self._context.say("info", "MPS control daemon started", resource=plan.resource, pid=pid)
        return pid

    async def _until_it_answers(self, pid: int, plan: Plan) -> None:
        deadline = anyio.current_time() + _TO_START
        while not await self._in_thread(self._daemon.answers, pid, plan):
            if anyio.current_time() > deadline:
                found = f"no answer within {_TO_START:g} s"
                raise self._failed(found, f"read {self.places.log_file}")
            await anyio.sleep(_POLL)

    async def _running(self) -> RunningDaemon | None:
        """Return the running daemon; None for none. Kill the servers of a dead one without clients.

        Raises:
            NvshimError: the daemon has died and its servers may have clients, or the lock file does
                not name its holder.
        """
        running = await self._in_thread(self._daemon.find)
        if running is None or running.pid:
            return running
        servers = await self._in_thread(self._daemon.holders)
        users = await self._in_thread(self._users)
        if users:
            raise self._failed(
                f"it has died, and its servers ({', '.join(map(str, servers))}) may have clients "
                f"in {', '.join(users)}",
                "stop those containers; the agent then starts a new daemon",
            )
        for pid in servers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with anyio.move_on_after(TIMEOUT):
            while running is not None:
                await anyio.sleep(_POLL)
                running = await self._in_thread(self._daemon.find)
        if running is not None:
            raise self._failed("servers of a dead daemon do not exit", "reboot the node")
        return None

    async def _adopt(self, running: RunningDaemon, plan: Plan) -> None:
        """Check that a running daemon answers. Kill it if it repeatedly does not."""
        config = self._context.config
        await self._in_thread(host_setup.prepare, self.places, config.sys)
        try:
            await self._in_thread(self._daemon.percentage, plan.programs)
        except MpsDaemonFailed as error:
            self._silent += 1
            if self._silent >= _MOST_SILENT:
                if users := await self._in_thread(self._users):
                    raise self._failed(
                        f"it does not answer, and may have clients in {', '.join(users)}",
                        "stop those containers; the agent replaces the daemon then",
                    ) from error
                self._silent = 0
                await self._in_thread(self._daemon.kill, running.pid)
            raise
        self._silent = 0
        await self._in_thread(modes.take, config, self.places, plan.gpus)
        if running.pid != self.status.pid:
            self._context.say(
                "info", "MPS control daemon found", resource=plan.resource, pid=running.pid
            )

    async def _end_of(self, pid: int, timeout: float = math.inf) -> str:
        """Wait until a daemon ends; return how it did, or "" after the timeout."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return await self._in_thread(self._daemon.ended, pid) or "it ended"
        try:
            with anyio.move_on_after(timeout):
                # `ended` also notices a pid that now belongs to another process.
                while not (how := await self._in_thread(self._daemon.ended, pid)):
                    await self._in_thread(self._daemon.trim_log)
                    with anyio.move_on_after(_LOG_CHECK):
                        await anyio.wait_readable(fd)
                return how
        finally:
            os.close(fd)
        return ""

    # -- a daemon that is not in the plan ---------------------------------------------------------

    async def _drain(self, running: RunningDaemon) -> None:
        """Make a daemon quit, and wait until it does."""
        self._context.say(
            "info", "draining MPS control daemon", resource=self.places.resource, pid=running.pid
        )
        self._report("its MPS control daemon is draining", running.pid)
        clients: tuple[int, ...] = ()
        with suppress(MpsDaemonFailed):  # query first: a daemon that quits no longer answers
            clients = await self._clients()
        while not await self._quit(running.pid, patient=bool(clients)):
            users = ", ".join(await self._in_thread(self._users)) or "no known container"
            line = f"its MPS control daemon quits when its clients exit: {users}"
            self._report(line, running.pid, fault=f"{self.places.resource}: {line}")
            if await self._end_of(running.pid, _QUIT_INTERVAL):
                break
        self._report("its MPS control daemon is draining", fault="")

    async def _quit(self, pid: int, *, patient: bool = False) -> bool:
        """Make a daemon quit; return whether it exited within the time limit of an answer.

        Args:
            patient: do not kill it even if no container has its pipes, because it had clients.
        """
        with suppress(MpsDaemonFailed):  # the program is gone with the driver
            if self._programs is not None:
                await self._in_thread(self._daemon.quit, self._programs)
        if await self._end_of(pid, _TO_END):
            return True
        if patient or bool(await self._in_thread(self._users)):
            return False
        await self._in_thread(self._daemon.kill, pid)
        return bool(await self._end_of(pid, _TO_END))

    async def _clients(self) -> tuple[int, ...]:
        """Return the processes that use the daemon, as it lists them.

        Raises:
            MpsDaemonFailed: it does not answer.
        """
        if self._programs is None:
            return ()
        return await self._in_thread(self._daemon.clients, self._programs)

    def _users(self) -> tuple[str, ...]:
        return users_of(self.places, self._context.options.states)

    # -- the agent stops --------------------------------------------------------------------------

    async def _release(self) -> None:
        if self.plan is not None and self.plan.stays:
            return
        running = await self._running()
        users = await self._in_thread(self._users)
        clients = () if running is None else await self._clients()
        if users or clients or (running is not None and not await self._quit(running.pid)):
            # Keep the files even without a daemon: users have the shared memory mounted, and the
            # next daemon must use the same one.
            self._context.say(
                "info",
                "MPS stays for its clients",
                resource=self.places.resource,
                pid=0 if running is None else running.pid,
                containers=", ".join(users),
            )
            return
        if await self._running() is None:  # its servers are gone, too
            await self._in_thread(lambda: self._daemon.clean_up(frozenset()))

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Run a blocking function in a thread.

        Raises:
            MpsDaemonFailed: it takes too long, or an earlier one does.
        """
        try:
            return await self._calls.run(partial(work, *args), self._to_call)
        except TimeoutError as error:
            found = f"the file system of {self.places.directory} does not answer"
            raise self._failed(found, "check it; the agent tries again") from error

    # -- the status -------------------------------------------------------------------------------

    def _failed(self, found: str, do: str) -> MpsDaemonFailed:
        return MpsDaemonFailed(
            f"the MPS control daemon of {self.places.resource}", found=found, do=do
        )

    def _report(
        self,
        unready: str,
        pid: int = 0,
        devices: tuple[str, ...] = (),
        *,
        fault: str | None = None,
        has_failed: bool = False,
        **fields: float,
    ) -> None:
        """Update the status and the fault, and log a change of the fault.

        Args:
            unready: a field of :class:`MpsDaemon`, like the arguments after it.
            fault: what is wrong; "" if it is resolved, None to keep the present fault.
            fields: further fields of the log line.
        """
        before, name = (self.status, self.fault), self.places.resource
        self.status = MpsDaemon(name, devices, unready, pid, self._restarts, has_failed)
        if fault is not None and fault != self.fault:
            if fault:
                self._context.say("warning", fault, part="mps", **fields)
            else:
                self._context.say("info", "over", part="mps", fault=self.fault)
            self.fault = fault
        if before != (self.status, self.fault):
            self._on_change()


def _fits(running: RunningDaemon, plan: Plan) -> bool:
    """Whether a daemon has all devices of the plan and no GPU of others; it may have lost GPUs."""
    return (
        running.driver == plan.driver
        and set(plan.devices) <= set(running.devices)
        and plan.others.isdisjoint(running.devices)
    )
