"""Which requests are granted: tables of containers, origins of requests, and settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hooks.config import Config, Denied, Mode
from hooks.errors import PrivilegeNeeded, RequestDenied, UnsupportedCapability
from hooks.requests.kubelet_record import KubeletRecord
from hooks.requests.policy import Container, judge, read_container
from hooks.requests.request import Request, read_request
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    IMEX,
    AllDevices,
    Feature,
    GpuIndex,
    GpuUuid,
    MigIndex,
    MigUuid,
    NamedDevices,
    NoDevices,
    Origin,
    Void,
)
from tests.harness.raising import raises
from tests.unit.hooks.fake_node import uuid_of

MODES = (Mode.DEFAULT, Mode.NVIDIA, Mode.PRIVILEGED, Mode.STRICT)
ENVIRONMENT, MOUNTS, ANNOTATIONS, DOCKER = (
    Origin.ENVIRONMENT, Origin.MOUNTS, Origin.ANNOTATIONS, Origin.DOCKER,
)  # fmt: skip

DESKTOP = Container()
PRIVILEGED_DESKTOP = Container(privileged=True)
POD = Container(kubernetes=True, namespace="team")
PRIVILEGED_POD = Container(kubernetes=True, namespace="team", privileged=True)
CRI = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.sandbox-id": "abc",
    "io.kubernetes.cri.sandbox-namespace": "team",
}

ALL = AllDevices()
INDEX = NamedDevices((GpuIndex(0),))
MIG_INDEX = NamedDevices((MigIndex(1, 0),))
UUIDS = NamedDevices((GpuUuid(uuid_of(0)), MigUuid(uuid_of(1, "MIG"))))
BEGINNING = NamedDevices((GpuUuid("GPU-00000000-aaaa"),))
MIXED = NamedDevices((GpuUuid(uuid_of(0)), GpuIndex(1)))


def asked(devices: Any, origin: str = ENVIRONMENT, **fields: Any) -> Request:
    source = f"NVIDIA_VISIBLE_DEVICES={devices}"
    capabilities = frozenset() if devices == Void() else DEFAULT_CAPABILITIES
    return Request(devices, capabilities, origin=origin, source=source, **fields)


def gets(request: Request, container: Container, **settings: Any) -> bool:
    verdict = judge(request, container, Config(**settings))
    assert bool(verdict.denials) == (verdict.allowed != request)
    assert verdict.asked == request
    if verdict.denials:
        assert not verdict.allowed.wants_driver
    return verdict.allowed == request


# Whether the request is granted, by mode: default, nvidia, privileged, strict.
TABLE: list[tuple[Any, Container, str]] = [
    (ALL, DESKTOP, "yes yes no no"),
    (INDEX, DESKTOP, "yes yes no no"),
    (UUIDS, DESKTOP, "yes yes no no"),
    (ALL, PRIVILEGED_DESKTOP, "yes yes yes no"),
    (ALL, POD, "no yes no no"),
    (INDEX, POD, "no yes no no"),
    (MIG_INDEX, POD, "no yes no no"),
    (BEGINNING, POD, "no yes no no"),
    (MIXED, POD, "no yes no no"),
    (UUIDS, POD, "no yes no no"),  # procfs shows them to every container
    (NoDevices(), POD, "yes yes no no"),
    (Void(), POD, "yes yes yes yes"),
    (ALL, PRIVILEGED_POD, "yes yes yes no"),
    (UUIDS, PRIVILEGED_POD, "yes yes yes no"),
    (INDEX, PRIVILEGED_POD, "yes yes yes no"),
]


@pytest.mark.parametrize(("devices", "container", "answers"), TABLE, ids=str)
def test_environment_is_a_grant_or_not(devices: Any, container: Container, answers: str) -> None:
    found = [gets(asked(devices), container, mode=mode) for mode in MODES]
    assert found == [answer == "yes" for answer in answers.split()]


@pytest.mark.parametrize(
    ("environment", "given"),
    [
        ([f"NVIDIA_VISIBLE_DEVICES={uuid_of(n)}" for n in (0, 1)], False),
        ([f"NVIDIA_VISIBLE_DEVICES={uuid_of(n)}" for n in (1, 0)], True),
        (["NVIDIA_VISIBLE_DEVICES=all", f"NVIDIA_VISIBLE_DEVICES={uuid_of(0)}"], True),
        ([f"NVIDIA_VISIBLE_DEVICES={uuid_of(0)},{uuid_of(1)}"], False),
        ([f"NVIDIA_VISIBLE_DEVICES={uuid_of(0)},0"], False),
        ([f"NVIDIA_VISIBLE_DEVICES= {uuid_of(0).upper()} ,{uuid_of(0)}"], True),
        ([f"NVIDIA_VISIBLE_DEVICES={uuid_of(0)[:-1]}"], False),
        ([f"NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu={uuid_of(0)}"], True),
        ([f"nvidia_visible_devices={uuid_of(0)}", "NVIDIA_VISIBLE_DEVICES=1"], False),
        (["NVIDIA_VISIBLE_DEVICES=0"], False),
    ],
)
def test_a_variable_is_judged_by_what_it_is_read_as(environment: list[str], *, given: bool) -> None:
    spec = {"process": {"env": environment}, "annotations": CRI}
    record = KubeletRecord(devices=(GpuUuid(uuid_of(0)),))
    verdict = judge(read_request(spec), read_container(spec), Config(), record)
    assert verdict.allowed.wants_driver is given
    assert bool(verdict.denials) is not given


@pytest.mark.parametrize("devices", [ALL, INDEX, UUIDS, NoDevices()], ids=str)
def test_annotations_are_a_grant_where_no_author_of_a_pod_could_have_written_them(
    devices: Any,
) -> None:
    request = asked(devices, ANNOTATIONS, cdi_devices=("a.b/c=d",), cdi_origin=ANNOTATIONS)
    for mode in MODES:
        for container in (DESKTOP, PRIVILEGED_POD):
            assert gets(request, container, mode=mode)
        in_pod = judge(request, POD, Config(mode=mode)).allowed
        # "none" gives no GPU.
        of_nobody = mode == Mode.DEFAULT and devices == NoDevices()
        assert in_pod.wants_driver == (mode == Mode.NVIDIA or of_nobody)
        assert bool(in_pod.cdi_devices) == (mode == Mode.NVIDIA)


# -- devices of the kubelet --------------------------------------------------------------------

GIVEN = KubeletRecord(
    devices=UUIDS.devices,
    features=frozenset({Feature.GDS}),
    imex_channels=(0,),
    cdi_devices=frozenset({"a.b/c=d"}),
    amd_devices=frozenset({"0", "1"}),
)
FIRST = NamedDevices(UUIDS.devices[:1])
RECORDED: list[tuple[Request, bool]] = [
    (asked(UUIDS), True),
    (asked(FIRST), True),
    (asked(FIRST, MOUNTS), True),
    (asked(FIRST, ANNOTATIONS), True),
    (asked(FIRST, DOCKER), True),
    (asked(NoDevices()), True),
    (asked(MIXED), False),
    (asked(BEGINNING), False),
    (asked(INDEX), False),
    (asked(INDEX, MOUNTS), False),
    (asked(INDEX, ANNOTATIONS), False),
    (asked(FIRST, features=frozenset({Feature.GDS}), imex_channels=(0,)), True),
    (asked(FIRST, features=frozenset({Feature.GDS, Feature.MOFED})), False),
    (asked(FIRST, imex_channels=(0, 1)), False),
    (asked(FIRST, imex_channels=None), False),
    (asked(Void(), imex_channels=(0,)), True),
    (asked(Void(), cdi_devices=("a.b/c=d",), cdi_origin=ENVIRONMENT), True),
    (asked(Void(), cdi_devices=("a.b/c=d", "a.b/c=e"), cdi_origin=ENVIRONMENT), False),
    (asked(Void(), cdi_devices=("a.b/c=e",), cdi_origin=ANNOTATIONS), False),
    (asked(Void(), amd_devices="1"), True),
    (asked(Void(), amd_devices="all"), False),
    (asked(Void(), intel_devices="0"), False),
]


@pytest.mark.parametrize("mode", [Mode.DEFAULT, Mode.PRIVILEGED, Mode.STRICT])
def test_a_pod_gets_what_the_kubelet_gave_it_wherever_that_is_requested(mode: str) -> None:
    for request, answer in RECORDED:
        verdict = judge(request, POD, Config(mode=mode), GIVEN)
        assert (verdict.allowed == request) is answer, request
        assert bool(verdict.denials) is not answer, request


def test_all_is_what_the_kubelet_gave_and_every_gpu_only_if_it_gave_that() -> None:
    for request in (asked(ALL), asked(ALL, MOUNTS), asked(ALL, ANNOTATIONS)):
        verdict = judge(request, POD, Config(), GIVEN)
        assert verdict.allowed.devices == UUIDS
        assert verdict.denials == ()
        assert uuid_of(0) in verdict.notes[0]
        assert judge(request, POD, Config(), KubeletRecord(every=True)).allowed == request
    of_claims = KubeletRecord(cdi_devices=frozenset({"k8s.gpu.nvidia.com/claim=1-gpu-0"}))
    assert judge(asked(ALL), POD, Config(), of_claims).denials


def test_record_of_a_container_makes_it_no_manager_and_no_sandbox() -> None:
    managing = KubeletRecord(every=True, features=frozenset({Feature.MANAGEMENT}))
    request = asked(Void(), ANNOTATIONS, features=frozenset({Feature.MANAGEMENT}))
    assert judge(request, POD, Config(), managing).denials
    assert not judge(asked(UUIDS), replace(POD, sandbox=True), Config(), GIVEN).allowed.wants_driver


def test_record_decides_in_pods_alone() -> None:
    for container in (DESKTOP, PRIVILEGED_POD):
        assert judge(asked(INDEX), container, Config(), GIVEN).allowed == asked(INDEX)
    for container in (DESKTOP, PRIVILEGED_DESKTOP):
        assert judge(asked(UUIDS), container, Config(mode=Mode.STRICT), GIVEN).denials
    assert judge(asked(UUIDS), PRIVILEGED_POD, Config(mode=Mode.STRICT), GIVEN).denials == ()


# -- trust settings ------------------------------------------------------------------------------


ON_THE_OPERATORS_WORD: list[tuple[Container, dict[str, Any], str]] = [
    (DESKTOP, {}, "yes yes yes yes"),
    (PRIVILEGED_POD, {}, "yes yes yes yes"),
    # hostPath volumes can make the same mounts as a device plugin.
    (POD, {}, "no yes no no"),
    (POD, {"accept_mounts": True}, "yes yes yes yes"),
    (POD, {"trusted_namespaces": ("team",)}, "yes yes yes yes"),
]


@pytest.mark.parametrize(("container", "settings", "answers"), ON_THE_OPERATORS_WORD, ids=str)
def test_mounts_are_a_grant_for_whoever_could_not_make_them_otherwise(
    container: Container, settings: dict[str, Any], answers: str
) -> None:
    for devices in (ALL, INDEX, UUIDS, NoDevices()):
        found = [gets(asked(devices, MOUNTS), container, mode=mode, **settings) for mode in MODES]
        assert found == [answer == "yes" for answer in answers.split()], devices


def test_mounts_that_are_not_believed_give_nothing_of_another_vendor_either() -> None:
    request = Request(Void(), cdi_devices=("a.b/c=d",), cdi_origin=MOUNTS, origin=MOUNTS)
    verdict = judge(request, POD, Config())
    assert verdict.allowed.cdi_devices == ()
    assert "accept-mounts" in verdict.denials[0]
    believed = judge(request, POD, Config(accept_mounts=True))
    assert believed.allowed.cdi_devices == ("a.b/c=d",)


@pytest.mark.parametrize("mode", MODES)
def test_dockers_gpus_are_a_grant_and_a_hook_in_a_pod_is_none(mode: str) -> None:
    assert gets(asked(ALL, DOCKER), DESKTOP, mode=mode)
    assert gets(asked(ALL, DOCKER), POD, mode=mode) == (mode == Mode.NVIDIA)


@pytest.mark.parametrize("mode", MODES)
def test_trusted_namespace_is_believed_in_each_mode(mode: str) -> None:
    assert gets(asked(ALL), POD, mode=mode, trusted_namespaces=("other", "team"))
    elsewhere = replace(POD, namespace="")
    assert not gets(asked(ALL), elsewhere, mode=Mode.DEFAULT, trusted_namespaces=("team",))
    # Only Kubernetes has namespaces.
    assert not gets(asked(ALL), DESKTOP, mode=Mode.STRICT, trusted_namespaces=("",))


@pytest.mark.parametrize("mode", MODES)
def test_sandbox_of_a_pod_gets_nothing_and_does_not_fail(mode: str) -> None:
    sandbox = replace(PRIVILEGED_POD, sandbox=True)
    for origin in (ENVIRONMENT, ANNOTATIONS, MOUNTS):
        request = asked(ALL, origin, cdi_devices=("a.b/c=d",), amd_devices="all")
        verdict = judge(request, sandbox, Config(mode=mode, denied=Denied.FAIL))
        assert not verdict.allowed.wants_injection
        assert "sandbox" in verdict.denials[0]


def test_denied_request_says_who_asked_for_what_and_why_not() -> None:
    record = KubeletRecord(found="/var/lib/kubelet/x: nothing for container main of pod 1-2")
    (denial,) = judge(asked(INDEX), POD, Config(), record).denials
    for words in ("NVIDIA_VISIBLE_DEVICES=", "unprivileged container of a pod", "team", "default"):
        assert words in denial
    assert denial.endswith(record.found)


def test_denied_request_fails_if_that_is_set() -> None:
    config = Config(denied=Denied.FAIL)
    with raises(RequestDenied, match="trusted-namespaces"):
        judge(asked(ALL), POD, config)
    assert judge(asked(UUIDS), POD, config, GIVEN).allowed == asked(UUIDS)
    assert judge(asked(Void()), POD, config).allowed == asked(Void())


def test_denied_request_keeps_no_part_of_what_was_nvidias() -> None:
    request = asked(
        ALL, features=frozenset({Feature.GDS, Feature.MIG_CONFIG}), imex_channels=(0,),
        requirements=(("NVIDIA_REQUIRE_CUDA", "cuda>=99"),),
    )  # fmt: skip
    allowed = judge(request, POD, Config()).allowed
    assert allowed == Request(Void(), origin=ENVIRONMENT, source=request.source)


def test_line_break_of_an_image_stays_out_of_the_log() -> None:
    request = Request(ALL, origin=ENVIRONMENT, source="NVIDIA_VISIBLE_DEVICES=all,\nlevel=info")
    (denial,) = judge(request, POD, Config()).denials
    assert "\n" not in denial


BESIDE = frozenset({Feature.GDS, Feature.MOFED, Feature.GDRCOPY})


@pytest.mark.parametrize(
    ("devices", "origin", "container", "answer"),
    [
        (UUIDS, ENVIRONMENT, POD, False),
        (UUIDS, ANNOTATIONS, POD, False),
        (NoDevices(), ENVIRONMENT, POD, False),
        (Void(), ENVIRONMENT, POD, False),
        (Void(), ANNOTATIONS, POD, False),
        (Void(), ANNOTATIONS, PRIVILEGED_POD, True),
        (NoDevices(), ENVIRONMENT, PRIVILEGED_POD, True),
        (NoDevices(), ENVIRONMENT, DESKTOP, True),
    ],
    ids=str,
)
def test_what_goes_with_gpus_needs_a_grant_of_its_own(
    devices: Any, origin: str, container: Container, answer: bool
) -> None:
    request = asked(devices, origin, features=BESIDE, imex_channels=(0,))
    record = KubeletRecord(devices=UUIDS.devices)
    verdict = judge(request, container, Config(), record)
    assert verdict.allowed.devices == devices
    assert (verdict.allowed.features == BESIDE) is answer
    assert (verdict.allowed.imex_channels == (0,)) is answer
    assert bool(verdict.denials) is not answer


ALL_BESIDE = BESIDE | {Feature.NVSWITCH}
ITS_OWN = frozenset({Feature.NVSWITCH, IMEX})


@pytest.mark.parametrize(
    ("devices", "origin", "container", "settings", "answer"),
    [
        (UUIDS, ENVIRONMENT, POD, {}, False),
        (UUIDS, MOUNTS, POD, {"accept_mounts": True}, False),
        (UUIDS, ANNOTATIONS, POD, {}, False),
        (UUIDS, DOCKER, DESKTOP, {}, True),
        (UUIDS, ENVIRONMENT, POD, {"trusted_namespaces": ("team",)}, True),
        (UUIDS, ENVIRONMENT, POD, {"mode": Mode.NVIDIA}, True),
        (ALL, ENVIRONMENT, PRIVILEGED_POD, {}, True),
    ],
    ids=str,
)
def test_image_with_a_gpu_gets_nothing_else_by_its_variables(
    devices: Any, origin: str, container: Container, settings: dict[str, Any], answer: bool
) -> None:
    beside = {"features": ALL_BESIDE, "imex_channels": None}
    request = asked(devices, origin, **beside, only_variables=ITS_OWN | ALL_BESIDE)
    record = KubeletRecord(devices=UUIDS.devices, features=BESIDE, imex_channels=(0,))
    verdict = judge(request, container, Config(**settings), record)
    assert verdict.allowed.devices == devices
    assert verdict.allowed.features == (ALL_BESIDE if answer else BESIDE)
    assert verdict.allowed.imex_channels == (None if answer else ())
    assert len(verdict.denials) == (0 if answer else 2)


def test_switch_and_every_channel_of_a_list_that_is_trusted_are_given() -> None:
    request = asked(UUIDS, MOUNTS, features=ALL_BESIDE, imex_channels=None)
    assert judge(request, POD, Config(accept_mounts=True)).allowed == request


# What a container gets when variables request features such as GDS, or IMEX channels.
BY_VARIABLES: list[tuple[str, Container, tuple[int, ...] | None, dict[str, Any], str]] = [
    (MOUNTS, POD, (0,), {"accept_mounts": True}, ""),
    (MOUNTS, POD, (0,), {"mode": Mode.STRICT, "accept_mounts": True}, ""),
    (ANNOTATIONS, PRIVILEGED_POD, (0,), {"mode": Mode.STRICT}, ""),
    (DOCKER, DESKTOP, (0,), {"mode": Mode.STRICT}, ""),
    (ANNOTATIONS, PRIVILEGED_POD, (0, 3), {"mode": Mode.PRIVILEGED}, "features channels"),
    (ANNOTATIONS, POD, (0, 3), {"mode": Mode.NVIDIA}, "features channels"),
    (ANNOTATIONS, POD, (0, 3), {"trusted_namespaces": ("team",)}, "features channels"),
    (ENVIRONMENT, DESKTOP, (0, 3), {}, "features channels"),
]


@pytest.mark.parametrize(("origin", "container", "channels", "settings", "given"), BY_VARIABLES)
def test_what_variables_ask_for_beside_gpus_needs_an_environment_that_is_believed(
    origin: str,
    container: Container,
    channels: tuple[int, ...],
    settings: dict[str, Any],
    given: str,
) -> None:
    request = asked(
        UUIDS, origin, features=BESIDE, imex_channels=channels, only_variables=BESIDE | {IMEX}
    )
    verdict = judge(request, container, Config(**settings))
    assert verdict.allowed.devices == UUIDS
    assert verdict.allowed.features == (BESIDE if "features" in given else frozenset())
    assert verdict.allowed.imex_channels == (channels if "channels" in given else ())
    assert bool(verdict.denials) == (given != "features channels")


def test_requests_of_imex_channels_are_ignored_if_that_is_set() -> None:
    verdict = judge(asked(UUIDS, imex_channels=(0, 1)), POD, Config(ignore_imex=True), GIVEN)
    assert verdict.allowed == asked(UUIDS)
    assert (verdict.denials, len(verdict.notes)) == ((), 1)


@pytest.mark.parametrize("feature", [Feature.MIG_CONFIG, Feature.MIG_MONITOR])
@pytest.mark.parametrize("mode", [Mode.DEFAULT, Mode.NVIDIA])
def test_steering_mig_needs_privilege_everywhere(feature: str, mode: str) -> None:
    request = asked(ALL, features=frozenset({feature}))
    for container in (DESKTOP, replace(POD, namespace="operator")):
        config = Config(mode=mode, trusted_namespaces=("operator",))
        with raises(PrivilegeNeeded, match=feature):
            judge(request, container, config)
    for container in (PRIVILEGED_DESKTOP, PRIVILEGED_POD):
        assert judge(request, container, Config(mode=mode)).allowed == request


@pytest.mark.parametrize(
    ("origin", "container", "settings", "answer"),
    [
        (ENVIRONMENT, DESKTOP, {}, True),
        (ENVIRONMENT, POD, {}, False),
        (ENVIRONMENT, PRIVILEGED_POD, {}, True),
        (ENVIRONMENT, PRIVILEGED_POD, {"mode": Mode.STRICT}, False),
        (ANNOTATIONS, POD, {}, False),
        (ANNOTATIONS, PRIVILEGED_POD, {"mode": Mode.STRICT}, True),
        (ANNOTATIONS, POD, {"trusted_namespaces": ("team",)}, True),
        (ENVIRONMENT, POD, {"trusted_namespaces": ("team",)}, True),
        (ANNOTATIONS, POD, {"mode": Mode.NVIDIA}, True),
        (ANNOTATIONS, DESKTOP, {"mode": Mode.STRICT}, True),
    ],
    ids=str,
)
def test_management_devices(
    origin: str, container: Container, settings: dict[str, Any], answer: bool
) -> None:
    request = asked(Void(), origin, features=frozenset({Feature.MANAGEMENT}))
    verdict = judge(request, container, Config(**settings))
    assert (Feature.MANAGEMENT in verdict.allowed.features) is answer
    assert bool(verdict.denials) is not answer
    if origin == ANNOTATIONS and not answer:
        assert "privileged containers and trusted namespaces" in verdict.denials[0]
        assert "the image" not in verdict.denials[0]


@pytest.mark.parametrize("mode", MODES)
def test_other_vendors_devices_of_the_environment_need_one_that_is_believed(mode: str) -> None:
    request = Request(Void(), amd_devices="all", intel_devices="0", origin=ENVIRONMENT)
    allowed = judge(request, POD, Config(mode=mode)).allowed
    assert allowed == (request if mode == Mode.NVIDIA else Request(Void(), origin=ENVIRONMENT))
    both = asked(UUIDS, ANNOTATIONS, amd_devices="0")
    verdict = judge(both, POD, Config(mode=mode), KubeletRecord(devices=UUIDS.devices))
    assert verdict.allowed == (both if mode == Mode.NVIDIA else asked(UUIDS, ANNOTATIONS))
    assert bool(verdict.denials) == (mode != Mode.NVIDIA)


@pytest.mark.parametrize(
    ("capabilities", "left"),
    [
        (CAPABILITIES, {"compute", "utility"}),
        (DEFAULT_CAPABILITIES, {"compute", "utility"}),
        (frozenset({"utility"}), {"utility"}),
        (frozenset({"graphics", "utility"}), None),
        (frozenset({"video"}), None),
    ],
)
def test_capabilities_are_narrowed_or_an_error(
    capabilities: frozenset[str], left: set[str] | None
) -> None:
    config = Config(supported_capabilities=("compute", "utility"))
    request = Request(ALL, capabilities, origin=ENVIRONMENT)
    if left is None:
        with raises(UnsupportedCapability, match="supported-driver-capabilities"):
            judge(request, DESKTOP, config)
        # A container that gets no devices has only that denial, not further errors.
        assert judge(request, POD, config).denials
    else:
        verdict = judge(request, DESKTOP, config)
        assert verdict.allowed.capabilities == left
        assert bool(verdict.notes) == (capabilities != left)
