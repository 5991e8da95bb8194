"""Many pods with claims that start and end in parallel."""

from __future__ import annotations

import os
import random
import threading

import grpc  # type: ignore[import-untyped] # it ships no types

from tests.harness.dra_node import Place
from tests.harness.kubelet_dra import Reference

__all__ = ["Storm"]


class Storm:
    """Pods that come and go in several threads, with the timeouts of a kubelet.

    Attributes:
        held: the pod that has each device.
        twice: devices that were allocated while another pod had them.
        prepared: how many claims were prepared.
        unanswered: how many calls got no answer.
    """

    def __init__(self, place: Place, devices: list[str]) -> None:
        self.held: dict[str, str] = {}
        self.twice: list[str] = []
        self.failed: list[BaseException] = []
        self.prepared = 0
        self.unanswered = 0
        self._place = place
        self._devices = devices
        self._lock = threading.Lock()

    def patiently(self, method: str, reference: Reference) -> str:
        """Retry a call until the agent answers; a refusal is an answer."""
        while True:
            try:
                driver = self._place.driver
                if method == "prepare":
                    return driver.prepare(reference)[reference[1]].error
                error = driver.unprepare(reference)[reference[1]]
            except (grpc.RpcError, ValueError):
                self.unanswered += 1
                continue  # the agent is down, or the channel closed: try again
            if not error:
                return ""

    def pods(self, number: int, count: int) -> None:
        """Run this many pods, each until the next one runs."""
        chance = random.Random(number)
        before: Reference | None = None
        try:
            for turn in range(count):
                name = f"claim-{number}-{turn}"
                wanted = chance.sample(self._devices, chance.randint(1, 2))
                reference = self._place.claim(name, *wanted)
                if not self.patiently("prepare", reference):
                    assert os.path.exists(self._place.spec(reference))
                    with self._lock:
                        self.prepared += 1
                        self.twice += [each for each in wanted if each in self.held]
                        self.held.update(dict.fromkeys(wanted, name))
                if before is not None:
                    self._end(before)
                before = reference
            if before is not None:
                self._end(before)
        except BaseException as error:  # noqa: BLE001 - the test reports it
            self.failed.append(error)

    def is_past(self, count: int) -> bool:
        """Return whether this many claims were prepared, or the storm failed."""
        return self.prepared >= count or bool(self.failed)

    def _end(self, reference: Reference) -> None:
        """Delete a pod and unprepare its claim, also one that was refused."""
        with self._lock:
            for device in [each for each, name in self.held.items() if name == reference[2]]:
                del self.held[device]
        self.patiently("unprepare", reference)
        assert not os.path.exists(self._place.spec(reference))
