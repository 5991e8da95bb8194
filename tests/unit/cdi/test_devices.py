"""``nvshim devices create``, on a node made of files."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pytest

from integration import exits
from integration.devices.creating import (
    CreateOptions,
    StepState,
    create,
    refuse_failures,
    run_command,
)
from integration.devices.errors import DevicesNotMade, ModulesNotLoaded
from integration.devices.expected import expected_nodes
from tests.harness.raising import raises
from tests.unit.cdi.conftest import Nvshim
from tests.unit.hooks.fake_node import CAPS, NVIDIA, UVM, Node

IMEX = "nvidia-caps-imex-channels"
CONTROL = ("nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools")


@pytest.fixture
def loaded(node: Node) -> Node:
    """Make a node with all modules loaded and their parameters, but no device nodes."""
    for module in ("nvidia", "nvidia_uvm", "nvidia_modeset"):
        (node.sys / "module" / module).mkdir(parents=True)
    text = "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 44\nDeviceFileMode: 432\n"
    node.write(node.proc / "driver/nvidia/params", text)
    for name in (*CONTROL, "nvidia0", "nvidia1"):
        (node.dev / name).unlink()
    below = node.proc / "driver/nvidia/capabilities"
    for name, minor, mode in (("mig/config", 1, 256), ("gpu1/mig/gi3/access", 21, 292)):
        told = f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"
        node.write(below / name, told)
    return node


def states(steps: Sequence[Any], kind: str) -> dict[str, str]:
    return {os.path.basename(step.path): step.state for step in steps if step.kind == kind}


def numbers(node: Node, name: str) -> tuple[int, int, int, int]:
    seen = (node.dev / name).stat()
    rdev = seen.st_rdev
    return os.major(rdev), os.minor(rdev), seen.st_mode & 0o777, seen.st_gid


def test_every_node_of_the_driver_is_made_once_with_its_mode_and_link(loaded: Node) -> None:
    steps = create(loaded.config, CreateOptions())
    names = {*CONTROL, "nvidia0", "nvidia1", "nvidia-cap1", "nvidia-cap21"}
    assert states(steps, "node") == dict.fromkeys(names, StepState.MADE)
    assert numbers(loaded, "nvidiactl") == (NVIDIA, 255, 0o660, 44)
    assert numbers(loaded, "nvidia1") == (NVIDIA, 1, 0o660, 44)
    assert numbers(loaded, "nvidia-uvm-tools") == (UVM, 1, 0o660, 44)
    assert numbers(loaded, "nvidia-caps/nvidia-cap1") == (CAPS, 1, 0o400, 0)
    assert numbers(loaded, "nvidia-caps/nvidia-cap21") == (CAPS, 21, 0o444, 0)
    links = states(steps, "link")
    assert set(links.values()) == {StepState.MADE}
    assert len(links) == len(names)
    assert os.readlink(loaded.dev / f"char/{NVIDIA}:255") == "../nvidiactl"
    assert os.readlink(loaded.dev / f"char/{CAPS}:21") == "../nvidia-caps/nvidia-cap21"
    again = create(loaded.config, CreateOptions())
    assert {step.state for step in again} == {StepState.PRESENT}


def test_a_dry_run_says_the_same_and_changes_nothing(loaded: Node) -> None:
    before = sorted(os.listdir(loaded.dev))
    dry = create(loaded.config, CreateOptions(dry_run=True))
    assert sorted(os.listdir(loaded.dev)) == before
    made = create(loaded.config, CreateOptions())
    assert {(step.kind, step.path, step.numbers) for step in dry} == {
        (step.kind, step.path, step.numbers) for step in made
    }
    assert {step.state for step in dry} == {StepState.ABSENT}


def test_control_nodes_alone(loaded: Node) -> None:
    steps = create(loaded.config, CreateOptions(control_only=True, links=False))
    assert states(steps, "node") == dict.fromkeys(CONTROL, StepState.MADE)
    assert not (loaded.dev / "nvidia0").exists()
    assert not (loaded.dev / "char").exists()


def test_links_of_whatever_nodes_of_the_driver_there_are(node: Node) -> None:
    node.add_node("nvidia-caps/nvidia-cap9", CAPS, 9)
    node.add_node("nvidia-nothing-of-the-driver", 7, 7)
    steps = create(node.config, CreateOptions(nodes=False))
    assert set(states(steps, "link")) == {
        *(f"{NVIDIA}:{minor}" for minor in (0, 1, 254, 255)), f"{UVM}:0", f"{UVM}:1", f"{CAPS}:9",
    }  # fmt: skip


def test_nodes_with_numbers_of_another_time_are_made_anew(loaded: Node) -> None:
    loaded.add_node("nvidia0", NVIDIA, 9)
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        loaded.add_node(name, UVM + 1, 0)
    devices = loaded.proc / "devices"
    text = devices.read_text()
    devices.write_text(text.replace(f"{UVM} nvidia-uvm\n", f"{UVM} nvidia-uvm\n237 {IMEX}\n"))
    loaded.add_node(f"{IMEX}/channel3", 236, 3)
    loaded.add_node(f"{IMEX}/channel4", 237, 4)
    stale = {
        "nvidia0": (NVIDIA, 0), "nvidia-uvm": (UVM, 0), "nvidia-uvm-tools": (UVM, 1),
        f"{IMEX}/channel3": (237, 3),
    }  # fmt: skip
    planned = {s.path: s for s in create(loaded.config, CreateOptions(links=False, dry_run=True))}
    for name in stale:
        seen = os.lstat(loaded.dev / name)
        before = f"{os.major(seen.st_rdev)}:{os.minor(seen.st_rdev)}"
        step = planned[f"{loaded.dev}/{name}"]
        assert step.state == StepState.ABSENT
        assert f"{name} is device {before}, not " in step.reason
    made = {s.path: s for s in create(loaded.config, CreateOptions(links=False))}
    for name, numbers in stale.items():
        seen = os.lstat(loaded.dev / name)
        assert (os.major(seen.st_rdev), os.minor(seen.st_rdev)) == numbers
        assert made[f"{loaded.dev}/{name}"].state == StepState.MADE
    assert f"{loaded.dev}/{IMEX}/channel4" not in made


def test_what_is_wrong_is_told_and_left(loaded: Node) -> None:
    (loaded.dev / "nvidia0").symlink_to("nowhere")
    (loaded.dev / "nvidia1").write_text("a file")
    steps = create(loaded.config, CreateOptions(links=False))
    reasons = {os.path.basename(s.path): s.reason for s in steps if s.state == StepState.FAILED}
    assert reasons == {
        "nvidia0": f"{loaded.dev}/nvidia0 is no character device",
        "nvidia1": f"{loaded.dev}/nvidia1 is no character device",
    }
    with raises(DevicesNotMade, match=r"2 of \d+ modules, nodes"):
        refuse_failures(steps)
    assert (loaded.dev / "nvidia1").read_text() == "a file"


def test_without_a_module_its_nodes_are_unavailable(loaded: Node) -> None:
    (loaded.sys / "module/nvidia_modeset").rmdir()
    text = (loaded.proc / "devices").read_text()
    (loaded.proc / "devices").write_text(text.replace(f"{UVM} nvidia-uvm\n", ""))
    steps = create(loaded.config, CreateOptions(links=False))
    unavailable = [s.path for s in steps if s.state == StepState.UNAVAILABLE]
    assert [os.path.basename(path) for path in unavailable] == [
        "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools",
    ]  # fmt: skip
    refuse_failures(steps)
    (loaded.proc / "devices").write_text("Character devices:\n  1 mem\n")
    for name in ("nvidiactl", "nvidia0", "nvidia1"):
        (loaded.dev / name).unlink()
    with raises(DevicesNotMade, match="lists no nvidia"):
        refuse_failures(create(loaded.config, CreateOptions(links=False)))


def test_the_modules_parameters_may_forbid_it(loaded: Node) -> None:
    loaded.write(loaded.proc / "driver/nvidia/params", "ModifyDeviceFiles: 0\n")
    steps = create(loaded.config, CreateOptions(links=False))
    assert {step.state for step in steps} == {StepState.FORBIDDEN}
    assert not (loaded.dev / "nvidiactl").exists()


# Modules


def pci(node: Node) -> None:
    device = node.sys / "bus/pci/devices/0000:01:00.0"
    node.write(device / "vendor", "0x10de\n")
    node.write(device / "class", "0x030200\n")


def test_without_the_drivers_own_module_nothing_is_made_and_without_others_the_rest_is(
    loaded: Node,
) -> None:
    pci(loaded)
    for module in ("nvidia", "nvidia_uvm", "nvidia_modeset"):
        (loaded.sys / "module" / module).rmdir()
    asked = []

    def run(command: Sequence[str]) -> str:
        asked.append(command[-1])
        if command[-1] == failing:
            return "no such device"
        (loaded.sys / "module" / command[-1].replace("-", "_")).mkdir()
        return ""

    failing = "nvidia"
    with raises(ModulesNotLoaded, match=r"nvidia.*no such device"):
        create(loaded.config, CreateOptions(modules=True), run)
    assert asked == ["nvidia"]
    assert not (loaded.dev / "nvidiactl").exists()
    failing = "nvidia-uvm"
    steps = create(loaded.config, CreateOptions(modules=True, links=False), run)
    assert states(steps, "module") == {
        "nvidia": StepState.MADE, "nvidia-uvm": StepState.FAILED, "nvidia-modeset": StepState.MADE,
    }  # fmt: skip
    made = states(steps, "node")
    assert (made["nvidia0"], made["nvidia-uvm"]) == (StepState.MADE, StepState.UNAVAILABLE)
    with raises(DevicesNotMade, match="nvidia-uvm: no such device"):
        refuse_failures(steps)
    dry = create(loaded.config, CreateOptions(modules=True, dry_run=True), run)
    assert states(dry, "module")["nvidia"] == StepState.PRESENT


def test_a_command_that_fails_says_why() -> None:
    assert run_command(["true"]) == ""
    assert run_command(["false"]) == "status 1"
    assert run_command(["sh", "-c", "echo bad luck >&2; exit 3"]) == "bad luck"
    assert "No such file" in run_command(["/no/such/program"])


def test_expected_nodes_without_a_driver_are_the_control_nodes(bare_node: Node) -> None:
    assert [node.path for node in expected_nodes(bare_node.config)] == [
        f"/dev/{name}" for name in CONTROL
    ]


# The command


@pytest.mark.usefixtures("config_file")
def test_command_tells_each_and_ends_with_three_if_it_would_do_something(
    loaded: Node, nvshim: Nvshim
) -> None:
    rows = nvshim("devices", "create", "--dry-run", "-o", "json", ends=exits.FOUND).json["items"]
    assert rows[0] == {
        "kind": "node",
        "path": f"{loaded.dev}/nvidiactl",
        "numbers": f"{NVIDIA}:255",
        "state": "absent",
        "reason": "",
    }
    assert f"{loaded.dev}/nvidia0" in nvshim("devices", "create", "-o", "wide").out
    nvshim("devices", "create", "--dry-run")
    (loaded.dev / "nvidia0").unlink()
    (loaded.dev / "nvidia0").write_text("")
    seen = nvshim("devices", "create", "-o", "json", ends=exits.FAILED)
    assert json.loads(seen.err)["error"]["code"] == "NVSHIM-E2536"
    other = loaded.base / "other"
    (other / "dev").mkdir(parents=True)
    nvshim("devices", "create", "--dev-root", str(other), "--no-links")
    assert sorted(os.listdir(other / "dev")) == sorted(
        [*CONTROL, "nvidia0", "nvidia1", "nvidia-caps"]
    )
