"""The URIs with which containerd names stdio, their meaning, and how to open them.

======================================  =================================================
(empty)                                 /dev/null
/path, fifo:///path                     an existing fifo, or another existing file
file:///path                            a file to append to, created if missing
binary:///path?key=value&…              a logger: a program that takes stdout and stderr
binary-v2:///path?key=value&…           the same, but it has to report that it is ready
======================================  =================================================

A logger is named for stdout, and also takes stderr unless that has its own URI.

Source: containerd cmd/containerd-shim-runc-v2/process/io.go.
"""

from __future__ import annotations

import os
from typing import Final, Protocol
from urllib.parse import unquote, urlsplit

from api.values import dataclass
from shim.context import ShimContext
from shim.errors import StdioUnsupported
from shim.stdio.files import leads_to_fifo, open_input_file, open_log_file
from shim.stdio.logger import LoggerUri, parse_logger, start_logger
from shim.stdio.pipes import Opening, open_fifo
from shim.stdio.streams import FifoOutput, Input, Output, PlainStdio, Stdio
from shim.stdio.terminal import TerminalStdio

_LOGGERS: Final = frozenset({"binary", "binary-v2"})


@dataclass(frozen=True, slots=True)
class StdioUris:
    """The URIs of a process's stdio from containerd, and whether it has a terminal."""

    stdin: str
    stdout: str
    stderr: str
    terminal: bool


@dataclass(frozen=True, slots=True)
class Fifo:
    """An existing fifo, or another existing file."""

    path: str


@dataclass(frozen=True, slots=True)
class LogFile:
    """A file to append to."""

    path: str


# The sinks of stdout and stderr; None is /dev/null. A logger for both is here twice, and stderr is
# then not a separate logger.
Places = tuple[Fifo | LogFile | LoggerUri | None, Fifo | LogFile | LoggerUri | None]


def parse_stdin(uri: str) -> Fifo | None:
    """Return the source of input; None is /dev/null.

    Raises:
        StdioUnsupported: it cannot be a source of input.
    """
    place = _parse(uri, "stdin")
    if isinstance(place, LogFile):
        return Fifo(place.path)
    if isinstance(place, LoggerUri):
        raise StdioUnsupported(
            f"stdin at {uri!r}", found="a logger, which gives nothing", do="name a fifo"
        )
    return place


def parse_outputs(stdout: str, stderr: str, *, terminal: bool = False) -> Places:
    """Return the sinks of stdout and stderr.

    Args:
        stdout: a URI from containerd.
        stderr: another URI.
        terminal: whether there is a terminal, and so no stderr.

    Raises:
        StdioUnsupported: the scheme is not supported, or only stderr names a logger.
        InvalidLogUri: a logger's URI cannot be parsed.
    """
    out = _parse(stdout, "stdout")
    if terminal:
        return out, None
    if isinstance(out, LoggerUri) and stderr in {"", stdout}:
        return out, out
    err = out if stderr == stdout else _parse(stderr, "stderr")
    if isinstance(err, LoggerUri):
        raise StdioUnsupported(
            f"stderr at {stderr!r}",
            found=f"a logger, with stdout at {stdout!r}",
            do="name the logger for stdout: it takes both",
        )
    return out, err


def _parse(uri: str, role: str) -> Fifo | LogFile | LoggerUri | None:
    if not uri:
        return None
    if uri.startswith("/"):
        return Fifo(uri)
    scheme, _, rest = uri.partition(":")
    if scheme in _LOGGERS:
        return parse_logger(uri, speaks=scheme == "binary-v2")
    if scheme in {"fifo", "file"} and rest.startswith("///") and "\0" not in uri:
        path = rest[2:]
        if any(sign in path for sign in "%?#"):
            path = unquote(urlsplit(uri).path)
        if "\0" not in path:
            return Fifo(path) if scheme == "fifo" else LogFile(path)
    raise StdioUnsupported(
        f"{role} at {uri!r}",
        found=f"scheme {scheme!r}",
        do="use the path of a fifo, file:// and an absolute path, or binary:// and a logger's",
    )


class Named(Protocol):
    """A process with stdio URIs from containerd."""

    exec_id: str
    uris: StdioUris

    @property
    def id(self) -> str:
        """The exec's id, or the container's for init."""


async def open_stdio(
    shim: ShimContext, process: Named, *, bundle: str, owner: tuple[int, int] = (0, 0)
) -> Stdio:
    """Open the stdio of a process before its creation.

    Args:
        shim: passes the output on, and reaps the processes that read it.
        process: the process, with its stdio URIs.
        bundle: the container's bundle, for a terminal's socket.
        owner: the uid and gid of the process's descriptors (options IoUid, IoGid).

    Returns:
        The open stdio, with any loggers ready.

    Raises:
        StdioUnavailable: a fifo or file cannot be opened.
        StdioTimeout: the file system of a file does not answer.
        StdioUnsupported: the scheme is not supported, or not for this stream.
        InvalidLogUri, LoggerNotAllowed, LoggerFailed, LoggerNotReady: a logger cannot be used.
        ConfigError: the configuration, which lists the allowed loggers, is unusable.
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
                # A process must not hang because its terminal has no reader.
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
    """Open stdout and stderr, by descriptor; the same one twice if shared."""
    plain = not process.uris.terminal
    stdout, stderr = places
    if isinstance(stdout, LoggerUri):
        outputs[1], second = await start_logger(shim, stdout, process.id, bundle)
        if stderr == stdout:
            outputs[2] = second
        else:
            second.close()
    elif stdout is not None:
        relayed = plain and (bool(process.exec_id) or stderr == stdout)
        outputs[1] = await _open_output(shim, stdout, relayed=relayed)
        if stderr == stdout:
            outputs[2] = outputs[1]
    if isinstance(stderr, Fifo | LogFile) and stderr != stdout:
        outputs[2] = await _open_output(shim, stderr, relayed=plain)


async def _open_input(shim: ShimContext, place: Fifo) -> Input:
    if await leads_to_fifo("stdin", place.path):
        with Opening("stdin", place.path):
            ends = open_fifo(place.path)
            return Input(ends.reading, writing=ends.writing)
    return await open_input_file(shim, place.path)


async def _open_output(shim: ShimContext, place: Fifo | LogFile, *, relayed: bool) -> Output:
    if isinstance(place, LogFile):
        return await open_log_file(shim, place.path)
    if await leads_to_fifo("stdout or stderr", place.path):
        with Opening("stdout or stderr", place.path):
            return FifoOutput(place.path, relayed=relayed)
    return await open_log_file(shim, place.path, make=False)
