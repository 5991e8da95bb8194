"""Nodes for the tests in this directory; the driver's packages are fetched once per checkout."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.simulated import Scenario, SimulatedNode
from integration.simulated.driver import DriverFiles

AskNvml = Callable[..., Any]
MakeNode = Callable[..., SimulatedNode]
Smi = Callable[..., subprocess.CompletedProcess[str]]

# nvmlReturn_t
INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 2, 3, 6, 7
DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH = 9, 13, 15, 25


@pytest.fixture(scope="session")
def driver_files() -> DriverFiles:
    return DriverFiles.fetch()


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """Make a node with two H100, which tests must not change."""
    directory = tmp_path_factory.mktemp("two") / "node"
    with SimulatedNode.create(str(directory), Scenario.load("two")) as node:
        yield node


@pytest.fixture(scope="session")
def mig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    """Make the shipped node with MIG devices, which tests must not change."""
    directory = tmp_path_factory.mktemp("mig") / "node"
    with SimulatedNode.create(str(directory), Scenario.load("mig")) as node:
        yield node


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    """Return a function that makes nodes for one test."""
    made: list[SimulatedNode] = []

    def make(scenario: Scenario, **options: Any) -> SimulatedNode:
        node = SimulatedNode.create(str(tmp_path / f"node-{len(made)}"), scenario, **options)
        made.append(node)
        return node

    yield make
    for node in made:
        node.remove()


def libraries(node: SimulatedNode) -> str:
    """Return the directory of the node's libraries."""
    triplets = os.listdir(os.path.join(node.driver_root, "usr/lib"))
    triplet = next(name for name in triplets if name.endswith("-linux-gnu"))
    return os.path.join(node.driver_root, "usr/lib", triplet)


@pytest.fixture(scope="session")
def smi() -> Smi:
    """Run the node's own nvidia-smi on the host, against the node's NVML."""

    def run(node: SimulatedNode, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [os.path.join(node.driver_root, "usr/bin/nvidia-smi"), *arguments],
            env={"LD_LIBRARY_PATH": libraries(node)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return run


_PREAMBLE = """
import json
from ctypes import *
from pynvml import *
def answer(value): print("answer:" + json.dumps(value, default=lambda number: number.value))
"""


@pytest.fixture(scope="session")
def ask_nvml() -> AskNvml:
    """Run Python against the node's NVML in a child, and return its answer.

    The code calls ``answer(value)`` once. If it raises an NVMLError, its number is returned.
    """

    def ask(
        node: SimulatedNode, code: str, *, init: bool = True, timeout: float = 20, faults: str = ""
    ) -> Any:
        body = ("nvmlInit()\n" if init else "") + textwrap.dedent(code)
        guarded = (
            "try:\n"
            + textwrap.indent(body, "    ")
            + ("\nexcept NVMLError as error:\n    answer({'error': error.value})\n")
        )
        done = subprocess.run(
            [sys.executable, "-c", _PREAMBLE + guarded],
            env={"LD_LIBRARY_PATH": libraries(node), "NVSHIM_SIMULATED_FAULTS": faults},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        answers = [line[7:] for line in done.stdout.splitlines() if line.startswith("answer:")]
        if done.returncode < 0:
            return {"signal": -done.returncode}
        assert len(answers) == 1, done.stderr
        return json.loads(answers[0])

    return ask


@contextlib.contextmanager
def without(*paths: str) -> Iterator[None]:
    """Hide files inside the block."""
    try:
        for path in paths:
            os.rename(path, path + ".away")
        yield
    finally:
        for path in paths:
            if os.path.exists(path + ".away"):
                os.rename(path + ".away", path)
