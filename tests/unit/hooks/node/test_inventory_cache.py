from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hooks.edits.grant import decide
from hooks.errors import DeviceNodeMissing, DriverNotFound
from hooks.node import fingerprint
from hooks.node import inventory as inventories
from hooks.node.cache import RELEASE
from hooks.node.fingerprint import first_change
from hooks.node.inventory import Inventory, load_inventory, take_inventory
from hooks.requests.request import Request
from hooks.words import GpuIndex, NamedDevices
from tests.harness.own_process import restored
from tests.unit.hooks.fake_node import (
    MULTIARCH,
    VERSION,
    Node,
    nvml_gpu,
    nvml_mig,
    put_directory,
    put_fifo,
    put_link,
    uuid_of,
)


def take(node: Node) -> Inventory:
    return node.take_inventory(nvml_gpu(0), nvml_gpu(1))


def kept(node: Node) -> Path:
    return Path(node.config.state) / "inventory.json"


def test_inventory_that_was_kept_is_the_one_that_was_taken(node: Node) -> None:
    node.write(node.driver / "usr/bin/nvidia-smi", "x")
    node.add_mig(1, 1, 0, (12, 13))
    mig = nvml_gpu(1, mig=True, mig_devices=[nvml_mig(0, 1, 0)])
    taken = node.take_inventory(nvml_gpu(0), mig)
    assert taken.mig_devices
    assert taken.nvml_failure == ""
    assert load_inventory(node.config) == taken


def test_nothing_is_loaded_before_something_was_kept(node: Node) -> None:
    assert load_inventory(node.config) is None


def test_only_root_can_read_or_write_what_is_kept(node: Node) -> None:
    with restored():
        os.umask(0)
        take(node)
    assert stat.S_IMODE(kept(node).stat().st_mode) == 0o600
    assert stat.S_IMODE(kept(node).parent.stat().st_mode) == 0o700
    assert os.listdir(node.config.state) == ["inventory.json"]


def test_what_a_killed_worker_left_is_removed_with_the_next_write(node: Node) -> None:
    take(node)
    left = kept(node).with_name(".inventory.json.4711")
    left.touch()
    at_work = kept(node).with_name(".inventory.json.4712")
    with at_work.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        take(node)
    assert {*os.listdir(node.config.state)} == {"inventory.json", at_work.name}


def replace_library(node: Node) -> None:
    path = node.driver / MULTIARCH / f"libcuda.so.{VERSION}"
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def rewrite_library(node: Node) -> None:
    path = node.driver / MULTIARCH / f"libcuda.so.{VERSION}"
    before = path.stat()
    with path.open("r+b") as file:
        file.write(path.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )


def edit(node: Node, old: str, new: str) -> None:
    path = node.proc / "driver/nvidia/gpus/0000:10:00.0/information"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


STALE: dict[str, Callable[[Node], object]] = {
    "another boot": lambda n: n.write(n.proc / "sys/kernel/random/boot_id", "second-boot\n"),
    "another module": lambda n: n.add_kernel_version("550.54.14"),
    "library replaced": replace_library,
    "library rewritten in place, of the same size and time": rewrite_library,
    "module gone": lambda n: (n.proc / "driver/nvidia/version").unlink(),
    "library added": lambda n: n.add_library(f"libnvcuvid.so.{VERSION}", "libnvcuvid.so.1"),
    "library removed": lambda n: (n.driver / MULTIARCH / f"libnvidia-ml.so.{VERSION}").unlink(),
    "library touched": lambda n: os.utime(n.driver / MULTIARCH / f"libcuda.so.{VERSION}", (1, 1)),
    "program added": lambda n: n.write(n.driver / "usr/sbin/nvidia-smi", "x"),
    "configuration added": lambda n: n.write(n.driver / "etc/OpenCL/vendors/nvidia.icd", "x"),
    "firmware added": lambda n: n.write(n.driver / f"lib/firmware/nvidia/{VERSION}/gsp.bin", "x"),
    "GPU added": lambda n: n.add_gpu(2),
    "GPU replaced": lambda n: n.write(
        n.proc / "driver/nvidia/gpus/0000:10:00.0/information", "GPU UUID: GPU-9\nDevice Minor: 0\n"
    ),
    "GPU gone": lambda n: shutil.rmtree(n.proc / "driver/nvidia/gpus/0000:10:00.0"),
    "GPU of another minor": lambda n: edit(n, "Device Minor: \t 0", "Device Minor: \t 7"),
    "GPU excluded": lambda n: edit(n, "Excluded:\t No", "Excluded:\t Yes"),
    "GPU used for the first time": lambda n: edit(n, uuid_of(0), uuid_of(9)),
    "MIG device made": lambda n: n.add_mig(0, 1, 0, (12, 13)),
    "DRM node added": lambda n: n.write(n.sys / "bus/pci/devices/0000:10:00.0/drm/card0/dev"),
}  # fmt: skip


