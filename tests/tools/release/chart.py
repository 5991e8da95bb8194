"""The Helm chart: the kustomize manifests again, with their components as values.

The manifests are the one source. The base gives the chart its templates, and each component becomes
a condition in them (:mod:`tests.tools.release.conditional`). So whatever a kustomization of ours
makes, the chart makes by values, which a test compares. Besides, the chart has the values that
users of charts expect (an image, tolerations, resources).

Source: helm.sh, the chart format (apiVersion v2), values and schema files; kubectl's documentation
of kustomizations.
"""

from __future__ import annotations

import json
import os
import textwrap
from typing import TYPE_CHECKING, Any, Final

import yaml

from integration.node.options import DRA_DRIVER
from tests.tools import REPOSITORY
from tests.tools.dist.archive import PROJECT, write_tar
from tests.tools.release.conditional import ABSENT, Choice, Items, Template, add, merge, to_template

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.tools.dist.project import Project

__all__ = ["MANIFESTS", "OPTIONS", "chart_name", "files", "write_chart"]

MANIFESTS: Final = os.path.join(REPOSITORY, "integration", "kubernetes", "manifests")

OPTIONS: Final = {
    "default-runtime": ".Values.defaultRuntime",
    "host-driver": 'eq .Values.driver "host"',
    "driver-container": 'eq .Values.driver "container"',
    "beside-gpu-operator": ".Values.besideGpuOperator",
    "restart-signal": 'eq .Values.restart "signal"',
    "restart-systemd": 'eq .Values.restart "systemd"',
    "remove-on-exit": ".Values.removeOnExit",
    "self-test": ".Values.selfTest",
    "no-device-plugin": "not .Values.devicePlugin.enabled",
    "device-plugin-config": ".Values.devicePlugin.config",
    "mps": ".Values.mps",
    "dra": ".Values.dra.enabled",
    "dra-mig": "and .Values.dra.enabled .Values.dra.mig",
    "dra-shares": "and .Values.dra.enabled .Values.dra.shares",
    "dra-evict": 'and .Values.dra.enabled (ne .Values.dra.unhealthy "taint")',
    "dra-extended-resource": "and .Values.dra.enabled .Values.dra.extendedResource",
    "dra-as-nvidia": 'and .Values.dra.enabled (eq .Values.dra.driverName "gpu.nvidia.com")',
    "node-condition": ".Values.nodeCondition",
    "metrics": "or .Values.metrics.enabled .Values.metrics.prometheusOperator",
    "prometheus-operator": ".Values.metrics.prometheusOperator",
}
"""When each component is part of the chart. Where two change the same, the later one wins."""

_ARGUMENTS: Final = {
    "--dra-shares=4": "--dra-shares={{ .Values.dra.shares }}",
    "--dra-unhealthy=evict": "--dra-unhealthy={{ .Values.dra.unhealthy }}",
}
"""What components give the agent, and a value can have otherwise."""

