"""Device configurations of claims and classes: parsed strictly, and applied to the right device."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.config import Config
from integration.agent_errors import ClaimConfigUnknown
from integration.node.services.dra.devices import Device
from integration.node.services.dra.sharing import OURS, daemons_of, edits_of
from integration.node.state import claims_file as state
from integration.node.values.claims import MEBI, Claim, Sharing, parse_quantity, quantity
from tests.harness.raising import raises
from tests.unit.node.dra.test_claims import DRIVER, GPU, OTHER, PART, POOL, SIBLING, claim_of

if TYPE_CHECKING:
    from pathlib import Path

NVIDIA: Final = "resource.nvidia.com/v1beta1"
GIB: Final = 1024
NEWER: Final = ("sharing", "share", "memory", "shares")
"""Fields of a device in this agent's checkpoint that the first version did not write."""
NO_SIZES: Final[tuple[Any, ...]] = (
    *("1Ki", "-1Gi", "1 Gi", "much", True, 0, [], "1" * 30, float("nan")),
)

DEVICES: Final = {
    # The order of their indices differs from that of their names.
    "gpu-a": Device("gpu-a", GPU, GPU, {"index": {"int": 1}}, {}),
    "gpu-b": Device("gpu-b", OTHER, OTHER, {"index": {"int": 0}}, {}),
    "mig-a": Device("mig-a", PART, "GPU-of-it", {"index": {"int": 2}}, {}),
    "mig-b": Device("mig-b", SIBLING, "GPU-of-it", {"index": {"int": 2}}, {}),
}


def gpu_config(**sharing: Any) -> dict[str, Any]:
    return {"apiVersion": NVIDIA, "kind": "GpuConfig", "sharing": sharing}


def mig_config(**sharing: Any) -> dict[str, Any]:
    return {"apiVersion": NVIDIA, "kind": "MigDeviceConfig", "sharing": sharing}


def slices(interval: str) -> dict[str, Any]:
    return gpu_config(strategy="TimeSlicing", timeSlicingConfig={"interval": interval})


def ours(**more: Any) -> dict[str, Any]:
    return {"apiVersion": OURS, "kind": "DeviceSharing", **more}


def entry(parameters: Any, *requests: str, source: str = "FromClaim", **more: Any) -> Any:
    opaque = {"driver": DRIVER, "parameters": parameters, **more}
    return {"source": source, "requests": list(requests), "opaque": opaque}


def claimed(*config: Any, devices: tuple[str, ...] = ("gpu-a",), **more: Any) -> Claim:
    """Return a claim with a request for each device, named like it; "x:…" has a subrequest."""
    results = [
        {"request": f"{name}/any", "driver": DRIVER, "pool": POOL, "device": name, **more}
        for name in devices
    ]
    return claim_of({"devices": {"results": results, "config": config}}, devices=DEVICES)


