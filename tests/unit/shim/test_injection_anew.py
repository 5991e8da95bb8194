"""A container is not refused for what the node had earlier."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from hooks.errors import MigModeGpu, UnknownDevice
from hooks.node.inventory import load_inventory, take_inventory
from shim import bundle as bundle_files
from shim import injection
from shim.errors import BundleUnusable, ProgramTimeout
from shim.injection import Injector
from shim.spawn import Completed
from tests.unit.hooks.fake_node import VERSION, Elves, Node, nvml_gpu

pytestmark = pytest.mark.anyio


def answer(*gpus: dict[str, Any]) -> bytes:
    return json.dumps({"driver": VERSION, "gpus": gpus}).encode()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose only GPU is in MIG mode without instances, which procfs does not show."""
    (tmp_path / "elves").mkdir()
    (tmp_path / "node").mkdir()
    node = Node(tmp_path / "node", Elves(tmp_path / "elves"))
    node.add_kernel()
    node.add_driver()
    node.add_gpu(0)
    config = "".join(
        f"{key} = {json.dumps(str(value))}\n"
        for key, value in (
            ("driver-root", node.driver), ("dev", node.dev), ("proc", node.proc),
            ("sys", node.sys), ("state", node.config.state),
        )
    )  # fmt: skip
    file = tmp_path / "config.toml"
    file.write_text(f'[node]\n{config}[policy]\nmode = "nvidia"\n')
    monkeypatch.setenv("NVSHIM_CONFIG", str(file))
    take_inventory(node.config, answer(nvml_gpu(0, mig=True)))
    assert load_inventory(node.config) is not None
    return node


class Asked:
    """How often NVML was asked, and what it says."""

    def __init__(self, node: Node, says: bytes) -> None:
        self.times = 0
        self._node = node
        self._says = says

    async def __call__(self, config: object) -> Any:
        self.times += 1
        return take_inventory(self._node.config, self._says)


def injector(tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> Injector:
    (tmp_path / "bundle/rootfs").mkdir(parents=True)
    made = Injector(cast("Any", None), str(tmp_path / "bundle"), cast("Any", None))
    monkeypatch.setattr(made, "_take_inventory", asked)
    return made


def spec_of(tmp_path: Path, devices: str) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "process": {"env": [f"NVIDIA_VISIBLE_DEVICES={devices}"], "user": {"uid": 0, "gid": 0}},
        "linux": {},
        "mounts": [],
    }
    (tmp_path / "bundle/config.json").write_text(json.dumps(spec))
    return spec


