"""The URIs by which containerd names stdio, and what each of them means.

======================================  =================================================
(empty)                                 /dev/null
/path, fifo:///path                     an existing fifo, or another existing file
file:///path                            a file to append to, made if it is missing
binary:///path?key=value&…              a logger: a program that takes stdout and stderr
binary-v2:///path?key=value&…           the same, which has to report that it is ready
======================================  =================================================

Rules
- A logger's arguments are each key and the first of its values, also if that is empty, in the
  order of the URI. (Go forgets the order; one key and its value stay together there too.)
- A key ``env.NAME`` is not an argument but a variable of the logger's environment.
- A logger is named for stdout, and takes stderr too, unless that has a URI of its own.

Source: containerd cmd/containerd-shim-runc-v2/process/io.go, io_util.go; net/url ParseQuery.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from api.values import dataclass
from shim.errors import InvalidLogUri, StdioUnsupported

_LOGGERS: Final = frozenset({"binary", "binary-v2"})
_VARIABLE: Final = "env."

# What the shim itself tells a logger; a URI cannot say otherwise.
CONTAINER_ID: Final = "CONTAINER_ID"
CONTAINER_NAMESPACE: Final = "CONTAINER_NAMESPACE"


@dataclass(frozen=True, slots=True)
class StdioUris:
    """Where a process's stdio is, as containerd named it, and whether it has a terminal."""

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


@dataclass(frozen=True, slots=True)
class LoggerUri:
    """A program that takes output."""

    path: str  # the program, absolute
    arguments: tuple[str, ...]  # what follows its name
    variables: tuple[tuple[str, str], ...]  # what is added to its environment: names and values
    # whether it writes a byte when it is ready (binary-v2), and does not only close the descriptor
    speaks: bool


# Where stdout and stderr go; None is /dev/null. A logger that takes both is named twice, and
# stderr is no logger of its own.
Places = tuple[Fifo | LogFile | LoggerUri | None, Fifo | LogFile | LoggerUri | None]


def parse_stdin(uri: str) -> Fifo | None:
    """Where input comes from; None is /dev/null.

    Raises:
        StdioUnsupported: input cannot come from there.
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
    """Where stdout and stderr go.

    Args:
        stdout: a URI as containerd sends it.
        stderr: another.
        terminal: whether there is a terminal; then there is no stderr.

    Raises:
        StdioUnsupported: a scheme that is not served, or a logger for stderr alone.
        InvalidLogUri: a logger that cannot be understood.
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
        return _logger(uri, speaks=scheme == "binary-v2")
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


def _logger(uri: str, *, speaks: bool) -> LoggerUri:
    try:
        parts = urlsplit(uri)
        pairs = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise _invalid(uri, str(error)) from error
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/"):
        raise _invalid(uri, "not an absolute path")
    first: dict[str, str] = {}
    for key, value in pairs:
        first.setdefault(key, value)
    if any("\0" in text for text in (path, *first, *first.values())):
        raise _invalid(uri, "a zero byte")
    arguments: list[str] = []
    variables: list[tuple[str, str]] = []
    for key, value in first.items():
        name = key.removeprefix(_VARIABLE)
        if name == key:
            arguments += [key, value]
        elif not name or "=" in name:
            raise _invalid(uri, f"a variable of the name {name!r}")
        elif name not in {CONTAINER_ID, CONTAINER_NAMESPACE}:
            variables.append((name, value))
    return LoggerUri(path, tuple(arguments), tuple(variables), speaks)


def _invalid(uri: str, found: str) -> InvalidLogUri:
    return InvalidLogUri(
        f"a logger at {uri!r}",
        found=found,
        do="write binary:///absolute/path?key=value&key=value",
    )