@pytest.mark.parametrize("change", STALE)
def test_inventory_is_stale_after(node: Node, change: str) -> None:
    take(node)
    assert load_inventory(node.config) is not None
    STALE[change](node)
    assert load_inventory(node.config) is None


def test_compute_instance_made_in_a_known_gpu_instance_is_noticed(node: Node) -> None:
    node.add_mig(0, 1, 0, (12, 13))
    take(node)
    assert load_inventory(node.config) is not None
    node.add_mig(0, 1, 1, (12, 14))
    assert load_inventory(node.config) is None


@pytest.mark.parametrize("gone", ["gi1/ci0", "gi1"])
def test_instance_that_is_destroyed_is_noticed(node: Node, gone: str) -> None:
    node.add_mig(0, 1, 0, (12, 13))
    node.add_mig(0, 2, 0, (14, 15))
    take_with_mig(node, (1, 0), (2, 0))
    assert load_inventory(node.config) is not None
    shutil.rmtree(node.proc / "driver/nvidia/capabilities/gpu0/mig" / gone)
    assert load_inventory(node.config) is None


def take_with_mig(node: Node, *instances: tuple[int, int]) -> Inventory:
    """Take the inventory of a node whose first GPU has MIG devices, according to NVML."""
    devices = [nvml_mig(index, *each) for index, each in enumerate(instances)]
    first = nvml_gpu(0, mig=True, mig_devices=devices)
    return node.take_inventory(first, nvml_gpu(1))


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    now = inventories._now() + seconds
    monkeypatch.setattr(inventories, "_now", lambda: now)


