"""Stdio with a terminal: what passes between its master and the fifos of a client.

The runtime opens the terminal inside the container and sends its master over a socket that we
listen on. Output is passed on until nobody has the terminal open any more.

CloseIO ends the input as a person at that terminal would, with Ctrl-D (its VEOF character,
twice: the first hands over a line that was begun). containerd's own shim hangs the terminal up,
which kills the foreground process and loses what it has still to say.

Source: runc(8) --console-socket (docs/terminals.md); pty(7), termios(3), tty_ioctl(4).
"""

from __future__ import annotations

import fcntl
import itertools
import os
import struct
import termios

from api import aio
from shim.errors import StdioUnavailable
from shim.runtime import ChildStdio
from shim.stdio import ends
from shim.stdio.ends import Descriptors, KeptEnd, Opening
from shim.stdio.plain import Flow, relay_to_file
from shim.stdio.relay import Relay
from shim.stdio.stdio import DRAIN_SECONDS
from shim.stdio.uris import Fifo, LogFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Final

    from shim.log import Log
    from shim.stdio.logger import Logger
    from shim.stdio.uris import Output
    from shim.tasks import Tasks

_CONTROL_CHARACTERS: Final = 6  # where termios.tcgetattr has them

# Seconds in which somebody who takes output is given the rest before the end is told; how often
# is looked whether somebody does, and after how many looks in vain nobody does.
_LAST_WORDS_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.01
_STALLED: Final = 5


