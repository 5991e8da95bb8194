"""Order the requests to one container, and the exits of its processes.

containerd sends requests for a container concurrently. Each request that changes the container is
an operation. It waits only for earlier operations, so no two wait for each other.

Rules for operations
- ``AFTER`` lists the earlier operations that each operation waits for. It overtakes all others.
  Operations on execs wait for each other only if they concern the same exec.
- Kill waits for nothing. SIGKILL cancels a Create, or the Start of an exec, that is running or
  queued; Delete also cancels a Create. Both then wait until the Create is undone, for ``LATE``
  seconds.
- ``EVER``: wait until the other operation has ended. Each of these always ends: Pause, Resume,
  Update and Delete call the runtime with a timeout, and a Start that hangs ends when the container
  is killed.
- ``BRIEFLY``: wait at most ``LATE`` seconds, for all of them together. Operations that are still
  running then are in ``overdue``, and this one continues without them or is refused.

Rules for exits
- The start of a process is published before its exit, even if it died before Start returned.
- The exits of execs are published before init's, after which containerd tears the task down. Once
  init has been reaped, no new exec starts; if the container shares a pid namespace, its remaining
  processes are killed first.
- The exit of init is not in the queue. It waits for operations whose event must come first: at most
  ``LATE`` seconds, then their runtime calls are killed, and ``LATE`` seconds more. It does not wait
  for Kill, Delete, Pause, Resume or Update.
- A checkpoint that should end init is published before the exit, if it completes in time.
- Errors of stdio must not delay an exit.
- The exit of a container with GPUs waits until its cause is recorded, at most a second
  (:mod:`shim.pod.causes`).
- An out-of-memory event is published immediately, but after the start of init and before the exit
  that it caused.

What can hang in an operation, and what ends it::

    Create      mount(2)          a thread, 30 s; a Kill or Delete (shim.pod.creation)
                a worker          60 s; a Kill or Delete
                the runtime       a Kill or Delete
    Start       the runtime       the exit of init, 5 s later: a Kill
    of an exec  the runtime       a Kill of the exec, or of the container as above
    restore     CRIU              a Kill
    Checkpoint  CRIU              the exit of init, at once or 5 s later
    Kill        the runtime       15 s, then the shim signals by itself
    Pause, Resume, Update         30 s, then the runtime is killed
    Delete      the runtime       30 s, then the runtime is killed
                umount(2)         a thread, 10 s (shim.pod.creation)
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Final, Self

from api.proto import events_pb2
from shim import loop
from shim.cgroup import oom
from shim.cgroup.oom import OomWatch
from shim.children import Exit
from shim.context import ShimContext
from shim.pod.causes import Ending, exit_with_cause, remember_end
from shim.pod.creation import Resources
from shim.pod.process import Process, State
from shim.runtime.runtime import POINTLESS

# Seconds.
LATE: Final = 5.0

_KILLED: Final = 128 + signal.SIGKILL


class Kind(Enum):
    """The operations on a container."""

    CREATE = auto()
    START = auto()
    EXEC = auto()
    START_EXEC = auto()
    DELETE_EXEC = auto()
    KILL = auto()
    PAUSE = auto()
    RESUME = auto()
    UPDATE = auto()
    CHECKPOINT = auto()
    DELETE = auto()


class Wait(Enum):
    """How long an operation waits for an earlier one."""

    EVER = auto()
    BRIEFLY = auto()


AFTER: Final[dict[Kind, dict[Kind, Wait]]] = {
    Kind.CREATE: {},
    Kind.START: {Kind.START: Wait.EVER, Kind.DELETE: Wait.EVER},
    # The program may run, and a client may request an exec, before the runtime returns from start.
    Kind.EXEC: {Kind.START: Wait.EVER},
    Kind.START_EXEC: {Kind.START_EXEC: Wait.EVER, Kind.DELETE_EXEC: Wait.EVER},
    Kind.DELETE_EXEC: {Kind.START_EXEC: Wait.BRIEFLY, Kind.DELETE_EXEC: Wait.EVER},
    Kind.KILL: {},
    # A runtime frozen in the middle of an exec would not return before Resume.
    Kind.PAUSE: {
        Kind.PAUSE: Wait.EVER, Kind.RESUME: Wait.EVER, Kind.START_EXEC: Wait.BRIEFLY,
    },
    Kind.RESUME: {Kind.PAUSE: Wait.EVER, Kind.RESUME: Wait.EVER},
    # The runtime reads its record, changes the cgroup, and writes its record.
    Kind.UPDATE: {Kind.UPDATE: Wait.EVER},
    Kind.CHECKPOINT: {Kind.CHECKPOINT: Wait.EVER},
    # A client deletes when it learns of the exit, while its Kill's runtime may still run.
    Kind.DELETE: {
        Kind.DELETE: Wait.EVER, Kind.START: Wait.BRIEFLY, Kind.KILL: Wait.BRIEFLY,
        Kind.CHECKPOINT: Wait.BRIEFLY,
    },
}  # fmt: skip


class Operation:
    """One operation, as an asynchronous context: entering it waits for its turn.

    Attributes:
        kind: the kind of operation.
        exec_id: the exec that it concerns; "" for the container.
        overdue: the operations that have not ended after a brief wait.
    """

    __slots__ = ("_ended", "_queue", "exec_id", "kind", "overdue")

    def __init__(self, kind: Kind, exec_id: str, queue: list[Operation]) -> None:
        self.kind = kind
        self.exec_id = exec_id
        self.overdue: Sequence[Kind] = ()
        self._queue = queue
        self._ended: loop.Event | None = None

    async def __aenter__(self) -> Self:
        waits = AFTER[self.kind]
        earlier = [other for other in self._queue if other.kind in waits and self._meets(other)]
        self._queue.append(self)
        if earlier:
            try:
                await wait_for([o for o in earlier if waits[o.kind] is Wait.EVER])
                rest = [o for o in earlier if waits[o.kind] is Wait.BRIEFLY]
                self.overdue = [o.kind for o in await wait_for(rest, within=LATE)]
            except BaseException:
                self._end()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    @property
    def under_way(self) -> bool:
        """Whether the operation is queued or running."""
        return self in self._queue

    async def ended(self) -> None:
        """Return when the operation has ended."""
        if self.under_way:
            if self._ended is None:
                self._ended = loop.Event()
            await self._ended.wait()

    def _meets(self, other: Operation) -> bool:
        return not (self.exec_id and other.exec_id) or self.exec_id == other.exec_id

    def _end(self) -> None:
        self._queue.remove(self)
        if self._ended is not None:
            self._ended.set()


class Operations:
    """The operations on one container that have not ended, in the order of their arrival."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: list[Operation] = []

    def turn(self, kind: Kind, exec_id: str = "") -> Operation:
        """Return an operation; enter it to wait for its turn."""
        return Operation(kind, exec_id, self._queue)

    def has(self, *kinds: Kind, exec_id: str = "") -> bool:
        """Whether an operation of one of these kinds has not ended.

        Args:
            kinds: the kinds.
            exec_id: count only those of this exec.
        """
        return any(o.kind in kinds and exec_id in ("", o.exec_id) for o in self._queue)

    async def ended(self, kind: Kind) -> bool:
        """Wait at most ``LATE`` seconds until all present operations of a kind have ended.

        Returns:
            Whether they have.
        """
        return not await wait_for([o for o in self._queue if o.kind is kind], within=LATE)


