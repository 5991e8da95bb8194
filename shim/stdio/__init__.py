"""A process's stdin, stdout and stderr: where they come from and who holds which end.

containerd names each of the three by a URI (:mod:`shim.stdio.uris`): a fifo that a client of
containerd reads or writes, a file to append to, a program that takes the output (a logger), or
nothing, which is /dev/null. :func:`open_stdio` opens them; :class:`~shim.stdio.stdio.Stdio` says
what can be asked of them then.

========  =======================  =======================================================
stdout    of                       what the process gets
========  =======================  =======================================================
fifo      init                     the fifo itself: no byte passes through this process
fifo      an exec                  a pipe, which is passed on (:mod:`shim.stdio.relay`)
file      both                     a pipe, which a child writes to it (:mod:`shim.stdio.files`)
logger    both                     a pipe, which the logger reads (:mod:`shim.stdio.logger`)
any       one with a terminal      the terminal, whose master is passed on
========  =======================  =======================================================

Rules
- An exec may leave a daemon behind that holds its output open for ever; only what we hold can
  be closed when it is deleted, and its client waits for that end. Hence the pipe.
- A file is never handed over: through /proc/self/fd a hostile image would truncate it, or
  change its mode. Nor does the shim open one: a stuck file system must not hold up the pod.
- The shim keeps a *read* end of whatever takes output, so that a container is never killed by
  SIGPIPE while containerd, or a logger, is away. What is written meanwhile waits in the pipe,
  and then the writer waits: nothing is dropped.
- The shim keeps a *write* end of stdin: a client that goes away is not the end of input, and
  another may attach. Only CloseIO drops it, and what is in the fifo then still arrives.
- No open of a fifo may block: a read end is opened first (non-blocking), which lets the write
  end be opened at once, and the other way round.
- An exit is published at once, whatever is unread. Only a client that is reading has a moment for
  the rest: containerd before 1.6.22 forgets what it has not read by then. Otherwise the shim holds
  it, with an open end, for a client that comes later.
- Delete waits until what was written has been taken, but not for ever.

Source: containerd docs/runtime-v2.md (I/O), core/runtime/v2/logging; fifo(7), pipe(7).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from shim.stdio import ends
from shim.stdio.ends import Opening
from shim.stdio.files import open_input_file, open_log_file
from shim.stdio.logger import start_logger
from shim.stdio.stdio import ChildStdio, PlainStdio, Stdio
from shim.stdio.streams import FifoOutput, Input, Output
from shim.stdio.terminal import TerminalStdio
from shim.stdio.uris import Fifo, LogFile, LoggerUri, parse_outputs, parse_stdin

if TYPE_CHECKING:
    from shim.context import ShimContext
    from shim.stdio.uris import Places, StdioUris

__all__ = ["ChildStdio", "Stdio", "open_stdio"]


class Named(Protocol):
    """A process whose stdio containerd has named."""

    exec_id: str
    uris: StdioUris

    @property
    def id(self) -> str:
        """The exec's id, or the container's for init."""


async def open_stdio(
    shim: ShimContext, process: Named, *, bundle: str, owner: tuple[int, int] = (0, 0)
) -> Stdio:
    """Open the stdio of a process that is about to be made.

    Args:
        shim: where output is passed on, and who reaps what takes it.
        process: whose stdio; it says where that is.
        bundle: the container's bundle; a terminal's socket is made there.
        owner: the uid and gid that own what the process gets (options IoUid, IoGid).

    Returns:
        The open stdio. A logger that it names runs and is ready.

    Raises:
        StdioUnavailable: a fifo or file cannot be opened.
        StdioTimeout: the file system of a file does not answer.
        StdioUnsupported: a scheme that this shim does not serve, or not there.
        InvalidLogUri, LoggerNotAllowed, LoggerFailed, LoggerNotReady: about a logger.
        ConfigError: the configuration, which says what loggers are allowed, is unusable.
    """
    uris = process.uris
    stdin = parse_stdin(uris.stdin)
    places = parse_outputs(uris.stdout, uris.stderr, terminal=uris.terminal)
    source: Input | None = None
    outputs: dict[int, Output] = {}
    try:
        if stdin is not None:
            source = await _open_input(shim, stdin)
        await _open_outputs(shim, process, places, bundle, outputs)
        if uris.terminal:
            if 1 not in outputs:
                # A process must not hang for want of a reader of its terminal.
                outputs[1] = Output(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
            return TerminalStdio(shim.tasks, source, outputs[1], bundle)
        return PlainStdio(shim.tasks, source, outputs, owner)
    except BaseException:
        if source is not None:
            source.close()
        for output in outputs.values():
            output.discard()
        raise


async def _open_outputs(
    shim: ShimContext, process: Named, places: Places, bundle: str, outputs: dict[int, Output]
) -> None:
    """Open stdout and stderr, by descriptor; the same one twice if they are one."""
    relayed = bool(process.exec_id) and not process.uris.terminal
    stdout, stderr = places
    if isinstance(stdout, LoggerUri):
        outputs[1], second = await start_logger(shim, stdout, process.id, bundle)
        if stderr == stdout:
            outputs[2] = second
        else:
            second.close()
    elif stdout is not None:
        outputs[1] = await _open_output(shim, stdout, relayed=relayed)
        if stderr == stdout:
            outputs[2] = outputs[1]
    if isinstance(stderr, Fifo | LogFile) and stderr != stdout:
        outputs[2] = await _open_output(shim, stderr, relayed=relayed)


async def _open_input(shim: ShimContext, place: Fifo) -> Input:
    with Opening("stdin", place.path):
        if ends.is_fifo(place.path):
            reading, writing = ends.open_fifo(place.path)
            return Input(reading, writing=writing)
    return await open_input_file(shim, place.path)


async def _open_output(shim: ShimContext, place: Fifo | LogFile, *, relayed: bool) -> Output:
    if isinstance(place, LogFile):
        return await open_log_file(shim, place.path)
    with Opening("stdout or stderr", place.path):
        if ends.is_fifo(place.path):
            return FifoOutput(place.path, relayed=relayed)
    return await open_log_file(shim, place.path, make=False)
