"""Stdio with a terminal: passing data between its master and the fifos of a client.

The runtime opens the terminal inside the container and sends its master over a socket that we
listen on. Output is passed on until the process has ended and no other has the terminal open. Until
then the shim has it open too, because a master reports its end whenever no process has the terminal
open, and an init may close it and open /dev/console for each message.

CloseIO ends the input like a user at the terminal, with Ctrl-D (its VEOF character, twice: the
first one submits an unfinished line). containerd's own shim hangs the terminal up, which kills the
foreground process and loses its last output.

Source: runc(8) --console-socket (docs/terminals.md); pty(7), termios(3), tty_ioctl(4),
ioctl_tty(2) TIOCGPTPEER.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import struct
import termios
from typing import Final

from shim import loop
from shim.errors import StdioUnavailable
from shim.loop import Tasks
from shim.stdio.pipes import Descriptors, Relay
from shim.stdio.streams import ChildStdio, Input, Output, Stdio

_CONTROL_CHARACTERS: Final = 6  # their index in termios.tcgetattr's result
_TIOCGPTPEER: Final = 0x5441  # on x86 and Arm


class TerminalStdio(Stdio):
    """Stdio with a terminal.

    Args:
        tasks: the group in which data is passed on.
        source: the input; None for /dev/null.
        output: the sink of the terminal's output.
        socket_directory: the bundle, for the master's socket, under a separate name.

    Raises:
        OSError: that socket cannot be created.
    """

    _sockets = itertools.count()

    def __init__(
        self, tasks: Tasks, source: Input | None, output: Output, socket_directory: str
    ) -> None:
        super().__init__(tasks, source, [output])
        self._output = output
        self._input: Relay | None = None
        self._master: _Master | None = None
        self._size: tuple[int, int] | None = None
        self._listener: socket.socket | None = None
        self._kept_directory = Descriptors()
        self._kept_open = Descriptors()
        # A bundle's path may be too long for a socket's address; its directory's descriptor gives
        # us and the runtime a short path.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._directory = self._kept_directory.keep(os.open(socket_directory, flags))
        # Not named after the process: clients choose exec ids, and the socket's address must be
        # short.
        self._socket_file = f"console.{next(self._sockets)}"
        self._console = f"/proc/{os.getpid()}/fd/{self._directory}/{self._socket_file}"
        self._child = ChildStdio(console_socket=self._console)
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(self._console)
            self._listener.listen(1)
            self._listener.setblocking(False)
        except BaseException:
            self.close()
            raise

    async def started(self) -> None:
        """Receive the terminal's master from the runtime, and start to pass data on."""
        master = self._master = _Master(self._receive_master())
        self._stop_listening()
        self._keep_open(master.fd)
        if self._size is not None:
            self.resize(*self._size)
        if self._source is not None:
            self._input = Relay(
                self._source.take(), master.share(), last=self._end_of_input, close=master.close
            )
            self._input.start(self._tasks)
        relay = self._output.relay_from(master.share(), close=master.close)
        await super().started()
        self._tasks.start_soon(self._watch_output, relay.done)

    def resize(self, width: int, height: int) -> None:
        """Set the terminal's size; the kernel notifies the foreground process (SIGWINCH)."""
        self._size = (width, height)
        if self._master is not None:
            size = struct.pack("HHHH", height & 0xFFFF, width & 0xFFFF, 0, 0)
            fcntl.ioctl(self._master.fd, termios.TIOCSWINSZ, size)

    async def ended(self) -> None:
        """Let the output end, with a moment for its client to read the rest."""
        self._kept_open.close()
        await super().ended()

    async def let_go(self) -> None:
        """Close the input, the terminal and, once its output has been read, the output."""
        self._kept_open.close()
        if self._source is not None:
            self._source.close()
        if self._output.relay is not None:
            await self._output.relay.done.wait()
        self._close_master()
        await self._output.let_go()

    def close(self) -> None:
        """Stop passing on and release everything."""
        self._stop_listening()
        self._kept_open.close()
        self._close_master()
        super().close()
        if self._input is not None:
            self._input.stop()

    def _keep_open(self, master: int) -> None:
        try:
            # By descriptor: the file system of the container's terminals is not mounted here.
            fd = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return  # no free descriptor, or not such a terminal: few programs need it
        self._kept_open.keep(fd)

    async def _watch_output(self, done: loop.Event) -> None:
        await done.wait()
        # No process is left to read a client's input.
        if self._input is not None:
            self._input.stop()

    def _end_of_input(self) -> bytes:
        if self._master is None:
            return b""
        try:
            characters = termios.tcgetattr(self._master.fd)[_CONTROL_CHARACTERS]
        except (OSError, termios.error):
            return b""  # it is gone
        return bytes(characters[termios.VEOF]) * 2

    def _receive_master(self) -> int:
        if self._listener is None:
            message = "the terminal is received once, before close"
            raise AssertionError(message)
        try:
            # The runtime has exited; its message waits in the listener's queue.
            connection, _ = self._listener.accept()
            with connection:
                connection.setblocking(False)
                _, fds, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            return fds[0]
        except (OSError, IndexError) as error:
            raise StdioUnavailable(
                "a terminal for the process",
                found="the runtime sent no terminal over the console socket",
                do="check that the runtime supports --console-socket",
            ) from error

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            try:
                os.unlink(self._socket_file, dir_fd=self._directory)
            except FileNotFoundError:
                pass
        self._kept_directory.close()

    def _close_master(self) -> None:
        master, self._master = self._master, None
        if master is not None:
            master.close(master.fd)


class _Master:
    """A terminal's master: one descriptor, closed by its last user.

    A terminal hangs up when its master's last descriptor closes, so a relay that ends must not
    close it for the other relay.

    Args:
        fd: the descriptor, now owned by this object; the caller is its first user.
    """

    __slots__ = ("_users", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._users = 1

    def share(self) -> int:
        """Return the descriptor for another user, who closes it with :meth:`close`."""
        self._users += 1
        return self.fd

    def close(self, fd: int) -> None:
        """Close a user's descriptor; the last user closes the master itself."""
        if fd == self.fd:
            self._users -= 1
            if self._users:
                return
        os.close(fd)
