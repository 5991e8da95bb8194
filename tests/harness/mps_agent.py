"""The agent's MPS service as a process, with a state in which the node's GPUs are shared by MPS.

    python -m tests.harness.mps_agent JSON

JSON: ``config``, ``root`` (mpsRoot), ``states``, ``replicas`` (0: nothing is shared),
``devices`` (UUIDs of the GPUs that are; none: all of them),
``timeout`` (seconds that a daemon has to answer), and ``dies``: after this many steps
(:data:`STEPS`) the process ends as if by SIGKILL. Each change of the state is written to stdout as
one line. The process stops on SIGTERM. It retries failures sooner than the real agent, and it waits
longer for a daemon that starts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio

from hooks.config import load_config
from integration import backoff
from integration.containers.procfs import Procfs
from integration.node.options import Options
from integration.node.refresh import look
from integration.node.service import Context
from integration.node.services.mps import compute_modes as modes
from integration.node.services.mps import daemon, daemon_supervisor, host_setup
from integration.node.services.mps import service as component
from integration.node.services.plugin.resources import resources_of
from integration.node.state.topic import wait_any
from integration.node.values import resources as values
from integration.node.values.resources import Settings, SharedResource, Sharing
from integration.signal_receiver import open_signal_receiver
from integration.simulated import SimulatedNode
from tests.harness.node_state import publish
from tests.harness.waiting import eventually
from tests.harness.warm import Warm

RESOURCE: Final = "nvidia.com/gpu"
PROGRAM: Final = "usr/bin/nvidia-cuda-mps-control"

STEPS: Final = (
    (host_setup, "prepare"),
    (host_setup, "empty_pipe"),
    (modes, "record"),
    (modes, "set_mode"),
    (os, "posix_spawn"),
    (daemon.Daemon, "answers"),
    (daemon.Daemon, "configure"),
)
"""The steps of starting a daemon, in order."""


class Agent:
    """A running agent process, its input and its reported state."""

    def __init__(self, node: SimulatedNode, work: Path, root: Path) -> None:
        self.node = node
        self.root = root  # short, because the paths of sockets are limited
        self.resource = RESOURCE
        self.out = work / "state"
        self.states = work / "states"
        self.states.mkdir(exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def directory(self) -> Path:
        """Return the directory of the resource."""
        return self.root / self.resource

    def start(
        self,
        *,
        replicas: int = 4,
        devices: tuple[str, ...] = (),
        dies: int = 0,
        timeout: float = daemon.TIMEOUT,
    ) -> None:
        """Start the agent; an earlier one has to be stopped."""
        wish = {
            "config": self.node.config_path, "root": str(self.root), "replicas": replicas,
            "states": [str(self.states)], "devices": devices, "dies": dies, "timeout": timeout,
        }  # fmt: skip
        with self.out.open("wb") as out:
            self.process = Warm("tests.harness.mps_agent", json.dumps(wish), stdout=out)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Stop the agent; return its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def said(self) -> list[dict[str, Any]]:
        """Return all states that it has reported."""
        lines = self.out.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def daemon(self) -> dict[str, Any]:
        """Return the latest state of the daemon; empty if there is none."""
        for line in reversed(self.said()):
            return dict(line["mps"].get(self.resource, {}))
        return {}

    def fault(self) -> str:
        """Return the fault in its state."""
        said = self.said()
        return str(said[-1]["faults"].get("mps", "")) if said else ""

    def ready(self) -> int:
        """Wait until the daemon is ready; return its pid."""
        return int(
            eventually(
                lambda: not self.daemon().get("unready", "no") and self.daemon()["pid"],
                "a daemon that serves",
            )
        )

    def modes(self) -> list[str]:
        """Return the compute modes of the node's GPUs: "3" is EXCLUSIVE_PROCESS."""
        found = []
        for gpu in self.node.scenario.gpus:
            try:
                path = f"{self.node.state}/nvml-compute-mode-{gpu.uuid}"
                with open(path, encoding="ascii") as file:
                    found.append(file.read())
            except FileNotFoundError:
                found.append("0")
        return found

    def processes(self) -> list[int]:
        """Return the pids of the running daemons and servers, with any parent."""
        # A client of a daemon, such as an agent that retries, runs the program without an argument.
        found = ((pid, Procfs().words(pid)) for pid in processes(self.root))
        return [pid for pid, words in found if words and not words[-1].endswith(f"/{PROGRAM}")]

    def close(self) -> None:
        """Remove everything, whatever has happened."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        end_daemons(self.root, self.node)


def processes(root: Path) -> list[int]:
    """Return the daemons and servers of the resources below a root."""
    variable = f"\0CUDA_MPS_PIPE_DIRECTORY={root}/".encode()
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if variable in b"\0" + file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


def end_daemons(root: Path, node: SimulatedNode) -> None:
    """Stop all daemons, and undo their changes of a node."""
    for pid in processes(root):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not processes(root), "daemons and servers have ended")
    host_setup.remove_shm(str(root))
    host_setup.remove_cgroups()
    for gpu in node.scenario.gpus:
        Path(f"{node.state}/nvml-compute-mode-{gpu.uuid}").unlink(missing_ok=True)


@contextmanager
def agent_of(node: SimulatedNode, work: Path) -> Iterator[Agent]:
    """Create an agent, not started yet, and remove everything at the end.

    Args:
        work: a directory of the test.
    """
    top = tempfile.mkdtemp(prefix="mps-")
    agent = Agent(node, work, Path(top, "mps"))
    try:
        yield agent
    finally:
        sys.stdout.write(agent.out.read_text(encoding="utf-8") if agent.out.exists() else "")
        log = agent.directory / "log/control.log"
        sys.stdout.write(log.read_text(encoding="utf-8") if log.exists() else "")
        agent.close()
        shutil.rmtree(top)


def _die_after(steps: int) -> None:
    owner, name = STEPS[steps - 1]
    step = getattr(owner, name)

    def last(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, last)


async def _main(wish: dict[str, Any]) -> None:
    config = load_config(wish["config"])
    options = Options(spec="", poll=60, states=tuple(wish["states"]))
    context = Context(config, options, lambda *_, **__: None)
    seen = look(config)
    assert seen.inventory is not None
    devices = tuple(wish["devices"]) or None
    share = SharedResource(RESOURCE, wish["replicas"], devices=devices)
    shared = (share,) if wish["replicas"] else ()
    sharing = Sharing(kind=values.MPS if shared else "", resources=shared)
    settings = Settings(mps_root=wish["root"], sharing=sharing)
    resources = resources_of(seen.inventory, settings)
    publish(context.state.node, seen)
    publish(context.state.settings, settings)
    publish(context.state.resources, resources)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        tasks.start_soon(_tell, context)
        with open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                break
        tasks.cancel_scope.cancel()


async def _tell(context: Context) -> None:
    version = -1
    while True:
        version = await wait_any(context.state.mps_daemons, context.state.faults, since=version)
        daemons = {
            name: dataclasses.asdict(each) for name, each in context.state.mps_daemons.value.items()
        }
        line = {"mps": daemons, "faults": dict(context.state.faults.lines)}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _wish = json.loads(sys.argv[1])
    daemon.TIMEOUT = _wish["timeout"]  # type: ignore[misc]
    daemon_supervisor._TO_START = 100.0  # type: ignore[misc]
    backoff._FIRST_PAUSE = 0.2  # type: ignore[misc]
    backoff._LONGEST_PAUSE = 0.5  # type: ignore[misc]
    daemon_supervisor._QUIT_INTERVAL = 0.5  # type: ignore[misc]
    if _wish["dies"]:
        _die_after(_wish["dies"])
    anyio.run(_main, _wish)
