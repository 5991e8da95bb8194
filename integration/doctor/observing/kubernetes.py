"""Read what Kubernetes expects of this node: the kubelet's cgroup driver, and RuntimeClasses.

RuntimeClasses come from a file of manifests, or from the cluster if a kubeconfig is given.

Source: kubelet.config.k8s.io/v1beta1 KubeletConfiguration; node.k8s.io/v1 RuntimeClass.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

import yaml

from hooks.named_files import read_named
from integration.containers.node_processes import host_processes
from integration.doctor.errors import ManifestUnusable
from integration.doctor.facts import CouldNotLook, Kubernetes, RuntimeClass
from integration.doctor.observing.machine import systemd_runs
from integration.doctor.observing.running import find_program, read_file, run
from integration.doctor.places import Places
from integration.json_documents import parse_json

_CONFIG: Final = "/var/lib/kubelet/config.yaml"
# What PyYAML raises; the second and third for a scalar that is not of its tag's kind.
_INVALID: Final = (yaml.YAMLError, LookupError, AttributeError, ValueError, RecursionError)
KUBELETS: Final = frozenset({"kubelet", "k3s-server", "k3s-agent", "rke2"})
"""The kernel's short names of processes that are, or contain, a kubelet."""
_DEFAULT_DRIVER: Final = "cgroupfs"
_LARGEST_MANIFEST: Final = 64 << 20


def look_at_kubernetes(places: Places) -> Kubernetes:
    """Return the kubelet's cgroup driver and the RuntimeClasses."""
    classes: tuple[RuntimeClass, ...] | None = None
    if places.manifest:
        classes = tuple(_of_manifest(places.manifest))
    elif places.kubeconfig:
        classes = tuple(_of_cluster(places))
    return Kubernetes(_cgroup_driver(places), systemd_runs(places), classes)


def _cgroup_driver(places: Places) -> str:
    kubelets = [p for p in host_processes(places.at("/proc")) if p.name in KUBELETS]
    flag = next((d for k in kubelets if (d := k.option("--cgroup-driver"))), "")
    if flag:
        return flag
    named = next((c for k in kubelets if (c := k.option("--config"))), _CONFIG)
    path = places.at(named)
    if not os.path.exists(path):
        return ""
    try:
        config = yaml.safe_load(read_file(path))
    except _INVALID as error:
        # Not the whole error, because it quotes the file.
        raise CouldNotLook(f"{named} is not valid YAML: {getattr(error, 'problem', '')}") from error
    driver = config.get("cgroupDriver") if isinstance(config, dict) else None
    return str(driver or _DEFAULT_DRIVER)


def _of_manifest(path: str) -> Iterator[RuntimeClass]:
    try:
        documents = list(yaml.safe_load_all(read_named(path, _LARGEST_MANIFEST)))
    except (OSError, *_INVALID) as error:
        raise ManifestUnusable(
            f"to read RuntimeClasses from {path}",
            found=str(error.strerror) if isinstance(error, OSError) else f"not valid YAML: {error}",
            do="name a file of Kubernetes manifests",
        ) from error
    yield from _classes(documents, path)


def _of_cluster(places: Places) -> Iterator[RuntimeClass]:
    kubectl = find_program(places, "kubectl")
    if not kubectl:
        raise CouldNotLook("reading RuntimeClasses needs kubectl, which is not installed")
    said = run(
        places,
        [
            kubectl, "--kubeconfig", places.kubeconfig, "--request-timeout=5s",
            "get", "runtimeclasses.node.k8s.io", "-o", "json",
        ],
    )  # fmt: skip
    yield from _classes([parse_json(said)], "the cluster")


def _classes(documents: Iterable[Any], source: str) -> Iterator[RuntimeClass]:
    for document in documents:
        if not isinstance(document, dict):
            continue
        items = document.get("items")
        if isinstance(items, list):
            yield from _classes(items, source)
        elif document.get("kind") == "RuntimeClass":
            metadata = document.get("metadata")
            name = metadata.get("name") if isinstance(metadata, dict) else None
            yield RuntimeClass(str(name or ""), str(document.get("handler") or ""), source)
