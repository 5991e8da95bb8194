"""The pod, the container and its privileges, as read from a spec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hooks.errors import MalformedSpec
from hooks.requests.policy import Container, read_container
from tests.harness.raising import raises
from tests.unit.hooks.requests.test_policy import (
    CRI,
    DESKTOP,
    POD,
    PRIVILEGED_DESKTOP,
    PRIVILEGED_POD,
)

ADMIN = {"bounding": ["CAP_CHOWN", "CAP_SYS_ADMIN"]}


@pytest.mark.parametrize(
    ("spec", "container"),
    [
        ({}, DESKTOP),
        ({"annotations": None, "process": {"capabilities": None}, "linux": None}, DESKTOP),
        ({"annotations": {"io.containerd.runc.v2.group": "x"}}, DESKTOP),
        ({"annotations": CRI}, POD),
        ({"annotations": {"io.kubernetes.cri.sandbox-id": "x"}}, Container(kubernetes=True)),
        ({"annotations": CRI | {"io.kubernetes.cri.container-type": "sandbox"}},
         replace(POD, sandbox=True)),
        ({"annotations": {"io.kubernetes.cri-o.ContainerType": "sandbox",
                          "io.kubernetes.cri-o.Namespace": "team"}}, replace(POD, sandbox=True)),
        ({"linux": {"cgroupsPath": "/kubepods/burstable/pod12/abc"}}, Container(kubernetes=True)),
        ({"linux": {"cgroupsPath": "kubepods-pod12.slice:docker:abc"}}, Container(kubernetes=True)),
        ({"linux": {"cgroupsPath": "system.slice:docker:abc"}}, DESKTOP),
        ({"process": {"capabilities": ADMIN}}, PRIVILEGED_DESKTOP),
        ({"annotations": CRI, "process": {"capabilities": ADMIN}}, PRIVILEGED_POD),
        ({"process": {"capabilities": {"effective": ["CAP_SYS_ADMIN"]}}}, DESKTOP),
        ({"process": {"capabilities": {"bounding": None}}}, DESKTOP),
        ({"process": {"capabilities": ADMIN}, "linux": {"namespaces": [{"type": "user"}]}},
         DESKTOP),
        ({"process": {"capabilities": ADMIN}, "linux": {"uidMappings": [{"size": 1}]}}, DESKTOP),
        ({"process": {"capabilities": ADMIN}, "linux": {"namespaces": [{"type": "pid"}]}},
         PRIVILEGED_DESKTOP),
    ],
)  # fmt: skip
def test_who_asks_is_read_from_the_spec(spec: dict[str, Any], container: Container) -> None:
    assert read_container(spec) == container


UID = "8f671f58-f552-4f04-9451-c6da55a39396"
OTHER = "0c25e414-e34e-4727-b579-70539c962489"
STATIC = "241085e86692375b15f08be531fd2a0f"
BY_CONTAINERD = {
    "io.kubernetes.cri.sandbox-uid": UID,
    "io.kubernetes.cri.container-name": "main",
    "io.kubernetes.cri.sandbox-namespace": "team",
}
BY_CRI_O = {
    "io.kubernetes.cri-o.ContainerType": "container",
    "io.kubernetes.pod.uid": UID,
    "io.kubernetes.container.name": "main",
    "io.kubernetes.pod.namespace": "team",
}


@pytest.mark.parametrize(
    ("annotations", "cgroup", "expected"),
    [
        (BY_CONTAINERD, f"/kubepods/besteffort/pod{UID}/abc", (UID, "main", "team")),
        (BY_CONTAINERD, f"kubepods-pod{UID.replace('-', '_')}.slice:cri-containerd:abc",
         (UID, "main", "team")),
        (BY_CONTAINERD, "/k8s.io/abc", (UID, "main", "team")),
        (BY_CONTAINERD | {"io.kubernetes.cri.sandbox-uid": STATIC}, f"/kubepods/pod{STATIC}/abc",
         (STATIC, "main", "team")),
        (BY_CRI_O, f"kubepods-pod{UID.replace('-', '_')}.slice:crio:abc", (UID, "main", "team")),
        # containerd 1.6 writes no UID, and cri-dockerd no annotation at all.
        ({"io.kubernetes.cri.container-name": "main"}, f"/kubepods/pod{UID}/abc",
         (UID, "main", "")),
        ({}, f"/kubepods/burstable/pod{UID}/abc", (UID, "", "")),
        # Engines that pass on a pod's annotations, whose author may forge those of an engine.
        (BY_CONTAINERD | {"io.kubernetes.cri.sandbox-uid": OTHER}, f"/kubepods/pod{UID}/abc",
         ("", "main", "team")),
        (BY_CONTAINERD | {"io.kubernetes.pod.uid": OTHER}, "/k8s.io/abc", ("", "main", "team")),
        (BY_CRI_O | {"io.kubernetes.cri.sandbox-uid": OTHER}, "", ("", "main", "team")),
        (BY_CRI_O | {"io.kubernetes.cri.sandbox-namespace": "kube-system"}, "",
         (UID, "main", "")),
        (BY_CRI_O | {"io.kubernetes.cri-o.Namespace": "kube-system"}, "", (UID, "main", "")),
        # With two names the container is unknown; it does not match every container, as one without
        # any name does.
        (BY_CRI_O | {"io.kubernetes.cri.container-name": "other"}, "", ("", "", "team")),
        (BY_CONTAINERD, f"/kubepods/pod{OTHER}/pod{UID}", ("", "main", "team")),
        ({"io.kubernetes.cri.container-name": "main"}, "/kubepods/pod12/abc", ("", "main", "")),
    ],
)  # fmt: skip
def test_which_pod_it_is_counts_if_all_that_say_so_agree(
    annotations: dict[str, str], cgroup: str, expected: tuple[str, str, str]
) -> None:
    found = read_container({"annotations": annotations, "linux": {"cgroupsPath": cgroup}})
    assert found.kubernetes
    assert (found.pod_uid, found.name, found.namespace) == expected


@pytest.mark.parametrize(
    "spec",
    [
        {"annotations": []},
        {"process": []},
        {"process": {"capabilities": ["CAP_SYS_ADMIN"]}},
        {"process": {"capabilities": {"bounding": "CAP_SYS_ADMIN"}}},
        {"process": {"capabilities": ADMIN}, "linux": 3},
        {"process": {"capabilities": ADMIN}, "linux": {"namespaces": {}}},
    ],
)
def test_spec_of_the_wrong_shape_is_a_typed_error(spec: dict[str, Any]) -> None:
    with raises(MalformedSpec):
        read_container(spec)