def sharing_of(*config: Any, devices: tuple[str, ...] = ("gpu-a",), **more: Any) -> list[Sharing]:
    return [each.sharing for each in claimed(*config, devices=devices, **more).devices]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"apiVersion": NVIDIA, "kind": "GpuConfig"}, Sharing()),
        ({"apiVersion": NVIDIA, "kind": "GpuConfig", "sharing": None}, Sharing()),
        (ours(), Sharing()),
        (gpu_config(strategy="TimeSlicing"), Sharing("Default")),
        (gpu_config(strategy="TimeSlicing", timeSlicingConfig={}), Sharing("Default")),
        (slices("Long"), Sharing("Long")),
        (ours(timeSlice="Short"), Sharing("Short")),
        (gpu_config(strategy="MPS"), Sharing(daemon="d")),
        (ours(mps={}), Sharing(daemon="d")),
        (
            gpu_config(strategy="MPS", mpsConfig={"defaultActiveThreadPercentage": 0}),
            Sharing(daemon="d"),
        ),
        (
            gpu_config(
                strategy="MPS",
                mpsConfig={
                    "defaultActiveThreadPercentage": 50,
                    "defaultPinnedDeviceMemoryLimit": "10Gi",
                    "multiUser": True,
                },
            ),
            Sharing("", "d", 50, 10 * GIB, multi_user=True),
        ),
        (
            ours(mps={"threadPercentage": 5, "memoryLimit": "1.5Gi", "memoryLimitOf": {"0": 1e9}}),
            Sharing("", "d", 5, 953),
        ),
        (
            gpu_config(
                strategy="MPS",
                mpsConfig={
                    "defaultPinnedDeviceMemoryLimit": "10Gi",
                    "defaultPerDevicePinnedMemoryLimit": {GPU: "2Gi"},
                },
            ),
            Sharing("", "d", 100, 2 * GIB),
        ),
    ],
)
def test_what_is_asked_for_is_understood(parameters: Any, expected: Sharing) -> None:
    (found,) = sharing_of(entry(parameters))
    assert bool(found.daemon) == bool(expected.daemon)
    assert (found.time_slice, found.threads, found.memory, found.multi_user) == (
        expected.time_slice, expected.threads, expected.memory, expected.multi_user,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("odd", "parameters is 'odd', not an object"),
        (None, "not an object"),
        ({}, "None of None is unknown; use GpuConfig of resource.nvidia.com/v1beta1"),
        ({"apiVersion": "resource.nvidia.com/v1", "kind": "GpuConfig"}, "v1 is unknown"),
        ({"apiVersion": NVIDIA, "kind": "VfioDeviceConfig"}, "GPU passthrough"),
        ({"apiVersion": NVIDIA, "kind": "GpuConfig", "share": {}}, "GpuConfig.share is unknown"),
        (gpu_config(), "strategy is None, not TimeSlicing or MPS"),
        (gpu_config(strategy="mps"), "strategy is 'mps'"),
        (slices("long"), "interval is 'long', not one of Default, Short, Medium, Long"),
        (gpu_config(strategy="TimeSlicing", mpsConfig={}), "sharing.mpsConfig is unknown"),
        (gpu_config(strategy="MPS", timeSlicingConfig={}), "timeSlicingConfig is unknown"),
        (
            gpu_config(strategy="TimeSlicing", timeSlicingConfig={"intervall": "Long"}),
            "timeSlicingConfig.intervall is unknown; use interval",
        ),
        (ours(timeSlice="Long", mps={}), "has both timeSlice and mps"),
        (ours(strategy="MPS"), "DeviceSharing.strategy is unknown; use mps, timeSlice"),
        *(
            (ours(mps={"threadPercentage": value}), f"threadPercentage is {value!r}")
            for value in (-1, 101, "50", 1.5, True)
        ),
        *(
            (ours(mps={"memoryLimit": value}), f"memoryLimit is {value!r}, not a quantity")
            for value in NO_SIZES
        ),
        (ours(mps={"memoryLimitOf": []}), "memoryLimitOf is [], not an object"),
        (ours(mps={"multiUser": 0}), "multiUser is 0, not true or false"),
        (ours(mps={"memoryLimitOf": [1]}), "memoryLimitOf is [1], not an object"),
        (ours(mps={"memoryLimitOf": {"0": "much"}}), "memoryLimitOf.0 is 'much', not"),
        (ours(mps={"memoryLimitOf": {"1": "1Gi"}}), "limits the memory of 1, but has GPU-0"),
        (ours(mps={"memoryLimitOf": {OTHER: "1Gi"}}), f"limits the memory of {OTHER}"),
        (ours(mps={"multiUser": "yes"}), "multiUser is 'yes', not true or false"),
    ],
)
def test_what_cannot_be_is_refused_in_words(parameters: Any, words: str) -> None:
    with raises(ClaimConfigUnknown) as raised:
        claimed(entry(parameters))
    assert words in str(raised.value)
    assert "the claim default/claim" in str(raised.value)


def test_what_a_class_says_wrongly_is_to_be_changed_there() -> None:
    with raises(ClaimConfigUnknown, match="in its DeviceClass"):
        claimed(entry("odd", source="FromClass"))


def test_the_last_that_fits_counts_and_what_the_claim_says_comes_after_its_class() -> None:
    of_class, of_claim = slices("Long"), slices("Short")
    assert sharing_of(entry(of_claim), entry(of_class, source="FromClass")) == [Sharing("Short")]
    assert sharing_of(entry(of_class), entry(of_claim)) == [Sharing("Short")]
    both = ("gpu-a", "gpu-b")
    found = sharing_of(entry(of_class), entry(of_claim, "gpu-b"), devices=both)
    assert found == [Sharing("Long"), Sharing("Short")]
    # A subrequest's name matches its request, and vice versa.
    assert sharing_of(entry(of_claim, "gpu-a/any")) == [Sharing("Short")]
    assert sharing_of(entry(of_claim, "gpu-a/other")) == [Sharing()]
    assert sharing_of(entry(of_claim, driver="another.example.com")) == [Sharing()]
    with raises(ClaimConfigUnknown, match="it is not a driver's"):
        claimed({"source": "FromClaim", "requests": []})
    # Unused configurations are parsed, too.
    with raises(ClaimConfigUnknown):
        claimed(entry(slices("odd")), entry(of_claim))


