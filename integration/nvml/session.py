"""Long-lived children of the agent that talk to NVML: start, ask, read and stop them.

Rules
- If the driver hangs, no signal reaches its child. The child is abandoned after a second, counted,
  and reaped if it ever exits. If there are :data:`_MOST_ABANDONED` such children, no other is
  started: a driver that hangs for days must not fill the node with processes.
- A child dies with the agent, or with the fork server, which dies with the agent
  (:mod:`integration.nvml.process`). PR_SET_PDEATHSIG watches the *thread* that started the child,
  so start children on the event loop's thread, which is the main one. A child has two pipes and the
  lock of NVML, and nothing else of the agent's.
- While a child runs, the kernel module is in use: it cannot be removed, no GPU can be reset, and
  MIG mode cannot be switched. So children are killed at once, without waiting for NVML, when the
  agent exits, or the driver or the GPUs change.
- A child's answer is one JSON object per line, of limited length. A longer line is a failure.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import anyio

from hooks.node.nvml import library_path
from integration.nvml.errors import ChildFailed
from integration.nvml.process import TO_DIE, NvmlClosed, Process, child_command, start
from integration.nvml.snapshot import NodeSnapshot

CRASHED: Final = "NVML crashed"
"""How the reason starts if a signal has ended the child."""

_CLOSED: Final = "a GPU is being reset, or its MIG mode switched: it is asked again soon"
_LONGEST: Final = 4 << 20
_CHUNK: Final = 1 << 16

# Children that may be stuck in the driver.
_MOST_ABANDONED: Final = 8


def library_of(seen: NodeSnapshot) -> str:
    """Return the path of the NVML library to ask.

    It is "" without a driver, with a driver that has no NVML (Tegra), or without a GPU.
    """
    inventory = seen.inventory
    if inventory is None or not inventory.gpus:
        return ""
    path = library_path(inventory.driver)
    return path if os.path.isabs(path) else ""


def identity_of(seen: NodeSnapshot) -> tuple[object, ...]:
    """Return what a child depends on: when it changes, start another child."""
    gpus = seen.inventory.gpus if seen.inventory is not None else ()
    return seen.driver, library_of(seen), seen.gpus, *(gpu.lost for gpu in gpus)


def uuids_of(seen: NodeSnapshot) -> dict[int, str]:
    """Return the known UUIDs of the node's GPUs by NVML's indices."""
    gpus = seen.inventory.gpus if seen.inventory is not None else ()
    return {gpu.index: gpu.uuid for gpu in gpus if gpu.uuid}


class Children:
    """Starts and ends children, and counts those that cannot be killed.

    Args:
        say: logs a line.
        state: the directory ``state`` of the configuration.
    """

    def __init__(self, say: Callable[..., None], state: str) -> None:
        self._say, self._state = say, state
        self._abandoned: list[Process] = []

    @property
    def abandoned(self) -> int:
        """The number of children that could not be killed, because the driver holds them."""
        self._abandoned = [each for each in self._abandoned if each.poll() is None]
        return len(self._abandoned)

    def start(self, task: str, library: str) -> Child:
        """Start a child.

        Args:
            task: :data:`.child.EVENTS` or :data:`.child.SAMPLES`.
            library: the path of NVML's library.

        Raises:
            ChildFailed: it cannot be started, too many others cannot be killed, or NVML has to stay
                closed for now.
        """
        asked = f"{task} of NVML"
        if (held := self.abandoned) >= _MOST_ABANDONED:
            raise ChildFailed(
                asked,
                found=f"the driver holds {held} earlier processes, so no other is started",
                do="check the kernel's log; the node may need a reboot",
            )
        try:
            return _start(task, library, self._state)
        except NvmlClosed:
            raise ChildFailed(asked, found=_CLOSED) from None
        except OSError as error:
            found = f"no process can be started: {error.strerror or error}"
            raise ChildFailed(asked, found=found) from error

    async def end(self, child: Child) -> None:
        """Kill a child, and abandon it if it does not die. It cannot be used afterwards."""
        with anyio.CancelScope(shield=True):
            process = child.process
            process.kill()
            child.close()
            if not await _ends(process):
                self._abandoned.append(process)
                self._say(
                    "error", "a child that asked NVML cannot be killed: the driver holds it",
                    pid=process.pid, left_alone=self.abandoned,
                )  # fmt: skip


def _start(task: str, library: str, state: str) -> Child:
    """Start a child with two pipes.

    Raises:
        NvmlClosed: NVML has to stay closed for now.
        OSError: the child cannot be started.
    """
    (stdin, to), (from_, stdout) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    try:
        command = child_command(task, library, ends_with_us=True)
        process = start(command, stdin=stdin, stdout=stdout, state=state, patience=0)
        return Child(task, process, to, from_)
    except BaseException:
        os.close(to)
        os.close(from_)
        raise
    finally:
        os.close(stdin)
        os.close(stdout)


async def _ends(process: Process) -> bool:
    """Wait for a process that was killed, or has closed its pipes; return whether it has ended."""
    with anyio.move_on_after(TO_DIE):
        while process.poll() is None:
            await anyio.wait_readable(process)
    return process.poll() is not None


class Child:
    """A long-lived child, and its two pipes.

    Args:
        to: the write end of a pipe; the child owns it from now on, and ``from_``.
    """

    def __init__(self, task: str, process: Process, to: int, from_: int) -> None:
        self.process: Final = process
        self._task = task
        self._to, self._from = os.fdopen(to, "wb", buffering=0), os.fdopen(from_, "rb", buffering=0)
        self._received = bytearray()
        os.set_blocking(to, False)
        os.set_blocking(from_, False)

    def ask(self, question: Mapping[Any, Any]) -> None:
        """Send a line. If the child has ended, :meth:`answer` reports that.

        Args:
            question: a JSON object that fits into a pipe.
        """
        with suppress(BrokenPipeError):
            self._to.write(json.dumps(question).encode() + b"\n")

    async def answer(self, seconds: float) -> dict[str, Any]:
        """Return the child's next line.

        Args:
            seconds: the time limit.

        Raises:
            ChildFailed: no line came in time, none will come, or the line is an error from NVML.
        """
        with anyio.move_on_after(seconds) as limit:
            while b"\n" not in self._received:
                await anyio.wait_readable(self._from)
                await self._receive()
        # After the machine has slept, the time may be up although the line has arrived.
        if limit.cancelled_caught:
            await self._receive()
        line, end, rest = self._received.partition(b"\n")
        if not end:
            raise self._failed(f"nothing within {seconds:g} s: NVML hangs")
        self._received = rest
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def close(self) -> None:
        """Close its pipes."""
        self._to.close()
        self._from.close()

    async def _receive(self) -> None:
        """Read what the child has written.

        Raises:
            ChildFailed: it will write nothing more, or has written too much.
        """
        try:
            chunk = os.read(self._from.fileno(), _CHUNK)
        except BlockingIOError:
            return
        self._received += chunk
        if not chunk:
            raise self._failed(await self._how_it_ended())
        if len(self._received) > _LONGEST:
            raise self._failed("a line without an end")

    async def _how_it_ended(self) -> str:
        # The kernel closes its pipes before it can be waited for.
        await _ends(self.process)
        status = self.process.poll()
        if status is None:
            return "it has hung up"
        if status < 0:
            return f"{CRASHED}: {signal.Signals(-status).name}"
        return f"it ended with {status}"

    def _failed(self, found: str) -> ChildFailed:
        return ChildFailed(f"{self._task} of NVML", found=found)
