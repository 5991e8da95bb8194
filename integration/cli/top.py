"""``nvshim top``: the GPU usage of containers, live in the terminal or frame by frame."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import stat
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TextIO

import anyio
import click
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from api.errors import printable
from hooks.config import Config
from integration import exits
from integration.cli.options import configured, located, with_listing
from integration.cli.output import Column, Format, Output, document_of, is_terminal, width_of
from integration.inspection.top import Sort, frame_of, lines_of
from integration.inspection.usage_query import observing
from integration.signal_receiver import open_signal_receiver

_COLUMNS: Final = (
    Column("GPU / CONTAINER", "what"),
    Column("SM", "sm", right=True),
    Column("MEM", "mem", right=True),
    Column("MEMORY", "memory", right=True),
    Column("ENC", "enc", right=True),
    Column("DEC", "dec", right=True),
    Column("POWER/ENERGY", "power", right=True),
    Column("TEMP", "temp", right=True),
    Column("STATE", "state"),
    Column("PROCESSES", "processes"),
)
_QUIT: Final = frozenset("qQ\x03\x04")
_CHARACTERS: Final = 6  # the index of the special characters in termios' attributes
_SORTS: Final = ("memory", "sm", "energy", "name")


@click.command("top")
@with_listing
@configured
@located
@click.option(
    "--interval", type=click.FloatRange(0.2, 3600), default=2, show_default=True,
    metavar="SECONDS", help="The time between two frames.",
)  # fmt: skip
@click.option(
    "--sort", type=click.Choice(_SORTS), default="memory", show_default=True,
    help="Sort the containers of a device by this value.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Show one frame and exit.")
def command(
    output: Output,
    config: Config,
    *,
    states: tuple[str, ...],
    proc: str,
    interval: float,
    sort: str,
    once: bool,
) -> None:
    """Show the usage of each GPU and MIG device by container, until q or Ctrl-C.

    No agent is needed; a separate process queries NVML. SM and MEM are the shares of time with
    running kernels and with memory traffic. ENERGY is a container's share since the start of this
    command, by SM. n/a means that NVML does not report the value. Without a terminal, or on a dumb
    one, each frame is a table. With -o json each frame is a line, with -o yaml a document; with
    --once there is one ordinary document. The exit status with --once is 1 if NVML did not answer.
    """
    show: _Display = _Frames(output, once=once)
    if output.form is Format.TABLE and not once and is_terminal(output.stream):
        show = _Screen(output)

    watch = functools.partial(observing, config, states, proc)
    try:
        status = anyio.run(_run, watch, show, Sort(sort), 0.0 if once else interval)
    except ExceptionGroup as group:
        # Report only the first error, for example a closed pipe.
        raise _first(group) from None
    if status:
        click.get_current_context().exit(status)


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class _Display:
    """Shows frames.

    Args:
        stream: where they are shown.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Prepare the display, and restore it at the end."""
        yield

    def frame(self, frame: Mapping[str, Any]) -> None:
        """Show a frame in place of the previous one."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw the frame again after a change of the terminal's size."""


async def _run(watch: Callable[[], Any], show: _Display, sort: Any, interval: float) -> int:
    """Show frames until a signal or key stops it; return the exit status."""
    status = exits.OK
    async with anyio.create_task_group() as tasks, watch() as observer:

        def stop(code: int) -> None:
            nonlocal status
            status = code
            tasks.cancel_scope.cancel()

        await tasks.start(_handle_signals, show, stop)
        tasks.start_soon(_watch_reader, show.stream, stop)
        with show.shown():
            if isinstance(show, _Screen):
                tasks.start_soon(_handle_keys, stop)
            while True:
                started = time.monotonic()
                frame = frame_of(await observer.snapshot(), sort)
                show.frame(frame)
                if not interval:
                    status = exits.FAILED if frame["failure"] else exits.OK
                    break
                await anyio.sleep(max(0.0, started + interval - time.monotonic()))
        tasks.cancel_scope.cancel()
    return status


async def _handle_signals(show: _Display, stop: Callable[[int], None], *, task_status: Any) -> None:
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH)
    with open_signal_receiver(*handled) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGWINCH:
                show.redraw()
            else:
                stop(exits.OK if number == signal.SIGINT else exits.TERMINATED)


async def _watch_reader(stream: TextIO, stop: Callable[[int], None]) -> None:
    """Stop when a pipe loses its last reader; the next frame may be an hour away."""
    try:
        number = stream.fileno()
    except OSError:
        return  # not a file, in a test
    if stat.S_ISFIFO(os.fstat(number).st_mode):
        # For the write end of a pipe, epoll(7) only reports that the last reader has closed it.
        await anyio.wait_readable(number)
        stop(exits.BROKEN_PIPE)


async def _handle_keys(stop: Callable[[int], None]) -> None:
    """Stop when the user types q; without a terminal on stdin only signals stop the command."""
    keys = sys.stdin.fileno()
    while os.isatty(keys):
        await anyio.wait_readable(keys)
        typed = os.read(keys, 64)
        if not typed or not _QUIT.isdisjoint(typed.decode(errors="replace")):
            stop(exits.OK)
            return


