"""Faults that a user queries, and a container whose shim does not stop it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hooks.config import Beyond, Config
from integration.agent_errors import CausesUnreadable, ContainerNotKilled
from integration.containers.bundles import Container, Pod
from integration.kubelet.pod_resources import PodResources
from integration.kubelet.values import Claimed
from integration.node.faults.limits import Excess
from integration.node.holders.values import Ledger
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services import memory_guard
from integration.node.services.causes.query import fault_of, fault_rows
from integration.node.services.memory_guard import _kill_container
from integration.node.values.claims import Claim, ClaimDevice
from shim.causes.record import Fault, Whose, write_causes
from tests.harness.node_state import publish
from tests.harness.raising import raises
from tests.unit.node.causes.holders import holding


def test_all_faults_are_listed_by_their_time(tmp_path: Path) -> None:
    config, now = Config(state=str(tmp_path)), time.time()
    assert fault_rows(config) == []
    own = Fault(now - 5, "xid", 31, "fault", "GPU-0", pid=7, whose=Whose.APPLICATION, sure=True)
    lost = Fault(now - 6, "gpu-lost", name="gone", whose=Whose.DEVICE, action="reset the GPU")
    pod = {"namespace": "research", "name": "train", "container": "main"}
    write_causes(config.state, "k8s.io", "c1", [own], pod=pod)
    write_causes(config.state, "default", "c2", [lost])
    first, second = fault_rows(config)
    assert (first["id"], first["pod"], first["name"], first["xid"], first["do"]) == (
        "c2", None, None, None, "reset the GPU",
    )  # fmt: skip
    assert (second["pod"], second["name"]) == ({"namespace": "research", "name": "train"}, "main")
    assert (second["xid"], second["pid"], second["whose"], second["sure"]) == (
        31, 7, "application", True,
    )  # fmt: skip
    assert (fault_of(config, "k8s.io", "c1") or "").startswith("GPU error: Xid 31 (fault)")
    assert fault_of(config, "k8s.io", "other") is None
    assert fault_of(config, "k8s.io", "../c1") is None


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "causes").write_text("no directory")
    with raises(CausesUnreadable, match="not a directory"):
        fault_rows(Config(state=str(tmp_path)))


def test_a_file_that_makes_no_sense_has_no_faults(tmp_path: Path) -> None:
    directory = tmp_path / "causes" / "k8s.io"
    directory.mkdir(parents=True)
    (directory / "c1.json").write_text("{")
    (directory / "not a name.json").write_text("{}")
    (directory / "c2").write_text("{}")
    assert fault_rows(Config(state=str(tmp_path))) == []


@pytest.mark.anyio
@pytest.mark.parametrize("address", ["", "nobody.sock"])
async def test_a_shim_that_cannot_be_asked_is_said(tmp_path: Path, address: str) -> None:
    container = replace(
        holding("a").container, address=str(tmp_path / address) if address else ""
    )  # fmt: skip
    with pytest.raises(ContainerNotKilled, match="research/pod-a/a"):
        await _kill_container(container)


@pytest.mark.anyio
@pytest.mark.parametrize(("pid", "kills"), [(7, 1), (8, 0), (0, 0)])
async def test_a_container_that_has_ended_meanwhile_is_not_killed_nor_one_with_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int, kills: int
) -> None:
    container = holding("a", pid=7).container
    killed: list[Container] = []

    async def kill(container: Container) -> None:
        killed.append(container)

    monkeypatch.setattr(memory_guard, "_TO_WRITE", 0.0)
    monkeypatch.setattr(memory_guard, "_kill_container", kill)
    monkeypatch.setattr(memory_guard, "read_container", lambda *_: replace(container, pid=pid))
    config = Config(state=str(tmp_path), guard_beyond=Beyond.KILL)
    guard = memory_guard._Guard(Context(config, Options("", 1), lambda *_, **__: None))
    excess = Excess(container, "GPU-0", "GPU-0", 2, 1)
    await guard._kill(excess, excess.hit(0.0))
    assert len(killed) == kills


@pytest.mark.anyio
@pytest.mark.parametrize("answers", [True, False])
async def test_a_claim_whose_entry_is_malformed_keeps_its_limit_if_the_kubelet_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    entries = [{"ClaimUID": "one", "PodUIDs": {"uid": {}}}, {"ClaimUID": "two", "PodUIDs": 1}]
    data = json.dumps({"ClaimInfoStateList": entries})
    (tmp_path / "dra_manager_state").write_text(json.dumps({"Data": data}))

    async def claims(*_: object) -> tuple[Claimed, ...] | None:
        names = ("one", "two") if answers else ()
        where = ("research", "train", "main")
        return tuple(Claimed("research", name, "d", (), where) for name in names) or None

    monkeypatch.setattr(PodResources, "claims", claims)
    config = Config(state=str(tmp_path), kubelet_root=str(tmp_path))
    context = Context(config, Options("", 1), lambda *_, **__: None)
    device = ClaimDevice("gpu", "node", "gpu-0", "GPU-0", "GPU-0", share="s", memory=1)
    claimed = [
        Claim(uid, "research", uid, (replace(device, share=uid, memory=memory),))
        for uid, memory in (("one", 1), ("two", 2))
    ]
    container = holding("a").container
    main = replace(container, bundle="/b/main", pod=Pod("research", "train", "uid"), name="main")
    publish(context.state.claims, tuple(claimed))
    publish(context.state.ledger, Ledger(containers=(main,)))
    guard = memory_guard._Guard(context)
    assert await guard._shares() == {"/b/main": {"GPU-0": (3 if answers else 1) << 20}}
    assert bool(context.state.faults.lines) is not answers
