"""The real kubectl of a Debian release, and an API server that only lists which kinds exist.

``kubectl apply --dry-run=client`` changes nothing, but asks the server which resources exist and
whether an object does. This server answers the first from a table and the second with "not found".
It stores nothing; it refuses and records any request that would change something.

``python -m tests.harness.kubectl RELEASE…`` downloads the programs.

Source: Kubernetes API, discovery (APIGroupList, APIResourceList), metav1.Status.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Self

import yaml

from integration.simulated.packages import default_cache, unpack
from tests.harness.http_server import Request, served
from tests.harness.launcher import REPOSITORY
from tools.packages import fetch
from tools.parts import programs_of_release

MANIFESTS: Final = os.path.join(REPOSITORY, "integration", "kubernetes", "manifests")

_PACKAGE: Final = "kubectl"
# There the program is static, and needs no libraries.
_STATIC: Final = {"bookworm": "kubernetes-client"}

# Group version → plural, kind, whether it is namespaced.
_RESOURCES: Final = {
    "v1": [
        ("namespaces", "Namespace", False),
        ("resourcequotas", "ResourceQuota", True),
        ("configmaps", "ConfigMap", True),
        ("services", "Service", True),
        ("serviceaccounts", "ServiceAccount", True),
        ("pods", "Pod", True),
    ],
    "apps/v1": [("daemonsets", "DaemonSet", True)],
    "batch/v1": [("jobs", "Job", True)],
    "rbac.authorization.k8s.io/v1": [
        ("clusterroles", "ClusterRole", False),
        ("clusterrolebindings", "ClusterRoleBinding", False),
    ],
    "node.k8s.io/v1": [("runtimeclasses", "RuntimeClass", False)],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy", True)],
}


@dataclass(frozen=True, slots=True)
class Kubectl:
    """A kubectl."""

    release: str  # the Debian release that it comes from
    program: str  # its path

    @classmethod
    def of_release(cls, release: str, *, say: Callable[[str], None] | None = None) -> Self:
        """Return the kubectl of a Debian release."""
        if release in _STATIC:
            package = _STATIC[release]
            into = os.path.join(default_cache(), f"{release}-{package}")
            directory = os.path.join(into, "unpacked")
            unpack(fetch([package], into, release=release, say=say), directory)
            return cls(release, os.path.join(directory, "usr", "bin", "kubectl"))
        where = programs_of_release({"kubectl": ("kubectl",)}, [_PACKAGE], release, say=say)
        return cls(release, f"{where}/kubectl/kubectl")

    def __call__(self, *words: str, server: str = "", stdin: str = "") -> str:
        """Run it and return its output; an error fails the test."""
        with tempfile.TemporaryDirectory() as home:
            options = ["--server", server] if server else []
            done = subprocess.run(
                [self.program, *options, *words],
                input=stdin, capture_output=True, text=True, timeout=50, check=False,
                env={"PATH": "/usr/bin:/bin", "HOME": home},
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", done.stderr
        return done.stdout


def render(kubectl: Kubectl, overlay: str, *components: str) -> list[dict[str, Any]]:
    """Return the objects of an overlay with more components, as a cluster's own overlay adds."""
    # Next to our overlays: kustomizations refer to each other by relative paths.
    directory = tempfile.mkdtemp(prefix=".test-", dir=os.path.join(MANIFESTS, "overlays"))
    path = os.path.join(directory, "kustomization.yaml")
    try:
        with open(path, "w", encoding="utf-8") as file:
            added = [f"../../components/{name}" for name in components]
            yaml.safe_dump({"resources": [f"../{overlay}"], "components": added}, file)
        return list(yaml.safe_load_all(kubectl("kustomize", directory)))
    finally:
        os.unlink(path)
        os.rmdir(directory)


@dataclass
class Discovery:
    """An API server that only serves discovery. It runs while the context is open."""

    # the requests that would have changed something
    changes: list[str] = field(default_factory=list)
    url: str = ""  # where it answers

    _running: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        port = self._running.enter_context(served(self._answer))
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _answer(self, request: Request) -> tuple[int, dict[str, Any]]:
        if request.method == "GET":
            return _answer(request.path.partition("?")[0])
        self.changes.append(f"{request.method} {request.path}")
        return 405, _status(405, "MethodNotAllowed")


def _answer(path: str) -> tuple[int, dict[str, Any]]:
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [_group(name) for name in _RESOURCES if "/" in name]
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version in _RESOURCES:
        resources = [
            {
                "name": plural, "singularName": "", "namespaced": namespaced, "kind": kind,
                "verbs": ["create", "delete", "get", "list", "patch", "update"],
            }
            for plural, kind, namespaced in _RESOURCES[version]
        ]  # fmt: skip
        return 200, {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return 404, _status(404, "NotFound")


def _group(version: str) -> dict[str, Any]:
    name, _, number = version.partition("/")
    known = {"groupVersion": version, "version": number}
    return {"name": name, "versions": [known], "preferredVersion": known}


def _status(code: int, reason: str) -> dict[str, Any]:
    return {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code,
    }  # fmt: skip


if __name__ == "__main__":
    for _release in sys.argv[1:]:
        Kubectl.of_release(_release, say=print)
