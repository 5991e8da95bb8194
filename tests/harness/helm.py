"""Render a Helm chart without Helm, by Go's template engine in kubectl.

``kubectl label --local -o go-template-file`` runs a template on an object and calls no server. The
object has the built-in objects of Helm (``.Values``, ``.Release``, ``.Chart``). The chart uses two
expressions of Helm's own, each alone and on a value: ``toYaml … | nindent`` and
``.Files.Get … | nindent``. They are expanded beforehand.

Source: kubectl label --help; helm.sh, built-in objects; Go, text/template.
"""

from __future__ import annotations

import json
import re
import tempfile
import textwrap
from typing import TYPE_CHECKING, Any, Final

import jsonschema
import yaml

from tests.harness.kubectl import MANIFESTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.harness.kubectl import Kubectl

with open(f"{MANIFESTS}/components/device-plugin-config/config.yaml", encoding="utf-8") as _file:
    _DEVICE_PLUGIN: Final = yaml.safe_load(_file)
with open(f"{MANIFESTS}/components/mig-config/config.yaml", encoding="utf-8") as _file:
    _MIG_CONFIG: Final = yaml.safe_load(_file)

_LITERAL: Final = re.compile(
    r"[ ]*\{\{- (?:toYaml \.Values\.([\w.]+)|\.Files\.Get \"(\S+)\") \| nindent (\d+) \}\}"
)
_PLACEHOLDER: Final = "nvshim-test-literal-"

OPTIONS: Final[Mapping[str, dict[str, Any]]] = {
    "default-runtime": {"defaultRuntime": True},
    "host-driver": {"driver": "host"},
    "driver-container": {"driver": "container"},
    "beside-gpu-operator": {"besideGpuOperator": True},
    "restart-signal": {"restart": "signal"},
    "restart-systemd": {"restart": "systemd"},
    "remove-on-exit": {"removeOnExit": True},
    "self-test": {"selfTest": True},
    "no-device-plugin": {"devicePlugin": {"enabled": False}},
    "device-plugin-config": {"devicePlugin": {"config": _DEVICE_PLUGIN}},
    "mps": {"mps": True},
    "dra": {"dra": {"enabled": True}},
    "dra-mig": {"dra": {"mig": True}},
    "dra-shares": {"dra": {"shares": 4}},
    "dra-metadata": {"dra": {"metadata": True}},
    "dra-evict": {"dra": {"unhealthy": "evict"}},
    "dra-extended-resource": {"dra": {"extendedResource": True}},
    "dra-as-nvidia": {"dra": {"driverName": "gpu.nvidia.com"}},
    "nri": {"nri": True},
    "node-condition": {"nodeCondition": True},
    "node-labels": {"nodeLabels": "node"},
    "node-labels-nfd": {"nodeLabels": "node-feature"},
    "node-labels-file": {"nodeLabels": "file"},
    "mig-config": {"migConfig": _MIG_CONFIG},
    "nvsentinel": {"nvsentinel": True},
    "metrics": {"metrics": {"enabled": True}},
    "prometheus-operator": {"metrics": {"prometheusOperator": True}},
    "metrics-dcgm": {"metrics": {"names": ["own", "dcgm"]}},
    "metrics-web-config": {"metrics": {"webConfigSecret": "metrics-web-config"}},
}  # fmt: skip
"""The components of a kustomization, and the equivalent values of the chart."""


def render_chart(
    kubectl: Kubectl, chart: Mapping[str, str], values: dict[str, Any], *, namespace: str
) -> list[dict[str, Any]]:
    """Return the objects that ``helm template`` would print.

    Args:
        values: override those of the chart.

    Raises:
        jsonschema.ValidationError: the chart's schema does not allow the values.
    """
    templates = [
        text
        for name, text in sorted(chart.items())
        if name.startswith("templates/") and name.endswith(".yaml")
    ]
    text = _execute(kubectl, chart, values, namespace, templates)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def notes(kubectl: Kubectl, chart: Mapping[str, str], values: dict[str, Any]) -> str:
    """Return the notes that Helm prints after an installation."""
    return _execute(kubectl, chart, values, "there", [chart["templates/NOTES.txt"]])


def _execute(
    kubectl: Kubectl,
    chart: Mapping[str, str],
    values: dict[str, Any],
    namespace: str,
    templates: list[str],
) -> str:
    whole = merged(yaml.safe_load(chart["values.yaml"]), values)
    jsonschema.validate(whole, json.loads(chart["values.schema.json"]))
    about = yaml.safe_load(chart["Chart.yaml"])
    literals: list[str] = []

    def literal(found: re.Match[str]) -> str:
        text = chart[found[2]] if found[2] else _yaml(whole, found[1])
        literals.append("\n" + textwrap.indent(text, " " * int(found[3])).rstrip())
        return f"{{{{- /* */ -}}}}{_PLACEHOLDER}{len(literals) - 1}."

    text = _LITERAL.sub(literal, "\n---\n".join(templates))
    data = {
        "apiVersion": "example.com/v1", "kind": "Release", "metadata": {"name": "x"},
        "Values": whole, "Release": {"Namespace": namespace, "Name": "x"},
        "Chart": {"AppVersion": about["appVersion"], "Name": about["name"]},
    }  # fmt: skip
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json") as given,
        tempfile.NamedTemporaryFile("w", suffix=".tpl") as template,
    ):
        json.dump(data, given)
        template.write(text)
        for file in (given, template):
            file.flush()
        said = kubectl(
            "label", "--local", "-f", given.name, "made=here", "-o",
            f"go-template-file={template.name}",
        )  # fmt: skip
    return re.sub(rf"{_PLACEHOLDER}(\d+)\.", lambda m: literals[int(m[1])], said)


def _yaml(values: Any, path: str) -> str:
    for word in path.split("."):
        values = values[word]
    text: str = yaml.safe_dump(values, sort_keys=False)
    return text


def merged(one: Any, other: Any) -> Any:
    """Merge values as Helm does: objects are merged, everything else is replaced."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{k: merged(one.get(k), v) for k, v in other.items()}}
    return other