_OF_THE_CLUSTER: Final = frozenset(
    {
        *("Namespace", "RuntimeClass", "ClusterRole", "ClusterRoleBinding", "DeviceClass"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    }
)
_IN_MANIFESTS: Final = "containerd-shim-nvidia"
_NAMESPACE: Final = Template("{{ .Release.Namespace }}")
_BOOLEAN: Final = {"type": "boolean"}
_TEXT: Final = {"type": "string"}
_OBJECT: Final = {"type": "object"}
_ARRAY: Final = {"type": "array"}
_FROM_MANIFEST: Final = object()

# Path, default, schema, comment.
_TABLE: Final[tuple[tuple[str, Any, dict[str, Any], str], ...]] = (
    ("image.repository", PROJECT, _TEXT, "Where you have put it: there is no published one."),
    ("image.tag", "", _TEXT, "Empty means the chart's version."),
    ("image.pullPolicy", "IfNotPresent", {"enum": ["Always", "IfNotPresent", "Never"]}, ""),
    ("imagePullSecrets", [], _ARRAY, "As in a pod: a list of objects with a name."),
    (
        "namespace.create", False, _BOOLEAN,
        "Make the namespace, with the label that its pods need: for `helm template` and GitOps.",
    ),
    (
        "driver", "auto", {"enum": ["auto", "host", "container"]},
        "Where the driver is: on the nodes (host), at /run/nvidia/driver (container), or look.",
    ),
    ("defaultRuntime", False, _BOOLEAN, "Pods that name no RuntimeClass get the shim too."),
    (
        "besideGpuOperator", False, _BOOLEAN,
        "Take the place of the container toolkit of NVIDIA's GPU operator.",
    ),
    (
        "restart", "none", {"enum": ["none", "signal", "systemd"]},
        "How the engine is restarted when it has to be.",
    ),
    ("selfTest", False, _BOOLEAN, "A new version has to start a container before it is in effect."),
    ("removeOnExit", False, _BOOLEAN, "A pod that ends takes everything back from its node."),
    ("devicePlugin.enabled", True, _BOOLEAN, "Whether the agent is the kubelet's device plugin."),
    (
        "devicePlugin.config", {}, _OBJECT,
        "The configuration of NVIDIA's device plugin (version, flags, resources, sharing).",
    ),
    ("mps", False, _BOOLEAN, "Room for MPS, for a device plugin configuration with sharing.mps."),
    (
        "dra.enabled", False, _BOOLEAN,
        "Be a driver of dynamic resource allocation, too (Kubernetes 1.34 and newer).",
    ),
    ("dra.mig", False, _BOOLEAN, "Make MIG devices for claims, and undo them."),
    (
        "dra.shares", 0, {"type": "integer", "minimum": 0, "maximum": 64},
        "So many claims can have a part of one GPU, or MIG device; 0 for one that has all of it.",
    ),
    (
        "dra.unhealthy", "taint", {"enum": ["taint", "evict", "omit"]},
        "What becomes of devices that are unhealthy, lost or out of service. omit leaves them out.",
    ),
    (
        "dra.driverName", DRA_DRIVER, {"enum": [DRA_DRIVER, "gpu.nvidia.com"]},
        "gpu.nvidia.com takes the place of NVIDIA's driver, which no node may have then.",
    ),
    (
        "dra.extendedResource", False, _BOOLEAN,
        "Pods that ask for nvidia.com/gpu get it by claims, and no device plugin serves it.",
    ),
    (
        "nodeCondition", False, _BOOLEAN,
        "Say on each Node which GPUs no pod can have (Kubernetes 1.32 and newer).",
    ),
    ("metrics.enabled", False, _BOOLEAN, "Serve metrics at port 9477 of the agent's pods."),
    (
        "metrics.prometheusOperator", False, _BOOLEAN,
        "That, and a PodMonitor and alerts for Prometheus' operator.",
    ),
    ("affinity", _FROM_MANIFEST, _OBJECT, "Which nodes have GPUs. One of the terms is enough."),
    ("tolerations", _FROM_MANIFEST, _ARRAY, ""),
    ("installer.env", [], _ARRAY, "More variables of the installer."),
    ("installer.resources", _FROM_MANIFEST, _OBJECT, ""),
    ("nodeAgent.args", [], _ARRAY, "More options of `nvshim node`."),
    ("nodeAgent.env", [], _ARRAY, "More variables, such as those of NVIDIA's device plugin."),
    ("nodeAgent.resources", _FROM_MANIFEST, _OBJECT, ""),
)  # fmt: skip

_NOTES: Final = """\
The installer now puts containerd-shim-nvidia on each GPU node of the cluster.

Its pods need a namespace that admits privileged pods:

  kubectl label namespace {{ .Release.Namespace }} pod-security.kubernetes.io/enforce=privileged
{{- if eq .Values.restart "none" }}

Nothing restarts containerd. A pod of the installer is ready once its node's containerd has been
restarted after the installation.
{{- end }}
{{- if not .Values.defaultRuntime }}

Pods get the shim by `runtimeClassName: nvidia`.
{{- end }}
"""


def chart_name(version: str) -> str:
    """What the chart's archive is called."""
    return f"{PROJECT}-chart-{version}.tgz"


def files(project: Project) -> dict[str, str]:
    """The chart's files.

    Args:
        project: whose version is the chart's.

    Returns:
        The text of each, by its path below the chart's directory.
    """
    chart = {
        "apiVersion": "v2",
        "name": PROJECT,
        "description": project.summary,
        "type": "application",
        "version": project.version,
        "appVersion": project.version,
        "kubeVersion": ">=1.25.0-0",
        "home": project.home,
        "keywords": ["containerd", "gpu", "nvidia"],
        "annotations": {"artifacthub.io/license": "Apache-2.0"},
    }
    made = {
        "Chart.yaml": yaml.safe_dump(chart, sort_keys=False),
        "values.yaml": _values_text(),
        "values.schema.json": f"{json.dumps(_schema(), indent=2)}\n",
        "templates/NOTES.txt": _NOTES,
    }
    for name, documents in _templates().items():
        made[f"templates/{name}"] = "---\n".join(map(to_template, documents))
    return made


def write_chart(path: str, project: Project, epoch: int) -> None:
    """Write the chart's archive, whole or not at all.

    Args:
        path: where to; what is there is replaced.
        project: whose chart it is.
        epoch: the time of each file, in seconds since 1970.
    """
    contents = {f"{PROJECT}/{name}": text.encode() for name, text in files(project).items()}
    write_tar(path, contents, epoch)


# -- templates ------------------------------------------------------------------------------


def _templates() -> dict[str, list[Any]]:
    """The documents of each file of the base, and those that components add."""
    base = _read("base/kustomization.yaml")
    (labels,) = (each["pairs"] for each in base["labels"])
    made = {name: _read_all(f"base/{name}") for name in base["resources"]}
    for documents in made.values():
        for document in documents:
            _label(document, labels)
    for component, condition in OPTIONS.items():
        directory = f"components/{component}"
        kustomization = _read(f"{directory}/kustomization.yaml")
        for patch in kustomization.get("patches", ()):
            _apply(made, patch, condition)
        for name in kustomization.get("resources", ()):
            if name in made:
                raise NotImplementedError(f"two components with a file {name}")
            made[name] = [Choice(((condition, x),)) for x in _read_all(f"{directory}/{name}")]
        for generator in kustomization.get("configMapGenerator", ()):
            made[f"{generator['name']}.yaml"] = [Choice(((condition, _config_map(generator)),))]
    return {
        name: [_with_values(_in_release(document)) for document in documents]
        for name, documents in made.items()
    }


def _apply(made: dict[str, list[Any]], patch: dict[str, Any], condition: str) -> None:
    change = yaml.safe_load(patch["patch"])
    if isinstance(change, list):
        of = (patch["target"]["kind"], patch["target"]["name"])
    else:
        of = (change["kind"], change["metadata"]["name"])
    ((documents, number),) = (
        (documents, number)
        for documents in made.values()
        for number, document in enumerate(documents)
        if _identity(document) == of
    )
    document = documents[number]
    of_component = document.cases[0][0] if isinstance(document, Choice) else ""
    document = _certain(document)
    if isinstance(change, list):
        for step in change:
            if step["op"] != "add":
                raise NotImplementedError(f"a JSON patch that does {step['op']}")
            document = add(document, step["path"], step["value"], condition)
    elif change.get("$patch") == "delete":
        document = Choice(((condition, ABSENT),), document)
    else:
        document = merge(document, change, condition)
    documents[number] = Choice(((of_component, document),)) if of_component else document


def _certain(document: Any) -> Any:
    """A document that a component adds, as if it always did."""
    if isinstance(document, Choice) and document.otherwise is ABSENT:
        ((_, document),) = document.cases
    return document


def _identity(document: Any) -> tuple[str, str]:
    document = _certain(document)
    if isinstance(document, Choice):
        return "", ""
    return document["kind"], document["metadata"]["name"]


def _label(document: dict[str, Any], labels: dict[str, str]) -> None:
    metadata = document["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    if template := document.get("spec", {}).get("template"):
        template["metadata"]["labels"] |= labels


def _in_release(node: Any) -> Any:
    """The document in the release's namespace; a namespace itself is made if that is wanted."""
    if isinstance(node, Choice):
        cases = tuple((c, v if v is ABSENT else _in_release(v)) for c, v in node.cases)
        other = node.otherwise
        return Choice(cases, other if other is ABSENT else _in_release(other))
    kind = node["kind"]
    if kind == "Namespace":
        named = {**node, "metadata": {**node["metadata"], "name": _NAMESPACE}}
        return Choice(((".Values.namespace.create", named),))
    if kind == "ClusterRoleBinding":
        node = {**node, "subjects": [{**x, "namespace": _NAMESPACE} for x in node["subjects"]]}
    if kind == "ValidatingAdmissionPolicy":
        ours = [{**each, "expression": _of_account(each["expression"])} for each in _matches(node)]
        node = {**node, "spec": {**node["spec"], "matchConditions": ours}}
    if kind in _OF_THE_CLUSTER:
        return node
    name, *_ = node["metadata"]  # first its name, then where it is
    metadata = {name: node["metadata"][name], "namespace": _NAMESPACE}
    return {**node, "metadata": {**node["metadata"], **metadata}}


def _matches(node: Any) -> list[dict[str, str]]:
    conditions: list[dict[str, str]] = node["spec"]["matchConditions"]
    return conditions


def _of_account(expression: str) -> Template:
    """An expression that names a service account, of the release's namespace."""
    before, after = json.dumps(expression).split(f"{_IN_MANIFESTS}:")
    return Template(f"{before}{{{{ .Release.Namespace }}}}:{after}")


def _with_values(node: Any) -> Any:
    """A DaemonSet with the values that every chart has."""
    if isinstance(node, Choice) or node["kind"] != "DaemonSet":
        return node
    values = {"installer": ".Values.installer", "node-agent": ".Values.nodeAgent"}
    own = values[node["metadata"]["name"]]
    pod = dict(node["spec"]["template"]["spec"])
    (container,) = pod["containers"]
    container = {
        **container,
        "image": Template(
            '"{{ .Values.image.repository }}:{{ or .Values.image.tag .Chart.AppVersion }}"'
        ),
        "imagePullPolicy": Template("{{ .Values.image.pullPolicy }}"),
        "env": [*container["env"], Items(f"{own}.env")],
        "resources": Template(f"toYaml {own}.resources"),
    }
    if "nodeAgent" in own:
        container["args"] = [*map(_argument, container["args"]), Items(f"{own}.args")]
    pod |= {
        "imagePullSecrets": Choice(
            ((".Values.imagePullSecrets", Template("toYaml .Values.imagePullSecrets")),)
        ),
        "affinity": Template("toYaml .Values.affinity"),
        "tolerations": Template("toYaml .Values.tolerations"),
        "containers": [container],
    }
    template = {**node["spec"]["template"], "spec": pod}
    return {**node, "spec": {**node["spec"], "template": template}}


def _argument(node: Any) -> Any:
    if isinstance(node, Choice):
        return Choice(tuple((condition, _argument(value)) for condition, value in node.cases))
    return Template(_ARGUMENTS[node]) if node in _ARGUMENTS else node


def _config_map(generator: dict[str, Any]) -> dict[str, Any]:
    (name,) = generator["files"]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"]},
        "data": {name: Template("toYaml .Values.devicePlugin.config", is_text=True)},
    }


# -- values ---------------------------------------------------------------------------------


def _manifest_defaults() -> dict[str, Any]:
    """What the DaemonSets say of those values that the manifests have."""
    found: dict[str, Any] = {}
    for file, name in (("installer", "installer"), ("node-agent", "nodeAgent")):
        pod = _read(f"base/{file}.yaml")["spec"]["template"]["spec"]
        found[f"{name}.resources"] = pod["containers"][0]["resources"]
        for key in ("affinity", "tolerations"):
            if found.setdefault(key, pod[key]) != pod[key]:
                raise NotImplementedError(f"two DaemonSets with different {key}")
    return found


def _rows() -> Iterator[tuple[list[str], Any, dict[str, Any], str]]:
    manifest = _manifest_defaults()
    for path, default, schema, comment in _TABLE:
        value = manifest[path] if default is _FROM_MANIFEST else default
        yield path.split("."), value, schema, comment


def _schema() -> dict[str, Any]:
    top: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": {}}
    # Helm's own, for charts that have this one as a part.
    top["properties"]["global"] = _OBJECT
    for words, _, schema, _ in _rows():
        node = top
        for word in words[:-1]:
            node = node["properties"].setdefault(
                word, {"type": "object", "additionalProperties": False, "properties": {}}
            )
        node["properties"][words[-1]] = schema
    return {"$schema": "http://json-schema.org/draft-07/schema#", **top}


def _values_text() -> str:
    lines = [
        "# What this chart can be told. `make chart` made it of integration/kubernetes/manifests."
    ]
    above: list[str] = []
    for words, value, _, comment in _rows():
        for depth, word in enumerate(words[:-1]):
            if above[: depth + 1] != words[: depth + 1]:
                lines.append(f"{'  ' * depth}{word}:")
        above = words[:-1]
        indent = "  " * len(above)
        lines += [f"{indent}# {line}" for line in textwrap.wrap(comment, 96 - len(indent))]
        text = yaml.safe_dump({words[-1]: value}, sort_keys=False)
        lines += [f"{indent}{line}" for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines)


def _read(name: str) -> Any:
    (document,) = _read_all(name)
    return document


def _read_all(name: str) -> list[Any]:
    with open(os.path.join(MANIFESTS, name), encoding="utf-8") as file:
        return list(yaml.safe_load_all(file))
