"""A cluster's API server with what a driver of dynamic resource allocation needs of it.

    with Cluster(directory, node="node-1") as cluster:
        cluster.claim("default", "claim", [("gpu", "gpu-0")], driver=..., pool=...)
        cluster.slices()
        cluster.wipe()

It has a Node, ResourceClaims and ResourceSlices: GET, LIST, WATCH, POST, PUT and DELETE, with
resource versions, preconditions, selectors and refusals as recorded from a real server
(tests/recorded/kubernetes-1.36/dra). It has no scheduler: a test allocates claims.

Source: Kubernetes API concepts; the recordings.
"""

from __future__ import annotations

import copy
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from tests.harness.api_server import ApiServer, invalid, refusal
from tests.harness.http_server import Request
from tests.harness.slice_rules import faults

__all__ = ["Cluster"]

_GROUP: Final = "/apis/resource.k8s.io"
_FIELDS: Final = {
    "spec.driver": lambda spec: spec["driver"],
    "spec.nodeName": lambda spec: spec["nodeName"],
}
_IMMUTABLE: Final[tuple[Callable[[Any], Any], ...]] = (
    *_FIELDS.values(),
    lambda spec: spec["pool"]["name"],
)
_PATIENCE: Final = 0.2


class Cluster(ApiServer):
    """An API server of one node's cluster.

    Args:
        directory: where the client finds its token.
        node: the name of its Node.
        node_uid: the UID of its Node.
        versions: of the API of dynamic resource allocation.
        how: it is reached, as :class:`ApiServer` has it.

    Attributes:
        node_uid: the UID of its Node.
        versions: of the API of dynamic resource allocation that it has.
        asked: method and path of each call, without its query.
        refuse: called first for each request; returns an answer or a status to refuse it with, or
            None.
        retry_after: seconds of the Retry-After header of refusals; 0 for none.
        drops: the fields of a device, or of its attributes, that it does not store.
        faults: validates a slice's spec; returns what is wrong.
    """

    def __init__(
        self, directory: str, *, node: str, versions: Sequence[str] = ("v1",), **how: Any
    ) -> None:
        super().__init__(directory, **how)
        self.asked: list[tuple[str, str]] = []
        self.refuse: Callable[[str, str], int | tuple[int, Any] | None] = lambda *_: None
        self.retry_after = 0
        self.drops: frozenset[str] = frozenset()
        self.faults: Callable[[Any], list[str]] = faults
        self.node_uid = str(uuid.uuid4())
        self._node = node
        self.versions = versions
        self._claims: dict[tuple[str, str], dict[str, Any]] = {}
        self._classes: dict[str, dict[str, Any]] = {}
        self._slices: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._is_trial = False
        self._last = 100
        self._oldest = 0
        self._watches = 0
        self._closing = 0
        self._changed = threading.Condition()

    # What a test does

    @property
    def watches(self) -> int:
        """Return how many watches are open."""
        return self._watches

    @property
    def writes(self) -> list[tuple[str, str]]:
        """Return the calls that change slices. Pods of tests that run in parallel may add some."""
        asked = list(self.asked)
        return [(how, path) for how, path in asked if how != "GET" and "/resourceslices" in path]

    def slices(self) -> list[dict[str, Any]]:
        """Return the current slices."""
        with self._changed:
            return copy.deepcopy(list(self._slices.values()))

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return the published devices by name."""
        return {
            device["name"]: device
            for each in self.slices()
            for device in each["spec"].get("devices", ())
        }

    def published(self) -> set[str]:
        """Return the names of the devices of the newest generation."""
        with self._changed:  # without a copy of everything: tests poll it
            specs = [each["spec"] for each in self._slices.values()]
            newest = max((spec["pool"]["generation"] for spec in specs), default=0)
            return {
                device["name"]
                for spec in specs
                if spec["pool"]["generation"] == newest
                for device in spec.get("devices", ())
            }

    def taints(self) -> dict[str, list[dict[str, str]]]:
        """Return the taints of each tainted device, by its name."""
        return {
            name: taints
            for name, device in self.devices().items()
            if (taints := device.get("basic", device).get("taints"))
        }

    def ever_published(self) -> set[str]:
        """Return the names of all devices that have ever been in a slice."""
        return {
            device["name"]
            for _, _, each in list(self._history)
            for device in each["spec"].get("devices", ())
        }

    def history(self) -> list[tuple[str, dict[str, Any]]]:
        """Return all changes of slices: the kind of each change, and the slice."""
        with self._changed:
            return [(kind, copy.deepcopy(each)) for _, kind, each in self._history]

    def put(self, like: dict[str, Any]) -> None:
        """Create a slice as another client would."""
        with self._changed:
            code, _ = self._made({**like, "metadata": {"name": f"slice-{uuid.uuid4()}"}})
            assert code < 300, code

    def wipe(self) -> None:
        """Delete every slice, as a kubelet does when it starts."""
        with self._changed:
            for name in list(self._slices):
                self._delete(name)

    def forget(self) -> None:
        """Forget all resource versions but the newest, and end all watches."""
        with self._changed:
            self._oldest = self._last
        self.close_watches()

    def tell(self, kind: str, spec: dict[str, Any]) -> None:
        """Send an event with this spec to all watches, valid or not."""
        with self._changed:
            self._note(kind, {"metadata": {}, "spec": spec})

    def close_watches(self) -> None:
        """End all watches."""
        with self._changed:
            self._closing += 1
            self._changed.notify_all()

    def claim(
        self,
        name: str,
        results: Sequence[dict[str, Any]] | None,
        *,
        namespace: str = "default",
        uid: str = "",
        config: Sequence[dict[str, Any]] = (),
        classes: Sequence[str] = (),
        annotations: dict[str, str] | None = None,
    ) -> str:
        """Allocate a claim and return its UID.

        Args:
            results: the allocated devices; None for a claim without an allocation.
            classes: the DeviceClasses of its requests.
            annotations: the claim's annotations.
        """
        uid = uid or str(uuid.uuid4())
        devices = {"results": list(results or ()), "config": list(config)}
        self._claims[namespace, name] = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": uid,
                "annotations": annotations or {},
            },
            "spec": {
                "devices": {
                    "requests": [
                        {"name": f"request-{n}", "exactly": {"deviceClassName": each}}
                        for n, each in enumerate(classes)
                    ]
                }
            },
            "status": {} if results is None else {"allocation": {"devices": devices}},
        }
        return uid

    def device_class(self, name: str, **spec: Any) -> None:
        """Create a DeviceClass."""
        self._classes[name] = {"metadata": {"name": name}, "spec": spec}

    def claims(self) -> list[tuple[str, str, str]]:
        """Return all claims, each as its namespace, UID and name."""
        found = list(self._claims.items())
        return [(namespace, body["metadata"]["uid"], name) for (namespace, name), body in found]

    def remove_claim(self, name: str, namespace: str = "default") -> None:
        """Delete the claim."""
        del self._claims[namespace, name]

    # What a client asks

    def answer(self, request: Request) -> tuple[int, Any]:
        parts = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        with self._changed:
            self.asked.append((request.method, parts.path))
        if no := self.refuse(request.method, parts.path):
            return no if isinstance(no, tuple) else refusal(no, retry_after=self.retry_after)
        if parts.path.endswith("/events"):
            return super().answer(request)
        words = parts.path.removeprefix(_GROUP).strip("/").split("/")
        if parts.path == _GROUP:
            return 200, {"kind": "APIGroup", "versions": [{"version": v} for v in self.versions]}
        if parts.path == f"/api/v1/nodes/{self._node}":
            return 200, {"metadata": {"name": self._node, "uid": self.node_uid}}
        if not parts.path.startswith(_GROUP) or words[0] not in self.versions:
            return refusal(404)
        if words[1] == "deviceclasses":
            one = self._classes.get(words[2])
            return refusal(404, "not found") if one is None else (200, one)
        if words[1] == "namespaces":
            found = self._claims.get((words[2], words[4]))
            none = f'{words[3]}.resource.k8s.io "{words[4]}" not found'
            return refusal(404, none) if found is None else (200, found)
        body = json.loads(request.body) if request.body else {}
        with self._changed:
            return self._of_slices(request.method, words[2:], body, query)

    def _of_slices(
        self, method: str, name: Sequence[str], body: Any, query: dict[str, str]
    ) -> tuple[int, Any]:
        if method == "GET":
            return self._found(query)
        if method == "POST":
            self._is_trial = "dryRun" in query
            try:
                return self._made(body)
            finally:
                self._is_trial = False
        if name[0] not in self._slices:
            return refusal(404, f"{name[0]} not found")
        seen = self._slices[name[0]]["metadata"]
        wanted = body.get("preconditions", {}) if method == "DELETE" else body["metadata"]
        for key in ("uid", "resourceVersion"):
            if key in wanted and wanted[key] != seen[key]:
                return refusal(409, f"{key} is {seen[key]}")
        return (200, self._delete(name[0])) if method == "DELETE" else self._put(name[0], body)

    def _found(self, query: dict[str, str]) -> tuple[int, Any]:
        selected = dict(
            term.split("=") for term in query.get("fieldSelector", "").split(",") if term
        )
        if not selected.keys() <= _FIELDS.keys():
            return refusal(400, "field label not supported")

        def is_meant(each: dict[str, Any]) -> bool:
            return all(_FIELDS[key](each["spec"]) == value for key, value in selected.items())

        if "watch" in query:
            since = int(query["resourceVersion"])
            if since < self._oldest:
                _, status = refusal(410, f"too old resource version: {since}")
                return 200, iter([{"type": "ERROR", "object": status}])
            return 200, self._watch(since, is_meant)
        items = [each for each in self._slices.values() if is_meant(each)]
        return 200, {"metadata": {"resourceVersion": str(self._last)}, "items": items}

    def _watch(self, since: int, is_meant: Callable[[Any], bool]) -> Iterator[Any]:
        closing = self._closing
        self._watches += 1
        try:
            while True:
                with self._changed:
                    due = [each for each in self._history if each[0] > since and is_meant(each[2])]
                    if not due and (closing != self._closing or not self.port):
                        return
                    if not due:
                        self._changed.wait(_PATIENCE)
                for number, kind, found in due:
                    since = number
                    yield {"type": kind, "object": found}
        finally:
            self._watches -= 1

    def _made(self, body: Any) -> tuple[int, Any]:
        metadata = body["metadata"]
        name = metadata.get("name") or f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        if name in self._slices:
            return refusal(409, f"{name} already exists")
        new = {**metadata, "name": name, "uid": str(uuid.uuid4()), "generation": 1}
        return self._kept(201, "ADDED", {**body, "metadata": new})

    def _put(self, name: str, body: Any) -> tuple[int, Any]:
        seen = self._slices[name]
        if any(get(seen["spec"]) != get(body["spec"]) for get in _IMMUTABLE):
            return invalid(("spec.nodeName", "field is immutable"))
        if seen["spec"] == body["spec"]:
            return 200, seen
        new = {**seen["metadata"], **body["metadata"]}
        return self._kept(200, "MODIFIED", {**body, "metadata": new})

    def _kept(self, code: int, kind: str, body: Any) -> tuple[int, Any]:
        if wrong := self.faults(body["spec"]):
            return invalid(*(("spec", each) for each in wrong))
        body = copy.deepcopy(body)
        for device in body["spec"].get("devices", ()):
            for name in self.drops:
                device.pop(name, None)
                device.get("attributes", {}).pop(name, None)
            for taint in device.get("basic", device).get("taints", ()):
                taint.setdefault("timeAdded", f"time {self._last}")
        if self._is_trial:
            return code, body
        self._note(kind, body)
        self._slices[body["metadata"]["name"]] = body
        return code, body

    def _delete(self, name: str) -> Any:
        body = self._slices.pop(name)
        self._note("DELETED", body)
        return body

    def _note(self, kind: str, body: Any) -> None:
        self._last += 1
        body["metadata"] = {**body["metadata"], "resourceVersion": str(self._last)}
        self._history.append((self._last, kind, copy.deepcopy(body)))
        self._changed.notify_all()

    def __exit__(self, *details: object) -> None:
        self.port = 0
        self.close_watches()
        super().__exit__(*details)