# -- frame by frame --------------------------------------------------------------------------


class _Frames(_Display):
    """Writes frames one after the other: for programs, files and dumb terminals."""

    def __init__(self, output: Output, *, once: bool) -> None:
        super().__init__(output.stream)
        self._output, self._once = output, once
        self._first = True

    def frame(self, frame: Mapping[str, Any]) -> None:
        output, stream = self._output, self._output.stream
        if output.form is Format.NAME:
            stream.write("".join(f"{device['uuid']}\n" for device in frame["devices"]))
        elif not output.form.is_document:
            if not self._first:
                stream.write("\n")
            lines = lines_of(frame)
            is_wide = output.form is Format.WIDE
            output.table(lines, _COLUMNS if is_wide else _fitting(lines, width_of(stream)))
            for note in _notes(frame):
                click.echo(printable(note), err=True)
        elif self._once:
            output.document(frame)
        elif output.form is Format.JSON:
            stream.write(f"{json.dumps(document_of(output.kind, frame))}\n")
        else:
            stream.write("---\n")
            output.document(frame)
        self._first = False
        stream.flush()


def _notes(frame: Mapping[str, Any]) -> list[str]:
    failure = frame["failure"]
    # Without a driver a note has the same text.
    is_new = failure and failure not in frame["notes"]
    return [*([f"NVML: {failure}"] if is_new else []), *frame["notes"]]


# -- live ------------------------------------------------------------------------------------


class _Screen(_Display):
    """Uses the whole terminal, and restores its content at the end."""

    def __init__(self, output: Output) -> None:
        super().__init__(output.stream)
        self._console = Console(file=output.stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            Text("querying…"), console=self._console, screen=True, auto_refresh=False,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._frame: Mapping[str, Any] | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        self._fit()
        with _hidden_typing(), self._live:
            yield

    def frame(self, frame: Mapping[str, Any]) -> None:
        self._frame = frame
        self.redraw()

    def _fit(self) -> None:
        """Use the terminal's current size, not the environment's LINES and COLUMNS."""
        with contextlib.suppress(OSError):
            self._console.size = ConsoleDimensions(*os.get_terminal_size(self.stream.fileno()))

    def redraw(self) -> None:
        self._fit()
        if self._frame is not None:
            width, height = self._console.size
            self._live.update(_render(self._frame, width, height), refresh=True)


@contextmanager
def _hidden_typing() -> Iterator[None]:
    """Read keys at once and without echo.

    Ctrl-Z is disabled: a stopped command would leave the shell with our screen and no cursor.
    """
    keys = sys.stdin.fileno()
    if not os.isatty(keys):
        yield
        return
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        modes = termios.tcgetattr(keys)
        modes[_CHARACTERS][termios.VSUSP] = b"\0"
        termios.tcsetattr(keys, termios.TCSANOW, modes)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


# The order in which columns get space; the last ones are the first to be left out.
_WANTED: Final = (
    "what", "sm", "memory", "state", "processes", "power", "temp", "mem", "enc", "dec",
)  # fmt: skip


def _fitting(lines: list[dict[str, Any]], width: int) -> list[Column]:
    """Return the columns that fit completely; the first one is always included."""
    chosen, room = {_WANTED[0]}, width
    by_key = {str(column.source): column for column in _COLUMNS}
    for key in _WANTED:
        cells = [by_key[key].title, *(printable(line[key]) for line in lines)]
        room -= max(map(len, cells)) + _GAP
        if room < -_GAP:
            break
        chosen.add(key)
    return [column for column in _COLUMNS if column.source in chosen]


_GAP: Final = 2  # spaces between two columns
_OTHER_LINES: Final = 3  # lines of the screen outside the table


def _render(frame: Mapping[str, Any], width: int, height: int) -> Any:
    """Render a frame for the screen; lines that do not fit are counted in the last line."""
    when = time.strftime("%H:%M:%S", time.localtime(math.floor(frame["time"])))
    head = f"{when}  driver {frame['driver'] or 'unknown'}  (q quits)"
    texts, most = _notes(frame), max(1, (height - _OTHER_LINES) // 3)
    if len(texts) > most:
        texts = [*texts[: most - 1], f"{len(texts) - most + 1} more notes: see nvshim top --once"]
    notes = [_line(note, style="yellow") for note in texts]
    lines = lines_of(frame)
    room = max(1, height - _OTHER_LINES - len(notes))
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold", expand=False)
    columns = _fitting(lines[:room], width)
    for column in columns:
        justify: Any = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, no_wrap=True, overflow="ellipsis")
    for line in lines[:room]:
        cells = [Text(printable(line[str(column.source)])) for column in columns]
        table.add_row(*cells, style="bold" if line["is_device"] else None)
    left = len(lines) - room
    more = [_line(f"and {left} more lines")] if left > 0 else []
    return Group(_line(head), *notes, table, *more)


def _line(text: str, style: str = "") -> Any:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")
