"""The node agent as a process on a simulated node, with a kubelet of :mod:`.kubelet_plugins`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import yaml

from integration.simulated import Scenario, SimulatedNode
from tests.harness.nvshim import start_nvshim
from tests.harness.processes import family
from tests.harness.waiting import eventually
from tools.nodes import changed_node

__all__ = ["NodeAgent", "agent_process"]


@contextmanager
def agent_process(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start ``nvshim node`` with these arguments; pytest shows its output if the test fails."""
    process = start_nvshim("node", *words, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        sys.stderr.write(process.communicate()[1])


class NodeAgent:
    """``nvshim node``. It runs while the context is open; pytest shows its log if the test fails.

    Args:
        node: the node that it manages.
        directory: for its log, and its configuration as a device plugin.
        kubelet: the socket of the kubelet with which it registers.
        engine: the CRI socket of an engine; by default none, even if an engine runs here.
        more: further arguments.
        log: the name of its log file.
    """

    def __init__(
        self,
        node: SimulatedNode,
        directory: str,
        kubelet: str,
        *more: str,
        engine: str = "/nowhere",
        log: str = "agent.log",
    ) -> None:
        self.node = node
        self.config_file = os.path.join(directory, "plugin.yaml")
        # Not in the directory of the configuration: the agent watches that.
        os.makedirs(os.path.join(directory, "log"), exist_ok=True)
        self._log = os.path.join(directory, "log", log)
        # No poll during a test: changes have to arrive as events.
        self._words = [
            *("node", "--config", node.config_path),
            *("--cdi-spec", "none", "--poll", "1000", "--kernel-log", "none", "--log-format"),
            *("json", "--kubelet-socket", kubelet, "--config-file", self.config_file),
            *("--cri-socket", engine, *more),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, **tables: Any) -> None:
        """Replace the device plugin's configuration in one step, as an editor does."""
        aside = f"{self.config_file}.new"
        with open(aside, "w", encoding="utf-8") as file:
            yaml.safe_dump({"version": "v1", **tables}, file)
        os.rename(aside, self.config_file)

    def start(self) -> None:
        if not os.path.exists(self.config_file):
            self.configure()
        with open(self._log, "ab") as log:
            self.process = start_nvshim(*self._words, stderr=log)

    def change_node(self, scenario: Scenario) -> None:
        """Change the simulated hardware under the running agent.

        The agent and its children are stopped meanwhile, so that they never see an incomplete node.
        """
        stopped: list[int] = []
        while more := [pid for pid in family(self.pid) if pid not in stopped]:
            for pid in more:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped += more
        try:
            self.node = changed_node(self.node, scenario)
        finally:
            for pid in reversed(stopped):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def is_running(self) -> bool:
        """Return whether it is still running."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Kill it, so that it cannot clean up."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stop it as an init system does; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def said(self, event: str = "") -> list[dict[str, Any]]:
        """Return the lines of its log, or only those of one event."""
        with open(self._log, encoding="utf-8") as file:
            # The last line may be incomplete.
            lines = [json.loads(line) for line in file if line[:1] + line[-1:] == "{\n"]
        return [line for line in lines if event in line["event"]]

    def forget(self) -> None:
        """Empty its log."""
        os.truncate(self._log, 0)

    def status(self) -> dict[str, Any]:
        """Return its status file, once that is no earlier agent's."""
        return eventually(self._status, "its status file is its own")

    def _status(self) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            with open(f"{self.node.state}/node.json", encoding="utf-8") as file:
                document: dict[str, Any] = json.load(file)
            if document["pid"] == self.pid:
                return document
        return {}

    def faults(self) -> list[str]:
        """Return the faults in its status file."""
        faults: list[str] = self.status()["faults"]
        return faults

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.kill()
        with open(self._log, encoding="utf-8") as file:
            sys.stderr.write(file.read())
