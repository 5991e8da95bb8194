"""The annotations with which NVIDIA's toolkit adds devices to the pods of a GPU operator."""

from __future__ import annotations

from typing import Any

import pytest

from hooks.config import Config
from hooks.errors import MalformedSpec
from hooks.requests import policy
from hooks.requests.prefilter import Settings, find_work
from hooks.requests.request import read_request
from hooks.words import Feature, GpuIndex, NamedDevices, Void
from tests.harness.raising import raises

KEY = "nvidia.cdi.k8s.io"
TRUSTING = Config(trusted_namespaces=("gpu-operator",))
MANAGE = "management.nvidia.com/gpu=all"
ONE, OTHER = "nvidia.com/gpu=1", "nvidia.com/gpu=0"


def spec_of(*env: str, namespace: str = "gpu-operator", **annotations: Any) -> dict[str, Any]:
    names = {"own": f"{KEY}/container.main", "pod": f"{KEY}/pod", "bare": KEY}
    names |= {"another": f"{KEY}/container.other"}
    return {
        "process": {"env": list(env)},
        "annotations": {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": "main",
            "io.kubernetes.cri.sandbox-namespace": namespace,
            **{names.get(name, name): value for name, value in annotations.items()},
        },
    }


@pytest.mark.parametrize(
    "annotations",
    [
        {"own": ONE, "pod": OTHER, "bare": OTHER},
        {"another": OTHER, "pod": ONE, "bare": OTHER},
        {"bare": f" {ONE} "},
    ],
)
def test_the_narrowest_scope_counts(annotations: dict[str, str]) -> None:
    # Pods of operators disable GPUs in their environment.
    spec = spec_of("NVIDIA_VISIBLE_DEVICES=void", **annotations)
    request = read_request(spec, TRUSTING)
    assert request.devices == NamedDevices((GpuIndex(1),))
    assert request.source.startswith(KEY)
    assert find_work(spec, Settings(TRUSTING)).requests


def test_management_devices_are_for_trusted_namespaces() -> None:
    spec = spec_of(bare=MANAGE)
    request = read_request(spec, TRUSTING)
    assert request.features == {Feature.MANAGEMENT}
    container = policy.read_container(spec)
    allowed = policy.judge(request, container, TRUSTING).allowed
    assert allowed.features == {Feature.MANAGEMENT}


@pytest.mark.parametrize(
    "forged", [{}, {"io.kubernetes.pod.namespace": "gpu-operator"}], ids=["plain", "forged"]
)
@pytest.mark.parametrize("value", [MANAGE, ONE, "nvidia.com/gpu=all"])
def test_in_another_namespace_they_do_not_count_and_hide_nothing(
    value: str, forged: dict[str, str]
) -> None:
    spec = spec_of("NVIDIA_VISIBLE_DEVICES=0", namespace="mine", bare=value, own=value, **forged)
    request = read_request(spec, TRUSTING)
    assert request.devices == NamedDevices((GpuIndex(0),))
    assert request.source == "NVIDIA_VISIBLE_DEVICES=0"
    alone = spec_of(namespace="mine", bare=value, **forged)
    assert not read_request(alone, TRUSTING).wants_injection
    assert not find_work(alone, Settings(TRUSTING)).requests


def test_what_names_nothing_leaves_the_next_place_and_other_shapes_are_errors() -> None:
    assert read_request(spec_of(bare="1, all"), TRUSTING).devices == Void()
    with raises(MalformedSpec):
        read_request(spec_of(bare=7), TRUSTING)