class TerminalStdio:
    """Stdio with a terminal.

    Args:
        tasks: where relays run.
        log: told when a log file takes no more.
        stdin, stdout: where they are. There is no stderr with a terminal.
        socket_directory: the bundle; the socket on which the runtime sends the master is
            made there, under a name of its own.
        logger: who takes the output, if stdout names one.

    Raises:
        StdioUnavailable: one of them cannot be opened.
    """

    _sockets = itertools.count()

    def __init__(
        self,
        tasks: Tasks,
        log: Log,
        *,
        stdin: Fifo | None,
        stdout: Output,
        socket_directory: str,
        logger: Logger | None = None,
    ) -> None:
        self._tasks = tasks
        self._log = log
        self._logger = logger
        self._kept = Descriptors()
        self._kept_end: KeptEnd | None = None
        self._kept_directory = Descriptors()
        self._input_open = Descriptors()
        self._sinks = Descriptors()
        self._input: Relay | None = None
        self._output: Flow | None = None
        self._relay: Relay | None = None
        self._master: int | None = None
        self._size: tuple[int, int] | None = None
        self._listener: socket.socket | None = None
        # Not named after the process: an exec's id is the client's choice, and the socket's
        # address has to be short.
        self._socket_file = f"console.{next(self._sockets)}"
        self._directory = -1
        self._source: int | None = None
        self._sink_is_file = False
        try:
            self._source = self._open_input(stdin)
            self._sink = self._open_output(stdout)
            self._file = stdout.path if isinstance(stdout, Fifo | LogFile) else ""
            self._listen(socket_directory)
        except BaseException:
            self.close()
            raise

    def child(self) -> ChildStdio:
        """Nothing but the way to our console socket."""
        return ChildStdio(console_socket=self._console)

    async def started(self) -> None:
        """Take the terminal's master, which the runtime has sent, and begin to pass on.

        Raises:
            StdioUnavailable: the runtime did not send one.
        """
        self._master = self._receive_master()
        self._stop_listening()
        if self._size is not None:
            self.resize(*self._size)
        if self._source is not None:
            self._input = Relay(self._source, _duplicate(self._master), last=self._end_of_input)
            self._source = None
            self._input.start(self._tasks)
        source = _duplicate(self._master)
        sink = self._sinks.release(self._sink)
        if self._sink_is_file:
            self._output = relay_to_file(source, sink, self._file, self._log)
        else:
            self._output = self._relay = Relay(source, sink)
        self._output.start(self._tasks)
        self._tasks.start_soon(self._watch_output, self._output.done)

    def close_stdin(self) -> None:
        """Take what the client still writes, then end the input: no other may attach."""
        self._input_open.close()

    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size; the kernel tells the foreground process (SIGWINCH)."""
        self._size = (width, height)
        if self._master is not None:
            size = struct.pack("HHHH", height & 0xFFFF, width & 0xFFFF, 0, 0)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    async def ended(self) -> None:
        """Let a client take what it is taking, and hold the rest for one that comes later."""
        if self._relay is None or self._kept_end is None:
            return  # no client takes it
        await self._while_passed_on(self._relay)
        if self._relay.done.is_set():
            await self._kept_end.taken()
        self._tasks.start_soon(self._hand_over, self._relay, self._kept_end)

    async def let_go(self) -> None:
        """Close the input and the terminal, and the fifo when the client has emptied it."""
        self._input_open.close()
        if self._output is not None:
            await self._output.done.wait()
        self._master = None
        self._kept.close()
        if self._kept_end is not None:
            await self._kept_end.close_when_empty()

    async def drain(self) -> None:
        """Pass on what has been written, but wait neither for a daemon nor for ever."""
        if self._output is not None:
            self._output.finish()
            with aio.move_on_after(DRAIN_SECONDS):
                await self._output.done.wait()
            if self._kept_end is not None and self._output.done.is_set():
                await self._kept_end.wait_for_reader()
            if self._logger is not None:
                await self._logger.finish()

    def close(self) -> None:
        """Stop passing on and close everything."""
        self._stop_listening()
        self._input_open.close()
        self._sinks.close()
        self._master = None
        self._kept.close()
        if self._kept_end is not None:
            self._kept_end.close()
        if self._source is not None:
            os.close(self._source)
            self._source = None
        for flow in (self._input, self._output):
            if flow is not None:
                flow.stop()
        if self._logger is not None:
            self._logger.close()

    async def _watch_output(self, done: aio.Event) -> None:
        await done.wait()
        # Nobody is left to read what a client may still type.
        if self._input is not None:
            self._input.stop()

    async def _while_passed_on(self, relay: Relay) -> None:
        passed, stalled = relay.passed, 0
        with aio.move_on_after(_LAST_WORDS_SECONDS):
            while not relay.done.is_set() and stalled < _STALLED:
                with aio.move_on_after(_LOOK_SECONDS):
                    await relay.done.wait()
                before, passed = passed, relay.passed
                stalled = 0 if passed > before else stalled + 1

    async def _hand_over(self, relay: Relay, end: KeptEnd) -> None:
        await relay.done.wait()
        await end.hand_over()

    def _end_of_input(self) -> bytes:
        if self._master is None:
            return b""
        try:
            characters = termios.tcgetattr(self._master)[_CONTROL_CHARACTERS]
        except (OSError, termios.error):
            return b""  # it is gone
        return bytes(characters[termios.VEOF]) * 2

    def _listen(self, socket_directory: str) -> None:
        import socket  # noqa: PLC0415 - only a terminal needs it by name

        # A bundle's path can be longer than a socket's address may be; the descriptor of its
        # directory is a short way to the same place, for us and for the runtime.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._directory = self._kept_directory.keep(os.open(socket_directory, flags))
        self._console = f"/proc/{os.getpid()}/fd/{self._directory}/{self._socket_file}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._console)
        self._listener.listen(1)
        self._listener.setblocking(False)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            try:
                os.unlink(self._socket_file, dir_fd=self._directory)
            except FileNotFoundError:
                pass
        self._kept_directory.close()

    def _open_input(self, place: Fifo | None) -> int | None:
        if place is None:
            return None
        with Opening("stdin", place.path):
            if not ends.is_fifo(place.path):
                return os.open(place.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            reading, writing = ends.open_fifo(place.path)
        self._input_open.keep(writing)
        return reading

    def _open_output(self, place: Output) -> int:
        if self._logger is not None:
            stdout, stderr = self._logger.take()
            os.close(stderr)
            return self._sinks.keep(stdout)
        if isinstance(place, LogFile):
            self._sink_is_file = True
            with Opening("stdout", place.path):
                return self._sinks.keep(ends.open_log_file(place.path))
        if isinstance(place, Fifo):
            with Opening("stdout", place.path):
                if ends.is_fifo(place.path):
                    reading, writing = ends.open_fifo(place.path)
                    self._kept_end = KeptEnd(reading)
                    return self._sinks.keep(writing)
                self._sink_is_file = True
                return self._sinks.keep(ends.open_existing_file(place.path))
        # A process must not hang for want of a reader of its terminal.
        return self._sinks.keep(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))

    def _receive_master(self) -> int:
        import socket  # noqa: PLC0415 - see _listen

        if self._listener is None:
            message = "the terminal is received once, before close"
            raise AssertionError(message)
        try:
            # The runtime has exited: what it sent waits in the listener's queue.
            connection, _ = self._listener.accept()
            with connection:
                connection.setblocking(False)
                _, fds, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            return self._kept.keep(fds[0])
        except (OSError, IndexError) as error:
            raise StdioUnavailable(
                "a terminal for the process",
                found="the runtime sent no terminal over the console socket",
                do="check that the runtime supports --console-socket",
            ) from error


def _duplicate(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
