"""A process's stdin, stdout and stderr: where they come from and who holds which end.

containerd names each of the three by a URI (:mod:`shim.stdio.uris`): a fifo that a client of
containerd reads or writes, a file to append to, a program that takes the output (a logger), or
nothing, which is /dev/null.

========  =======================  =======================================================
stdout    who                      what the process gets
========  =======================  =======================================================
fifo      init                     the fifo itself: no byte passes through this process
fifo      an exec                  a pipe, which is passed on (:mod:`shim.stdio.relay`)
file      both                     a pipe, which is passed on (:mod:`shim.stdio.log_file`)
logger    both                     a pipe, which the logger reads (:mod:`shim.stdio.logger`)
any       whoever has a terminal   the terminal, whose master is passed on
========  =======================  =======================================================

Rules
- An exec may leave a daemon behind that holds its output open for ever; only what we hold can
  be closed when it is deleted, and its client waits for that end. Hence the pipe.
- A file is never handed over: through /proc/self/fd a hostile image would truncate it, or
  change its mode.
- The shim keeps a *read* end of whatever takes output, so that a container is never killed by
  SIGPIPE while containerd, or a logger, is away. What is written meanwhile waits in the pipe,
  and then the writer does: nothing is dropped.
- The shim keeps a *write* end of stdin: a client that goes away is not the end of input, and
  another may attach. Only CloseIO drops it, and what is in the fifo then still arrives.
- No open of a fifo may block: a read end is opened first (non-blocking), which lets the write
  end be opened at once, and the other way round.
- An exit is told at once, whatever is unread. Only who is taking output has a moment for the rest,
  as containerd before 1.6.22 forgets what it has not read by then. Otherwise it is held, with an
  end behind it, for whoever comes.
- Delete waits until what was written has been taken, but not for ever.

Source: containerd docs/runtime-v2.md (I/O), core/runtime/v2/logging; fifo(7), pipe(7).
"""

from __future__ import annotations

from shim.stdio.plain import PlainStdio
from shim.stdio.terminal import TerminalStdio
from shim.stdio.uris import LoggerUri, parse_outputs, parse_stdin

TYPE_CHECKING = False
if TYPE_CHECKING:
    from shim.container import Surroundings
    from shim.process import Process
    from shim.stdio.stdio import Stdio

__all__ = ["PlainStdio", "TerminalStdio", "open_stdio"]


async def open_stdio(
    shim: Surroundings, process: Process, *, bundle: str, owner: tuple[int, int] = (0, 0)
) -> Stdio:
    """Open the stdio of a process that is about to be made.

    Args:
        shim: where relays run and who reaps a logger.
        process: whose stdio; it says where that is.
        bundle: the container's bundle; a terminal's socket is made there.
        owner: the uid and gid that own what the process gets (options IoUid, IoGid).

    Returns:
        The open stdio. A logger that it names runs and is ready.

    Raises:
        StdioUnavailable: a fifo or file cannot be opened.
        StdioUnsupported: a scheme that this shim does not serve, or not there.
        InvalidLogUri, LoggerNotAllowed, LoggerFailed, LoggerNotReady: about a logger.
        ConfigError: the configuration, which says what loggers are allowed, is unusable.
    """
    uris = process.uris
    stdin = parse_stdin(uris.stdin)
    stdout, stderr = parse_outputs(uris.stdout, uris.stderr, terminal=uris.terminal)
    logger = None
    if isinstance(stdout, LoggerUri):
        from shim.stdio.logger import start_logger  # noqa: PLC0415 - few containers have one

        logger = await start_logger(shim, stdout, process.id, bundle)
    try:
        if uris.terminal:
            return TerminalStdio(
                shim.tasks,
                shim.log,
                stdin=stdin,
                stdout=stdout,
                socket_directory=bundle,
                logger=logger,
            )
        return PlainStdio(
            shim.tasks,
            shim.log,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            owner=owner,
            relayed=bool(process.exec_id),
            logger=logger,
        )
    except BaseException:
        if logger is not None:
            logger.kill()
        raise
