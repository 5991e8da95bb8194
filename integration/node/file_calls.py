"""Read and write files for the services of the agent: a file system that hangs blocks nothing else.

Rules
- Calls about one directory are made one at a time, in the order of the callers.
- A call that takes longer than :data:`LONGEST` is given up: its caller gets an error. It continues
  in its thread, and what it writes may appear at any later moment. So until it has ended, no other
  call about that directory is made, and a write that was given up never replaces a later one.
- A caller cannot know whether a write that was given up took place. It has to treat the file as
  unknown, and write it again later.
- A cancelled call has :data:`TO_FINISH` seconds, so that a restarted service finds it complete.
- Threads are daemon threads, so a call that hangs does not delay the exit of the agent. The kernel
  completes at most the system call in which the thread hangs. This may be after the next agent has
  the node (:mod:`.lock`): the directory then hangs for that agent, too, which writes its files
  again when the directory answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from integration.agent_errors import FilesSilent
from integration.detached import SlowCall
from integration.timeouts import PATIENCE

__all__ = ["LONGEST", "TO_FINISH", "FileCalls"]

T = TypeVar("T")

LONGEST: Final = 5.0 * PATIENCE
"""Seconds that a call may take. The kubelet waits 45 seconds for several of them."""

TO_FINISH: Final = 4.0
"""Seconds that a call may take after a cancellation. A pod has 15 seconds to end."""


class FileCalls:
    """The calls about files, by directory."""

    def __init__(self) -> None:
        self._calls: defaultdict[str, SlowCall] = defaultdict(partial(SlowCall, TO_FINISH))

    async def run(self, directory: str, asked: str, do: Callable[..., T], *arguments: object) -> T:
        """Call a function in a thread.

        Args:
            directory: where the files are that the function reads or writes.
            asked: what the function is for, with the file's name: "to write PATH".
            do: the function.
            arguments: the arguments of ``do``.

        Returns:
            The result of ``do``. An exception in ``do`` is raised here.

        Raises:
            FilesSilent: the function takes too long, or an earlier one about this directory does.
        """
        try:
            return await self._calls[directory].run(partial(do, *arguments), LONGEST)
        except TimeoutError as error:
            raise FilesSilent(
                asked, found=f"the file system of {directory} does not answer"
            ) from error