async def test_gpu_whose_mig_mode_was_turned_off_is_given(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(node, answer(nvml_gpu(0)))
    made = injector(tmp_path, asked, monkeypatch)
    await made.inject(spec_of(tmp_path, "0"), str(tmp_path / "bundle/rootfs"))
    assert asked.times == 1
    edited = json.loads((tmp_path / "bundle/config.json").read_text())
    assert "/dev/nvidia0" in {device["path"] for device in edited["linux"]["devices"]}


@pytest.mark.parametrize(("devices", "error"), [("0", MigModeGpu), ("7", UnknownDevice)])
async def test_refusal_that_is_founded_anew_stands(
    node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: str,
    error: type[Exception],
) -> None:
    asked = Asked(node, answer(nvml_gpu(0, mig=True)))
    made = injector(tmp_path, asked, monkeypatch)
    with pytest.raises(error):
        await made.inject(spec_of(tmp_path, devices), str(tmp_path / "bundle/rootfs"))
    assert asked.times == 1
    assert sorted(path.name for path in (tmp_path / "bundle").iterdir()) == [
        "config.json",
        "rootfs",
    ]
    assert list((tmp_path / "bundle/rootfs").iterdir()) == []


@pytest.mark.parametrize(
    ("loads", "tried"),
    [
        ({}, ["nvidia", "nvidia-uvm"]),
        ({"nvidia": 1}, ["nvidia"]),
        ({"nvidia": None}, ["nvidia"]),
        ({"nvidia-uvm": 1}, ["nvidia", "nvidia-uvm"]),
    ],
)
async def test_module_that_fails_or_hangs_holds_nobody_up_twice(
    node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loads: dict[str, int | None],
    tried: list[str],
) -> None:
    """The status that modprobe ends with, by the module; None if it does not end in time."""
    bus = node.sys / "bus/pci/devices/0000:10:00.0"
    node.write(bus / "vendor", "0x10de\n")
    node.write(bus / "class", "0x030200\n")
    asked: list[str] = []

    async def run(_: object, command: list[str], *, timeout: float) -> Completed:
        asked.append(command[-1])
        status = loads.get(command[-1], 0)
        if status is None:
            raise ProgramTimeout("to run it", found=f"it had not ended after {timeout} s")
        return Completed(cast("Any", SimpleNamespace(status=status)), b"")

    monkeypatch.setattr("shim.injection.run", run)
    made = injector(tmp_path, Asked(node, answer(nvml_gpu(0))), monkeypatch)
    monkeypatch.setattr(made, "_log", Mock())
    await made.inject(spec_of(tmp_path, "all"), str(tmp_path / "bundle/rootfs"))
    assert asked == tried


async def test_refusal_of_what_was_just_looked_at_is_not_founded_twice(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(node.config.state)
    asked = Asked(node, answer(nvml_gpu(0, mig=True)))
    made = injector(tmp_path, asked, monkeypatch)
    with pytest.raises(MigModeGpu):
        await made.inject(spec_of(tmp_path, "0"), str(tmp_path / "bundle/rootfs"))
    assert asked.times == 1


@pytest.mark.parametrize("full", ["nvidia.json", "config.json"])
async def test_bundle_on_a_full_disk_is_left_as_it_was(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    write = bundle_files.write

    def written(path: str, content: bytes, *, mode: int = 0o600) -> None:
        if path.endswith(f"/{full}"):
            raise BundleUnusable(f"to write {path}", found="no space left on device")
        write(path, content, mode=mode)

    monkeypatch.setattr(bundle_files, "write", written)
    made = injector(tmp_path, Asked(node, answer(nvml_gpu(0))), monkeypatch)
    spec = spec_of(tmp_path, "0")
    bundle = tmp_path / "bundle"
    inode = (bundle / "config.json").stat().st_ino
    with pytest.raises(BundleUnusable, match=full):
        await made.inject(spec, str(bundle / "rootfs"))
    made.undo()
    assert sorted(path.name for path in bundle.iterdir()) == ["config.json", "rootfs"]
    assert (bundle / "config.json").stat().st_ino == inode


async def test_spec_as_it_came_is_kept_for_who_asks_later_and_put_back_if_undone(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = injector(tmp_path, Asked(node, answer(nvml_gpu(0))), monkeypatch)
    spec = spec_of(tmp_path, "0")
    bundle = tmp_path / "bundle"
    came = (bundle / "config.json").read_bytes()
    inode = (bundle / "config.json").stat().st_ino
    await made.inject(spec, str(bundle / "rootfs"))
    assert (bundle / "config.json").read_bytes() != came
    assert (bundle / bundle_files.BEFORE).stat().st_ino == inode
    assert (bundle / bundle_files.BEFORE).read_bytes() == came
    made.undo()
    assert sorted(path.name for path in bundle.iterdir()) == ["config.json", "rootfs"]
    assert (bundle / "config.json").stat().st_ino == inode


async def test_log_says_why_each_container_waits_for_nvml(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(node.config.state)
    Path(node.config.state).write_text("no directory")

    async def run(_: object, __: object, *, timeout: float) -> Completed:
        assert timeout > 0
        return Completed(cast("Any", SimpleNamespace(status=1)), b'{"error": "Driver Not Loaded"}')

    monkeypatch.setattr("shim.injection.run", run)
    log = Mock()
    (tmp_path / "bundle/rootfs").mkdir(parents=True)
    made = Injector(cast("Any", None), str(tmp_path / "bundle"), log)
    await made.inject(spec_of(tmp_path, "0"), str(tmp_path / "bundle/rootfs"))
    said = [call.kwargs["why"] for call in log.warning.call_args_list]
    assert said[0] == "Driver Not Loaded"
    assert said[1].startswith("the inventory was not kept: ")


async def test_nothing_is_left_for_the_delete_verb_to_look_after(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = injector(tmp_path, Asked(node, answer(nvml_gpu(0))), monkeypatch)
    await made.inject(spec_of(tmp_path, "0"), str(tmp_path / "bundle/rootfs"))
    staging = tmp_path / "bundle" / bundle_files.STAGING
    staging.mkdir(exist_ok=True)
    (staging / "params").touch()
    made.release()
    assert not staging.exists()
    assert (tmp_path / "bundle" / bundle_files.RECORD).exists()


@pytest.mark.parametrize(("later", "looks"), [(0.05, 0), (1.0, 1)])
async def test_what_was_seen_ahead_is_used_soon_or_not_at_all(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: float, looks: int
) -> None:
    made = injector(tmp_path, Asked(node, answer(nvml_gpu(0))), monkeypatch)
    take_inventory(node.config, answer(nvml_gpu(0)))
    spec = spec_of(tmp_path, "0")
    injection.look_ahead(str(tmp_path / "bundle"))
    looked = Mock(side_effect=load_inventory)
    monkeypatch.setattr("hooks.engine.load_inventory", looked)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + later)
    await made.inject(spec, str(tmp_path / "bundle/rootfs"))
    assert looked.call_count == looks
    # Nor a second time.
    assert injection._seen_ahead(node.config) is None


async def test_a_module_that_is_loaded_changes_what_was_seen_ahead(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = injector(tmp_path, Asked(node, answer(nvml_gpu(0))), monkeypatch)
    take_inventory(node.config, answer(nvml_gpu(0)))
    spec = spec_of(tmp_path, "0")
    injection.look_ahead(str(tmp_path / "bundle"))
    looked = Mock(side_effect=load_inventory)
    monkeypatch.setattr("hooks.engine.load_inventory", looked)
    monkeypatch.setattr("hooks.engine.module_commands", Mock(return_value=[["modprobe", "nvidia"]]))
    monkeypatch.setattr(made, "_load_module", AsyncMock(return_value=True))
    await made.inject(spec, str(tmp_path / "bundle/rootfs"))
    assert looked.call_count == 1


async def test_a_mistake_in_looking_ahead_is_for_create_to_tell(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bundle").mkdir()
    spec_of(tmp_path, "0")
    failing = Mock(side_effect=TypeError)
    monkeypatch.setattr("hooks.engine.read_request", failing)
    injection.look_ahead(str(tmp_path / "bundle"))
    assert failing.call_count == 1
    assert injection._seen_ahead(node.config) is None


async def test_a_bundle_that_asks_for_nothing_or_is_broken_is_not_looked_at(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Mock(side_effect=AssertionError)
    monkeypatch.setattr("hooks.engine.load_inventory", looked)
    (tmp_path / "bundle").mkdir()
    for content in ("{}", "{", '{"process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}}'):
        (tmp_path / "bundle/config.json").write_text(content)
        injection.look_ahead(str(tmp_path / "bundle"))
    injection.look_ahead(str(tmp_path / "no bundle"))
    assert looked.call_count == 0


def test_without_a_spec_none_is_kept_and_that_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BundleUnusable, match=r"config\.json"):
        bundle_files.keep_spec(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
