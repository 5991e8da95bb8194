"""``nvshim top``: what containers use of the GPUs, live in the terminal or frame by frame."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

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
_CHARACTERS: Final = 6  # of what termios tells, where special characters are
_SORTS: Final = ("memory", "sm", "energy", "name")


@click.command("top")
@with_listing
@configured
@located
@click.option(
    "--interval", type=click.FloatRange(0.2, 3600), default=2, show_default=True,
    metavar="SECONDS", help="From one look to the next.",
)  # fmt: skip
@click.option(
    "--sort", type=click.Choice(_SORTS), default="memory", show_default=True,
    help="By what the containers of a device are sorted.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Look once, show it, and end.")
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
    """Show what each container uses of each GPU and MIG device, until q or Ctrl-C.

    It needs no agent: NVML is asked in a process of its own. SM and MEM are of the time that
    kernels ran and memory was used; ENERGY is a container's share since this began to look, by SM.
    n/a is what NVML was asked and does not tell. Where there is no terminal, or a dumb one, each
    frame is a table. With -o json each frame is a line, with -o yaml a document; with --once, it is
    the only one, and is written as elsewhere; the exit status is 1 if NVML said nothing.
    """
    show: _Shown = _Frames(output, once=once)
    if output.form is Format.TABLE and not once and is_terminal(output.stream):
        show = _Screen(output)

    watch = functools.partial(observing, config, states, proc)
    try:
        status = anyio.run(_look, watch, show, Sort(sort), 0.0 if once else interval)
    except ExceptionGroup as group:
        # Whoever read the answer went away, say; all that is told is what went wrong first.
        raise _first(group) from None
    if status:
        click.get_current_context().exit(status)


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


class _Shown:
    """Where frames go."""

    @contextmanager
    def shown(self) -> Iterator[None]:
        """For as long as frames are shown."""
        yield

    def frame(self, frame: Mapping[str, Any]) -> None:
        """Show one, in place of that before."""
        raise NotImplementedError

    def again(self) -> None:
        """Show it anew: the terminal has another size."""


async def _look(watch: Callable[[], Any], show: _Shown, sort: Any, interval: float) -> int:
    """Look again and again; the exit status."""
    status = exits.OK
    async with anyio.create_task_group() as tasks, watch() as observer:

        def end(said: int) -> None:
            nonlocal status
            status = said
            tasks.cancel_scope.cancel()

        await tasks.start(_hear_signals, show, end)
        with show.shown():
            if isinstance(show, _Screen):
                tasks.start_soon(_hear_keys, end)
            while True:
                begun = time.monotonic()
                frame = frame_of(await observer.moment(), sort)
                show.frame(frame)
                if not interval:
                    status = exits.FAILED if frame["failure"] else exits.OK
                    break
                await anyio.sleep(max(0.0, begun + interval - time.monotonic()))
        tasks.cancel_scope.cancel()
    return status


async def _hear_signals(show: _Shown, end: Callable[[int], None], *, task_status: Any) -> None:
    told = (signal.SIGINT, signal.SIGTERM, signal.SIGWINCH)
    with open_signal_receiver(*told) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGWINCH:
                show.again()
            else:
                end(exits.OK if number == signal.SIGINT else exits.TERMINATED)


async def _hear_keys(end: Callable[[int], None]) -> None:
    """End when somebody types q; who has no terminal to type on ends it otherwise."""
    keys = sys.stdin.fileno()
    while os.isatty(keys):
        await anyio.wait_readable(keys)
        typed = os.read(keys, 64)
        if not typed or not _QUIT.isdisjoint(typed.decode(errors="replace")):
            end(exits.OK)
            return


# -- frame by frame --------------------------------------------------------------------------


class _Frames(_Shown):
    """One after the other: for programs, files, and terminals that can do nothing else."""

    def __init__(self, output: Output, *, once: bool) -> None:
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
    # Without a driver both say the same.
    said = failure and failure not in frame["notes"]
    return [*([f"NVML: {failure}"] if said else []), *frame["notes"]]


# -- live ------------------------------------------------------------------------------------


class _Screen(_Shown):
    """The whole terminal, which is as it was at the end."""

    def __init__(self, output: Output) -> None:
        self._console = Console(file=output.stream, highlight=False, markup=False, emoji=False)
        self._live = Live(
            Text("looking…"), console=self._console, screen=True, auto_refresh=False,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._terminal = output.stream.fileno()
        self._frame: Mapping[str, Any] | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        self._fit()
        with _typing_unseen(), self._live:
            yield

    def frame(self, frame: Mapping[str, Any]) -> None:
        self._frame = frame
        self.again()

    def _fit(self) -> None:
        """Go by the terminal's size, and not by what the environment says that it was."""
        with contextlib.suppress(OSError):
            self._console.size = ConsoleDimensions(*os.get_terminal_size(self._terminal))

    def again(self) -> None:
        self._fit()
        if self._frame is not None:
            width, height = self._console.size
            self._live.update(_picture(self._frame, width, height), refresh=True)


@contextmanager
def _typing_unseen() -> Iterator[None]:
    """What is typed is read at once, and is not written to the screen.

    Ctrl-Z is nothing special: it would leave the shell with our screen, and without a cursor.
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


# In which order columns are given room; the last are missed least.
_WANTED: Final = (
    "what", "sm", "memory", "state", "processes", "power", "temp", "mem", "enc", "dec",
)  # fmt: skip


def _fitting(lines: list[dict[str, Any]], width: int) -> list[Column]:
    """The columns for which there is room, each whole; the first is there in any case."""
    chosen, room = {_WANTED[0]}, width
    by_key = {str(column.source): column for column in _COLUMNS}
    for key in _WANTED:
        cells = [by_key[key].title, *(printable(line[key]) for line in lines)]
        room -= max(map(len, cells)) + _GAP
        if room < -_GAP:
            break
        chosen.add(key)
    return [column for column in _COLUMNS if column.source in chosen]


_GAP: Final = 2  # columns between two of the table
_BESIDE: Final = 3  # lines of a screen that are not of the table


def _picture(frame: Mapping[str, Any], width: int, height: int) -> Any:
    """A frame that fits the screen: what does not is left out at the end, and that is said."""
    when = time.strftime("%H:%M:%S", time.localtime(math.floor(frame["time"])))
    head = f"{when}  driver {frame['driver'] or 'unknown'}  (q ends)"
    said, most = _notes(frame), max(1, (height - _BESIDE) // 3)
    if len(said) > most:
        said = [*said[: most - 1], f"{len(said) - most + 1} notes more: see nvshim top --once"]
    notes = [_line(note, style="yellow") for note in said]
    lines = lines_of(frame)
    room = max(1, height - _BESIDE - len(notes))
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
