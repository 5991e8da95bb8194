"""A simulated node whose GPUs fail, with faults from the agent and the kernel, and a message file.

The kernel's log is a FIFO in the node's device directory; a reader gets its content. A held lock
stands in for the agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Any

from integration.simulated import SimulatedNode
from shim.causes.agent import LOCK
from shim.causes.record import Fault, write_causes
from shim.causes.xids import about

__all__ = ["FailingNode", "MessageFile"]


class FailingNode:
    """A simulated node that a test may change.

    Args:
        node: a node without an agent.
    """

    def __init__(self, node: SimulatedNode, namespace: str) -> None:
        self.node = node
        self._namespace = namespace

    def uuid(self, index: int = 0) -> str:
        return self.node.scenario.gpus[index].uuid

    def bus_id(self, index: int = 0) -> str:
        """Return the bus id as the kernel logs it, without a function."""
        return self.node.scenario.gpus[index].pci.rpartition(".")[0]

    def fault(self, number: int, **more: Any) -> Fault:
        """Build a current Xid of the first GPU, as the agent reports it."""
        about_it = about(number)
        values: dict[str, Any] = {
            "at": time.time(), "kind": "xid", "code": number, "name": about_it.meaning,
            "gpu": self.uuid(), "pid": 4711, "whose": about_it.whose, "sure": True,
            "action": about_it.action,
        }  # fmt: skip
        return Fault(**(values | more))

    def tell(self, container: str, *xids: int, **more: Any) -> None:
        """Write the faults that an agent knows for a container."""
        faults = [self.fault(number, **more) for number in xids]
        write_causes(self.node.state, self._namespace, container, faults)

    @contextlib.contextmanager
    def agent(self) -> Iterator[None]:
        """Hold the lock of the node's agent."""
        with open(os.path.join(self.node.state, LOCK), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def kernel_log(self, *lines: str, facility: int = 0) -> Iterator[None]:
        """Put these lines into the kernel's log, with the current time."""
        path = os.path.join(self.node.dev, "kmsg")
        os.mkfifo(path)
        fd = os.open(path, os.O_RDWR)
        try:
            for number, line in enumerate(lines):
                moment = int(time.monotonic() * 1e6)
                record = f"{facility << 3 | 4},{number},{moment},-;{line}\n"
                os.write(fd, record.encode())
            yield
        finally:
            os.close(fd)
            os.unlink(path)

    def xid(self, number: int, text: str = "x", *, index: int = 0, pid: int = 0) -> str:
        """Return the driver's log line for an Xid."""
        process = f"pid={pid}, name=python3, " if pid else ""
        return f"NVRM: Xid (PCI:{self.bus_id(index)}): {number}, {process}{text}"


class MessageFile:
    """A termination message file, as a kubelet creates it.

    Args:
        text: its initial content.
    """

    def __init__(self, directory: str, text: str = "") -> None:
        self.directory = f"{directory}/pods/add545db-3370-4b63-a1e5-c52a0da8ca30/containers/main"
        self.path = f"{self.directory}/0a1b2c3d"
        os.makedirs(self.directory)
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(self.path, 0o666)

    @property
    def text(self) -> str:
        """Return the termination message that a kubelet would show."""
        with open(self.path, "rb") as file:
            return file.read()[-4096:].decode()
