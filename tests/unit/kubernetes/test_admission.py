"""What the agent's token may write: our admission policies, and a real API server's answers.

An evaluator of CEL is asked what a real API server was asked. It says the same of the policies that
were there then; so what it says of ours is what an API server will say.
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
DRA: Final = "containerd-shim-nvidia-dra"


def read(name: str) -> Any:
    with open(os.path.join(RECORDS, name), encoding="utf-8") as file:
        return json.load(file)


NODE: Final[Object] = read("node.json")
THEN: Final = {each["metadata"]["name"]: each for each in read("policies.json")}
NAME: Final = NODE["metadata"]["name"]


def ours() -> Iterator[Object]:
    for path in ("node-condition/node-access.yaml", "dra/dra-access.yaml"):
        with open(os.path.join(MANIFESTS, "components", path), encoding="utf-8") as file:
            yield from yaml.safe_load_all(file)


NOW: Final = {
    each["metadata"]["name"]: each for each in ours() if each["kind"] == "ValidatingAdmissionPolicy"
}


class Question(NamedTuple):
    """A request of the agent's account."""

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
    """A patch of the Node's status that makes it another."""
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

# By the names that answers.txt has; what the server itself sets back is not in it.
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
# What a real server allowed with the policy of then, and must not any more.
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
    "a field that nobody knows yet": node(lambda n: n["status"].update(fieldOf2030={"a": 1})),
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
