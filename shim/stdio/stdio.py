"""What can be asked of a process's stdio, whatever it is made of."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Final, Protocol

    from shim.runtime import ChildStdio
else:
    Protocol = object

# The longest that Delete waits for output that was written and not yet taken.
DRAIN_SECONDS: Final = 10.0


class Stdio(Protocol):
    """What a process's stdio can do."""

    def child(self) -> ChildStdio:
        """What the runtime hands to the process."""

    async def started(self) -> None:
        """The process has its descriptors now: let go of ours that were meant for it."""

    def close_stdin(self) -> None:
        """No more input will come (CloseIO)."""

    def resize(self, width: int, height: int) -> None:
        """Tell the terminal its size in characters; nothing without a terminal."""

    async def ended(self) -> None:
        """The process has ended, and is about to be said to have.

        A client that takes its output has a moment for the rest; nobody is waited for who does not.
        What is left is held until somebody comes.
        """

    async def let_go(self) -> None:
        """The process has ended, and may never be deleted: keep open what is still needed alone.

        A client that was cut off does not delete its exec, and nobody else does.
        """

    async def drain(self) -> None:
        """Wait until what the process wrote has been passed on."""

    def close(self) -> None:
        """Release everything. May be called more than once, and in any state."""
