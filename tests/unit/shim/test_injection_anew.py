"""An injection uses the current state of the node, and is written completely or not at all."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hooks.errors import MigModeGpu, UnknownDevice
from hooks.node.inventory import load_inventory
from hooks.requests.prefilter import prefilter
from shim import bundle as bundle_files
from shim import files
from shim.errors import BundleUnusable, ProgramTimeout
from shim.work.injection import Injection
from shim.work.provision import Provision, newest_oci_version
from shim.work.worker import Link
from tests.unit.hooks.fake_node import Node, nvml_gpu, nvml_report


class _Alone(Link):
    """A worker's end of a connection without a peer."""

    def __init__(self) -> None:
        """Do nothing: it has no socket."""

    def extend_deadline(self, seconds: float) -> None:
        """Do nothing: no peer waits."""


class Place:
    """A node whose only GPU is in MIG mode in the cached inventory, and a bundle on it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        node.add_kernel()
        node.add_driver()
        node.add_gpu(0)
        self.bundle = node.base / "bundle"
        (self.bundle / "rootfs").mkdir(parents=True)
        self.log = Mock()
        self.provision = Provision(str(self.bundle), self.log, _Alone())
        self.answer = node.base / "answer"
        self.asked = node.base / "asked"

    def says(self, *gpus: dict[str, Any]) -> None:
        """Set NVML's answer."""
        self.answer.write_bytes(nvml_report(*gpus))

    def times(self) -> int:
        """Return how often NVML was queried."""
        return len(self.asked.read_text()) if self.asked.exists() else 0

    def provide(self, devices: str) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "root": {"path": "rootfs"},
            "process": {"env": [f"NVIDIA_VISIBLE_DEVICES={devices}"], "user": {"uid": 0, "gid": 0}},
            "linux": {},
            "mounts": [],
        }
        (self.bundle / "config.json").write_text(json.dumps(spec))
        value, layer = self.provision.provide(prefilter(spec), [], "runc")
        assert layer == -1
        return value

    def files(self) -> list[str]:
        return sorted(path.name for path in self.bundle.iterdir())


@pytest.fixture
def place(bare_node: Node, monkeypatch: pytest.MonkeyPatch) -> Place:
    place, node = Place(bare_node), bare_node
    config = "".join(
        f"{key} = {json.dumps(str(value))}\n"
        for key, value in (
            ("driver-root", node.driver), ("dev", node.dev), ("proc", node.proc),
            ("sys", node.sys), ("state", node.config.state),
        )
    )  # fmt: skip
    file = node.base / "config.toml"
    file.write_text(f'[node]\n{config}[policy]\nmode = "nvidia"\n')
    monkeypatch.setenv("NVSHIM_CONFIG", str(file))
    command = ("sh", "-c", f"printf x >> {place.asked}; cat {place.answer}")
    monkeypatch.setattr("hooks.engine.probe_command", lambda _: command)
    place.says(nvml_gpu(0))
    node.take_inventory(nvml_gpu(0, mig=True))
    assert load_inventory(node.config) is not None
    return place


def test_gpu_whose_mig_mode_was_turned_off_is_given(place: Place) -> None:
    place.provide("0")
    assert place.times() == 1
    edited = json.loads((place.bundle / "config.json").read_text())
    assert "/dev/nvidia0" in {device["path"] for device in edited["linux"]["devices"]}


@pytest.mark.parametrize(("devices", "error"), [("0", MigModeGpu), ("7", UnknownDevice)])
def test_refusal_that_is_founded_anew_stands(
    place: Place, devices: str, error: type[Exception]
) -> None:
    place.says(nvml_gpu(0, mig=True))
    with pytest.raises(error):
        place.provide(devices)
    assert place.times() == 1
    assert place.files() == ["config.json", "rootfs"]
    assert list((place.bundle / "rootfs").iterdir()) == []


def test_refusal_of_what_was_just_looked_at_is_not_founded_twice(place: Place) -> None:
    shutil.rmtree(place.node.config.state)
    place.says(nvml_gpu(0, mig=True))
    with pytest.raises(MigModeGpu):
        place.provide("0")
    assert place.times() == 1


@pytest.mark.parametrize(
    ("loads", "tried"),
    [
        ({}, ["nvidia", "nvidia-uvm"]),
        ({"nvidia": 1}, ["nvidia"]),
        ({"nvidia": None}, ["nvidia"]),
        ({"nvidia-uvm": 1}, ["nvidia", "nvidia-uvm"]),
    ],
)
def test_module_that_fails_or_hangs_is_waited_for_once(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    loads: dict[str, int | None],
    tried: list[str],
) -> None:
    """Each module has modprobe's exit status, or None if it hangs."""
    bus = place.node.sys / "bus/pci/devices/0000:10:00.0"
    place.node.write(bus / "vendor", "0x10de\n")
    place.node.write(bus / "class", "0x030200\n")
    asked: list[str] = []

    def run(_: object, command: list[str], timeout: float) -> tuple[int, bytes]:
        if command[0] == "sh":
            return 0, place.answer.read_bytes()
        asked.append(command[-1])
        status = loads.get(command[-1], 0)
        if status is None:
            raise ProgramTimeout("to run it", found=f"it had not ended after {timeout} s")
        return status, b""

    monkeypatch.setattr(Link, "run", run)
    place.provide("all")
    assert asked == tried


