"""The agent's children that talk with NVML: starting, hearing and ending them.

Rules
- NVML is never loaded into the agent. A driver that hangs leaves a child that no signal reaches; it
  is left alone after a second, counted, and reaped if it ever ends. With so many of them nobody
  asks any more until one has ended: a driver that hangs for days does not fill the node.
- A child dies with the agent, or with the server that has forked it and does so
  (:mod:`integration.nvml.children`; PR_SET_PDEATHSIG goes by the *thread* that started it: so
  children are started by the event loop's, which is the process's first). It gets no environment,
  no terminal, and nothing of the agent's but two pipes.
- While a child runs, the kernel module is in use: it cannot be removed, a GPU cannot be reset, and
  MIG mode cannot be switched. So children are killed, not asked, when the agent is told to end or
  when the driver or the GPUs change; nobody waits for NVML then.
- So none is started while somebody needs NVML closed, and each shares the lock that keeps others
  waiting who do (:mod:`integration.nvml.lock`), from before it opens NVML.
- What a child says is a line at a time and bounded. One that says more without an end is a failure.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import anyio

from hooks.node.nvml import library_path, modules_directory
from integration.agent_errors import ChildFailed
from integration.nvml import monitor_child as program
from integration.nvml.children import Process, parent, start
from integration.nvml.lock import opening

if TYPE_CHECKING:
    from integration.nvml.snapshot import NodeSnapshot


CRASHED: Final = "NVML crashed"
"""How the reason begins of a child that a signal has ended."""

_CLOSED: Final = "a GPU is being reset, or its MIG mode switched: it is asked again soon"
_LONGEST: Final = 4 << 20
_CHUNK: Final = 1 << 16

# Seconds for a killed child to be gone, and how often one looks.
_TO_DIE: Final = 1.0
_POLL: Final = 0.01

# Children that the driver may hold.
_MOST_ABANDONED: Final = 8


def library_of(seen: NodeSnapshot) -> str:
    """The NVML library that is to be asked.

    Returns:
        Its path; "" if there is no driver, none with NVML (Tegra), or no GPU to ask about.
    """
    inventory = seen.inventory
    if inventory is None or not inventory.gpus:
        return ""
    path = library_path(inventory.driver)
    return path if os.path.isabs(path) else ""


def identity_of(seen: NodeSnapshot) -> tuple[object, ...]:
    """What a child depends on: when it differs, there is to be another one."""
    gpus = seen.inventory.gpus if seen.inventory is not None else ()
    return seen.driver, library_of(seen), seen.gpus, *(gpu.lost for gpu in gpus)


def uuids_of(seen: NodeSnapshot) -> dict[int, str]:
    """The UUIDs of the node's GPUs, as far as they are known, by NVML's numbers."""
    gpus = seen.inventory.gpus if seen.inventory is not None else ()
    return {gpu.index: gpu.uuid for gpu in gpus if gpu.uuid}


class Children:
    """Who starts and ends them.

    Args:
        state: the directory ``state`` of the configuration.
    """

    def __init__(self, say: Callable[..., None], state: str) -> None:
        self._say, self._state = say, state
        self._abandoned: list[Process] = []

    @property
    def abandoned(self) -> int:
        """How many could not be ended: the driver holds them."""
        self._abandoned = [each for each in self._abandoned if each.poll() is None]
        return len(self._abandoned)

    def start(self, what: str, library: str) -> Child:
        """Start one.

        Args:
            what: :data:`.child.EVENTS` or :data:`.child.SAMPLES`.
            library: the path of NVML's.

        Raises:
            ChildFailed: it could not be started, too many cannot be ended, or NVML is not to be
                opened now.
        """
        if (held := self.abandoned) >= _MOST_ABANDONED:
            raise ChildFailed(
                f"{what} of NVML",
                found=f"the driver holds {held} processes that asked before: no other is started",
                do="look at the kernel's log; the node may have to be rebooted",
            )
        with opening(self._state, 0) as lock:
            if lock is None:
                raise ChildFailed(f"{what} of NVML", found=_CLOSED)
            try:
                return _started(what, library, lock)
            except OSError as error:
                raise ChildFailed(
                    f"{what} of NVML", found=f"no process can be started: {error.strerror or error}"
                ) from error

    async def end(self, child: Child) -> None:
        """End one at once, or leave it alone.

        Args:
            child: which. It is not to be used any more.
        """
        with anyio.CancelScope(shield=True):
            process = child.process
            process.kill()
            child.close()
            with anyio.move_on_after(_TO_DIE):
                while process.poll() is None:  # noqa: ASYNC110 - nobody tells of it
                    await anyio.sleep(_POLL)
            if process.poll() is None:
                self._abandoned.append(process)
                self._say(
                    "error", "a child that asked NVML cannot be killed: the driver holds it",
                    pid=process.pid, left_alone=self.abandoned,
                )  # fmt: skip


def _started(what: str, library: str, lock: int) -> Child:
    """One that has been started.

    Raises:
        OSError: it cannot be.
    """
    (stdin, to), (from_, stdout) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    try:
        words = (what, library, modules_directory(), str(parent()))
        command = (sys.executable, "-I", "-S", program.__file__, *words)
        return Child(what, start(command, stdin=stdin, stdout=stdout, lock=lock), to, from_)
    except OSError:
        os.close(to)
        os.close(from_)
        raise
    finally:
        os.close(stdin)
        os.close(stdout)


class Child:
    """One of them.

    Args:
        to: a pipe's end, which is its own from now on, as is ``from_``.
    """

    def __init__(self, what: str, process: Process, to: int, from_: int) -> None:
        self.process: Final = process
        self._what = what
        self._to, self._from = os.fdopen(to, "wb", buffering=0), os.fdopen(from_, "rb", buffering=0)
        self._heard = bytearray()
        os.set_blocking(to, False)
        os.set_blocking(from_, False)

    def ask(self, question: Mapping[Any, Any]) -> None:
        """Send it a line.

        That it has ended is told to whoever waits for its answer.

        Args:
            question: what JSON has; it fits into a pipe.
        """
        with suppress(BrokenPipeError):
            self._to.write(json.dumps(question).encode() + b"\n")

    async def word(self, seconds: float) -> dict[str, Any]:
        """The next that it says.

        Args:
            seconds: that it may take.

        Raises:
            ChildFailed: it said nothing in time, will not any more, or says that NVML failed.
        """
        with anyio.move_on_after(seconds) as limit:
            while b"\n" not in self._heard:
                await anyio.wait_readable(self._from)
                await self._hear()
        # Whoever was asleep itself finds the time up, and the line there.
        if limit.cancelled_caught:
            await self._hear()
        line, end, rest = self._heard.partition(b"\n")
        if not end:
            raise self._failed(f"nothing within {seconds:g} s: NVML hangs")
        self._heard = rest
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise self._failed(said["error"])
        return said

    def close(self) -> None:
        """Let go of its pipes."""
        self._to.close()
        self._from.close()

    async def _hear(self) -> None:
        """Take what it has said.

        Raises:
            ChildFailed: there will be no more of it, or it is too much.
        """
        try:
            said = os.read(self._from.fileno(), _CHUNK)
        except BlockingIOError:
            return
        self._heard += said
        if not said:
            raise self._failed(await self._end())
        if len(self._heard) > _LONGEST:
            raise self._failed("a line without an end")

    async def _end(self) -> str:
        """How it ended, as far as that is known."""
        # The kernel closes its pipes before it can be waited for.
        with anyio.move_on_after(_TO_DIE):
            while self.process.poll() is None:  # noqa: ASYNC110 - nobody tells of it
                await anyio.sleep(_POLL)
        status = self.process.poll()
        if status is None:
            return "it has hung up"
        if status < 0:
            return f"{CRASHED}: {signal.Signals(-status).name}"
        return f"it ended with {status}"

    def _failed(self, found: str) -> ChildFailed:
        return ChildFailed(f"{self._what} of NVML", found=found)
