"""What the installer is doing: a file for probes and programs, lines for people.

The file is one JSON object with the keys of :class:`Status`, at two places: on the node, where
``nvshim`` and others see it; and in the container, where the probes look. A probe asks two things:
whether the node is ready, and whether the installer still lives; for that, it says from time to
time that it does.

The log is one JSON object per line, on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TextIO

from api.errors import one_line
from integration.files import replace_file
from integration.json_documents import parse_json
from integration.kubernetes.errors import InstallerUnwell

if TYPE_CHECKING:
    from integration.kubernetes.host import Host

FILE: Final = "node-installer.json"

# A step may take as long as the slowest of the commands that are run.
SILENCE: Final = 600.0
"""Seconds without a word after which an installer counts as hung."""


class State:
    """The words of ``state``."""

    STARTING: Final = "starting"
    NO_GPU: Final = "no-gpu"
    WAITING: Final = "waiting-for-driver"
    INSTALLING: Final = "installing"
    CONFIGURING: Final = "configuring"
    ENGINE: Final = "waiting-for-engine"
    RESTART: Final = "restart-outstanding"
    READY: Final = "ready"
    REMOVING: Final = "removing"
    ENDED: Final = "ended"
    FAILED: Final = "failed"

    # Of a node without a GPU nothing more is wanted.
    ALL_DONE: Final = frozenset({READY, NO_GPU})


@dataclass(frozen=True, slots=True)
class Status:
    """What the installer is doing."""

    state: str = State.STARTING  # of State
    version: str = ""  # of this project
    message: str = ""  # for people
    # whether the engine has yet to be restarted before a pod can have the handler; None if that is
    # not known
    restart_outstanding: bool | None = None
    driver_root: str = ""  # that was set; empty if it is found by looking
    reasserted: int = 0  # how often the configuration was put back
    since: int = 0  # when this state began, in seconds since the epoch
    # when the installer was last heard of, in seconds since the machine has started
    heard: float = 0.0


class Log:
    """Writes lines, each a JSON object with ``time``, ``level`` and ``event``.

    Args:
        stream: by default stderr.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def info(self, event: str, **fields: Any) -> None:
        """Something that happened and is all right."""
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something that should not be so; the installer goes on."""
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Something that failed."""
        self._say("error", event, fields)

    def _say(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"time": now, "level": level, "event": event}
        line |= {k: one_line(v) if isinstance(v, str) else v for k, v in fields.items()}
        stream = self._stream or sys.stderr
        stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        stream.flush()


class Reporter:
    """Keeps the file as it should be.

    Args:
        host: the node.
        state: the directory on the node.
        local: the directory in the container; empty for none.
        version: of this project.
    """

    def __init__(self, host: Host, state: str, local: str, version: str) -> None:
        self._host = host
        self._path = os.path.join(state, FILE)
        self._local = local
        self._said = float("-inf")
        self.status = Status(version=version)

    def say(self, **changes: Any) -> None:
        """Change what the file says.

        Args:
            changes: fields of :class:`Status`.
        """
        new = replace(self.status, **changes)
        # The first word always: what is there may be of one that was killed.
        if new != self.status or not self.status.since:
            self._write(replace(new, since=int(time.time())))

    def alive(self, now: float, *, every: float = 30.0) -> None:
        """Say that the installer lives, if it has not done so for a while.

        Args:
            now: seconds of the clock of :func:`time.monotonic`.
            every: seconds between two words.
        """
        if now - self._said >= every:
            self._write(self.status)

    def _write(self, status: Status) -> None:
        self._said = time.monotonic()
        self.status = replace(status, heard=self._said)
        content = (json.dumps(asdict(self.status)) + "\n").encode()
        self._host.write(self._path, content)
        if self._local:
            replace_file(os.path.join(self._local, FILE), content, durable=False)


def check(question: str, local: str, now: float) -> Status:
    """Answer a probe.

    Args:
        question: "alive" or "ready".
        local: the directory in the container.
        now: seconds of the clock of :func:`time.monotonic`.

    Returns:
        What the installer is doing.

    Raises:
        InstallerUnwell: it is not so.
    """
    path = os.path.join(local, FILE)
    try:
        with open(path, "rb") as file:
            status = Status(**parse_json(file.read()))
    except (OSError, ValueError, TypeError) as error:
        raise InstallerUnwell(
            f"whether the installer is {question}", found=f"nothing to be read from {path}: {error}"
        ) from error
    silent = now - status.heard
    if silent > SILENCE or (question == "ready" and status.state not in State.ALL_DONE):
        raise InstallerUnwell(
            f"whether the installer is {question}",
            found=f"{status.state}: {status.message or '-'}; last heard of {silent:.0f} s ago",
        )
    return status