def test_a_configuration_is_for_devices_of_its_kind() -> None:
    mixed = ("gpu-a", "mig-a")
    mps = mig_config(strategy="MPS")
    found = sharing_of(entry(slices("Long")), entry(mps), devices=mixed)
    assert found[0] == Sharing("Long")
    assert found[1].daemon
    assert sharing_of(entry(slices("Long")), devices=("mig-a",)) == [Sharing()]
    with raises(ClaimConfigUnknown, match="GpuConfig is not for the request mig-a/any"):
        claimed(entry(slices("Long"), "mig-a"), devices=mixed)
    for parameters in (mig_config(strategy="TimeSlicing"), ours(timeSlice="Long")):
        with raises(ClaimConfigUnknown, match="a MIG device"):
            claimed(entry(parameters), devices=("mig-a",))


def test_a_daemon_is_for_the_devices_of_one_configuration() -> None:
    limits = {"0": "1Gi", GPU: "3Gi"}
    claim = claimed(entry(ours(mps={"memoryLimitOf": limits})), devices=("gpu-a", "gpu-b"))
    (name,), (daemon,) = daemons_of([claim]), daemons_of([claim]).values()
    assert name.startswith(f"claims/{claim.uid}-")
    # The order follows the GPUs' indices: gpu-b is the first.
    assert daemon.limits == {OTHER: GIB, GPU: 3 * GIB}
    apart = claimed(
        entry(ours(mps={}), "gpu-a"), entry(ours(mps={}), "gpu-b"), devices=("gpu-a", "gpu-b")
    )
    assert len(daemons_of([apart])) == 2
    assert not daemons_of([claimed(entry(ours(mps={})), adminAccess=True)])
    with raises(ClaimConfigUnknown, match="a daemon serves at most one MIG device"):
        claimed(entry(ours(mps={})), devices=("mig-a", "mig-b"))


def test_containers_find_the_daemon_of_their_claim() -> None:
    (device,) = claimed(entry(ours(mps={}))).devices
    edits = edits_of(device, "/run/nvidia/mps")
    pipe = f"/mps/{device.sharing.daemon}/pipe"
    assert edits.env == (f"CUDA_MPS_PIPE_DIRECTORY={pipe}",)
    sockets, memory = edits.mounts
    assert (sockets.host_path, sockets.container_path) == (f"/run/nvidia{pipe}", pipe)
    assert "ro" in sockets.options
    assert (memory.host_path, memory.container_path) == ("/run/nvidia/mps/shm", "/dev/shm")
    assert "rw" in memory.options
    # The path of a socket is limited to 107 bytes.
    uid = "0b1f5c5e-7d47-4c3c-9f0d-5f4b4a3d2c1b"
    assert len(sockets.host_path) - len(claimed().uid) + len(uid) + len("/control_privileged") < 108


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10Gi", 10 << 30), ("1", 1), (4, 4), ("1k", 1000), ("1.5Gi", 3 << 29), ("1e3", 1000),
        ("1E3", 1000), ("1E", 10**18), ("500m", 1), ("", None), ("Gi", None), ("1gi", None),
        ("-1", None), (None, None), (True, None), ("\u0661", None), ("+1", 1), ("2e+3", 2000),
        ("1e-3", 1), ("2500E-3", 3), ("++1", None), ("1e", None),
    ],
)  # fmt: skip
def test_a_quantity_is_read_as_kubernetes_does(text: Any, size: int | None) -> None:
    assert parse_quantity(text) == size


@given(st.integers(1, 1 << 30))
def test_a_quantity_that_we_write_is_the_one_that_we_read(mebibytes: int) -> None:
    assert parse_quantity(quantity(mebibytes * MEBI)) == mebibytes * MEBI


def test_what_an_older_agent_has_written_down_is_read(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path), proc=str(tmp_path))
    claims = [claimed(), claimed(entry(ours(mps={"threadPercentage": 5})))]
    state.save(config, claims[1:])
    assert list(state.load(config, DRIVER).values()) == claims[1:]
    state.save(config, claims[:1])
    path = tmp_path / "dra.json"
    document = json.loads(path.read_text("ascii"))
    for device in document["claims"][0]["devices"]:
        for name in NEWER:
            del device[name]
    path.write_text(json.dumps(document), "ascii")
    assert list(state.load(config, DRIVER).values()) == claims[:1]