@pytest.mark.parametrize("full", ["nvidia.json", "config.json"])
def test_bundle_on_a_full_disk_is_left_as_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    write = files.write

    def written(path: str, content: bytes, *, mode: int = 0o600) -> None:
        if path.endswith(f"/{full}"):
            raise BundleUnusable(f"to write {path}", found="no space left on device")
        write(path, content, mode=mode)

    monkeypatch.setattr(files, "write", written)
    with pytest.raises(BundleUnusable, match=full):
        place.provide("0")
    Injection(Mock(), str(place.bundle), place.log).undo()
    assert place.files() == ["config.json", "rootfs"]
    assert "linux" in json.loads((place.bundle / "config.json").read_text())


def test_spec_as_it_came_is_kept_for_later_and_put_back_if_undone(place: Place) -> None:
    later = place.provide("0")["later"]
    assert sorted(later) == ["driver_layer", "identity", "proc_files", "process"]
    kept = (place.bundle / bundle_files.BEFORE).read_bytes()
    assert (place.bundle / "config.json").read_bytes() != kept
    inode = (place.bundle / bundle_files.BEFORE).stat().st_ino
    Injection(Mock(), str(place.bundle), place.log).undo()
    assert place.files() == ["config.json", "rootfs"]
    assert (place.bundle / "config.json").read_bytes() == kept
    assert (place.bundle / "config.json").stat().st_ino == inode


def test_log_says_why_each_container_waits_for_nvml(place: Place) -> None:
    shutil.rmtree(place.node.config.state)
    Path(place.node.config.state).write_text("no directory")
    place.answer.write_bytes(b'{"error": "Driver Not Loaded"}')
    place.provide("0")
    said = [call.kwargs["why"] for call in place.log.warning.call_args_list]
    assert said[0] == "Driver Not Loaded"
    assert said[1].startswith("the inventory was not kept: ")


@pytest.mark.parametrize(("later", "looks"), [(0.05, 0), (1.0, 1)])
def test_what_was_seen_ahead_is_used_soon_or_not_at_all(
    place: Place, monkeypatch: pytest.MonkeyPatch, later: float, looks: int
) -> None:
    place.node.take_inventory(nvml_gpu(0))
    place.provision.look_ahead()
    looked = Mock(side_effect=load_inventory)
    monkeypatch.setattr("hooks.engine.load_inventory", looked)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + later)
    place.provide("0")
    assert looked.call_count == looks


def test_a_module_that_is_loaded_changes_what_was_seen_ahead(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.node.take_inventory(nvml_gpu(0))
    place.provision.look_ahead()
    looked = Mock(side_effect=load_inventory)
    monkeypatch.setattr("hooks.engine.load_inventory", looked)
    monkeypatch.setattr("hooks.engine.module_commands", Mock(return_value=[["true"]]))
    place.provide("0")
    assert looked.call_count == 1


@pytest.mark.parametrize("failing", ["shim.work.provision.load_config"])
def test_a_mistake_in_looking_ahead_is_for_create_to_tell(
    place: Place, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    fails: Callable[..., Any] = Mock(side_effect=TypeError)
    monkeypatch.setattr(failing, fails)
    place.provision.look_ahead()
    with pytest.raises(TypeError):
        place.provide("0")


def test_without_a_spec_none_is_kept_and_that_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BundleUnusable, match=r"config\.json"):
        bundle_files.keep_spec(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("features", "version"),
    [
        ({"ociVersionMax": "1.2.1"}, "1.2.1"),
        ({"ociVersionMax": "1.2.1", "linux": None}, "1.2.1"),
        # As crun 1.21 and 1.28 have it.
        ({"ociVersionMax": "1.1.0+dev", "linux": {"cgroup": {}}}, "1.1.0+dev"),
        ({"ociVersionMax": "1.1.0+dev", "linux": {"netDevices": {"enabled": True}}}, "1.3.0"),
        ({"ociVersionMax": "1.1.0+dev", "linux": {"netDevices": {"enabled": False}}}, "1.1.0+dev"),
    ],
)
def test_a_runtime_that_moves_interfaces_is_told_by_its_features(
    features: dict[str, Any], version: str
) -> None:
    assert newest_oci_version(json.dumps(features).encode()) == version
