"""What the agent's token may write: our admission policies, and the answers of a real API server.

A CEL evaluator gets the requests that a real API server got. For the policies of that time it gives
the same answers, so its answers for today's policies are those of an API server.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Final, NamedTuple

import pytest
import yaml

from integration.node.services.labels.writers import NOTE
from integration.node.services.node_condition import TYPE
from tests.harness.admission import denials
from tests.harness.kubectl import MANIFESTS
from tests.harness.recorded import RECORDED

Object = dict[str, Any]

RECORDS: Final = os.path.join(RECORDED, "admission")
AGENT: Final = "system:serviceaccount:containerd-shim-nvidia:node-agent"
BOUND: Final = "authentication.kubernetes.io/node-name"
OWN, OTHER, FOREIGN = "gpu.containerd-shim-nvidia", "other", "gpu.example.com"
CONDITION: Final = "containerd-shim-nvidia-node-condition"
LABELS: Final = "containerd-shim-nvidia-node-labels"
FEATURES: Final = "containerd-shim-nvidia-node-labels-nfd"
DRA: Final = "containerd-shim-nvidia-dra"
PATHS: Final = (
    "node-condition/node-access.yaml", "node-labels/label-access.yaml",
    "node-labels-nfd/feature-access.yaml", "dra/dra-access.yaml",
)  # fmt: skip


def read(name: str) -> Any:
    with open(os.path.join(RECORDS, name), encoding="utf-8") as file:
        return json.load(file)


NODE: Final[Object] = read("node.json")
THEN: Final = {each["metadata"]["name"]: each for each in read("policies.json")}
NAME: Final = NODE["metadata"]["name"]


def ours() -> Iterator[Object]:
    for path in PATHS:
        with open(os.path.join(MANIFESTS, "components", path), encoding="utf-8") as file:
            yield from yaml.safe_load_all(file)


NOW: Final = {
    each["metadata"]["name"]: each for each in ours() if each["kind"] == "ValidatingAdmissionPolicy"
}


class Question(NamedTuple):
    """A request of the agent's service account."""

    policy: str
    request: Object
    new: Object | None
    old: Object | None

    def answer(self, policies: dict[str, Object]) -> list[str]:
        return denials(policies[self.policy], self.request, self.new, self.old)


def asked(operation: str, group: str, what: str, part: str = "", **more: Any) -> Object:
    extra = {} if more.pop("unbound", False) else {BOUND: [NAME]}
    user = {"username": more.pop("user", AGENT), "extra": extra}
    resource = {"group": group, "version": more.pop("version", "v1"), "resource": what}
    return {"operation": operation, "resource": resource, "subResource": part, "userInfo": user}


# -- the Node ------------------------------------------------------------------------------------


def node(change: Callable[[Object], Any], old: Object = NODE, **more: Any) -> Question:
    """Return a patch of the Node's status that applies a change."""
    new = deepcopy(old)
    change(new)
    new["metadata"] |= {"resourceVersion": "7777", "managedFields": [{"manager": "nvshim"}]}
    return Question(CONDITION, asked("UPDATE", "", "nodes", "status", **more), new, old)


def conditions(there: Object) -> list[Object]:
    found: list[Object] = there["status"]["conditions"]
    return found


def of_type(there: Object, type_: str) -> Object:
    return next(each for each in conditions(there) if each["type"] == type_)


def drained(there: Object) -> None:
    of_type(there, TYPE).update(status="True", reason="Drained", message="GPU 0 is out of service")


def with_spec(there: Object, **spec: Any) -> None:
    there["spec"] = {**there["spec"], **spec}


def renamed(there: Object) -> None:
    there["metadata"]["name"] = OTHER


BARE: Final = deepcopy(NODE)
BARE["status"].pop("conditions")
ELSEWHERE: Final = deepcopy(NODE)
renamed(ELSEWHERE)
WITHOUT: Final = deepcopy(NODE)
conditions(WITHOUT).remove(of_type(WITHOUT, TYPE))