async def wait_for(
    operations: Sequence[Operation], *, within: float | None = None
) -> list[Operation]:
    """Wait until operations have ended.

    Args:
        operations: the operations.
        within: the time limit in seconds; None for no limit.

    Returns:
        The operations that have not ended in time.
    """
    left = list(operations)
    with loop.move_on_after(within):
        while left:
            await left[0].ended()
            del left[0]
    return [operation for operation in left if operation.under_way]


class Exits:
    """Publishes the exits of one container's processes.

    Args:
        shim: the state that the shim's containers share.
        resources: the container's resources on the node.
        operations: the container's running operations.
        report: publishes an event of the container with only the named fields.
        init: its init process.
        execs: its execs by id.
        bundle: its bundle.

    Attributes:
        init_reaped: whether init has ended, perhaps before its exit is published.
        by_checkpoint: whether a running checkpoint should end init.
    """

    def __init__(
        self,
        shim: ShimContext,
        resources: Resources,
        operations: Operations,
        *,
        report: Callable[..., None],
        init: Process,
        execs: Mapping[str, Process],
        bundle: str,
    ) -> None:
        self.init_reaped = False
        self.by_checkpoint = False
        self._shim = shim
        self._resources = resources
        self._operations = operations
        self._report = report
        self._init = init
        self._execs = execs
        self._bundle = bundle
        self._oom: OomWatch | None = None
        self._following = False
        self._watching = loop.CancelScope()

    def watch_init(self) -> None:
        """Publish the exit of init when it comes."""
        if self._init.child is not None:
            self._shim.tasks.start_soon(self._publish_exit_of_init)

    def follow_memory(self) -> None:
        """Publish out-of-memory events from now on, once init's start is published."""
        if not self.init_reaped:
            self._following = True
            self._shim.tasks.start_soon(self._follow_memory)

    def watch_exec(self, process: Process) -> None:
        """Publish the exit of an exec when it comes. Call this once its start is published."""
        self._shim.tasks.start_soon(self._publish_exit_of_exec, process)

    async def _publish_exit_of_exec(self, process: Process) -> None:
        if process.child is not None:
            exit_ = await process.child.wait()
            if exit_.status == _KILLED and self._has_run_out_of_memory():
                self._publish_out_of_memory()
        self._publish_exit(process)
        if process.stdio is not None:
            await self.best_effort(process.stdio.let_go())

    async def _publish_exit_of_init(self) -> None:
        self._watch_memory()  # in a task, so that Create has been answered
        out_of_memory = killed = False
        if self._init.child is not None:
            killed = (await self._init.child.wait()).status == _KILLED
            # At once: systemd removes the cgroup when it is empty.
            out_of_memory = self._has_run_out_of_memory(init_killed=killed)
        self._watching.cancel()
        if self._oom is not None and not self._following:
            self._oom.close()
        self.init_reaped = True
        await self._settle(Kind.START)
        if killed and self.by_checkpoint:
            await self._operations.ended(Kind.CHECKPOINT)
        self._resources.runtime.end_calls("checkpoint")
        if out_of_memory:
            self._publish_out_of_memory()
        await self._end_execs()
        ending = None
        if self._resources.has_gpus and not (killed and self.by_checkpoint):
            ending = await self._exit_with_cause(out_of_memory=out_of_memory)
        if self._init.stdio is not None:
            await self.best_effort(self._init.stdio.ended())
        self._publish_exit(self._init, ending.exit if ending else None)
        if ending is not None:
            remember_end(self._shim, self._init.container_id, ending)

    async def _exit_with_cause(self, *, out_of_memory: bool) -> Ending | None:
        child = self._init.child
        if child is None or child.exit is None:
            return None
        return await exit_with_cause(
            self._shim, self._init, self._bundle, child.exit, out_of_memory=out_of_memory
        )

    def _publish_exit(self, process: Process, told: Exit | None = None) -> None:
        """Publish a process' exit, and answer the clients that wait for it."""
        child = process.child
        if child is None or child.exit is None:
            message = "an exit is published after it happened"
            raise AssertionError(message)
        process.finish(told or child.exit)
        self._report(events_pb2.TaskExit, process, id=process.id, pid=child.pid)

    def _publish_out_of_memory(self) -> None:
        self._report(events_pb2.TaskOOM)

    async def _end_execs(self) -> None:
        """Wait until the exits of all running execs are published."""
        shared = not self._resources.own_pid_namespace
        if shared:
            await self._resources.kill_all()
        # Starting execs fail by themselves: the runtime finds no init.
        await self._settle(Kind.START_EXEC)
        running = [p for p in self._execs.values() if p.state is State.RUNNING]
        if running and shared:
            await self._resources.kill_all()  # kill processes that started meanwhile, too
            for process in running:
                if process.child is not None:
                    process.child.kill()  # even without a cgroup
        for process in running:
            await process.wait()

    async def _settle(self, kind: Kind) -> None:
        """Wait until no Start is running; end one that hangs."""
        if not await self._operations.ended(kind):
            self._resources.runtime.end_calls(*POINTLESS)
            await self._operations.ended(kind)

    async def best_effort(self, output: Awaitable[None]) -> None:
        """Errors of output must not delay an exit or a Delete (no descriptor is free)."""
        try:
            await output
        except OSError as error:
            self._shim.log.warning("output may be lost", id=self._init.id, why=str(error))

    # -- memory ------------------------------------------------------------------------------

    def _watch_memory(self) -> None:
        try:
            self._oom = oom.watch(self._resources.cgroup)
        except OSError as error:
            self._shim.log.warning(
                "running out of memory is not reported", id=self._init.id, why=str(error)
            )

    async def _follow_memory(self) -> None:
        if self._oom is not None:
            with self._watching:
                await oom.follow(self._oom, self._publish_out_of_memory)

    def _has_run_out_of_memory(self, *, init_killed: bool = False) -> bool:
        if self._oom is None or self.init_reaped:
            return False
        return self._oom.news(init_killed=init_killed)
