"""The shim refuses devices that an admin has taken out of service."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import Mock

import pytest

from hooks import engine
from hooks.errors import OutOfService
from hooks.node.drained import DRIVER, path_of
from hooks.requests.prefilter import prefilter
from shim import bundle as bundle_files
from shim.work.provision import Provision
from tests.unit.hooks.fake_node import Node, nvml_gpu, uuid_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LISTED: Final = [{"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1}]


class Place:
    """A node with two GPUs, and a bundle."""

    def __init__(self, node: Node) -> None:
        self.node = node
        node.add_kernel()
        node.add_driver()
        node.add_gpu(0)
        node.add_gpu(1)
        node.take_inventory(nvml_gpu(0), nvml_gpu(1))
        self.bundle = node.base / "bundle"
        (self.bundle / "rootfs").mkdir(parents=True)
        self.spec: dict[str, Any] = {
            "root": {"path": "rootfs"},
            "process": {"env": [], "user": {"uid": 0, "gid": 0}},
            "linux": {},
            "mounts": [],
        }

    def mark(self, device: str) -> None:
        os.makedirs(self.node.config.drained, exist_ok=True)
        with open(path_of(self.node.config, device), "w", encoding="utf-8") as file:
            file.write('{"reason": "fan", "since": 1}')

    def provide(self, devices: str, *, listed: Sequence[Any] = (), bounding: str = "") -> list[str]:
        """Create a container; return the GPUs that it gets."""
        self.spec["process"]["env"] = [f"NVIDIA_VISIBLE_DEVICES={devices}"]
        self.spec["process"]["capabilities"] = {"bounding": [bounding] * bool(bounding)}
        self.spec["linux"]["devices"] = list(listed)
        (self.bundle / "config.json").write_text(json.dumps(self.spec))
        Provision(str(self.bundle), Mock(), Mock()).provide(prefilter(self.spec), [], "runc")
        edited = json.loads((self.bundle / "config.json").read_text())
        paths = (each["path"] for each in edited["linux"].get("devices", ()))
        return [path for path in paths if path in {"/dev/nvidia0", "/dev/nvidia1"}]

    @property
    def record(self) -> Path:
        return self.bundle / bundle_files.RECORD


@pytest.fixture
def place(bare_node: Node, monkeypatch: pytest.MonkeyPatch) -> Place:
    place, config = Place(bare_node), bare_node.config
    names = ("driver_root", "dev", "proc", "sys", "state", "drained")
    lines = (f"{n.replace('_', '-')} = {json.dumps(getattr(config, n))}\n" for n in names)
    file = bare_node.base / "config.toml"
    file.write_text(f"[node]\n{''.join(lines)}")
    monkeypatch.setenv("NVSHIM_CONFIG", str(file))
    return place


def test_a_gpu_that_is_named_is_refused_and_all_is_the_others(place: Place) -> None:
    place.mark(uuid_of(1))
    with pytest.raises(OutOfService, match=r"GPU 1 \(GPU-.*\) is out of service since .*: fan"):
        place.provide("1")
    with pytest.raises(OutOfService):
        place.provide(f"0,{uuid_of(1)}")
    assert place.provide("0") == ["/dev/nvidia0"]
    assert place.provide("all") == ["/dev/nvidia0"]
    notes = json.loads(place.record.read_text())["grant"]["notes"]
    assert [note.split(" (")[0] for note in notes if "out of service" in note] == ["GPU 1"]
    place.mark(uuid_of(0))
    with pytest.raises(OutOfService, match="all GPUs of this node cannot be given: GPU 0"):
        place.provide("all")
    assert place.provide("none") == []


def test_of_a_driver_out_of_service_nothing_is_given_loaded_or_asked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.mark(DRIVER)
    for devices in ("none", "all", "0"):
        with pytest.raises(OutOfService, match="the driver is out of service since"):
            place.provide(devices)
    assert place.provide("void") == []
    # The same if it is already gone, for example during its update.
    monkeypatch.setattr(Provision, "_load_module", Mock(side_effect=AssertionError))
    monkeypatch.setattr(engine, "probe_command", Mock(side_effect=AssertionError))
    commands = [("modprobe", "nvidia")]
    monkeypatch.setattr(engine, "module_commands", lambda *_: commands)
    with pytest.raises(OutOfService):
        place.provide("0")
    commands.clear()
    os.unlink(f"{place.node.config.state}/inventory.json")
    with pytest.raises(OutOfService):
        place.provide("0")


def test_what_a_spec_lists_already_is_refused_too(place: Place) -> None:
    """containerd lists the nodes of CDI names, and all host nodes in a privileged container."""
    assert place.provide("void", listed=LISTED) == ["/dev/nvidia1"]
    place.mark(uuid_of(0))
    assert place.provide("void", listed=LISTED) == ["/dev/nvidia1"]
    place.mark(uuid_of(1))
    with pytest.raises(OutOfService, match="GPU 1 "):
        place.provide("void", listed=LISTED)
    assert place.provide("void", listed=LISTED, bounding="CAP_SYS_ADMIN") == ["/dev/nvidia1"]


def test_a_mark_that_comes_after_the_decision_is_seen_once_the_record_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draining marks, then lists holders: a container that is not listed yet must see the mark."""
    inject, seen = engine.inject, []

    def inject_then_mark(*args: Any, **more: Any) -> Any:
        done = inject(*args, **more)
        place.mark(uuid_of(1))  # and its list lacks this container
        seen.append(place.record.exists())
        return done

    monkeypatch.setattr(engine, "inject", inject_then_mark)
    assert place.provide("0") == ["/dev/nvidia0"]
    place.record.unlink()
    os.unlink(path_of(place.node.config, uuid_of(1)))
    with pytest.raises(OutOfService, match="GPU 1 "):
        place.provide("1")
    assert seen == [False, False]
    assert place.record.exists(), "it was looked for before everybody could see the container"


def test_looking_costs_two_calls_where_everything_is_in_service(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, listdir = [], os.listdir

    def counted(path: Any = ".") -> list[str]:
        if path == place.node.config.drained:
            looked.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    assert place.provide("0") == ["/dev/nvidia0"]
    assert len(looked) == 2
