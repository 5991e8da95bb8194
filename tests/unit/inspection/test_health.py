"""The health of devices in the output of commands."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from hooks.config import Config
from integration import exits
from integration.cli.app import main
from integration.inspection.gpus import list_gpus
from integration.node.device_health import health_store as store
from integration.node.device_health import report as health
from integration.node.device_health import requests
from integration.node.device_health.device_state import Moment, Rules
from integration.node.device_health.health_table import (
    HealthTable,
    Place,
    after_event,
    after_inventory,
    judge,
)
from integration.node.faults.policy import policy_of
from integration.nvml.values import GpuEvent
from tests.unit.hooks.fake_node import Node, uuid_of

MIG = "MIG-00000000-0000-4000-8000-000000000001"


def keep(config: Config) -> HealthTable:
    """Write the file of an agent: GPU 0 and its MIG device are unhealthy."""
    places = {
        uuid_of(0): Place(uuid_of(0), uuid_of(0)),
        MIG: Place(MIG, uuid_of(0), "", 1, 0),
        uuid_of(1): Place(uuid_of(1), uuid_of(1)),
    }
    known = after_inventory(HealthTable(), places, {}, Moment(1, 100), Rules())
    event = GpuEvent(2, "xid", uuid_of(0), xid=79)
    known = after_event(
        known, event, judge(known, event, policy_of(config, "", "")), Moment(2, 2), Rules()
    )
    store.write(config, known)
    return known


@pytest.fixture
def watched(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Make a node whose agent is ready."""
    keep(node.config)
    monkeypatch.setattr("integration.node.device_health.report.is_ready", lambda _: True)
    return node


def test_a_list_of_gpus_has_it_where_an_agent_watches(watched: Node) -> None:
    known = health.read_health(watched.config)
    rows = {row["uuid"]: row for row in list_gpus(watched.config, (), nvml=False, health=known)}
    assert rows[uuid_of(0)]["health"] == "unhealthy"
    assert rows[uuid_of(0)]["health_reason"] == "XID 79: the GPU has fallen off the bus"
    assert (rows[uuid_of(1)]["health"], rows[uuid_of(1)]["health_reason"]) == ("healthy", None)
    unwatched = list_gpus(watched.config, (), nvml=False)
    assert {(row["health"], row["health_reason"]) for row in unwatched} == {(None, None)}


def test_what_an_agent_that_is_gone_has_thought_says_nothing(node: Node) -> None:
    keep(node.config)
    assert health.read_health(node.config) is None


def command(monkeypatch: pytest.MonkeyPatch, config: Config, *words: str) -> int:
    monkeypatch.setattr("hooks.config.load_config", lambda _: config)
    return main(["health", *words])


def test_the_command_lists_and_says_by_its_status_whether_all_are_given(
    watched: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, watched.config, "list", "-o", "json") == exits.FOUND
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["items"]
    assert rows[0] == {
        "uuid": uuid_of(0), "kind": "gpu", "gpu": uuid_of(0), "state": "unhealthy",
        "given": False, "out_of_service": None, "since": 2.0,
        "reason": "XID 79: the GPU has fallen off the bus",
        "xid": 79, "containers": [],
        "do": "reboot the node; if it comes back, have the GPU replaced",
    }  # fmt: skip
    assert [row["kind"] for row in rows] == ["gpu", "mig", "gpu"]
    assert command(monkeypatch, watched.config, "list") == exits.FOUND
    said = capsys.readouterr().out
    assert "1970-01-01T00:00:02Z" in said
    assert max(map(len, said.splitlines())) <= 80
    told = " ".join(line[46:] for line in said.splitlines())
    assert "XID 79: the GPU has fallen off the bus; reboot the node;" in " ".join(told.split())
    # The name in the first column is enough to return a device to service.
    assert uuid_of(0).startswith(said.splitlines()[1].split()[0])


def test_devices_are_put_back_by_their_uuid_or_its_beginning(
    watched: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(requests, "ask", lambda _, uuid, __: asked.append(uuid))
    assert command(monkeypatch, watched.config, "clear", uuid_of(0).upper(), "mig-0") == exits.FOUND
    assert asked == [uuid_of(0), MIG]
    assert command(monkeypatch, watched.config, "clear", uuid_of(1)) == exits.OK
    capsys.readouterr()
    for name in ("GPU-", "GPU-nobody", ""):
        assert command(monkeypatch, watched.config, "clear", name) == exits.FAILED
        assert capsys.readouterr().err.startswith("NVSHIM-E2757 device-unwatched: ")
    assert len(asked) == 3


def test_without_an_agent_there_is_nothing_to_say(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, node.config, "list") == exits.FAILED
    assert capsys.readouterr().err.startswith("NVSHIM-E2756 health-unknown: ")


def test_a_request_may_be_taken_as_soon_as_it_is_made(
    watched: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = requests.directory_of(watched.config)
    os.mkdir(directory)
    close = os.close

    def close_and_take(fd: int) -> None:
        close(fd)
        for name in requests.waiting(watched.config):
            requests.taken(watched.config, name)

    monkeypatch.setattr(os, "close", close_and_take)
    requests.ask(watched.config, uuid_of(0), 10)
    assert os.listdir(directory) == []
