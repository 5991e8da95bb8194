"""Writing the labels of a node to the Node, a NodeFeature or a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from integration.agent_errors import ApiServerRefused, NodeLabelsUnwritten
from integration.node.options import FILE, NODE, NODE_FEATURE, Options
from integration.node.reporter import api_server_of
from integration.node.services.labels.decision import NodeLabels
from integration.node.services.labels.writers import NOTE, WRITERS
from tests.harness.raising import raises
from tests.unit.node.labels.label_cluster import FEATURES, FOREIGN, NAME, NAMESPACE, Cluster

ONE: Final = NodeLabels({"nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "81559"})
TWO: Final = NodeLabels({"nvidia.com/gpu.count": "2"}, "one of two models")
NONE: Final = NodeLabels()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(str(tmp_path_factory.mktemp("cluster") / "account")) as cluster:
        yield cluster


@pytest.fixture
def cluster(server: Cluster) -> Cluster:
    server.reset()
    return server


def write(cluster: Cluster, way: str, wanted: NodeLabels, **more: str) -> None:
    options = cluster.options(**more)
    api = api_server_of(options)
    WRITERS[way](api, options, wanted)
    api.close()


def test_the_node_gets_what_differs_and_keeps_what_is_not_ours(cluster: Cluster) -> None:
    stale = {"nvidia.com/mig-1g.10gb.count": "7", "nvidia.com/gpu.engines.ofa": "0"}
    cluster.labels.update(stale)
    write(cluster, NODE, ONE)
    assert cluster.labels == {**FOREIGN, **ONE.labels}
    write(cluster, NODE, ONE)
    assert len(cluster.writes) == 1, "nothing has changed"
    write(cluster, NODE, TWO)
    assert cluster.labels == {**FOREIGN, **TWO.labels}
    assert cluster.node["annotations"] == {NOTE: TWO.note}
    write(cluster, NODE, NONE)
    assert (cluster.labels, cluster.node["annotations"]) == (FOREIGN, {})
    write(cluster, NODE, NONE)
    assert len(cluster.writes) == 3


def test_a_node_without_labels_gets_the_first_ones(cluster: Cluster) -> None:
    del cluster.node["labels"]
    write(cluster, NODE, ONE)
    assert cluster.labels == ONE.labels


def test_a_node_feature_is_made_changed_and_deleted(cluster: Cluster) -> None:
    write(cluster, NODE_FEATURE, ONE)
    (feature,) = cluster.features
    assert feature["metadata"]["name"] == f"nvidia-features-for-{NAME}"
    assert feature["metadata"]["labels"] == {"nfd.node.kubernetes.io/node-name": NAME}
    empty: dict[str, Any] = {"flags": {}, "attributes": {}, "instances": {}}
    assert feature["spec"] == {"labels": ONE.labels, "features": empty}
    write(cluster, NODE_FEATURE, ONE)
    write(cluster, NODE_FEATURE, TWO)
    (feature,) = cluster.features
    assert feature["spec"]["labels"] == TWO.labels
    assert feature["metadata"]["annotations"] == {NOTE: TWO.note}
    write(cluster, NODE_FEATURE, NONE)
    write(cluster, NODE_FEATURE, NONE)
    assert cluster.features == []
    path = f"{FEATURES}/nvidia-features-for-{NAME}"
    assert cluster.writes == [("POST", FEATURES), ("PUT", path), ("DELETE", path)]
    assert cluster.labels == FOREIGN, "only NFD labels the Node"


def test_a_cluster_without_nfd_is_named(cluster: Cluster) -> None:
    cluster.serves_features = False
    with raises(ApiServerRefused, match="Check that the API server serves it"):
        write(cluster, NODE_FEATURE, ONE)
    write(cluster, NODE_FEATURE, NONE)


@pytest.mark.parametrize("way", [NODE, NODE_FEATURE])
def test_who_forbids_it_is_named(cluster: Cluster, way: str) -> None:
    more = {"node_labels_namespace": NAMESPACE}
    policy = f"node-labels{'-nfd' if way == NODE_FEATURE else ''}"
    with raises(ApiServerRefused, match=f"Check the ValidatingAdmissionPolicy .*-{policy};"):
        write(cluster, way, NodeLabels({"example.com/gpu": "1"}), **more)


def read(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_file_has_a_label_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "features.d" / "nvshim"
    options = Options(node_labels_file=str(path))
    api = api_server_of(options)
    WRITERS[FILE](api, options, ONE)
    assert read(path) == ["nvidia.com/gpu.count=1", "nvidia.com/gpu.memory=81559"]
    assert path.stat().st_mode & 0o777 == 0o644
    before = path.stat()
    WRITERS[FILE](api, options, ONE)
    assert path.stat() == before, "nothing has changed"
    WRITERS[FILE](api, options, TWO)
    assert read(path) == ["# one of two models", "nvidia.com/gpu.count=2"]
    assert os.listdir(path.parent) == ["nvshim"]
    WRITERS[FILE](api, options, NONE)
    WRITERS[FILE](api, options, NONE)
    assert os.listdir(path.parent) == []


def test_a_place_that_is_no_file_is_named(tmp_path: Path) -> None:
    options = Options(node_labels_file=str(tmp_path))
    with raises(NodeLabelsUnwritten, match="set --node-labels-file; the agent retries"):
        WRITERS[FILE](api_server_of(options), options, ONE)
