"""The GPU memory that a container has from claims, according to the kubelet only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from hooks.config import Config
from integration.containers.bundles import Container, Pod
from integration.kubelet.values import Claimed
from integration.node.faults.shares import pod_claims, share_limits
from integration.node.values.claims import Claim, ClaimDevice

if TYPE_CHECKING:
    from pathlib import Path

GIB: Final = 1 << 30
POD: Final = Pod("research", "train", "uid-train")


def _claim(uid: str, *shares: tuple[str, str, int], admin: bool = False) -> Claim:
    devices = tuple(
        ClaimDevice(
            "gpu",
            "node",
            gpu.lower(),
            gpu,
            gpu,
            admin=admin,
            share=share,
            memory=gib << 10,
            shares=1,
        )
        for share, gpu, gib in shares
    )
    return Claim(uid, "research", f"name-{uid}", devices)


def _container(name: str, pod: Pod | None = POD, *, sandbox: bool = False) -> Container:
    return Container(f"id-{name}", "k8s.io", f"/b/{name}", pod, name, "p", sandbox=sandbox, pid=1)


def _named(uid: str, container: str) -> Claimed:
    of = ("research", "train", container)
    return Claimed("research", f"name-{uid}", "gpu.example.com", (f"k8s/claim={uid}-gpu",), of)


ONE, TWO = _claim("one", ("s1", "GPU-0", 10)), _claim("two", ("s2", "GPU-0", 40))
OTHER: Final = _claim("other", ("s3", "GPU-1", 5), ("s4", "GPU-1", 6))
MAIN, BESIDE = _container("main"), _container("beside")


def test_the_claims_of_its_pod_decide_and_each_share_counts_once() -> None:
    of_pods = {"uid-train": frozenset({"one", "other"}), "uid-else": frozenset({"two"})}
    found = share_limits([MAIN], [ONE, ONE, TWO, OTHER], of_pods, None)
    assert found == {"/b/main": {"GPU-0": 10 * GIB, "GPU-1": 11 * GIB}}
    # An earlier pod of the same name had other claims.
    earlier = _container("main", Pod("research", "train", "uid-before"))
    assert share_limits([earlier], [ONE, TWO], of_pods, None) == {}
    # The sandbox, a container without a pod and an admin claim have none, either.
    outside = [_container("main", None), _container("pause", sandbox=True)]
    assert share_limits(outside, [ONE], of_pods, None) == {}
    after = _claim("one", ("s1", "GPU-0", 10), admin=True)
    assert share_limits([MAIN], [after], of_pods, None) == {}


def test_of_a_pods_claims_those_of_the_container_count_where_the_kubelet_tells() -> None:
    of_pods = {"uid-train": frozenset({"one", "two"})}
    named = [_named("one", "main"), _named("two", "beside")]
    both = {"/b/main": {"GPU-0": 10 * GIB}, "/b/beside": {"GPU-0": 40 * GIB}}
    assert share_limits([MAIN, BESIDE], [ONE, TWO], of_pods, named) == both
    # The kubelet's record is unreadable.
    assert share_limits([MAIN, BESIDE], [ONE, TWO], None, named) == both
    # The API lists no claims, or does not answer.
    pods = {"/b/main": {"GPU-0": 50 * GIB}}
    assert share_limits([MAIN], [ONE, TWO], of_pods, []) == pods
    assert share_limits([MAIN], [ONE, TWO], of_pods, None) == pods
    assert share_limits([MAIN], [ONE, TWO], None, None) == {}


def test_the_record_is_read_as_a_kubelet_writes_it(tmp_path: Path) -> None:
    config = Config(kubelet_root=str(tmp_path))
    assert pod_claims(config) == (None, f"{tmp_path}/dra_manager_state: no such file")
    claims = [
        {"ClaimUID": "one", "PodUIDs": {"a": {}, "b": {}}},
        {"ClaimUID": "two", "PodUIDs": {"b": {}}},
        {"ClaimUID": "none", "PodUIDs": None},
    ]
    path = tmp_path / "dra_manager_state"
    pods = {"a": frozenset({"one"}), "b": frozenset({"one", "two"})}
    for listed, expected in ((claims, pods), (None, {})):
        data = {"kind": "DRACheckpoint", "ClaimInfoStateList": listed}
        path.write_text(json.dumps({"Data": json.dumps(data), "Checksum": 1}))
        assert pod_claims(config) == (expected, "")


@pytest.mark.parametrize(
    "bad",
    [None, 1, {}, {"ClaimUID": "bad"}, {"PodUIDs": {"a": {}}}, {"ClaimUID": "bad", "PodUIDs": "a"}],
)
def test_a_malformed_entry_of_the_record_hides_no_other(tmp_path: Path, bad: Any) -> None:
    entries: list[Any] = [{"ClaimUID": uid, "PodUIDs": {"a": {}}} for uid in ("one", "two")]
    data = {"ClaimInfoStateList": [entries[0], bad, entries[1]]}
    path = tmp_path / "dra_manager_state"
    path.write_text(json.dumps({"Data": json.dumps(data)}))
    pods = {"a": frozenset({"one", "two"})}
    why = f"{path}: 1 of its entries are malformed"
    assert pod_claims(Config(kubelet_root=str(tmp_path))) == (pods, why)


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"Data": 1}', '{"Data": "[]"}', '{"Data": "' + "[" * 10000 + '"}', "[" * 10000],
    ids=["empty", "list", "number", "list in it", "deep in it", "deep"],
)
def test_a_record_that_is_none_says_so(tmp_path: Path, content: str) -> None:
    (tmp_path / "dra_manager_state").write_text(content)
    found, why = pod_claims(Config(kubelet_root=str(tmp_path)))
    assert found is None
    assert why.startswith(f"{tmp_path}/dra_manager_state: not as a kubelet writes it")
