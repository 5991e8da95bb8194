"""The Helm chart renders the same objects as the kustomizations, and follows chart conventions."""

from __future__ import annotations

import functools
import os
import tarfile
from typing import TYPE_CHECKING, Any, Final

import jsonschema
import pytest
import yaml

from shim import VERSION
from tests.harness.helm import OPTIONS, merged, notes, render_chart
from tests.harness.kubectl import MANIFESTS, Kubectl, render
from tests.harness.schemas import validate
from tools.dist.project import Project
from tools.release.chart import chart_name, files, write_chart

if TYPE_CHECKING:
    from pathlib import Path

NAMESPACE: Final = "containerd-shim-nvidia"
VERSIONS: Final = ("1.25", "1.31", "1.37")

# Each component alone, with its parents, and several at once: a chart could get those wrong that
# change the same fields.
_PARTS: Final = {"dra", "metrics"}
ALONE: Final = [
    (whole, name) if (whole := name.partition("-")[0]) in _PARTS - {name} else (name,)
    for name in OPTIONS
]
TOGETHER: Final = (
    ("default-runtime", "host-driver", "restart-systemd", "remove-on-exit", "self-test"),
    (
        *("driver-container", "restart-signal", "remove-on-exit", "no-device-plugin", "dra"),
        *("dra-extended-resource", "dra-as-nvidia", "node-condition", "node-labels"),
        *("mig-config", "nvsentinel", "metrics", "metrics-dcgm", "metrics-web-config"),
    ),
    (
        *("beside-gpu-operator", "self-test", "device-plugin-config", "mps", "dra", "dra-mig"),
        *("dra-shares", "dra-metadata", "dra-evict", "node-labels-nfd", "prometheus-operator"),
        "metrics-dcgm",
    ),
)


@pytest.fixture(scope="module")
def kubectl() -> Kubectl:
    return Kubectl.of_release("trixie")


@pytest.fixture(scope="module")
def chart() -> dict[str, str]:
    return files()


@pytest.fixture
def rendered(kubectl: Kubectl, chart: dict[str, str]) -> Any:
    def make(values: dict[str, Any] | None = None) -> dict[tuple[str, str], dict[str, Any]]:
        documents = render_chart(kubectl, chart, values or {}, namespace=NAMESPACE)
        return _by_name(documents)

    return make