def test_instance_made_while_nvml_was_asked_is_not_missed_for_long(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.add_mig(0, 1, 0, (12, 13))
    taken = take_with_mig(node)
    assert "other MIG devices" in taken.notes[-1]
    assert load_inventory(node.config) == taken
    later(monkeypatch, inventories.RETRY_AFTER + 1)
    assert load_inventory(node.config) is None
    settled = take_with_mig(node, (1, 0))
    assert settled.notes == ()
    later(monkeypatch, 1000)
    assert load_inventory(node.config) == settled


def test_mig_mode_without_instances_is_believed_for_a_while_only(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = take_with_mig(node)
    assert taken.gpus[0].mig
    assert "no instances" in taken.notes[-1]
    loaded = load_inventory(node.config)
    assert loaded == taken
    assert loaded is not None
    assert loaded.kept
    later(monkeypatch, inventories.RETRY_AFTER + 1)
    assert load_inventory(node.config) is None


def test_gpu_that_nvml_cannot_open_keeps_its_index_and_is_not_given(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = {"index": 0, "lost": "GPU is lost"}
    taken = node.take_inventory(lost, nvml_gpu(1))
    assert [gpu.index for gpu in taken.gpus] == [0, 1]
    assert "GPU is lost" in taken.nodes.faults["/dev/nvidia0"]
    assert "/dev/nvidia1" in taken.nodes.usable
    assert load_inventory(node.config) == taken
    later(monkeypatch, inventories.RETRY_AFTER + 1)
    assert load_inventory(node.config) is None


def test_gpu_that_nvml_cannot_open_by_a_wrong_node_is_not_called_lost(node: Node) -> None:
    (node.dev / "nvidia0").unlink()
    (node.dev / "nvidia0").touch()
    taken = node.take_inventory({"index": 0, "lost": "GPU is lost"}, nvml_gpu(1))
    path = taken.gpus[0].path
    assert "is no character device" in taken.nodes.faults[path]
    assert path in taken.nodes.wrong
    assert path not in taken.nodes.lost
    with pytest.raises(DeviceNodeMissing, match="what stands in the node's place"):
        decide(Request(NamedDevices((GpuIndex(0),))), taken)


def test_gpu_that_fell_off_the_bus_is_noticed_at_once_and_keeps_its_index(node: Node) -> None:
    take(node)
    (node.sys / "bus/pci/devices/0000:10:00.0").rmdir()
    loaded = load_inventory(node.config)
    assert loaded is not None
    assert [gpu.index for gpu in loaded.gpus] == [0, 1]
    assert "fell off the bus" in loaded.nodes.faults["/dev/nvidia0"]
    assert "/dev/nvidia0" not in loaded.nodes.usable
    assert "/dev/nvidia1" in loaded.nodes.usable


def test_new_name_of_a_file_does_not_make_it_stale(node: Node) -> None:
    path = node.driver / MULTIARCH / f"libcuda.so.{VERSION}"
    os.link(path, node.base / "first")
    take(node)
    os.link(path, node.base / "second")
    assert load_inventory(node.config) is not None


def test_nodes_of_a_driver_container_s_own_dev_are_found(node: Node) -> None:
    own = node.driver / "dev"
    own.mkdir()
    (node.dev / "nvidia1").rename(own / "nvidia1")
    (node.dev / "nvidia-uvm").rename(own / "nvidia-uvm")
    nodes = take(node).nodes
    assert nodes.usable["/dev/nvidia1"].host == str(own / "nvidia1")
    assert nodes.usable["/dev/nvidia0"].host == str(node.dev / "nvidia0")
    assert "/dev/nvidia-uvm" in nodes.usable


def test_check_of_a_large_node_looks_once_at_each_of_few_files(
    bare_node: Node, elves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare_node.add_kernel()
    bare_node.add_driver()
    for minor in range(8):
        bare_node.add_gpu(minor)
    bare_node.take_inventory(*map(nvml_gpu, range(8)))
    observations = json.loads(kept(bare_node).read_bytes())["observations"]
    looks: Counter[tuple[str, str]] = Counter()

    def counted(kind: str, look: Callable[[str], Any]) -> Callable[[str], Any]:
        def once(path: str) -> Any:
            looks[kind, path] += 1
            return look(path)

        return once

    for kind, look in fingerprint._LOOKS.items():
        monkeypatch.setitem(fingerprint._LOOKS, kind, counted(kind, look))
    assert first_change(observations) is None
    # It is done for each container: within a millisecond on a usual machine.
    assert 0 < len(looks) <= len(observations) < 100
    assert set(looks.values()) == {1}


def test_uses_of_a_gpu_do_not_make_it_stale(node: Node) -> None:
    take(node)
    file = node.proc / "driver/nvidia/gpus/0000:10:00.0/information"
    file.write_text(file.read_text().replace("IRQ:   \t\t 30", "IRQ:   \t\t 99"))
    assert load_inventory(node.config) is not None


def test_inventory_of_another_configuration_is_stale(node: Node) -> None:
    take(node)
    assert load_inventory(replace(node.config, dev="/dev")) is None
    assert load_inventory(replace(node.config, nvml_timeout=1.0)) is None


def test_nodes_and_sockets_are_those_of_now(node: Node) -> None:
    (node.dev / "nvidia-uvm").unlink()
    assert "/dev/nvidia-uvm" in take(node).nodes.faults
    node.add_node("nvidia-uvm", 508, 0)
    (node.driver / "tmp/nvidia-mps").mkdir(parents=True)
    loaded = load_inventory(node.config)
    assert loaded is not None
    assert "/dev/nvidia-uvm" in loaded.nodes.usable
    assert "/tmp/nvidia-mps" in loaded.sockets


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda f: f.write_bytes(b""),
    "torn": lambda f: f.write_bytes(f.read_bytes()[:-9]),
    "no JSON": lambda f: f.write_bytes(b"\xff\x00"),
    "a list": lambda f: f.write_bytes(b"[]"),
    "deeply nested": lambda f: f.write_bytes(b"[" * 100000),
    "of another format": lambda f: f.write_text(f.read_text().replace('"format":', '"format":1')),
    "of another release": lambda f: f.write_text(f.read_text().replace(RELEASE, "0.1.9")),
    "without a key": lambda f: f.write_text(f.read_text().replace('"gpus"', '"gups"')),
    "with a key too many": lambda f: f.write_text(f.read_text().replace('"minor"', '"minors"')),
    "of an unknown architecture": lambda f: f.write_text(f.read_text().replace("x86_64", "z80")),
    "another user's": lambda f: os.chown(f, 1000, 1000),
    "writable for others": lambda f: f.chmod(0o666),
    "in a directory writable for others": lambda f: f.parent.chmod(0o777),
    "in another user's directory": lambda f: os.chown(f.parent, 1000, 1000),
    "a link": lambda f: put_link(f, str(f.rename(f.with_name("other")))),
    "a directory": put_directory,
    "a fifo": put_fifo,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_file_is_stale_and_no_error_if_it_is(node: Node, damage: str) -> None:
    take(node)
    assert load_inventory(node.config) is not None
    DAMAGE[damage](kept(node))
    assert load_inventory(node.config) is None


@given(st.data())
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_byte_of_the_file_may_be_wrong(node: Node, data: st.DataObject) -> None:
    if not kept(node).exists():
        take(node)
        (node.base / "good").write_bytes(kept(node).read_bytes())
    content = bytearray((node.base / "good").read_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] = data.draw(st.integers(0, 255))
    kept(node).write_bytes(content)
    load_inventory(node.config)


def test_damaged_file_is_replaced_and_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    victim = node.write(tmp_path / "victim", "precious")
    Path(node.config.state).mkdir(mode=0o700)
    kept(node).symlink_to(victim)
    take(node)
    assert victim.read_text() == "precious"
    assert not kept(node).is_symlink()
    assert load_inventory(node.config) is not None


@pytest.mark.parametrize(
    "obstacle",
    [
        lambda state: state.symlink_to("/tmp"),
        lambda state: state.write_text("a file"),
        lambda state: (state.mkdir(), state.chmod(0o777)),
        lambda state: (state.mkdir(mode=0o700), (state / "inventory.json").mkdir()),
    ],
)
def test_inventory_that_cannot_be_kept_is_as_good_and_says_so(node: Node, obstacle: Any) -> None:
    obstacle(Path(node.config.state))
    taken = take(node)
    assert len(taken.gpus) == 2
    assert "not kept" in taken.notes[-1]
    assert load_inventory(node.config) is None


def test_failed_nvml_is_asked_again_after_a_while_and_not_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = take_inventory(node.config, None)
    assert len(taken.gpus) == 2
    assert taken.nvml_failure
    assert load_inventory(node.config) == taken
    later = inventories._now() + inventories.RETRY_AFTER + 1
    monkeypatch.setattr(inventories, "_now", lambda: later)
    assert load_inventory(node.config) is None


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (None, "in time"),
        (b"", "nothing"),
        (b"garbage", "no JSON"),
        (b'{"error": "Driver Not Loaded"}', "Driver Not Loaded"),
        (b'{"driver": "550.54.14", "gpus": []}', "550.54.14"),
    ],
)
def test_gpus_are_known_without_nvml_and_its_failure_is_kept(
    node: Node, told: bytes | None, why: str
) -> None:
    taken = take_inventory(node.config, told)
    assert [gpu.index for gpu in taken.gpus] == [0, 1]
    assert why in taken.nvml_failure


def test_answer_from_the_midst_of_an_update_is_asked_for_again_at_once(node: Node) -> None:
    taken = node.take_inventory(nvml_gpu(0), driver="550.54.14")
    assert "550.54.14" in taken.nvml_failure
    assert load_inventory(node.config) is None


def test_node_without_driver_is_an_error_and_leaves_no_file(bare_node: Node) -> None:
    bare_node.add_kernel()
    with pytest.raises(DriverNotFound):
        take_inventory(bare_node.config, None)
    assert not kept(bare_node).exists()


def test_what_is_parsed_once_is_not_believed_longer_than_its_file(node: Node) -> None:
    take(node)
    first = load_inventory(node.config)
    assert first is not None
    path = kept(node)
    with path.open(encoding="utf-8") as file:
        document = json.load(file)
    document["cuda_version"] = "99.9"
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file)
    second = load_inventory(node.config)
    assert second is not None
    assert (first.cuda_version, second.cuda_version) != ("99.9", "99.9")
    assert second.cuda_version == "99.9"
    with path.open("w", encoding="utf-8") as file:
        file.write("{")
    assert load_inventory(node.config) is None
