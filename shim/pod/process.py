"""The processes of a container: its init, and its execs.

A process goes through the states of this table; other transitions cannot happen::

    state    event    next
    CREATED  STARTED  RUNNING
    CREATED  EXITED   STOPPED   it died, or was killed, before Start
    RUNNING  EXITED   STOPPED
    RUNNING  PAUSED   PAUSED    init alone: a whole container is paused
    PAUSED   RESUMED  RUNNING
    PAUSED   EXITED   STOPPED
    CREATED  DELETED  DELETED   an exec that was never started
    STOPPED  DELETED  DELETED

``EXITED`` happens when the exit is *published*, not when the process dies: an exec's exit is
published before init's, and a start before the exit. Until then State returns RUNNING and Wait
waits, so a client that learns of an exit can rely on all earlier events.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Final

from shim import loop
from shim.children import Child, Exit
from shim.errors import NvshimError, WrongProcessState
from shim.stdio import Stdio
from shim.stdio.uris import StdioUris


class State(Enum):
    """The states of a process."""

    CREATED = auto()
    RUNNING = auto()
    PAUSED = auto()
    STOPPED = auto()
    DELETED = auto()


class Event(Enum):
    """The events of a process."""

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


class Process:
    """One process of a container, as containerd sees it.

    Args:
        container_id: its container.
        exec_id: empty for the init process.
        uris: its stdio.

    Attributes:
        state: its current state.
        child: the process itself, once it exists.
        exit: how it ended, once that is published.
        stdio: its open stdio; None before it is opened.
        kills: how often it was killed during its start.
    """

    def __init__(self, container_id: str, exec_id: str, uris: StdioUris) -> None:
        self.container_id = container_id
        self.exec_id = exec_id
        self.uris = uris
        self.state = State.CREATED
        self.child: Child | None = None
        self.exit: Exit | None = None
        self.stdio: Stdio | None = None
        self.kills = 0
        self._settled = loop.Event()
        self._no_exit: NvshimError | None = None
        self._input_ended = False
        self._size: tuple[int, int] | None = None

    @property
    def pid(self) -> int:
        """The pid in the host's pid namespace; 0 before the process exists."""
        return self.child.pid if self.child else 0

    @property
    def id(self) -> str:
        """Its id in events: the exec's, or for init the container's."""
        return self.exec_id or self.container_id

    def advance(self, event: Event) -> None:
        """Change to the next state.

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
        """Answer the clients that wait for the exit, which is published."""
        self.advance(Event.EXITED)
        self.exit = exit_
        self._settled.set()

    def fail_waiters(self, why: NvshimError) -> None:
        """Fail the clients that wait: the process could not start, or is deleted."""
        self._no_exit = why
        self._settled.set()

    def await_exit(self) -> None:
        """Let clients wait for an exit: the process is starting, perhaps again."""
        if self._no_exit is not None:
            self._no_exit = None
            self._settled = loop.Event()

    async def wait(self) -> Exit:
        """Return how the process ended, once the exit is published.

        Raises:
            WrongProcessState: it could not start.
            ProcessNotFound: it was deleted before its start.
        """
        while self.exit is None:
            if self._no_exit is not None:
                raise self._no_exit
            await self._settled.wait()
        return self.exit

    def attach(self, stdio: Stdio) -> None:
        """Set its stdio, and apply earlier requests to it."""
        self.stdio = stdio
        if self._size is not None:
            stdio.resize(*self._size)
        if self._input_ended:
            stdio.close_stdin()

    def resize(self, width: int, height: int) -> None:
        """Set its terminal's size in characters, now or when it opens."""
        self._size = (width, height)
        if self.stdio is not None:
            self.stdio.resize(width, height)

    def close_stdin(self) -> None:
        """Close its input, even before its start."""
        self._input_ended = True
        if self.stdio is not None:
            self.stdio.close_stdin()

    def close_stdio(self) -> None:
        """Release its stdio."""
        if self.stdio is not None:
            self.stdio.close()
            self.stdio = None


def fill_exit(message: Any, process: Process) -> None:
    """Write how a process ended into a message, if its exit is published."""
    if process.exit is not None:
        message.exit_status = process.exit.status
        message.exited_at.FromNanoseconds(process.exit.at)