def _by_name(documents: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    found = {(x["kind"], x["metadata"]["name"]): x for x in documents}
    assert len(found) == len(documents)
    # Text with comments in one of them and without in the other, of the same meaning.
    for document in found.values():
        if document["kind"] == "ConfigMap":
            document["data"] = {k: yaml.safe_load(v) for k, v in document["data"].items()}
        if document["kind"] == "DaemonSet":
            # kustomize puts variables that it has patched first; none refers to another.
            (container,) = document["spec"]["template"]["spec"]["containers"]
            container["env"].sort(key=lambda variable: variable["name"])
    return found


@pytest.mark.parametrize("components", [(), *ALONE, *TOGETHER], ids="+".join)
def test_the_chart_makes_what_the_kustomization_makes(
    kubectl: Kubectl, rendered: Any, components: tuple[str, ...]
) -> None:
    wanted = _by_name(render(kubectl, "not-default", *components))
    values: dict[str, Any] = functools.reduce(
        merged, map(OPTIONS.__getitem__, components), {"namespace": {"create": True}}
    )
    made = rendered(values)
    assert made.keys() == wanted.keys()
    for name, document in wanted.items():
        assert made[name] == document


def test_every_component_is_a_value() -> None:
    assert OPTIONS.keys() == {*os.listdir(os.path.join(MANIFESTS, "components"))}


def test_the_namespace_is_the_release_s_and_made_by_whoever_makes_that(
    kubectl: Kubectl, chart: dict[str, str]
) -> None:
    made = _by_name(render_chart(kubectl, chart, {}, namespace="elsewhere"))
    assert ("Namespace", "elsewhere") not in made
    assert made["DaemonSet", "installer"]["metadata"]["namespace"] == "elsewhere"
    (binding,) = (x for (kind, _), x in made.items() if kind == "ClusterRoleBinding")
    assert binding["subjects"][0]["namespace"] == "elsewhere"


def test_values_that_charts_have_reach_both_daemon_sets(rendered: Any) -> None:
    values: dict[str, Any] = {
        "image": {"repository": "registry.example/x", "tag": "7", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "secret"}],
        "affinity": {"podAntiAffinity": {}},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "installer": {"env": [{"name": "A", "value": "b"}], "resources": {"limits": {"cpu": "1"}}},
        "nodeAgent": {"args": ["--verbose"], "env": [{"name": "MIG_STRATEGY", "value": "mixed"}]},
    }
    made = rendered(values)
    plain = rendered()
    for name in ("installer", "node-agent"):
        pod = made["DaemonSet", name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert (container["image"], container["imagePullPolicy"]) == (
            "registry.example/x:7",
            "Always",
        )
        assert pod["imagePullSecrets"] == [{"name": "secret"}]
        assert pod["affinity"].keys() == {"nodeAffinity", "podAntiAffinity"}
        assert pod["tolerations"] == values["tolerations"]
        (before,) = plain["DaemonSet", name]["spec"]["template"]["spec"]["containers"]
        own = values["installer" if name == "installer" else "nodeAgent"]
        assert container["env"] == sorted(before["env"] + own["env"], key=lambda x: x["name"])
        assert container["args"] == before["args"] + own.get("args", [])
        assert before["image"] == f"{NAMESPACE}:{VERSION}"
    (installer,) = made["DaemonSet", "installer"]["spec"]["template"]["spec"]["containers"]
    assert installer["resources"]["limits"]["cpu"] == "1"
    # Objects that the kustomizations render, too, are validated in their tests.
    for document in made.values():
        for version in VERSIONS:
            validate(document, version)


def test_what_is_said_of_claims_reaches_the_agent_if_that_is_a_driver(rendered: Any) -> None:
    def arguments(**dra: Any) -> list[str]:
        made = rendered({"dra": dra})
        (container,) = made["DaemonSet", "node-agent"]["spec"]["template"]["spec"]["containers"]
        plain: list[str] = container["args"]
        return plain[plain.index("--dra") + 1 :] if "--dra" in plain else []

    assert arguments() == []
    assert arguments(enabled=True) == []
    assert arguments(enabled=True, shares=2, unhealthy="omit") == [
        "--dra-shares=2", "--dra-unhealthy=omit",
    ]  # fmt: skip
    assert arguments(enabled=True, shares="memory") == ["--dra-shares=memory"]


@pytest.mark.parametrize(
    "values",
    [
        {"drivr": "host"}, {"driver": "hst"}, {"metrics": {"enable": True}}, {"mps": "yes"},
        {"dra": True}, {"dra": {"shares": "4"}}, {"dra": {"shares": 65}},
        {"dra": {"shares": "all"}},
        {"dra": {"driverName": "gpu.example.com"}}, {"dra": {"unhealthy": "ignore"}},
        {"nodeLabels": "nfd"}, {"runtimeClass": {"selector": {}}},
        {"metrics": {"enabled": True, "names": ["dcgm-4.7"]}},
        {"runtimeClass": {"nodeSelector": {"a": True}}},
        # The API server would refuse these, of which some come from --set.
        {"nodeAgent": {"env": [{"name": "A", "value": 1}]}}, {"nodeAgent": {"args": ["--x", 1]}},
        {"installer": {"env": [{"value": "a"}]}}, {"installer": {"resources": {"limit": {}}}},
        {"tolerations": [{"key": "a", "value": True}]}, {"tolerations": [{"effect": "no"}]},
        {"imagePullSecrets": ["secret"]}, {"image": {"repository": ""}},
    ],
)  # fmt: skip
def test_a_value_that_is_misspelt_is_refused(rendered: Any, values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        rendered(values)


@pytest.mark.parametrize(
    "dra",
    [
        {"extendedResource": True}, {"mig": True}, {"shares": 2}, {"unhealthy": "evict"},
        {"driverName": "gpu.nvidia.com"}, {"metadata": True},
    ],
)  # fmt: skip
def test_what_means_nothing_without_the_driver_is_refused(
    rendered: Any, dra: dict[str, Any]
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        rendered({"dra": dra})
    rendered({"dra": {"enabled": True, **dra}})


@pytest.mark.parametrize(
    ("metrics", "more"),
    [
        ({"enabled": False}, {"names": ["dcgm"]}), ({"enabled": False}, {"webConfigSecret": "a"}),
        # The alerts and the PodMonitor would not work.
        ({"prometheusOperator": True}, {"names": ["dcgm", "dcgm-4.9"]}),
        ({"prometheusOperator": True}, {"webConfigSecret": "a"}),
    ],
)  # fmt: skip
def test_metrics_that_nobody_could_use_are_refused(
    rendered: Any, metrics: dict[str, Any], more: dict[str, Any]
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        rendered({"metrics": {**metrics, **more}})
    rendered({"metrics": metrics})
    rendered({"metrics": {"enabled": True, **more}})


def test_the_runtime_class_selects_what_it_is_told_to(rendered: Any) -> None:
    def scheduling(**values: Any) -> dict[str, Any]:
        found: dict[str, Any] = rendered(values)["RuntimeClass", "nvidia"]["scheduling"]
        return found

    assert "nodeSelector" not in scheduling()
    mine = {"example.com/gpu": "yes"}
    assert scheduling(runtimeClass={"nodeSelector": mine})["nodeSelector"] == mine


def test_what_is_to_be_done_after_an_installation_is_said(
    kubectl: Kubectl, chart: dict[str, str]
) -> None:
    text = notes(kubectl, chart, {})
    assert "kubectl label namespace there pod-security.kubernetes.io/enforce=privileged" in text
    assert "containerd is not restarted automatically" in text
    assert "restarted" not in notes(kubectl, chart, {"restart": "systemd"})
    assert "no label is needed" in text
    assert "Set runtimeClass.nodeSelector to restrict such pods" in text
    assert "gpu.present" not in text
    assert 'or with nvidia.com/gpu.present: "true".' in notes(
        kubectl, chart, {"nodeLabels": "node"}
    )
    selects = {"runtimeClass": {"nodeSelector": {"example.com/gpu": "yes"}}}
    assert "runtimeClass.nodeSelector" not in notes(kubectl, chart, selects)


def test_the_archive_is_a_chart_and_the_same_each_time(tmp_path: Path) -> None:
    archives = []
    for name in ("one", "two"):
        path = tmp_path / name
        write_chart(str(path), 1_700_000_000)
        archives.append(path.read_bytes())
    assert archives[0] == archives[1]
    with tarfile.open(tmp_path / "one") as archive:
        members = archive.getmembers()
        about = archive.extractfile("containerd-shim-nvidia/Chart.yaml")
        assert about is not None
        chart = yaml.safe_load(about)
    assert {member.name.partition("/")[0] for member in members} == {chart["name"]}
    assert {(m.uid, m.gid, m.mode, m.mtime) for m in members} == {(0, 0, 0o644, 1_700_000_000)}
    assert (chart["version"], chart["appVersion"], chart["apiVersion"]) == (VERSION, VERSION, "v2")
    project = Project.of()
    assert (chart["description"], chart["home"]) == (project.summary, project.home)
    assert chart_name(VERSION).endswith(f"-{VERSION}.tgz")
