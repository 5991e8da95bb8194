"""The node agent as a process, with GPUs whose driver and kernel log a test controls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.harness.nvshim import nvshim, start_nvshim
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.simulated import SimulatedNode

__all__ = ["GpuAgent", "gpu_agent"]


@dataclass
class GpuAgent:
    """The agent, and the parts of the node that a test changes."""

    process: subprocess.Popen[bytes]
    node: SimulatedNode
    log: str
    kernel: int

    def lines(self) -> list[dict[str, Any]]:
        with open(self.log, encoding="utf-8") as file:
            # The last line may be incomplete.
            return [json.loads(line) for line in file if line[:1] + line[-1:] == "{\n"]

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["event"].startswith(event)]

    def xid(self, index: int, number: int, text: str, *, pid: int = 0) -> None:
        """Write an Xid to the kernel's log."""
        bus = self.node.scenario.gpus[index].pci.rpartition(".")[0]
        process = f"pid={pid}, name=sleep, " if pid else ""
        line = f"4,1,2,-;NVRM: Xid (PCI:{bus}): {number}, {process}{text}\n"
        os.write(self.kernel, line.encode())

    def listens(self) -> None:
        """Wait until the agent reads the kernel's log."""

        def is_heard() -> bool:
            self.xid(0, 14, "a test")
            return bool(self.said("XID 14"))

        eventually(is_heard, "it hears the kernel's log")

    def nvml(self, name: str, text: str) -> None:
        """Set NVML's faults."""
        with open(f"{self.node.state}/nvml-{name}", "w", encoding="utf-8") as file:
            file.write(text)

    def nvshim(self, *words: str) -> tuple[int, Any]:
        """Run a command; return its exit status and output."""
        where = ("-o", "json", "--config", self.node.config_path)
        done = nvshim(*words, *where, check=False, stderr=None)
        return done.code, done.items if done.stdout else None

    def listed(self) -> list[str]:
        """Return the states of the GPUs, from `nvshim list`."""
        # Ignores the containers of this machine's other engines.
        words = ("list", "--containerd-state", self.node.state)
        return [row["health"] for row in self.nvshim(*words)[1]]

    def states(self) -> list[str]:
        """Return the same from the agent's file, which is cheaper to poll."""
        try:
            with open(f"{self.node.state}/health.json", encoding="utf-8") as file:
                return [device["state"] for device in json.load(file)["devices"]]
        except FileNotFoundError:
            return []


@contextmanager
def gpu_agent(node: SimulatedNode, directory: Path, *more: str) -> Iterator[GpuAgent]:
    kmsg, log = directory / "kmsg", str(directory / "agent.log")
    if not kmsg.exists():
        os.mkfifo(kmsg)
    kernel = os.open(kmsg, os.O_RDWR)
    words = ("node", "--config", node.config_path, "--cdi-spec", "none", "--poll", "0.3")
    with open(log, "w", encoding="utf-8") as stderr:
        told = ("--kernel-log", str(kmsg), "--log-format", "json", *more)
        process = start_nvshim(*words, *told, stderr=stderr)
    try:
        yield GpuAgent(process, node, log, kernel)
    finally:
        process.terminate()
        process.wait(timeout=60)
        os.close(kernel)
        with open(log, encoding="utf-8") as said:
            sys.stderr.write(said.read())  # shown if the test fails
