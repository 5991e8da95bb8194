"""The events that containerd publishes, as ``ctr events`` prints them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    topic: str  # "/tasks/exit" and the like
    fields: dict[str, Any]  # the message's fields, by their names in JSON

    @property
    def short(self) -> str:
        """The topic's last part, and the exec's id if it is about one: "exit", "exit e1"."""
        name = self.topic.rpartition("/")[2]
        container = self.fields.get("container_id", "")
        exec_id = self.fields.get("exec_id") or self.fields.get("id") or ""
        return name if exec_id in {"", container} else f"{name} {exec_id}"


class Recorder:
    """Records events from the moment it is entered.

    Args:
        containerd: publishes the events. After a restart of it, call :meth:`listen`.
    """

    def __init__(self, containerd: PrivateContainerd) -> None:
        self._containerd = containerd
        self._process: subprocess.Popen[bytes] | None = None
        self._path = ""

    def __enter__(self) -> Self:
        handle, self._path = tempfile.mkstemp(prefix="nvshim-events-")
        os.close(handle)
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        os.unlink(self._path)

    def listen(self) -> None:
        """Subscribe, again after a restart of containerd, and wait for the first event."""
        self._end()
        with open(self._path, "ab") as file:
            self._process = self._containerd.spawn_ctr(
                "events", stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.DEVNULL
            )
        # Only an event that arrives proves that the subscription is active.
        before = len(self._lines())

        def heard() -> bool:
            self._containerd.ctr(
                "namespaces", "label", self._containerd.namespace, f"heard={time.monotonic_ns()}"
            )
            return len(self._lines()) > before

        eventually(heard, "an event is heard")

    def of(self, container: str) -> list[Event]:
        """Return the task events of one container so far, in the order of arrival."""
        return [
            event
            for event in map(_parse, self._lines())
            if event is not None
            and event.topic.startswith("/tasks/")
            and event.fields.get("container_id") == container
        ]

    def wait_for(
        self, container: str, done: Callable[[list[str]], bool], *, timeout: float = 60
    ) -> list[str]:
        """Wait until the container's events are as expected, and return their short names."""

        def look() -> list[str]:
            names = [event.short for event in self.of(container)]
            return names if done(names) else []

        try:
            return eventually(look, "the events", timeout=timeout)
        except AssertionError as error:
            seen = [event.short for event in self.of(container)]
            raise AssertionError(f"events of {container} not as awaited: {seen}") from error

    def _lines(self) -> list[str]:
        with open(self._path, encoding="utf-8") as file:
            # The last part may be a line that is still being written.
            return file.read().split("\n")[:-1]

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def _parse(line: str) -> Event | None:
    """Parse a line: "DATE TIME ZONE ZONE NAMESPACE TOPIC JSON"."""
    with contextlib.suppress(ValueError):
        _, _, _, _, _, topic, text = line.split(" ", 6)
        return Event(topic, json.loads(text))
    return None
