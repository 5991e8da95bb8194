"""The checkpoint of prepared claims: a full disk, and files of other versions."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import Config
from integration.agent_errors import DraStateUnwritten
from integration.node.services.dra import mig_create as cutting
from integration.node.services.dra.mig_create import MigCreator, MigModes, MigNote
from integration.node.services.dra.mig_layout import Part
from integration.node.state.claims_file import (
    held,
    is_written,
    load,
    plugin_allocated,
    recorded,
    save,
    write_record,
)
from integration.node.values.claims import Claim, ClaimDevice, ClaimPhase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEVICE: Final = ClaimDevice("gpu", "node-1", "gpu-0", "GPU-0", "GPU-0")
CLAIMS: Final = [Claim(f"uid-{n}", "default", f"claim-{n}", (DEVICE,)) for n in range(20)]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 32 KiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "small", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def config_of(directory: Path) -> Config:
    return Config(state=str(directory / "state"), kubelet_root=str(directory / "kubelet"))


def test_on_a_full_disk_claims_are_taken_back_and_none_is_prepared(small: Path) -> None:
    config = config_of(small)
    save(config, CLAIMS)
    with suppress(OSError), open(small / "large", "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    for left in (19, 3, 0):
        save(config, CLAIMS[:left])
        assert [*load(config, "driver").values()] == CLAIMS[:left]
        assert len(held(config)) == left
    save(config, CLAIMS[:3])
    with pytest.raises(DraStateUnwritten, match="NVSHIM-E2777"):
        save(config, [*CLAIMS, *CLAIMS])
    assert [*load(config, "driver").values()] == CLAIMS[:3]
    assert os.listdir(small / "state") == ["dra.json"]


def part_of(gpu: str) -> Part:
    return Part(f"GPU-{gpu * 8}-0000-0000-0000-000000000000", 19, 2, 1, "1g.10gb")


def test_what_was_made_is_forgotten_on_a_full_disk(small: Path) -> None:
    config = config_of(small)
    making = MigCreator(config)
    notes = [MigNote("uid", "claim a/b", part_of(gpu), "MIG-1") for gpu in "abc"]
    for note in notes:
        making._note(note)
    with suppress(OSError), open(small / "large", "wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    making.forget(notes[1:])
    again = MigCreator(config)
    again.load()
    assert again.created == making.created == {notes[0].part: "MIG-1"}


def test_modes_of_two_gpus_that_are_switched_at_once_are_both_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, both = config_of(tmp_path), threading.Barrier(2)

    def write(*what: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # until both write, if the lock allows it
        write_record(*what)

    monkeypatch.setattr(cutting, "write_record", write)
    modes = MigModes(config)
    monkeypatch.setattr(modes, "_is_on", lambda _: False)
    monkeypatch.setattr(modes, "_switch", lambda *_, **__: None)
    threads = [
        threading.Thread(target=modes.on, args=(SimpleNamespace(uuid=uuid), None, "a claim"))
        for uuid in ("GPU-1", "GPU-2")
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    again = MigModes(config)
    again.load()
    assert again.switched == modes.switched == {"GPU-1", "GPU-2"}


def test_what_a_killed_agent_has_left_of_a_write_is_removed(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    save(config, CLAIMS)
    (tmp_path / "state" / ".dra.json.abcdefgh.new").write_text("{")
    assert [*load(config, "driver").values()] == CLAIMS
    assert os.listdir(tmp_path / "state") == ["dra.json"]


def test_what_a_newer_agent_has_added_is_passed_over(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    save(config, CLAIMS)
    path = tmp_path / "state" / "dra.json"
    document = json.loads(path.read_text())
    for claim in document["claims"]:
        claim["new"] = 1
        for device in claim["devices"]:
            device["new"] = device["sharing"]["new"] = 1
    path.write_text(json.dumps({**document, "new": 1}))
    assert [*load(config, "driver").values()] == CLAIMS


def test_what_a_newer_agent_has_added_to_what_was_made_is_passed_over(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    making = MigCreator(config)
    making._note(MigNote("uid", "claim a/b", part_of("a"), "MIG-1"))
    path = tmp_path / "state" / "dra-mig.json"
    document = json.loads(path.read_text())
    document["made"][0]["new"] = document["made"][0]["part"]["new"] = 1
    path.write_text(json.dumps({**document, "new": 1}))
    again = MigCreator(config)
    again.load()
    assert again.created == making.created


def test_the_kubelets_record_says_of_which_gpu_a_part_is(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    gpu = "8b53c73b-1f5f-4a3e-9c2f-0d1a2b3c4d5e"
    names = [f"gpu-{gpu}-mig-1g10gb-19-2", f"gpu-{gpu}", f"mig-{gpu}"]
    told = [{"PoolName": "node-1", "DeviceName": name, "RequestNames": ["a"]} for name in names]
    info = {"ClaimUID": "u", "Namespace": "n", "ClaimName": "c"}
    info |= {"DriverState": {"driver": {"Devices": told}}}  # type: ignore[dict-item]
    (tmp_path / "kubelet").mkdir()
    data = json.dumps({"ClaimInfoStateList": [info]})
    (tmp_path / "kubelet" / "dra_manager_state").write_text(json.dumps({"Data": data}))
    (claim,) = load(config, "driver").values()
    assert [each.gpu for each in claim.devices] == [f"GPU-{gpu}", f"GPU-{gpu}", ""]


def entry_of(uid: str, device: Any, **more: Any) -> dict[str, Any]:
    state = {"driver": {"Devices": [device]}}
    return {"ClaimUID": uid, "Namespace": "n", "ClaimName": uid, "DriverState": state, **more}


@pytest.mark.parametrize(
    "bad",
    [
        None, 1, [], "uid", {}, {"ClaimUID": "bad"},
        entry_of("bad", {"DeviceName": "gpu-bad"}),
        entry_of("bad", "gpu-bad"),
        entry_of("bad", {}, DriverState=[1]),
        entry_of("bad", {}, DriverState={"driver": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_entry_of_the_kubelets_record_hides_no_other(tmp_path: Path, bad: Any) -> None:
    config = config_of(tmp_path)
    one, two = ({"PoolName": "node-1", "DeviceName": f"gpu-{n}"} for n in "12")
    entries = [entry_of("one", one), bad, entry_of("two", two)]
    (tmp_path / "kubelet").mkdir()
    path, told = tmp_path / "kubelet" / "dra_manager_state", list[str]()
    data = {"Data": json.dumps({"ClaimInfoStateList": entries})}
    path.write_text(json.dumps(data))
    assert load(config, "driver", told.append).keys() == {"one", "two"}
    assert told == [f"{path}: 1 of its entries are malformed, and are ignored"]
    assert recorded(config, "driver") is None


@pytest.mark.parametrize("other", ["other", 7, None])
def test_a_claim_of_another_driver_need_not_be_as_ours_are(tmp_path: Path, other: Any) -> None:
    config = config_of(tmp_path)
    one = {"PoolName": "node-1", "DeviceName": "gpu-1"}
    entries = [{"DriverState": {"nic": other}, "Namespace": None}, entry_of("one", one)]
    (tmp_path / "kubelet").mkdir()
    data = {"Data": json.dumps({"ClaimInfoStateList": entries})}
    (tmp_path / "kubelet" / "dra_manager_state").write_text(json.dumps(data))
    told: list[str] = []
    assert load(config, "driver", told.append).keys() == {"one"}
    assert told == []
    assert recorded(config, "driver") == frozenset({"one"})


BAD: Final[list[Any]] = [
    None, 1, "uid", [], {}, {"uid": "bad", "namespace": "n", "name": "n", "devices": [{"new": 1}]},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_malformed_claim_of_the_checkpoint_frees_no_other(tmp_path: Path, bad: Any) -> None:
    config = config_of(tmp_path)
    kept = [replace(each, devices=(replace(DEVICE, admin=False),)) for each in CLAIMS[:2]]
    save(config, kept)
    path = tmp_path / "state" / "dra.json"
    document = json.loads(path.read_text())
    document["claims"].insert(1, bad)
    path.write_text(json.dumps(document))
    (tmp_path / "kubelet").mkdir()
    entry = entry_of("bad", {"PoolName": "node-1", "DeviceName": "gpu-bad"})
    data = {"Data": json.dumps({"ClaimInfoStateList": [entry]})}
    (tmp_path / "kubelet" / "dra_manager_state").write_text(json.dumps(data))
    assert held(config) == (DEVICE, DEVICE)
    assert not is_written(config)  # so the API server is asked about the one that is malformed
    found = load(config, "driver")
    assert found.keys() == {"bad", "uid-0", "uid-1"}
    assert found["uid-0"] == kept[0]


def test_a_malformed_device_of_a_claim_does_not_free_the_others(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    one = {"PoolName": "node-1", "DeviceName": "gpu-1"}
    entry = entry_of("one", one)
    entry["DriverState"]["driver"]["Devices"].insert(0, {"DeviceName": "gpu-bad"})
    (tmp_path / "kubelet").mkdir()
    data = {"Data": json.dumps({"ClaimInfoStateList": [entry]})}
    (tmp_path / "kubelet" / "dra_manager_state").write_text(json.dumps(data))
    told: list[str] = []
    (claim,) = load(config, "driver", told.append).values()
    assert [each.device for each in claim.devices] == ["gpu-1"]
    assert len(told) == 1


@pytest.mark.parametrize("bad", [None, 1, {}, {"PodUID": "bad"}, {"PodUID": "bad", "DeviceIDs": 1}])
def test_a_malformed_entry_of_the_device_managers_checkpoint_hides_no_other(
    tmp_path: Path, bad: Any
) -> None:
    config = config_of(tmp_path)
    assert plugin_allocated(config) == ({}, "")
    (tmp_path / "kubelet" / "device-plugins").mkdir(parents=True)
    path = tmp_path / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint"
    one, two = ({"PodUID": n, "DeviceIDs": {"0": [f"GPU-{n}::1", "other"]}} for n in "12")
    path.write_text(json.dumps({"Data": {"PodDeviceEntries": [one, bad, two]}}))
    found, fault = plugin_allocated(config)
    assert found == {"GPU-1": "pod 1", "GPU-2": "pod 2"}
    assert fault == f"{path}: 1 of its entries are malformed, and are ignored"
    path.write_text("{}")
    assert plugin_allocated(config) == ({}, f"{path}: not as a kubelet writes it")


@pytest.mark.parametrize(
    "text",
    ["", "null", "[" * 100_000, '{"format": 1}', '{"format": 2, "boot": "", "claims": []}',
     '{"format": 1, "boot": "BOOT", "claims": [{"uid": "u", "devices": [{"new": 1}]}]}',
     '{"format":1,"boot":"BOOT","claims":[{"uid":"","namespace":"","name":"","devices":[[]]}]}'],
    ids=["empty", "null", "deep", "cut", "newer", "of a newer agent", "of another shape"],
)  # fmt: skip
def test_what_cannot_be_read_is_as_if_it_were_not_there(tmp_path: Path, text: str) -> None:
    config = config_of(tmp_path)
    save(config, CLAIMS)
    path = tmp_path / "state" / "dra.json"
    boot = path.read_text().partition('"boot": "')[2].partition('"')[0]
    path.write_text(text.replace("BOOT", boot))
    (tmp_path / "kubelet").mkdir()
    (tmp_path / "kubelet" / "dra_manager_state").write_text("[" * 100_000)
    assert load(config, "driver") == {}
    assert held(config) == ()


def test_a_file_of_prepared_claims_is_that_of_agents_without_phases(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    save(config, CLAIMS[:1])
    path = tmp_path / "state" / "dra.json"
    document = json.loads(path.read_text())
    assert document["format"] == 1
    (claim,) = document["claims"]
    assert claim.keys() == {"uid", "namespace", "name", "devices"}
    (loaded,) = load(config, "driver").values()
    assert loaded.is_prepared


def test_a_claim_that_is_being_prepared_is_a_claim_for_agents_without_phases(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    other = replace(DEVICE, device="gpu-1", uuid="GPU-1", gpu="GPU-1")
    begun = replace(CLAIMS[0], phase=ClaimPhase.PREPARING, previous=(other,))
    save(config, [CLAIMS[0]])
    save(config, [begun])
    path = tmp_path / "state" / "dra.json"
    document = json.loads(path.read_text())
    assert document["format"] == 1
    (claim,) = document["claims"]
    assert [each["uuid"] for each in claim["devices"]] == ["GPU-0"]
    (loaded,) = load(config, "driver").values()
    assert (loaded.phase, loaded.previous) == (ClaimPhase.PREPARING, (other,))
    assert loaded.before == replace(CLAIMS[0], devices=(other,))
    assert held(config) == (DEVICE, other)


def test_a_phase_that_only_a_newer_agent_knows_is_passed_over(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    save(config, [replace(CLAIMS[0], phase=ClaimPhase.PREPARING)])
    path = tmp_path / "state" / "dra.json"
    path.write_text(path.read_text().replace('"preparing"', '"resting"'))
    (loaded,) = load(config, "driver").values()
    assert loaded.is_prepared
