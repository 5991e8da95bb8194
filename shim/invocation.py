"""The command line: Go's flags, as every containerd since 1.6 writes them.

Rules
- ``-flag value``, ``-flag=value`` and both with two dashes mean the same.
- A switch takes no value, unless after ``=``.
- The first word that belongs to no flag is the verb; what follows it is ignored.
- A flag that we do not know is skipped, with its value if it seems to have one: a newer
  containerd may say more than this shim understands, and must not fail for it.
- Ids and namespaces are checked here, before anything makes a path of them.

Source: containerd pkg/shim; Go's package flag; containerd pkg/identifiers.
"""

from __future__ import annotations

from shim.errors import InvalidIdentifier, InvalidInvocation

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Final, NoReturn

VERBS: Final = ("start", "delete")

# What ``start`` calls us by, to leave a fork server behind, and systemd; containerd never does.
FORK_SERVER: Final = "fork-server"

# Flags with a value, and the attribute that keeps it.
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

_ALPHANUMERIC: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_ALLOWED: Final = _ALPHANUMERIC | frozenset("_.-")

LONGEST_ID: Final = 76


class Invocation:
    """What containerd asks of the program.

    Attributes:
        verb: ``start``, ``delete``, or empty.
        namespace: containerd's namespace.
        address: containerd's gRPC address.
        publish_binary: containerd's own path; unused, since events go over ttrpc.
        socket: where a fork server is to listen; empty if it is to find that out.
        stay: whether a fork server stays although nobody asks.
        container_id: the container that the verb is about.
        bundle: its bundle; empty for the current directory.
        debug: whether the shim is to log its steps.
        info: whether the runtime's description is asked for.
        version: whether the version is asked for.
        help: whether a person asks how it is called.
        parent: the process that asks; 0 before :func:`shim.verbs.main` has looked.
        warm: whether this process was forked from one that has the server's modules.
        afterwards: what this process does once the verb has answered; None if it ends.
    """

    __slots__ = (
        "address",
        "afterwards",
        "bundle",
        "container_id",
        "debug",
        "help",
        "info",
        "namespace",
        "parent",
        "publish_binary",
        "socket",
        "stay",
        "verb",
        "version",
        "warm",
    )

    def __init__(self) -> None:
        self.verb = ""
        self.namespace = ""
        self.address = ""
        self.publish_binary = ""
        self.container_id = ""
        self.bundle = ""
        self.socket = ""
        self.debug = False
        self.stay = False
        self.info = False
        self.version = False
        self.help = False
        self.parent = 0
        self.warm = False
        self.afterwards: Callable[[], NoReturn] | None = None


def parse(arguments: Sequence[str]) -> Invocation:
    """Read the command line.

    Args:
        arguments: the words after the program's name.

    Returns:
        What is asked. For a verb, its id and namespace are there and safe.

    Raises:
        InvalidInvocation: no verb, a flag without its value, a value of the wrong kind.
        InvalidIdentifier: an id or a namespace that containerd would not accept either.
    """
    invocation = Invocation()
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            invocation.verb = word
            break
        if word == "--":
            invocation.verb = words[0] if words else ""
            break
        _take_flag(invocation, word, words)
    alone = invocation.info or invocation.version or invocation.help
    if alone or invocation.verb == FORK_SERVER:
        return invocation
    if invocation.verb not in VERBS:
        raise InvalidInvocation(
            f"to do {invocation.verb!r}",
            found="not one of: start, delete, -info, -v",
            do="leave calling this program to containerd: ctr run --runtime "
            "io.containerd.nvidia.v1",
        )
    check_id(invocation.container_id)
    check_id(invocation.namespace, "namespace")
    return invocation


def _take_flag(invocation: Invocation, word: str, rest: list[str]) -> None:
    name, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
    if name in _VALUES:
        if not equals:
            if not rest:
                raise InvalidInvocation(f"flag -{name}", found="no value after it", do="add one")
            value = rest.pop(0)
        setattr(invocation, _VALUES[name], value)
    elif name in _SWITCHES:
        if equals and value not in _TRUE and value not in _FALSE:
            raise InvalidInvocation(
                f"flag -{name}", found=f"{value!r}, neither true nor false", do="use one of them"
            )
        setattr(invocation, _SWITCHES[name], not equals or value in _TRUE)
    elif not equals and rest and not rest[0].startswith("-") and rest[0] not in VERBS:
        del rest[0]


def check_id(text: str, what: str = "container id") -> str:
    """Refuse what could not safely become part of a path.

    Args:
        text: an id or a namespace.
        what: which of them, for the message.

    Returns:
        ``text``, unchanged.

    Raises:
        InvalidIdentifier: it does not match ``[A-Za-z0-9][A-Za-z0-9_.-]*``, or is longer
            than 76 characters.
    """
    if not text or text[0] not in _ALPHANUMERIC or not _ALLOWED.issuperset(text):
        raise InvalidIdentifier(
            f"{what} {text!r}",
            found="not a letter or digit followed by letters, digits, '_', '.' and '-'",
            do="name it so",
        )
    if len(text) > LONGEST_ID:
        raise InvalidIdentifier(
            f"{what} {text!r}",
            found=f"{len(text)} characters",
            do=f"use at most {LONGEST_ID}",
        )
    return text
