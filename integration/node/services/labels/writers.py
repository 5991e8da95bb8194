"""Write the labels to the Node, to a NodeFeature object, or to a file.

====================  ==========================================================================
``node``              the Node's metadata. We own those of its labels that :mod:`.names` lists
``node-feature``      the object ``nvidia-features-for-NODE``; the master of node feature discovery
                      (NFD) copies its labels to the Node, and removes those it no longer has
``file``              a file in the directory from which NFD's worker on this node reads labels
====================  ==========================================================================

If the labels are already there, nothing is written. If the node has no labels, old ones are
removed.

Source: Kubernetes, strategic merge patch; NFD, pkg/apis/nfd/v1alpha1 and source/local.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from integration.agent_errors import ApiServerRefused, NodeLabelsUnwritten
from integration.apiserver.client import ApiServer
from integration.files import read_file, remove_file, replace_file
from integration.node.options import FILE, NODE, NODE_FEATURE, Options
from integration.node.services.labels.decision import NodeLabels
from integration.node.services.labels.names import is_label

NOTE: Final = "gpu.containerd-shim-nvidia/labelled-gpus"
"""The annotation that says which GPUs the labels describe, if there are several models."""

_NFD: Final = "nfd.k8s-sigs.io/v1alpha1"
_OF_NODE: Final = "nfd.node.kubernetes.io/node-name"
_NO_FEATURES: Final[Mapping[str, Any]] = {"flags": {}, "attributes": {}, "instances": {}}
_NOT_FOUND: Final = 404


def _write_node(api: ApiServer, options: Options, wanted: NodeLabels) -> None:
    path = f"/api/v1/nodes/{quote(options.node_name, safe='')}"
    there = api.call("GET", path).get("metadata") or {}
    changes = {
        "labels": _changes(there.get("labels"), is_label, wanted.labels),
        "annotations": _changes(there.get("annotations"), NOTE.__eq__, _annotations(wanted)),
    }
    metadata = {name: change for name, change in changes.items() if change}
    if metadata:
        api.call("PATCH", path, {"metadata": metadata})


def _changes(
    there: Mapping[str, str] | None, is_ours: Callable[[str], bool], wanted: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the patch of labels or annotations; None removes one."""
    before = there or {}
    gone = (name for name in before if is_ours(name) and name not in wanted)
    new = {name: value for name, value in wanted.items() if before.get(name) != value}
    return {**dict.fromkeys(gone), **new}


def _annotations(wanted: NodeLabels) -> dict[str, str]:
    return {NOTE: wanted.note} if wanted.note else {}


def _write_node_feature(api: ApiServer, options: Options, wanted: NodeLabels) -> None:
    namespace = quote(options.node_labels_namespace, safe="")
    everyone = f"/apis/{_NFD}/namespaces/{namespace}/nodefeatures"
    name = f"nvidia-features-for-{options.node_name}"
    path = f"{everyone}/{quote(name, safe='')}"
    there = _get(api, path)
    if not wanted.labels:
        if there is not None:
            api.call("DELETE", path)
        return
    spec = {"labels": dict(wanted.labels), "features": _NO_FEATURES}
    labels, annotations = {_OF_NODE: options.node_name}, _annotations(wanted)
    if there is None:
        kind = {"apiVersion": _NFD, "kind": "NodeFeature"}
        metadata = {"name": name, "labels": labels, "annotations": annotations}
        api.call("POST", everyone, {**kind, "metadata": metadata, "spec": spec})
        return
    before = there["metadata"]
    metadata = {**before, "labels": labels, "annotations": annotations}
    if {"annotations": {}, **before} != metadata or there.get("spec") != spec:
        api.call("PUT", path, {**there, "metadata": metadata, "spec": spec})


def _get(api: ApiServer, path: str) -> dict[str, Any] | None:
    """Return an object; None if there is none."""
    try:
        return api.call("GET", path)
    except ApiServerRefused as error:
        if error.http != _NOT_FOUND:
            raise
        return None


def _write_file(_: ApiServer, options: Options, wanted: NodeLabels) -> None:
    path = options.node_labels_file
    content = "".join(f"{line}\n" for line in _lines(wanted)).encode()
    try:
        if content and read_file(path) != content:
            replace_file(path, content, durable=False)  # the agent writes it again after a crash
        elif not content and os.path.lexists(path):
            remove_file(path, durable=False)
    except OSError as error:
        raise NodeLabelsUnwritten(
            f"to write the node's labels to {path}",
            found=error.strerror or str(error),
            do="make its directory writable, or set --node-labels-file; the agent retries",
        ) from error


def _lines(wanted: NodeLabels) -> Iterator[str]:
    if wanted.note:
        yield f"# {wanted.note}"
    for name in sorted(wanted.labels):
        yield f"{name}={wanted.labels[name]}"


WRITERS: Final[Mapping[str, Callable[[ApiServer, Options, NodeLabels], None]]] = {
    NODE: _write_node,
    NODE_FEATURE: _write_node_feature,
    FILE: _write_file,
}
"""What writes labels, by the option ``--node-labels``.

They raise:
    ApiServerSilent: the server does not answer.
    ApiServerRefused: the server refuses.
    NodeLabelsUnwritten: the file cannot be written.
"""
