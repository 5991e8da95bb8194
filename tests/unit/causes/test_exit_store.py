"""The stored causes of containers that a fault ended."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shim.causes import exit_store
from shim.causes.record import Fault, Whose, faults_of
from shim.errors import BundleUnusable, InvalidIdentifier
from tests.harness.raising import raises

LOST = Fault(
    1000.0, "xid", 79, "the GPU has fallen off the bus", whose=Whose.DEVICE, sure=True, action=""
)
WILD = Fault(1001.0, "xid", 31, "memory page fault", whose=Whose.APPLICATION)


def container(name: str = "c1", **more: Any) -> dict[str, Any]:
    return {
        "id": name, "namespace": "k8s.io", "name": "main",
        "pod": {"namespace": "research", "name": "train-0", "uid": "u"}, "gpus": ["GPU-a"],
        "ended": 1002.0, "exit_status": 134, "told_status": 85, **more,
    }  # fmt: skip


def test_what_was_written_is_read(tmp_path: Path) -> None:
    exit_store.write_ended(str(tmp_path), container(), [LOST], "a line")
    exit_store.write_ended(str(tmp_path), container("c0", pod=None), [WILD], "another")
    found = exit_store.read_ended(str(tmp_path), "k8s.io", "c1")
    assert found is not None
    assert found["cause"] == "a line"
    assert faults_of(found) == (LOST,)
    assert [each["id"] for each in exit_store.list_ended(str(tmp_path))] == ["c0", "c1"]
    assert os.stat(tmp_path / "ended/k8s.io/c1.json").st_mode & 0o777 == 0o600
    assert exit_store.read_ended(str(tmp_path), "k8s.io", "c2") is None
    assert list(exit_store.list_ended(str(tmp_path / "none"))) == []


def test_a_fault_that_comes_late_is_added_and_told(tmp_path: Path) -> None:
    state = str(tmp_path)
    assert not exit_store.add_faults(state, "k8s.io", "c1", [LOST])
    exit_store.write_ended(state, container(), [WILD], "a line")
    assert exit_store.add_faults(state, "k8s.io", "c1", [LOST, WILD])
    found = exit_store.read_ended(state, "k8s.io", "c1")
    assert found is not None
    assert faults_of(found) == (LOST, WILD)
    assert found["cause"] == (
        "GPU failure: Xid 79 (GPU has fallen off the bus) at 00:16:40, 2.0 s before exit, and 1 "
        "more. Not the application's fault. The exit code was 134."
    )


def test_what_is_said_anew_of_a_fault_takes_the_place_of_what_was_said(tmp_path: Path) -> None:
    state = str(tmp_path)
    exit_store.write_ended(state, container(), [LOST], "a line")
    heeded = replace(LOST, action="reboot the node")
    assert exit_store.add_faults(state, "k8s.io", "c1", [heeded])
    found = exit_store.read_ended(state, "k8s.io", "c1")
    assert found is not None
    assert faults_of(found) == (heeded,)


def test_only_the_newest_are_kept_and_those_without_a_cause_go_first(tmp_path: Path) -> None:
    for number in range(exit_store.MOST_ENDED + 10):
        faults = [LOST] if number % 2 else []
        exit_store.write_ended(
            str(tmp_path), container(f"c{number}", ended=number), faults, "a line"
        )
    names = {each["id"] for each in exit_store.list_ended(str(tmp_path))}
    gone = {f"c{number}" for number in range(0, 20, 2)}
    assert names == {f"c{number}" for number in range(exit_store.MOST_ENDED + 10)} - gone


def _in_pod(namespace: str, name: str) -> dict[str, str]:
    return {"namespace": namespace, "name": name, "uid": f"uid-{name}"}


def _names(state: Path) -> set[str]:
    return {each["id"] for each in exit_store.list_ended(str(state))}


def test_a_tenant_that_ends_often_pushes_out_no_other(tmp_path: Path) -> None:
    """Limits apply per namespace, and per pod within a namespace."""
    state, most = str(tmp_path), exit_store.MOST_ENDED
    quiet = {
        "other": container("other", pod=_in_pod("quiet", "train"), ended=1.0),
        "plain": container("plain", pod=None, ended=2.0),
        "beside": container("beside", pod=_in_pod("loud", "beside"), ended=3.0),
    }
    for each in quiet.values():
        exit_store.write_ended(state, each, [], "")
    for number in range(2 * most):
        loud = container(f"c{number}", pod=_in_pod("loud", "crash"), ended=100.0 + number)
        exit_store.write_ended(state, loud, [LOST], "a line")
    newest = {f"c{number}" for number in range(most + 1, 2 * most)}
    assert _names(tmp_path) == quiet.keys() | newest


def test_many_namespaces_are_bounded_together_and_the_greatest_gives_way(tmp_path: Path) -> None:
    most = exit_store.MOST_ENDED
    crowd = exit_store.MOST_OF_ALL // most + 1
    first = container("first", pod=_in_pod("quiet", "train"), ended=1.0)
    exit_store.write_ended(str(tmp_path), first, [], "")
    for number in range(crowd * most):
        pod = _in_pod(f"crowd-{number % crowd}", "crash")
        told = {**container(f"c{number}", pod=pod, ended=100.0 + number), "cause": "a line"}
        path = tmp_path / f"ended/k8s.io/c{number}.json"
        path.write_text(json.dumps({"version": 1, **told, "faults": [{"kind": "xid"}]}))
    exit_store.write_ended(str(tmp_path), first, [], "")
    names = _names(tmp_path)
    assert "first" in names
    assert len(names) == exit_store.MOST_OF_ALL
    shares = [sum(int(n[1:]) % crowd == k for n in names - {"first"}) for k in range(crowd)]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b'{"version": 2}', b'{"version": 1}',
        json.dumps({**container(pod=7), "version": 1, "cause": "", "faults": []}).encode(),
        json.dumps({**container(gpus=7), "version": 1, "cause": "", "faults": []}).encode(),
    ],
)  # fmt: skip
def test_what_is_malformed_is_not_remembered(tmp_path: Path, content: bytes) -> None:
    exit_store.write_ended(str(tmp_path), container(), [LOST], "a line")
    (tmp_path / "ended/k8s.io/c1.json").write_bytes(content)
    (tmp_path / "ended/file").touch()
    assert exit_store.read_ended(str(tmp_path), "k8s.io", "c1") is None
    assert list(exit_store.list_ended(str(tmp_path))) == []


def test_names_are_checked_and_a_failure_is_an_error(tmp_path: Path) -> None:
    with raises(InvalidIdentifier):
        exit_store.write_ended(str(tmp_path), container("../x"), [LOST], "a line")
    with raises(InvalidIdentifier):
        exit_store.read_ended(str(tmp_path), "..", "c1")
    (tmp_path / "ended").touch()
    with pytest.raises(BundleUnusable, match="cannot write"):
        exit_store.write_ended(str(tmp_path), container(), [LOST], "a line")
