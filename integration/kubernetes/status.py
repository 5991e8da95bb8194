"""The installer's status file for probes and programs, and its log.

The file is one JSON object with the keys of :class:`Status`. One copy is on the node for
``nvshim`` and other programs, one in the container for probes. A probe asks whether the node is
ready, or whether the installer is alive; for the latter the installer rewrites the file
periodically.

The log is one JSON object per line, on stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TextIO

from api.errors import one_line
from hooks.named_files import read_named
from integration.files import replace_file
from integration.json_documents import parse_json
from integration.kubernetes.errors import InstallerUnwell
from integration.kubernetes.host import Host

FILE: Final = "node-installer.json"

# Above the time limit of the slowest command.
SILENCE: Final = 600.0
"""Seconds without a heartbeat after which an installer counts as hung."""


class State:
    """The values of ``state``."""

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

    # On a node without a GPU there is nothing to do.
    ALL_DONE: Final = frozenset({READY, NO_GPU})


@dataclass(frozen=True, slots=True)
class Status:
    """The installer's status; its fields are the keys of the JSON file."""

    state: str = State.STARTING  # of State
    version: str = ""  # the installer's version
    message: str = ""  # a sentence for the operator
    # whether the engine must be restarted before pods can use the handler; None if unknown
    restart_outstanding: bool | None = None
    driver_root: str = ""  # the configured driver root; empty if it is detected
    reasserted: int = 0  # how often the configuration was restored
    since: int = 0  # start of this state, in seconds since the epoch
    # the last heartbeat, in seconds since boot
    heard: float = 0.0


class Log:
    """Write log lines: JSON objects with ``time``, ``level`` and ``event``.

    Args:
        stream: stderr by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def info(self, event: str, **fields: Any) -> None:
        """Log a normal event."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log a problem; the installer continues."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log a failure."""
        self._write("error", event, fields)

    def _write(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"time": now, "level": level, "event": event}
        line |= {k: one_line(v) if isinstance(v, str) else v for k, v in fields.items()}
        stream = self._stream or sys.stderr
        stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        stream.flush()


class Reporter:
    """Keep the status file up to date.

    Args:
        host: the node.
        state: the directory on the node.
        local: the directory in the container; empty for none.
        version: the installer's version.
    """

    def __init__(self, host: Host, state: str, local: str, version: str) -> None:
        self._host = host
        self._path = os.path.join(state, FILE)
        self._local = local
        self._written = float("-inf")
        self.status = Status(version=version)

    def update(self, **changes: Any) -> None:
        """Change fields of the status and write the file.

        Args:
            changes: fields of :class:`Status`.
        """
        new = replace(self.status, **changes)
        # Write the first status in any case: an old file may be from an installer that was killed.
        if new != self.status or not self.status.since:
            self._write(replace(new, since=int(time.time())))

    def heartbeat(self, now: float, *, every: float = 30.0) -> None:
        """Rewrite the file if the last write was at least ``every`` seconds ago.

        Args:
            now: the time of :func:`time.monotonic`.
            every: the interval in seconds.
        """
        if now - self._written >= every:
            self._write(self.status)

    def _write(self, status: Status) -> None:
        self._written = time.monotonic()
        self.status = replace(status, heard=self._written)
        content = (json.dumps(asdict(self.status)) + "\n").encode()
        self._host.write(self._path, content)
        if self._local:
            replace_file(os.path.join(self._local, FILE), content, durable=False)


def probe(question: str, local: str, now: float) -> Status:
    """Answer a probe.

    Args:
        question: "alive" or "ready".
        local: the directory in the container.
        now: the time of :func:`time.monotonic`.

    Returns:
        The installer's status.

    Raises:
        InstallerUnwell: the installer is not alive, or not ready.
    """
    path = os.path.join(local, FILE)
    try:
        status = Status(**parse_json(read_named(path)))
    except (OSError, ValueError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InstallerUnwell(f"probe {question}", found=f"cannot read {path}: {why}") from error
    silent = now - status.heard
    if silent > SILENCE or (question == "ready" and status.state not in State.ALL_DONE):
        raise InstallerUnwell(
            f"probe {question}",
            found=f"{status.state}: {status.message or '-'}; last heartbeat {silent:.0f} s ago",
        )
    return status
