"""The processes of a container: its init, and what is executed beside it.

A process goes through the states of this table; what it does not list cannot happen::

    state    event    next
    CREATED  STARTED  RUNNING
    CREATED  EXITED   STOPPED   it died, or was killed, before Start
    RUNNING  EXITED   STOPPED
    RUNNING  PAUSED   PAUSED    init alone: a whole container is paused
    PAUSED   RESUMED  RUNNING
    PAUSED   EXITED   STOPPED
    CREATED  DELETED  DELETED   an exec that was never started
    STOPPED  DELETED  DELETED

``EXITED`` is when the exit is *published*, not when the process died: an exec's exit comes
before init's, and a start before its exit. Until then State says RUNNING and Wait waits, so
whoever is told that a process ended can rely on all that comes before it.
"""

from __future__ import annotations

from enum import Enum, auto

from api import aio
from shim.errors import NvshimError, WrongProcessState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final

    from shim.reaper import Child, Exit
    from shim.stdio.stdio import Stdio


class State(Enum):
    """Where a process is in its life."""

    CREATED = auto()
    RUNNING = auto()
    PAUSED = auto()
    STOPPED = auto()
    DELETED = auto()


class Event(Enum):
    """What can happen to a process."""

    STARTED = auto()
    PAUSED = auto()
    RESUMED = auto()
    EXITED = auto()
    DELETED = auto()


TRANSITIONS: Final = {
    (State.CREATED, Event.STARTED): State.RUNNING,
    (State.CREATED, Event.EXITED): State.STOPPED,
    (State.RUNNING, Event.EXITED): State.STOPPED,
    (State.RUNNING, Event.PAUSED): State.PAUSED,
    (State.PAUSED, Event.RESUMED): State.RUNNING,
    (State.PAUSED, Event.EXITED): State.STOPPED,
    (State.CREATED, Event.DELETED): State.DELETED,
    (State.STOPPED, Event.DELETED): State.DELETED,
}


class Underway:
    """Counts what is under way (as a context), and lets others wait until nothing is."""

    __slots__ = ("_count", "_none")

    def __init__(self) -> None:
        self._count = 0
        self._none = aio.Event()

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()
            self._none = aio.Event()

    async def none(self) -> None:
        """Return when nothing is under way, which may be at once."""
        while self._count:
            await self._none.wait()


class StdioUris:
    """Where a process's stdio is, as containerd named it, and whether it has a terminal."""

    __slots__ = ("stderr", "stdin", "stdout", "terminal")

    def __init__(self, stdin: str, stdout: str, stderr: str, *, terminal: bool) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.terminal = terminal


class Process:
    """One process of a container, as containerd sees it.

    Args:
        container_id: its container.
        exec_id: empty for the init process.
        uris: where its stdio is.

    Attributes:
        state: where it is in its life.
        child: the process itself, once it exists.
        exit: how it ended, once that is published.
        stdio: its open stdio; None before it is opened.
    """

    def __init__(self, container_id: str, exec_id: str, uris: StdioUris) -> None:
        self.container_id = container_id
        self.exec_id = exec_id
        self.uris = uris
        self.state = State.CREATED
        self.child: Child | None = None
        self.exit: Exit | None = None
        self.stdio: Stdio | None = None
        # Held by Start, so that an exit that comes meanwhile is told after the start, and a
        # Delete judges what the start has made of the process.
        self.starting = aio.Lock()
        self._settled = aio.Event()
        self._no_exit: NvshimError | None = None
        self._input_ended = False
        self._size: tuple[int, int] | None = None

    @property
    def pid(self) -> int:
        """The pid in the host's pid namespace; 0 before the process exists."""
        return self.child.pid if self.child else 0

    @property
    def id(self) -> str:
        """What events call it: the exec's id, or the container's for init."""
        return self.exec_id or self.container_id

    def advance(self, event: Event) -> None:
        """Move to the state that follows.

        Raises:
            WrongProcessState: the table has no such transition.
        """
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise WrongProcessState(
                f"{event.name.lower()} for process {self.id}",
                found=f"it is {self.state.name.lower()}",
                do="ask for its state first",
            )
        self.state = following

    def finish(self, exit_: Exit) -> None:
        """Its exit is published: let those who wait know."""
        self.advance(Event.EXITED)
        self.exit = exit_
        self._settled.set()

    def never_ends(self, why: NvshimError) -> None:
        """There will be no exit, as it could not be started or is gone: say so to who waits."""
        if self.exit is None:
            self._no_exit = why
            self._settled.set()

    def begin(self) -> None:
        """It is being started, perhaps again: there may be an exit after all."""
        if self._no_exit is not None:
            self._no_exit = None
            self._settled = aio.Event()

    async def wait(self) -> Exit:
        """How it ended, once that is published.

        Raises:
            WrongProcessState: it could not be started.
            ProcessNotFound: it was deleted before it was started.
        """
        while self.exit is None:
            if self._no_exit is not None:
                raise self._no_exit
            await self._settled.wait()
        return self.exit

    def attach(self, stdio: Stdio) -> None:
        """Give it its stdio, which learns what was asked for before it was there."""
        self.stdio = stdio
        if self._size is not None:
            stdio.resize(*self._size)
        if self._input_ended:
            stdio.close_stdin()

    def resize(self, width: int, height: int) -> None:
        """Set its terminal's size in characters, now or when it has one."""
        self._size = (width, height)
        if self.stdio is not None:
            self.stdio.resize(width, height)

    def close_stdin(self) -> None:
        """No more input will come to it, also if it is not started yet."""
        self._input_ended = True
        if self.stdio is not None:
            self.stdio.close_stdin()

    def close_stdio(self) -> None:
        """Release its stdio."""
        if self.stdio is not None:
            self.stdio.close()
            self.stdio = None