TAINT: Final = {"key": "a", "value": "b", "effect": "NoSchedule"}
OWNER: Final = {"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "1"}
NEW: Final = {"type": "New", "status": "True", "reason": "r", "message": "m"}

# By their names in answers.txt, without changes that the server itself reverts.
NODES: Final = {
    "node: own condition": node(drained),
    "node: Ready=False": node(lambda n: of_type(n, "Ready").update(status="False")),
    "node: new condition": node(lambda n: conditions(n).append(NEW)),
    "node: capacity": node(lambda n: n["status"]["capacity"].update({"nvidia.com/gpu": "9"})),
    "node: addresses": node(lambda n: n["status"]["addresses"][0].update(address="10.0.0.9")),
    "node: daemonEndpoints": node(
        lambda n: n["status"]["daemonEndpoints"]["kubeletEndpoint"].update(Port=1)
    ),
    "node: labels": node(lambda n: n["metadata"]["labels"].update(a="b")),
    "node: annotations": node(lambda n: n["metadata"]["annotations"].update(a="b")),
    "node: ownerRef/finalizer": node(
        lambda n: n["metadata"].update(ownerReferences=[OWNER], finalizers=["a.b/c"])
    ),
    "node: spec.taints": node(lambda _: None),
    "node: images": node(lambda n: n["status"]["images"].append({"names": ["a"], "sizeBytes": 1})),
    "node: unbound": node(drained, unbound=True),
    "other node's condition": node(drained, ELSEWHERE),
}
# Requests that a real server allowed with the old policy, and that must be denied now.
CLOSED: Final = {
    "node: addresses", "node: daemonEndpoints", "node: labels", "node: annotations",
    "node: ownerRef/finalizer", "node: images",
}  # fmt: skip

ALLOWED: Final = {
    "the first condition of ours": node(lambda n: conditions(n).insert(0, NEW | {"type": TYPE}),
                                        WITHOUT),
    "the first of all": node(lambda n: n["status"].update(conditions=[{"type": TYPE}]), BARE),
    "another word": node(lambda n: of_type(n, TYPE).update(message="GPU 1 is unhealthy")),
    "a heartbeat": node(
        lambda n: of_type(n, TYPE).update(lastHeartbeatTime="2026-11-29T10:00:00Z")
    ),
    "its removal": node(lambda n: conditions(n).remove(of_type(n, TYPE))),
    "nothing": node(lambda _: None),
    "another generation": node(lambda n: n["metadata"].update(generation=2)),
    "what another account writes": node(
        lambda n: n["metadata"]["labels"].update(a="b"), user="system:node:gpu-node"
    ),
}  # fmt: skip

DENIED: Final = {
    "a label taken away": node(lambda n: n["metadata"]["labels"].popitem()),
    "all labels taken away": node(lambda n: n["metadata"].pop("labels")),
    "an annotation taken away": node(lambda n: n["metadata"]["annotations"].popitem()),
    "a finalizer": node(lambda n: n["metadata"].update(finalizers=["a.b/c"])),
    "an owner": node(lambda n: n["metadata"].update(ownerReferences=[OWNER])),
    "an address more": node(
        lambda n: n["status"]["addresses"].append({"type": "ExternalIP", "address": "1.2.3.4"})
    ),
    "no addresses": node(lambda n: n["status"].pop("addresses")),
    "no images": node(lambda n: n["status"].pop("images")),
    "no endpoints": node(lambda n: n["status"].pop("daemonEndpoints")),
    "allocatable": node(lambda n: n["status"]["allocatable"].update(pods="0")),
    "a resource more": node(lambda n: n["status"]["allocatable"].update({"a.b/c": "1"})),
    "the kubelet's version": node(lambda n: n["status"]["nodeInfo"].update(kubeletVersion="v1")),
    "runtime handlers": node(lambda n: n["status"]["runtimeHandlers"].clear()),
    "features": node(lambda n: n["status"]["features"].clear()),
    "declared features": node(lambda n: n["status"]["declaredFeatures"].clear()),
    "a phase": node(lambda n: n["status"].update(phase="Terminated")),
    "volumes in use": node(lambda n: n["status"].update(volumesInUse=["a"])),
    "volumes attached": node(lambda n: n["status"].update(volumesAttached=[{"name": "a"}])),
    "a configuration": node(lambda n: n["status"].update(config={"error": "a"})),
    "a future field": node(lambda n: n["status"].update(fieldOf2030={"a": 1})),
    "Ready taken away": node(lambda n: conditions(n).remove(of_type(n, "Ready"))),
    "all conditions taken away": node(lambda n: n["status"].pop("conditions")),
    "Ready, with ours": node(lambda n: [c.update(status="Unknown") for c in conditions(n)]),
    "another's heartbeat": node(
        lambda n: of_type(n, "Ready").update(lastHeartbeatTime="2030-01-01T00:00:00Z")
    ),
    "another order of others": node(lambda n: conditions(n).reverse()),
    "a condition twice": node(lambda n: conditions(n).append(of_type(n, "Ready"))),
    "a condition in other letters": node(
        lambda n: conditions(n).append(NEW | {"type": TYPE.lower()})
    ),
    "a taint": node(lambda n: with_spec(n, taints=[TAINT])),
    "unschedulable": node(lambda n: with_spec(n, unschedulable=True)),
    "a provider": node(lambda n: with_spec(n, providerID="aws:///i-1")),
    "no spec": node(lambda n: n.pop("spec"), {**NODE, "spec": {"podCIDR": "10.0.0.0/24"}}),
    "another uid": node(lambda n: n["metadata"].update(uid="1")),
    "a deletion": node(lambda n: n["metadata"].update(deletionTimestamp="2026-11-29T10:00:00Z")),
    "another's node, with nothing changed": node(lambda _: None, ELSEWHERE),
}


@pytest.mark.parametrize("name", [*ALLOWED, *DENIED])
def test_of_its_node_the_agent_may_write_its_own_condition_alone(name: str) -> None:
    if name in ALLOWED:
        assert ALLOWED[name].answer(NOW) == []
    else:
        assert DENIED[name].answer(NOW)


# -- labels --------------------------------------------------------------------------------------


def labelled(change: Callable[[Object], Any], old: Object = NODE, **more: Any) -> Question:
    """Return a patch of the Node itself. The API server ignores changes of its status."""
    new = deepcopy(old)
    change(new)
    new["metadata"] |= {"resourceVersion": "7777", "managedFields": [{"manager": "nvshim"}]}
    return Question(LABELS, asked("UPDATE", "", "nodes", **more), new, old)


def labels(there: Object) -> Object:
    found: Object = there["metadata"].setdefault("labels", {})
    return found


def notes_of(there: Object) -> Object:
    found: Object = there["metadata"].setdefault("annotations", {})
    return found


UNLABELLED: Final = deepcopy(NODE)
UNLABELLED["metadata"].pop("labels")
UNLABELLED["metadata"].pop("annotations")
PRODUCT: Final = {"nvidia.com/gpu.product": "H100"}

LABELS_ALLOWED: Final = {
    "a label": labelled(lambda n: labels(n).update(PRODUCT)),
    "another value": labelled(lambda n: labels(n).update({"nvidia.com/gpu.present": "false"})),
    "a label's removal": labelled(lambda n: labels(n).pop("nvidia.com/gpu.present")),
    "the first label": labelled(lambda n: labels(n).update(PRODUCT), UNLABELLED),
    "the note": labelled(lambda n: notes_of(n).update({NOTE: "two"})),
    "the first annotation": labelled(lambda n: notes_of(n).update({NOTE: "2"}), UNLABELLED),
    "nothing": labelled(lambda _: None),
    "another generation": labelled(lambda n: n["metadata"].update(generation=2)),
    "what another account writes": labelled(
        lambda n: labels(n).update(a="b"), user="system:node:gpu-node"
    ),
}
LABELS_DENIED: Final = {
    "another label": labelled(lambda n: labels(n).update(a="b")),
    "a role": labelled(lambda n: labels(n).update({"node-role.kubernetes.io/master": ""})),
    "a longer domain": labelled(lambda n: labels(n).update({"nvidia.com.example/gpu": "a"})),
    "a domain below": labelled(lambda n: labels(n).update({"x.nvidia.com/gpu": "a"})),
    "another's label with ours": labelled(lambda n: labels(n).update(PRODUCT | {"a": "b"})),
    "another's label changed": labelled(
        lambda n: labels(n).update({"kubernetes.io/hostname": "elsewhere"})
    ),
    "another's label taken away": labelled(lambda n: labels(n).pop("kubernetes.io/hostname")),
    "all labels taken away": labelled(lambda n: n["metadata"].pop("labels")),
    "another annotation": labelled(lambda n: notes_of(n).update({"nvidia.com/a": "b"})),
    "an annotation taken away": labelled(lambda n: notes_of(n).popitem()),
    "all annotations taken away": labelled(lambda n: n["metadata"].pop("annotations")),
    "a finalizer": labelled(lambda n: n["metadata"].update(finalizers=["a.b/c"])),
    "an owner": labelled(lambda n: n["metadata"].update(ownerReferences=[OWNER])),
    "another uid": labelled(lambda n: n["metadata"].update(uid="1")),
    "a deletion": labelled(
        lambda n: n["metadata"].update(deletionTimestamp="2026-11-29T10:00:00Z")
    ),
    "an unknown field": labelled(lambda n: n["metadata"].update(fieldOf2030="a")),
    "a taint": labelled(lambda n: with_spec(n, taints=[TAINT])),
    "unschedulable": labelled(lambda n: with_spec(n, unschedulable=True)),
    "a provider": labelled(lambda n: with_spec(n, providerID="aws:///i-1")),
    "an unknown part": labelled(lambda n: n.update(part2030={"a": 1})),
    "a condition, were it not set back": labelled(drained),
    "another node": labelled(lambda n: labels(n).update(PRODUCT), ELSEWHERE),
    "a token of no node": labelled(lambda n: labels(n).update(PRODUCT), unbound=True),
}


@pytest.mark.parametrize("name", [*LABELS_ALLOWED, *LABELS_DENIED])
def test_of_its_node_the_agent_may_write_labels_of_nvidia_alone(name: str) -> None:
    if name in LABELS_ALLOWED:
        assert LABELS_ALLOWED[name].answer(NOW) == []
    else:
        assert LABELS_DENIED[name].answer(NOW)


def feature(
    operation: str = "CREATE",
    change: Callable[[Object], Any] = lambda _: None,
    name: str = f"nvidia-features-for-{NAME}",
    **more: Any,
) -> Question:
    metadata = {"name": name, "labels": {"nfd.node.kubernetes.io/node-name": NAME}}
    empty: Object = {"flags": {}, "attributes": {}, "instances": {}}
    new = {"metadata": metadata, "spec": {"labels": dict(PRODUCT), "features": empty}}
    old = deepcopy(new)
    change(new)
    request = asked(operation, "nfd.k8s-sigs.io", "nodefeatures", version="v1alpha1", **more)
    return Question(
        FEATURES, request, None if operation == "DELETE" else new,
        None if operation == "CREATE" else old,
    )  # fmt: skip


FEATURES_ALLOWED: Final = {
    "made": feature(),
    "changed": feature("UPDATE", lambda f: f["spec"]["labels"].update({"nvidia.com/a": "b"})),
    "noted": feature("UPDATE", lambda f: f["metadata"].update(annotations={NOTE: "two"})),
    "deleted": feature("DELETE"),
    "another's": feature(name=OTHER, user="system:serviceaccount:nfd:nfd-worker"),
}
FEATURES_DENIED: Final = {
    **{f"{each} of another": feature(each, name=f"nvidia-features-for-{OTHER}")
       for each in ("CREATE", "UPDATE", "DELETE")},
    **{f"{each} unbound": feature(each, unbound=True) for each in ("CREATE", "UPDATE", "DELETE")},
    "the worker's object": feature("DELETE", name=NAME),
    "for another node": feature(
        "UPDATE",
        lambda f: f["metadata"]["labels"].update({"nfd.node.kubernetes.io/node-name": OTHER}),
    ),
    "for no node": feature("UPDATE", lambda f: f["metadata"].pop("labels")),
    "another label": feature("UPDATE", lambda f: f["spec"]["labels"].update(a="b")),
    "a flag": feature("UPDATE", lambda f: f["spec"]["features"]["flags"].update(a={})),
    "other features": feature("UPDATE", lambda f: f["spec"]["features"].update(x={"a": 1})),
    "another part": feature("UPDATE", lambda f: f["spec"].update(taints=[TAINT])),
}  # fmt: skip


@pytest.mark.parametrize("name", [*FEATURES_ALLOWED, *FEATURES_DENIED])
def test_the_agent_may_write_the_features_of_its_own_node_with_labels_of_nvidia(name: str) -> None:
    if name in FEATURES_ALLOWED:
        assert FEATURES_ALLOWED[name].answer(NOW) == []
    else:
        assert FEATURES_DENIED[name].answer(NOW)


# -- slices --------------------------------------------------------------------------------------


def slice_of(driver: str = OWN, **spec: Any) -> Object:
    where = spec or {"nodeName": NAME}
    pool = {"name": NAME, "generation": 1, "resourceSliceCount": 1}
    return {"metadata": {"name": "t1"}, "spec": {"driver": driver, "pool": pool, **where}}


def of_slice(
    operation: str, new: Object | None, old: Object | None = None, **more: Any
) -> Question:
    return Question(DRA, asked(operation, "resource.k8s.io", "resourceslices", **more), new, old)


ELSE: Final = slice_of(nodeName=OTHER)
SLICES: Final = {
    "own node, own driver": of_slice("CREATE", slice_of()),
    "own node, nvidia name": of_slice("CREATE", slice_of("gpu.nvidia.com")),
    "other node": of_slice("CREATE", ELSE),
    "all nodes": of_slice("CREATE", slice_of(allNodes=True)),
    "other driver": of_slice("CREATE", slice_of(FOREIGN)),
    "unbound token": of_slice("CREATE", slice_of(), unbound=True),
    "other node, v1beta1": of_slice("CREATE", ELSE, version="v1beta1"),
    "other node, v1beta2": of_slice("CREATE", ELSE, version="v1beta2"),
    "delete other node's": of_slice("DELETE", None, ELSE),
    "delete foreign driver's": of_slice("DELETE", None, slice_of(FOREIGN)),
    "update other node's": of_slice("UPDATE", ELSE, ELSE),
}


def test_the_driver_writes_and_deletes_slices_of_its_own() -> None:
    mine = slice_of()
    assert of_slice("UPDATE", mine, mine).answer(NOW) == []
    assert of_slice("DELETE", None, mine).answer(NOW) == []
    chosen = slice_of(nodeSelector={"nodeSelectorTerms": []})
    assert of_slice("CREATE", chosen).answer(NOW)
    assert of_slice("CREATE", slice_of(perDeviceNodeSelection=True)).answer(NOW)


# -- what a real API server answered ---------------------------------------------------------------

LINE: Final = re.compile(r"(?P<name>[^:]+(: [^:]+)?):\s*(?P<status>\d{3}) (?P<text>.*)")
DENIES: Final = re.compile(r"ValidatingAdmissionPolicy '(.+)' with binding .* denied request: (.+)")


class Answer(NamedTuple):
    """A line of answers.txt."""

    status: int
    text: str

    @property
    def denial(self) -> tuple[str, ...]:
        found = DENIES.search(self.text)
        return found.groups() if found else ()


def answers() -> dict[str, Answer]:
    found = {}
    with open(os.path.join(RECORDS, "answers.txt"), encoding="utf-8") as file:
        for line in file:
            match = LINE.fullmatch(line.rstrip("\n"))
            assert match, line
            found[match["name"]] = Answer(int(match["status"]), match["text"])
    return found


ANSWERS: Final = answers()
FORBIDDEN: Final = {name for name, answer in ANSWERS.items() if answer.status == 403}


def test_every_recorded_question_that_no_role_forbids_is_asked_here() -> None:
    assert len(ANSWERS) == 30
    assert {*NODES, *SLICES} == set(ANSWERS) - FORBIDDEN


@pytest.mark.parametrize("name", [*NODES, *SLICES])
def test_the_evaluator_answers_as_the_api_server_did(name: str) -> None:
    question, answer = (NODES | SLICES)[name], ANSWERS[name]
    denied = question.answer(THEN)
    assert bool(denied) == (answer.status == 422), denied
    if answer.denial:
        assert (question.policy, denied[0]) == answer.denial


@pytest.mark.parametrize("name", [*NODES, *SLICES])
def test_our_policies_answer_the_same_and_deny_what_was_open(name: str) -> None:
    denied = (NODES | SLICES)[name].answer(NOW)
    if name in CLOSED:
        assert denied == ["the agent writes its own condition only"]
    else:
        assert denied[:1] == list(ANSWERS[name].denial[1:])
