"""Properties of every verdict, for any request, container and settings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hooks.config import Config, Mode
from hooks.requests.kubelet_record import KubeletRecord
from hooks.requests.policy import Container, judge
from hooks.requests.request import Request
from hooks.words import (
    CAPABILITIES,
    DEFAULT_CAPABILITIES,
    AllDevices,
    Feature,
    NamedDevices,
    NoDevices,
    Void,
)
from tests.unit.hooks.requests.test_policy import (
    ALL,
    ALL_BESIDE,
    ANNOTATIONS,
    BEGINNING,
    DOCKER,
    ENVIRONMENT,
    FIRST,
    INDEX,
    ITS_OWN,
    MIXED,
    MODES,
    MOUNTS,
    POD,
    UUIDS,
)

DEVICES = st.sampled_from([Void(), NoDevices(), ALL, INDEX, UUIDS, BEGINNING, MIXED])
REQUESTS = st.builds(
    Request,
    DEVICES,
    st.sampled_from([CAPABILITIES, DEFAULT_CAPABILITIES, frozenset({"utility"})]),
    features=st.frozensets(st.sampled_from(sorted(ALL_BESIDE | {Feature.MANAGEMENT}))),
    imex_channels=st.none() | st.sampled_from([(), (0,), (0, 3)]),
    only_variables=st.frozensets(st.sampled_from(sorted(ALL_BESIDE | ITS_OWN))),
    cdi_devices=st.sampled_from([(), ("amd.com/gpu=0",)]),
    amd_devices=st.sampled_from(["", "all"]),
    intel_devices=st.sampled_from(["", "0"]),
    origin=st.sampled_from([ENVIRONMENT, MOUNTS, ANNOTATIONS, DOCKER]),
)
RECORDS = st.builds(
    KubeletRecord,
    every=st.booleans(),
    devices=st.sampled_from([(), UUIDS.devices, FIRST.devices, INDEX.devices]),
    features=st.frozensets(st.sampled_from(sorted(ALL_BESIDE | {Feature.MANAGEMENT}))),
    imex_channels=st.none() | st.sampled_from([(), (0,), (0, 3)]),
    cdi_devices=st.sampled_from([frozenset(), frozenset({"amd.com/gpu=0"})]),
    amd_devices=st.sampled_from([frozenset(), frozenset({"all"})]),
)
CONTAINERS = st.builds(
    Container, st.booleans(), st.booleans(), st.sampled_from(["", "team"]), st.booleans()
)
CONFIGS = st.builds(
    Config,
    mode=st.sampled_from(MODES),
    trusted_namespaces=st.sampled_from([(), ("team",)]),
    accept_mounts=st.sampled_from(["auto", True]),
    ignore_imex=st.booleans(),
)


@given(REQUESTS, CONTAINERS, CONFIGS, RECORDS)
def test_verdict_only_takes_away_and_says_so(
    request_: Request, container: Container, config: Config, record: KubeletRecord
) -> None:
    verdict = judge(request_, container, config, record)
    allowed = verdict.allowed
    less = {NamedDevices(record.devices)} if request_.devices == ALL else set()
    assert allowed.devices in {request_.devices, Void()} | less
    assert allowed.capabilities <= request_.capabilities
    assert allowed.features <= request_.features
    assert allowed.imex_channels in {request_.imex_channels, ()}
    assert set(allowed.cdi_devices) <= set(request_.cdi_devices)
    assert allowed.amd_devices in {request_.amd_devices, ""}
    assert allowed.intel_devices in {request_.intel_devices, ""}
    taken = any(
        getattr(allowed, name) != getattr(request_, name)
        for name in ("devices", "features", "imex_channels", "cdi_devices", "amd_devices")
    )
    assert not taken or verdict.reasons
    # An allowed request is allowed again, without further notes.
    assert judge(allowed, container, config, record).allowed == allowed


@given(REQUESTS, st.sampled_from([Mode.DEFAULT, Mode.PRIVILEGED, Mode.STRICT]), RECORDS)
def test_an_unprivileged_pod_gets_nothing_that_the_kubelet_did_not_give(
    request_: Request, mode: str, record: KubeletRecord
) -> None:
    allowed = judge(request_, POD, Config(mode=mode), record).allowed
    match allowed.devices:
        case AllDevices():
            assert record.every
        case NamedDevices(names):
            assert record.every or set(names) <= set(record.devices)
    assert allowed.features <= record.features
    if allowed.imex_channels is None or record.imex_channels is None:
        assert record.imex_channels is None or allowed.imex_channels == ()
    else:
        assert set(allowed.imex_channels) <= set(record.imex_channels)
    assert record.cdi_devices.issuperset(allowed.cdi_devices)
    assert record.amd_devices.issuperset(filter(None, [allowed.amd_devices]))
    assert not allowed.intel_devices


@given(REQUESTS, CONTAINERS, RECORDS, st.sampled_from([(), ("team",)]))
def test_no_mode_gives_more_than_nvidias_nor_less_than_strict(
    request_: Request,
    container: Container,
    record: KubeletRecord,
    namespaces: tuple[str, ...],
) -> None:
    def amount(mode: str) -> set[str]:
        config = Config(mode=mode, trusted_namespaces=namespaces)
        allowed = judge(request_, container, config, record).allowed
        got = {f"feature {feature}" for feature in allowed.features}
        got |= {name for name in ("amd_devices", "intel_devices", "cdi_devices")
                if getattr(allowed, name)}  # fmt: skip
        got |= {"devices"} if not isinstance(allowed.devices, Void) else set()
        return got | ({"imex"} if allowed.imex_channels != () else set())

    strict, default = amount(Mode.STRICT), amount(Mode.DEFAULT)
    assert strict <= amount(Mode.PRIVILEGED) <= default <= amount(Mode.NVIDIA)
