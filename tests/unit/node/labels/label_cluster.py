"""An API server with a Node, NodeFeature objects, and our admission policies for them."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

import yaml

from integration.node.options import Options
from tests.harness.admission import denials
from tests.harness.api_server import ApiServer, denied, refusal
from tests.harness.kubectl import MANIFESTS

if TYPE_CHECKING:
    from tests.harness.http_server import Request

NAME: Final = "gpu-node"
NAMESPACE: Final = "containerd-shim-nvidia"
FEATURES: Final = f"/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/{NAMESPACE}/nodefeatures"
FOREIGN: Final = {"kubernetes.io/hostname": NAME, "nvidia.com/mig.config": "all-1g.10gb"}
"""Labels that other programs set."""

_OPERATIONS: Final = {"POST": "CREATE", "PUT": "UPDATE", "PATCH": "UPDATE", "DELETE": "DELETE"}
_USER: Final = {
    "username": f"system:serviceaccount:{NAMESPACE}:node-agent",
    "extra": {"authentication.kubernetes.io/node-name": [NAME]},
}

Object = dict[str, Any]


def _policies() -> list[Object]:
    found: list[Object] = []
    for path in ("node-labels/label-access.yaml", "node-labels-nfd/feature-access.yaml"):
        with open(os.path.join(MANIFESTS, "components", path), encoding="utf-8") as file:
            found += yaml.load_all(file, yaml.CSafeLoader)
    return [each for each in found if each["kind"] == "ValidatingAdmissionPolicy"]


class Cluster(ApiServer):
    """The server.

    Attributes:
        objects: the current objects, by path.
        asked: the number of requests.
        writes: method and path of each request that changes something.
        serves_features: whether it supports NodeFeatures.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._policies = _policies()
        self._versions = 1
        self.reset()

    def reset(self) -> None:
        """Reset to the objects of a new cluster."""
        self.serves_features = True
        self.asked = 0
        self.writes: list[tuple[str, str]] = []
        metadata = {"name": NAME, "labels": dict(FOREIGN), "resourceVersion": "1"}
        self.objects: dict[str, Object] = {
            f"/api/v1/nodes/{NAME}": {
                "apiVersion": "v1", "kind": "Node", "metadata": metadata,
                "spec": {"podCIDR": "10.0.0.0/24"}, "status": {"conditions": [{"type": "Ready"}]},
            }
        }  # fmt: skip

    @property
    def node(self) -> Object:
        """Return the Node's metadata."""
        found: Object = self.objects[f"/api/v1/nodes/{NAME}"]["metadata"]
        return found

    @property
    def labels(self) -> dict[str, str]:
        """Return the Node's labels."""
        found: dict[str, str] = self.node["labels"]
        return found

    @property
    def features(self) -> list[Object]:
        """Return the NodeFeatures."""
        return [each for path, each in self.objects.items() if path.startswith(FEATURES)]

    def options(self, **more: Any) -> Options:
        """Return the agent's options for this server."""
        return Options(
            api_server="127.0.0.1", api_port=self.port, service_account=self.service_account,
            node_name=NAME, **more,
        )  # fmt: skip

    def answer(self, request: Request) -> tuple[int, Any]:
        self.asked += 1
        path, is_new = request.path, request.method == "POST"
        if path.startswith("/apis/") and not self.serves_features:
            return refusal(404, "the server could not find the requested resource")
        body: Any = json.loads(request.body) if request.body else None
        path += f"/{body['metadata']['name']}" if is_new else ""
        old = self.objects.get(path)
        if (old is not None) is is_new:
            return refusal(409 if is_new else 404, f'"{path}" not found')
        if request.method == "GET":
            return 200, old
        self.writes.append((request.method, request.path))
        new = self._changed(request.method, old, body)
        group = "nfd.k8s-sigs.io" if path.startswith("/apis/") else ""
        asked = {
            "operation": _OPERATIONS[request.method], "subResource": "", "userInfo": _USER,
            "resource": {"group": group, "version": "v1", "resource": path.split("/")[-2]},
        }  # fmt: skip
        for policy in self._policies:
            if denials(policy, asked, new, old):
                return denied(policy=policy["metadata"]["name"])
        if new is None:
            return 200, self.objects.pop(path)
        before = (old or new)["metadata"].get("resourceVersion")
        if new["metadata"].get("resourceVersion") != before:
            return refusal(409, "the object has been modified")
        self._versions += 1
        new["metadata"]["resourceVersion"] = str(self._versions)
        new["metadata"]["managedFields"] = [{"manager": "nvshim"}]
        self.objects[path] = new
        return 200, new

    @staticmethod
    def _changed(method: str, old: Object | None, body: Any) -> Object | None:
        """Return the object after a request; None if it is deleted."""
        if method != "PATCH":
            changed: Object | None = None if method == "DELETE" else body
            return changed
        new = deepcopy(old or {})
        assert body.keys() == {"metadata"}
        for part, changes in body["metadata"].items():
            values = {**new["metadata"].get(part, {}), **changes}
            new["metadata"][part] = {k: v for k, v in values.items() if v is not None}
        return new
