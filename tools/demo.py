"""``make demo``: run one GPU container from start to exit, and show what it saw.

On a machine with a GPU the container gets the real one; otherwise a simulated node is created first
(:mod:`integration.simulated`). In both cases the containerd is a private, unmodified one, and the
container runs through this checkout's shim. Nothing is left on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from api.errors import NvshimError
from integration.simulated.node import SimulatedNode
from integration.simulated.scenario import Scenario
from integration.simulated.smoke_test import container_flags, shim_directory
from tools import REPOSITORY
from tools.containerd import PrivateContainerd
from tools.errors import DemoFailed
from tools.images import GLIBC, glibc, write_archive

_CACHE: Final = os.path.join(REPOSITORY, ".cache")
_REAL_DRIVER: Final = "/proc/driver/nvidia/version"
_NAME: Final = "demo"
_LIBRARIES: Final = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1")
_WIDTH: Final = 36


class _Stopwatch:
    """The duration of each step, in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.steps.append((name, time.monotonic() - began))


def main(arguments: list[str] | None = None) -> int:
    """Run the demo.

    Args:
        arguments: the command line; None for the process's own.

    Returns:
        The exit status: 0 if the container saw its GPUs.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of the simulated node")
    parser.add_argument("--scenario", help="a scenario of the simulated node: a name or a file")
    parser.add_argument(
        "--simulated", action="store_true", help="simulate the node even if there is a real GPU"
    )
    parser.add_argument("--devices", default="all", help="NVIDIA_VISIBLE_DEVICES")
    parser.add_argument("--capabilities", default="compute,utility")
    asked = parser.parse_args(arguments)
    try:
        _run(asked)
    except NvshimError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def _run(asked: argparse.Namespace) -> None:
    watch = _Stopwatch()
    with ExitStack() as cleanup:
        directory = tempfile.mkdtemp(prefix="demo-", dir=_CACHE)
        cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        real = os.path.exists(_REAL_DRIVER) and not asked.simulated
        config = None
        if not real:
            with watch.step("make the simulated node"):
                node = SimulatedNode.create(
                    os.path.join(directory, "node"), _scenario(asked), say=print
                )
            cleanup.callback(node.remove)
            config = node.config_path
        _tell_node(real=real)
        with watch.step("make an image, start containerd"):
            containerd = PrivateContainerd(shim_directory=shim_directory(), shim_config=config)
            cleanup.enter_context(containerd)
            archive = write_archive(os.path.join(containerd.directory, "image.tar"), [glibc()])
            containerd.ctr("images", "import", archive)
        _show_container(containerd, asked, watch)
    _title("How long each step took")
    for name, seconds in watch.steps:
        _row(name, f"{seconds * 1000:8.1f} ms")


def _scenario(asked: argparse.Namespace) -> Scenario:
    if asked.scenario:
        return Scenario.load(asked.scenario)
    return Scenario.of(gpus=asked.gpus)


def _show_container(
    containerd: PrivateContainerd, asked: argparse.Namespace, watch: _Stopwatch
) -> None:
    flags = container_flags(asked.devices, asked.capabilities)
    command = ["run", "--detach", *flags, GLIBC, _NAME]
    _title("The container")
    print("  ctr " + " ".join([*command, "probe", "signals"]))
    with watch.step("first container (no cache yet)"):
        containerd.ctr(*command, "probe", "signals")
    record = _record(containerd)

    def inside(*words: str) -> list[str]:
        return containerd.ctr("tasks", "exec", "--exec-id", words[0], _NAME, *words).lines

    _title("GPUs, as nvidia-smi -L lists them inside")
    with watch.step("exec nvidia-smi -L"):
        gpus = inside("nvidia-smi", "-L")
    for line in gpus:
        print(f"  {line}")
    _title("Devices, and why each is there")
    for device in record["edits"]["devices"]:
        number = f"{device['major']}:{device['minor']}"
        _row(device["path"], f"{number:<10}{device['access']}  {device['reason']}")
    _title("Libraries, as the container's own loader finds them")
    for line in inside("probe", "dlopen", *_LIBRARIES):
        name, _, path = line.partition(" ")
        _row(name, path)
    sources = {m["destination"]: m["source"] for m in record["edits"]["mounts"]}
    where = sorted({os.path.dirname(s) for d, s in sources.items() if ".so." in d})
    _row("from the host's", ", ".join(where))
    _row("in all", f"{len(sources)} mounts, {len(record['edits']['links'])} links, no hook")
    containerd.ctr("tasks", "kill", "--signal", "TERM", _NAME)
    _wait_stopped(containerd)
    containerd.ctr("tasks", "rm", _NAME)
    containerd.ctr("containers", "rm", _NAME)
    short = ["run", "--rm", *flags, GLIBC, "again", "true"]
    with watch.step("ctr run --rm true, after it"):
        containerd.ctr(*short)
    injection = sum(record["milliseconds"].values()) / 1000
    watch.steps.append(("of the first one: injection", injection))
    if asked.devices != "none" and not any(line.startswith("GPU ") for line in gpus):
        raise DemoFailed(
            "a container with GPUs",
            found="nvidia-smi -L lists no GPU",
            do=f"see {containerd.log_path}",
        )


def _record(containerd: PrivateContainerd) -> dict[str, Any]:
    with open(os.path.join(containerd.bundle(_NAME), "nvidia.json"), "rb") as file:
        record: dict[str, Any] = json.load(file)
    return record


def _wait_stopped(containerd: PrivateContainerd) -> None:
    deadline = time.monotonic() + 10
    while "STOPPED" not in containerd.ctr("tasks", "ls").stdout:
        if time.monotonic() > deadline:
            raise DemoFailed(
                "to stop the container", found="it is still running 10 s after SIGTERM"
            )
        time.sleep(0.02)


def _tell_node(*, real: bool) -> None:
    _title("The node")
    if real:
        with open(_REAL_DRIVER, encoding="utf-8") as file:
            print(f"  a real GPU: {file.readline().strip()}")
    else:
        print("  simulated: NVIDIA's user-space driver, real device nodes, no GPU behind them")
    for program in ("containerd", "runc"):
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        print(f"  {said.stdout.splitlines()[0] if said.stdout else program + ': not installed'}")


def _title(text: str) -> None:
    print(f"\n{text}")


def _row(name: str, value: str) -> None:
    print(f"  {name:<{_WIDTH}}  {value}")


if __name__ == "__main__":
    sys.exit(main())
