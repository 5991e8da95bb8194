"""A container is started only with the driver with which it was created."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.errors import Status
from hooks import engine
from hooks.errors import DriverChanged
from hooks.node.identity import refuse_changed, what_changed
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import MULTIARCH, UVM, VERSION, Node, nvml_gpu

SPEC: dict[str, Any] = {
    "process": {
        "env": ["NVIDIA_VISIBLE_DEVICES=0", "NVIDIA_DRIVER_CAPABILITIES=all"],
        "user": {"uid": 0, "gid": 0},
    },
    "root": {"path": "rootfs"},
    "linux": {},
    "mounts": [],
}


def record_of(
    node: Node,
    tmp_path: Path,
    spec: dict[str, Any] = SPEC,
    meanwhile: Callable[[Node], object] = lambda _: None,
) -> dict[str, Any]:
    """Return the record of a container on the node, as read from its bundle."""
    inventory = node.take_inventory(nvml_gpu(0), nvml_gpu(1))
    meanwhile(node)
    for name in ("rootfs", "staging"):
        (tmp_path / name).mkdir(exist_ok=True)
    injection = engine.inject(
        spec, engine.read_request(spec), inventory,
        engine.RootfsTarget(str(tmp_path / "rootfs"), str(tmp_path / "staging")),
        config=node.config,
    )  # fmt: skip
    record: dict[str, Any] = json.loads(json.dumps(injection.record))
    return record


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def renumbered(node: Node, name: str, major: int, minor: int) -> None:
    (node.dev / name).unlink()
    node.add_node(name, major, minor)


CHANGES: dict[str, tuple[Callable[[Node], object], str]] = {
    "another module": (lambda n: n.add_kernel_version("550.54.14"), "550.54.14"),
    "no module": (lambda n: (n.proc / "driver/nvidia/version").unlink(), "unloaded"),
    "a module reloaded": (
        lambda n: n.write(
            n.proc / "driver/nvidia/version", f"NVRM version: NVIDIA Module  {VERSION}  Fri"
        ),
        "reloaded",
    ),
    "a library replaced": (
        lambda n: replaced(n.driver / MULTIARCH / f"libcuda.so.{VERSION}"),
        "libcuda.so",
    ),
    "a library gone": (
        lambda n: (n.driver / MULTIARCH / f"libnvidia-ml.so.{VERSION}").unlink(),
        "libnvidia-ml",
    ),
    "a program replaced": (lambda n: replaced(n.driver / "usr/bin/nvidia-smi"), "nvidia-smi"),
    "a node of other numbers": (
        lambda n: renumbered(n, "nvidia-uvm", UVM - 1, 0),
        "nvidia-uvm",
    ),
    "a node gone": (lambda n: (n.dev / "nvidia0").unlink(), "nvidia0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_container_is_refused_after(node: Node, tmp_path: Path, change: str) -> None:
    node.write(node.driver / "usr/bin/nvidia-smi", "x")
    record = record_of(node, tmp_path)
    refuse_changed(record, "web-1")
    make, says = CHANGES[change]
    make(node)
    with raises(DriverChanged) as caught:
        refuse_changed(record, "web-1")
    error = caught.value
    assert error.status is Status.FAILED_PRECONDITION
    assert "web-1" in error.asked
    assert VERSION in error.found or says in error.found
    assert says in error.found
    assert "\n" not in str(error)


def test_a_file_that_is_replaced_while_a_container_is_made_is_not_the_one_of_its_driver(
    node: Node, tmp_path: Path
) -> None:
    record = record_of(node, tmp_path, meanwhile=CHANGES["a library replaced"][0])
    with raises(DriverChanged, match=r"libcuda\.so"):
        refuse_changed(record, "web-1")


UNCHANGED: dict[str, Callable[[Node], object]] = {
    "nothing": lambda _: None,
    "another GPU's node": lambda n: (n.dev / "nvidia1").unlink(),
    "another library": lambda n: n.add_library("libx.so.1", "libx.so.1"),
    "the mode of a node": lambda n: (n.dev / "nvidia0").chmod(0o600),
    "a service that was restarted": lambda n: (n.driver / "tmp/nvidia-mps").rename(
        n.driver / "tmp/old"
    ),
    "the use of the GPU": lambda n: n.write(
        n.proc / "driver/nvidia/gpus/0000:10:00.0/information", "IRQ: 99\n"
    ),
}


@pytest.mark.parametrize("change", UNCHANGED)
def test_container_is_started_after(node: Node, tmp_path: Path, change: str) -> None:
    (node.driver / "tmp/nvidia-mps").mkdir(parents=True)
    record = record_of(node, tmp_path)
    UNCHANGED[change](node)
    assert what_changed(record) == ""


def test_container_without_a_driver_has_nothing_to_compare(node: Node, tmp_path: Path) -> None:
    assert what_changed({}) == ""
    assert what_changed({"identity": None}) == ""


def test_every_library_and_node_that_was_given_is_compared(node: Node, tmp_path: Path) -> None:
    record = record_of(node, tmp_path)
    paths = {path for _, path, _ in record["identity"]["observations"]}
    sources = {mount["source"] for mount in record["edits"]["mounts"]}
    nodes = {node.config.dev + edit["path"][4:] for edit in record["edits"]["devices"]}
    assert {source for source in sources if os.path.isfile(source)} | nodes <= paths
