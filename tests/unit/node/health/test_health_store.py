"""The file of the devices' health, and users' requests to the agent."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hooks.config import Config
from hooks.node.drained import Drain
from integration.agent_errors import AgentSilent
from integration.devices import drain_marks as marks
from integration.node.device_health import health_store as store
from integration.node.device_health import report, requests
from integration.node.device_health.device_state import Moment, Rules
from integration.node.device_health.health_table import (
    HealthTable,
    Place,
    after_event,
    after_inventory,
    judge,
)
from integration.node.faults.policy import policy_of
from integration.node.values.health import HealthState
from integration.nvml.values import GpuEvent
from tests.harness.raising import raises
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

PLACES = {
    "GPU-0": Place("GPU-0", "GPU-0", "0000:18:00.0"),
    "MIG-GPU-0/1/0": Place("MIG-GPU-0/1/0", "GPU-0", "0000:18:00.0", 1, 0),
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "state").mkdir()
    random = tmp_path / "proc" / "sys" / "kernel" / "random"
    random.mkdir(parents=True)
    (random / "boot_id").write_text("one\n")
    return Config(
        state=str(tmp_path / "state"), proc=str(tmp_path / "proc"), sys=str(tmp_path / "sys")
    )


def ill() -> HealthTable:
    known = after_inventory(HealthTable(), PLACES, {}, Moment(1, 100), Rules(), load="535:7")
    event = GpuEvent(2, "xid", "GPU-0", xid=79)
    verdict = replace(judge(known, event, policy_of(Config(), "", "")), blamed=("a/b/\x1b",))
    return after_event(known, event, verdict, Moment(2, 200), Rules())


def test_what_an_agent_before_this_one_did_not_write_is_as_nothing(config: Config) -> None:
    store.write(config, ill())
    with open(store.path_of(config), encoding="utf-8") as file:
        document = json.load(file)
    for device in document["devices"]:
        del device["asks"], device["own"], device["profile"]
    with open(store.path_of(config), "w", encoding="utf-8") as file:
        json.dump(document, file)
    found = store.read(config)
    assert found.fault == ""
    assert found.table.conditions == ill().conditions


def test_errors_of_a_mig_device_that_is_gone_outlive_the_agent(config: Config) -> None:
    part = Place("MIG-a", "GPU-0", "0000:18:00.0", 1, 0, "1g.10gb")
    gpu = PLACES["GPU-0"]
    known = after_inventory(
        HealthTable(), {"GPU-0": gpu, "MIG-a": part}, {}, Moment(1, 100), Rules()
    )
    event = GpuEvent(2, "xid", "GPU-0", xid=94, gpu_instance=1, compute_instance=0)
    verdict = judge(known, event, policy_of(Config(), "", ""))
    known = after_event(known, event, verdict, Moment(2, 200), Rules())
    known = after_inventory(known, {"GPU-0": gpu}, {}, Moment(3, 300), Rules())
    store.write(config, known)
    found = store.read(config).table
    assert found.gone == {"MIG-a"}
    assert (found.places, found.conditions) == (known.places, known.conditions)
    places = {"GPU-0": gpu, "MIG-b": replace(part, uuid="MIG-b")}
    found = after_inventory(found, places, {}, Moment(4, 400), Rules())
    assert found.conditions["MIG-b"].state == HealthState.SUSPECT


def test_a_gpu_that_was_drained_by_its_address_is_out_of_service(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, drained=str(tmp_path / "drained"))
    monkeypatch.setattr(report, "is_ready", lambda _: True)
    store.write(config, after_inventory(HealthTable(), PLACES, {}, Moment(1, 100), Rules()))
    marks.put(config, Drain(PLACES["GPU-0"].bus_id, reason="fan"))
    rows = {each["uuid"]: each["out_of_service"] for each in report.health_rows(config)}
    assert rows.keys() == PLACES.keys()
    assert all(why and why.endswith("fan") for why in rows.values())


def test_what_was_known_is_known_again_in_the_same_boot(config: Config, tmp_path: Path) -> None:
    store.write(config, ill())
    found = store.read(config)
    assert found.fault == ""
    assert (found.table.conditions, found.table.places) == (ill().conditions, ill().places)
    assert found.table.load == "535:7"
    devices = store.read_devices(config)
    assert devices is not None
    assert [each["state"] for each in devices] == ["unhealthy", "unhealthy"]
    assert os.stat(store.path_of(config)).st_mode & 0o777 == 0o600  # it names containers
    before = os.stat(store.path_of(config)).st_ino
    store.write(config, ill())
    assert os.stat(store.path_of(config)).st_ino == before  # it is unchanged
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("two\n")
    assert store.read(config) == store.Record(HealthTable())
    assert store.read_devices(config) is None


def test_there_need_be_no_file(config: Config) -> None:
    assert store.read(config) == store.Record(HealthTable())
    assert store.read_devices(config) is None


def changed(config: Config, change: dict[str, Any], *, entry: bool = True) -> None:
    store.write(config, ill())
    with open(store.path_of(config), encoding="utf-8") as file:
        document = json.load(file)
    (document["devices"][0] if entry else document).update(change)
    with open(store.path_of(config), "w", encoding="utf-8") as file:
        json.dump(document, file)


@pytest.mark.parametrize(
    "change",
    [
        {"state": "fine"}, {"state": "healthy"}, {"need": 7}, {"need": 0}, {"since": "now"},
        {"since": -1}, {"since": float("nan")}, {"blamed": [1]}, {"errors": ["x"]}, {"gone": 0},
        {"uuid": ""}, {"gpu_instance": "1"}, {"xid": True}, {"lost": None}, {"pending": 1},
        {"silent_since": "x"}, {"was_away": None}, {"uuid": None}, {"gpu": 1},
    ],
)  # fmt: skip
def test_an_entry_that_makes_no_sense_is_left_out(config: Config, change: dict[str, Any]) -> None:
    changed(config, change)
    found = store.read(config)
    assert set(found.table.conditions) == {"MIG-GPU-0/1/0"}
    assert found.fault.endswith("1 of its entries are invalid")
    assert [each["uuid"] for each in store.read_devices(config) or ()] == ["MIG-GPU-0/1/0"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 9}', b"\xff", b"[" * 9999])
def test_a_damaged_file_keeps_nobody_from_watching(config: Config, content: bytes) -> None:
    with open(store.path_of(config), "wb") as file:
        file.write(content)
    found = store.read(config)
    assert found.table == HealthTable()
    assert found.fault.startswith(store.path_of(config))
    assert store.read_devices(config) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.sampled_from(["state", "need", "since", "errors", "blamed", "xid", "uuid", "gpu", "gone"]),
    json_values,
)
def test_whatever_is_in_the_file_it_is_read_or_said(config: Config, key: str, value: Any) -> None:
    changed(config, {key: value})
    found = store.read(config)
    for condition in found.table.conditions.values():
        assert condition.state in HealthState
    changed(config, {"devices": value}, entry=False)
    assert store.read(config).table.conditions == {} or not store.read(config).fault


def test_which_loading_of_the_driver_it_is(config: Config) -> None:
    assert store.load_of_driver(config) == ""
    module = f"{config.sys}/module/nvidia"
    os.makedirs(module)
    with open(f"{module}/version", "w", encoding="utf-8") as file:
        file.write("535.104.05\n")
    assert store.load_of_driver(config) == f"535.104.05:{os.stat(module).st_ino}"


def test_what_is_asked_is_done_or_taken_back(config: Config) -> None:
    os.makedirs(requests.directory_of(config))
    with raises(AgentSilent, match=r"has not done it in 0\.05 s"):
        requests.ask(config, "MIG-GPU-0/1/0", 0.05)
    assert requests.waiting(config) == []
    (asking := threading.Thread(target=requests.ask, args=(config, "MIG-GPU-0/1/0", 10))).start()
    try:
        eventually(lambda: requests.waiting(config) == ["MIG-GPU-0/1/0"], "it is asked")
    finally:
        requests.taken(config, "MIG-GPU-0/1/0")
        asking.join()
    for stray in (".x", "GPU-..%2F..", "other"):
        with open(f"{requests.directory_of(config)}/{stray}", "w", encoding="utf-8"):
            pass
    assert requests.waiting(config) == []
    left = f"{requests.directory_of(config)}/GPU-0"
    with open(left, "w", encoding="utf-8"):
        os.utime(left, (1, 1))
    assert requests.waiting(config) == []  # the process that asked has exited
    assert not os.path.exists(left)


def test_what_a_killed_command_left_is_asked_anew(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs(requests.directory_of(config))
    left = f"{requests.directory_of(config)}/GPU-0"
    with open(left, "w", encoding="utf-8"):
        os.utime(left, (1, 1))
    done: list[str] = []

    def do(_: float) -> None:
        done.extend(requests.waiting(config))
        requests.taken(config, "GPU-0")

    monkeypatch.setattr(time, "sleep", do)
    requests.ask(config, "GPU-0", 10)
    assert done == ["GPU-0"]


def test_nobody_is_asked_where_no_agent_has_been(config: Config) -> None:
    with raises(AgentSilent, match=r"No such file"):
        requests.ask(config, "GPU-0", 1)
