"""Read containerd's request: the command line in Go's flags, and stdin.

Rules
- ``-flag value``, ``-flag=value`` and both with two dashes mean the same.
- A switch takes no value, except after ``=``.
- The first word that belongs to no flag is the verb; everything after it is ignored.
- An unknown flag is skipped, with its value if it seems to have one, because a newer containerd may
  pass flags that this shim does not know.
- Ids and namespaces are checked here, before they become part of a path.

Source: containerd pkg/shim; Go's package flag; containerd pkg/identifiers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from api.values import dataclass, replace
from shim.errors import InvalidInvocation, RequestTooLarge
from shim.files import check_id

VERBS: Final = ("start", "delete")

# The last word of a fork server's command line, which only ``start`` and systemd use.
FORK_SERVER: Final = "fork-server"

# Flags with a value, and the attribute for it.
_VALUES: Final = {
    "namespace": "namespace",
    "address": "address",
    "publish-binary": "publish_binary",
    "id": "container_id",
    "bundle": "bundle",
    "socket": "socket",
}
_SWITCHES: Final = {
    "debug": "debug",
    "stay": "stay",
    "info": "info",
    "v": "version",
    "version": "version",
    "h": "help",
    "help": "help",
}
_TRUE: Final = ("1", "t", "T", "true", "TRUE", "True")
_FALSE: Final = ("0", "f", "F", "false", "FALSE", "False")

# The limit of containerd's own shim.
_LARGEST_REQUEST: Final = 10 << 20
_CHUNK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Invocation:
    """Containerd's request to the program."""

    verb: str = ""  # ``start``, ``delete``, or empty
    namespace: str = ""  # containerd's namespace
    address: str = ""  # containerd's gRPC address
    publish_binary: str = ""  # containerd's own path; unused, since events go over ttrpc
    container_id: str = ""  # the container of the verb
    bundle: str = ""  # its bundle; empty for the current directory
    socket: str = ""  # the socket of a fork server; empty for the default
    debug: bool = False  # whether the shim logs its steps
    stay: bool = False  # whether a fork server stays even without requests
    info: bool = False  # whether to print the runtime's description
    version: bool = False  # whether to print the version
    help: bool = False  # whether to print the usage


def parse(arguments: Sequence[str], verbs: Sequence[str] = VERBS) -> Invocation:
    """Read the command line.

    Args:
        arguments: the words after the program's name.
        verbs: the known verbs.

    Returns:
        The request. For a verb, its id and namespace are present and safe.

    Raises:
        InvalidInvocation: the verb or a flag's value is missing, or a value has the wrong kind.
        InvalidIdentifier: containerd would also reject the id or namespace.
    """
    found: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            found["verb"] = word
            break
        if word == "--":
            found["verb"] = words[0] if words else ""
            break
        _take_flag(found, word, words)
    invocation = Invocation(**found)
    if invocation.info or invocation.version or invocation.help:
        return replace(invocation, verb="")
    if invocation.verb not in verbs:
        raise InvalidInvocation(
            f"to do {invocation.verb!r}",
            found="not one of: start, delete, -info, -v",
            do="leave calling this program to containerd: ctr run --runtime "
            "io.containerd.nvidia.v1",
        )
    if invocation.verb in VERBS:
        check_id(invocation.container_id)
        check_id(invocation.namespace, "namespace")
    return invocation


def _take_flag(found: dict[str, Any], word: str, rest: list[str]) -> None:
    name, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
    if name in _VALUES:
        if not equals:
            if not rest:
                raise InvalidInvocation(f"flag -{name}", found="no value after it", do="add one")
            value = rest.pop(0)
        found[_VALUES[name]] = value
    elif name in _SWITCHES:
        if equals and value not in _TRUE and value not in _FALSE:
            raise InvalidInvocation(
                f"flag -{name}", found=f"{value!r}, not true or false", do="use one of them"
            )
        found[_SWITCHES[name]] = not equals or value in _TRUE
    elif not equals and rest and not rest[0].startswith("-") and rest[0] not in VERBS:
        del rest[0]


def read_stdin() -> bytes:
    """Read all of stdin; nothing if it cannot be read.

    Raises:
        RequestTooLarge: it has more than 10 MiB.
    """
    content = bytearray()
    try:
        while chunk := os.read(0, _CHUNK):
            content += chunk
            if len(content) > _LARGEST_REQUEST:
                raise RequestTooLarge(
                    "to read the request from stdin",
                    found=f"more than {_LARGEST_REQUEST} bytes",
                    do="leave calling this program to containerd",
                )
    except OSError:
        return b""  # a directory, or open only for writing: not a request
    return bytes(content)
