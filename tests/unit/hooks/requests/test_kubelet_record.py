"""A container's devices from the kubelet's files, both real and malformed ones."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.proto import deviceplugin_pb2 as pb
from hooks.config import Config
from hooks.requests.kubelet_record import KubeletRecord, RecordFile, record_of
from hooks.words import Feature, GpuIndex, GpuUuid, MigUuid

RECORDED: Final = Path(__file__).parents[3] / "recorded" / "kubernetes-1.36" / "kubelet"
FIRST = "GPU-14b5d60e-717f-5926-8c10-bfa432a3c8f1"
SECOND = "GPU-414dcd81-ed67-5847-8bd5-b8812b045111"
PLUGIN = "k8s.device-plugin.nvidia.com/gpu="
INIT_POD = "0c25e414-e34e-4727-b579-70539c962489"
SHARED_POD = "d31bcbab-10ec-481c-92ab-2e300b37b4fd"
MIG_POD = "edec4083-7397-460a-9291-f518f678cb07"
MIG = "MIG-0388ba1a-745e-5dd8-9b44-22551c328d4d"


def look(
    checkpoint: bytes, pod: str, container: str, claims: bytes | None = None, **settings: Any
) -> KubeletRecord:
    state = None if claims is None else RecordFile("/k/dra_manager_state", claims)
    return record_of(RecordFile("/k/c", checkpoint), state, pod, container, Config(**settings))


def recorded(name: str) -> bytes:
    return (RECORDED / f"{name}.json").read_bytes()


def checkpoint_of(pod: str, container: str, *answers: pb.ContainerAllocateResponse) -> bytes:
    entries = [
        {
            "PodUID": pod,
            "ContainerName": container,
            "ResourceName": "example.com/gpu",
            "DeviceIDs": {"-1": [f"{SECOND}::1"]},
            "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
        }
        for answer in answers
    ]
    registered = {"example.com/gpu": [f"{SECOND}::1"]}
    data = {"PodDeviceEntries": entries or None, "RegisteredDevices": registered}
    return json.dumps({"Data": data, "Checksum": 1}).encode()


@pytest.mark.parametrize(
    ("state", "pod", "container", "uuids"),
    [
        # The main container reuses the GPU of the init container.
        ("init-container", INIT_POD, "init-gpu", [SECOND]),
        ("init-container", INIT_POD, "main", [SECOND]),
        ("init-container", INIT_POD, "cpu", []),
        ("init-container", "8f671f58-f552-4f04-9451-c6da55a39396", "main", [FIRST]),
        ("time-slicing", SHARED_POD, "one", [SECOND]),
        ("time-slicing", SHARED_POD, "two", [FIRST]),
        ("time-slicing", "21c9531e-155a-42aa-9fe0-ce8ed6983920", "main", []),  # from another plugin
        ("envvar", "b3808049-9bfc-42a5-ab85-64728294433a", "main", [FIRST]),
        ("envvar", "c5c194d8-784b-4a36-b9f5-36f30a8e9359", "main", []),  # by its own wish
        ("mig", MIG_POD, "main", [MIG]),
        ("mig", MIG_POD, "whole", ["GPU-818f4644-d8b4-53b3-9985-9492d461e4fb"]),
    ],
)
def test_a_container_was_given_what_a_real_kubelet_recorded(
    state: str, pod: str, container: str, uuids: list[str]
) -> None:
    record = look(recorded(f"checkpoint-{state}"), pod, container)
    assert [str(device) for device in record.devices] == uuids
    assert record.gave_anything is bool(uuids)
    names = frozenset() if state == "envvar" else {f"{PLUGIN}{uuid}" for uuid in uuids}
    assert record.cdi_devices == names
    assert pod in record.found
    assert container in record.found


def test_entries_of_a_pod_count_for_a_container_whose_name_nobody_tells() -> None:
    record = look(recorded("checkpoint-time-slicing"), SHARED_POD, "")
    assert set(record.devices) == {GpuUuid(FIRST), GpuUuid(SECOND)}


def test_claim_is_of_each_pod_that_uses_it() -> None:
    none, claims = checkpoint_of("", ""), recorded("claims-shared")
    shared = "gpu.example.com/claim=d6d30ddf-4b8a-4ac4-a6f7-fc00b8bd6d17-gpu-1"
    for pod in ("3aebbfd5-fd51-4658-b607-555b7b05fbb0", "98ec04ad-c5f2-4ec1-bb3b-1d4df189bad0"):
        assert look(none, pod, "main", claims).cdi_devices == {shared}
    other = look(none, "245dafb4-6477-459e-ba4a-8839d7fb3458", "main", claims)
    assert other.cdi_devices == {"gpu.example.com/claim=b9aed2d9-ead1-4183-b411-abf8aeefa541-gpu-0"}
    # A claim's own UID, which is in the file, too, is not that of a pod.
    assert not look(none, "d6d30ddf-4b8a-4ac4-a6f7-fc00b8bd6d17", "main", claims).gave_anything


def mount(name: str) -> pb.Mount:
    below = f"/var/run/nvidia-container-devices/{name}"
    return pb.Mount(container_path=below, host_path="/dev/null", read_only=True)


ANSWERS: list[tuple[pb.ContainerAllocateResponse, KubeletRecord]] = [
    (
        pb.ContainerAllocateResponse(
            envs={"NVIDIA_VISIBLE_DEVICES": f"{FIRST},{MIG}", "NVIDIA_GDS": "enabled",
                  "NVIDIA_IMEX_CHANNELS": "0"}
        ),
        KubeletRecord(devices=(GpuUuid(FIRST), MigUuid(MIG)), features=frozenset({Feature.GDS}),
                      imex_channels=(0,)),
    ),
    # device-id-strategy index
    (pb.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "0,2"}),
     KubeletRecord(devices=(GpuIndex(0), GpuIndex(2)))),
    (pb.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "all"}),
     KubeletRecord(every=True)),
    (pb.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "void"}), KubeletRecord()),
    (
        pb.ContainerAllocateResponse(
            envs={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
            mounts=[mount(FIRST), mount("imex/0"), mount("cdi/nvidia.com/gds/all")],
        ),
        KubeletRecord(devices=(GpuUuid(FIRST),), features=frozenset({Feature.GDS}),
                      imex_channels=(0,)),
    ),
    (
        pb.ContainerAllocateResponse(
            annotations={
                "cdi.k8s.io/nvidia-device-plugin_1":
                    f"{PLUGIN}{FIRST},k8s.device-plugin.nvidia.com/gdrcopy=all",
                "example.com/x": f"{PLUGIN}{SECOND}",
            }
        ),
        KubeletRecord(cdi_devices=frozenset(
            {f"{PLUGIN}{FIRST}", "k8s.device-plugin.nvidia.com/gdrcopy=all"})),
    ),
    (
        pb.ContainerAllocateResponse(
            cdi_devices=[
                pb.CDIDevice(name=f"{PLUGIN}{FIRST}"),
                pb.CDIDevice(name="k8s.device-plugin.nvidia.com/imex-channel=0"),
                pb.CDIDevice(name="amd.com/gpu=1"),
                pb.CDIDevice(name="no name of a device"),
            ],
            devices=[pb.DeviceSpec(container_path="/dev/x", host_path="/dev/null")],
        ),
        KubeletRecord(
            devices=(GpuUuid(FIRST),),
            imex_channels=(0,),
            cdi_devices=frozenset({f"{PLUGIN}{FIRST}", "amd.com/gpu=1",
                                   "k8s.device-plugin.nvidia.com/imex-channel=0"}),
        ),
    ),
    # Answers of other plugins. HAMi's devices differ from the ids.
    (
        pb.ContainerAllocateResponse(
            envs={"NVIDIA_VISIBLE_DEVICES": FIRST, "CUDA_DEVICE_MEMORY_LIMIT_0": "1000m"},
            mounts=[pb.Mount(container_path="/etc/ld.so.preload", host_path="/usr/local/vgpu/x")],
        ),
        KubeletRecord(devices=(GpuUuid(FIRST),)),
    ),
    (pb.ContainerAllocateResponse(envs={"AMD_VISIBLE_DEVICES": "0,1"}),
     KubeletRecord(amd_devices=frozenset({"0", "1"}))),
    (pb.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": "GPU 1"}), KubeletRecord()),
    (pb.ContainerAllocateResponse(), KubeletRecord()),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_each_part_of_an_answer_gives_what_it_would_request(
    answer: pb.ContainerAllocateResponse, expected: KubeletRecord
) -> None:
    record = look(checkpoint_of("1-2", "main", answer), "1-2", "main")
    if answer.annotations:  # both names of NVIDIA's devices in them are recognized
        assert record.cdi_devices == expected.cdi_devices
    else:
        assert _without_words(record) == _without_words(expected)


def _without_words(record: KubeletRecord) -> list[object]:
    return [getattr(record, name) for name in record.__match_args__ if name != "found"]


def test_several_entries_and_both_files_are_united() -> None:
    first, second = ANSWERS[0][0], ANSWERS[4][0]
    claims = recorded("claims-shared")
    pod = "245dafb4-6477-459e-ba4a-8839d7fb3458"
    record = look(checkpoint_of(pod, "main", first, second), pod, "main", claims)
    assert record.devices == (GpuUuid(FIRST), MigUuid(MIG))
    assert record.cdi_devices == {
        "gpu.example.com/claim=b9aed2d9-ead1-4183-b411-abf8aeefa541-gpu-0"
    }


def test_pod_of_the_same_name_that_was_before_gives_nothing() -> None:
    answer = ANSWERS[0][0]
    record = look(checkpoint_of("1-1", "main", answer), "1-2", "main")
    assert not record.gave_anything
    assert record.found == "of container main of pod 1-2, by /k/c: nothing"


ENTRY: dict[str, Any] = {"PodUID": "1-2", "ContainerName": "main"}
# Field 1 cut off, its length cut off, an endless varint, an unknown type, invalid UTF-8, and an
# eight-byte number with one byte.
NO_MESSAGES = (
    b"\x0a",
    b"\x0a\xff",
    b"\x80" * 11,
    b"\x0b",
    b"\x0a\x04\x0a\x02\xff\xfe",
    b"\x09\x00",
)
DAMAGED: list[bytes] = [
    b"1-2", b"\xff1-2", b"[" * 100000 + b"1-2", b'"1-2"', b'["1-2"]', b'{"Data": "1-2"}',
    b'{"Data": {"PodDeviceEntries": "1-2"}}', b'{"Data": {"PodDeviceEntries": ["1-2"]}}',
    recorded("checkpoint-init-container").replace(INIT_POD.encode(), b"1-2")[:-20],
    json.dumps({"Data": {"PodDeviceEntries": [ENTRY | {"ContainerName": ["main"]}]}}).encode(),
    *(
        json.dumps({"Data": {"PodDeviceEntries": [ENTRY | {"AllocResp": answer}]}}).encode()
        for answer in (1, "A", *(base64.b64encode(each).decode() for each in NO_MESSAGES))
    ),
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_file_gives_nothing_and_is_said_to_be_wrong(content: bytes) -> None:
    record = look(content, "1-2", "main")
    assert not record.gave_anything
    assert "/k/c: not as a kubelet writes it" in record.found
    as_claims = look(b"{}", "1-2", "main", content)
    assert not as_claims.gave_anything
    assert "/k/dra_manager_state: not as a kubelet writes it" in as_claims.found


ODD: list[Any] = [
    None, 7, "text", ["x"], {}, {"PodUID": None}, {"PodUID": ["9-9"]}, {"podUID": "9-9"},
    {"PodUID": "9-9", "ContainerName": 1, "AllocResp": "A"}, {"ClaimUID": "c", "PodUIDs": None},
    {"ClaimUID": "c", "PodUIDs": ["9-9"]}, {"ClaimUID": "c", "PodUIDs": "9-9"},
    {"PodUIDs": {"9-9": {}}, "DriverState": "odd"},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_entry_of_another_pod_voids_nothing_of_this_one(odd: Any) -> None:
    plugins = json.loads(checkpoint_of("1-2", "main", ANSWERS[0][0]))
    plugins["Data"]["PodDeviceEntries"][:0] = [odd]
    document = json.loads(recorded("claims-shared"))
    state = json.loads(document["Data"])
    state["ClaimInfoStateList"][:0] = [odd]
    state["ClaimInfoStateList"][1]["PodUIDs"] = {"1-2": {}}
    claims = json.dumps(document | {"Data": json.dumps(state)}).encode()
    record = look(json.dumps(plugins).encode(), "1-2", "main", claims)
    assert record.devices == (GpuUuid(FIRST), MigUuid(MIG))
    assert record.cdi_devices == {
        "gpu.example.com/claim=b9aed2d9-ead1-4183-b411-abf8aeefa541-gpu-0"
    }
    assert record.doubt == ""


# Entries with this pod's UID. As one of a newer kubelet may be written, or with a part missing.
OWN_PLUGIN: list[Any] = [
    "1-2", ["1-2"], {"podUID": "1-2"}, {"PodUID": ["1-2"]}, {"PodUID": None, "Pod": {"UID": "1-2"}},
    {"PodUID": "1-2"}, {"PodUID": "1-2", "ContainerName": "main"},
    {"PodUID": "1-2", "Container": "main", "AllocResp": ""},
]  # fmt: skip
OWN_CLAIM: list[Any] = [
    "1-2", {"PodUIDs": ["1-2"]}, {"PodUIDs": "1-2"}, {"Pods": {"1-2": {}}},
    {"PodUIDs": {"1-2": {}}},
    {"PodUIDs": {"1-2": {}}, "DriverState": {"d": None}},
    {"PodUIDs": {"1-2": {}}, "DriverState": {"d": {"devices": []}}},
    {"PodUIDs": {"1-2": {}}, "DriverState": {"d": {"Devices": [{"PoolName": "p"}]}}},
    {"PodUIDs": {"1-2": {}}, "DriverState": {"d": {"Devices": [{"CDIDeviceIDs": [None]}]}}},
]  # fmt: skip


@pytest.mark.parametrize("odd", OWN_PLUGIN)
def test_odd_entry_of_this_pod_is_said_and_never_nothing(odd: Any) -> None:
    content = json.dumps({"Data": {"PodDeviceEntries": [odd], "RegisteredDevices": {}}}).encode()
    record = look(content, "1-2", "main")
    assert not record.gave_anything
    assert record.doubt.startswith("/k/c: not as a kubelet writes it (")
    assert "\n" not in record.found


@pytest.mark.parametrize("odd", OWN_CLAIM)
def test_odd_claim_of_this_pod_is_said_and_never_nothing(odd: Any) -> None:
    content = json.dumps({"Data": json.dumps({"ClaimInfoStateList": [odd]})}).encode()
    record = look(b"{}", "1-2", "main", content)
    assert not record.gave_anything
    assert record.doubt.startswith("/k/dra_manager_state: not as a kubelet writes it (")
    assert "\n" not in record.found


@given(st.binary(max_size=200))
def test_answer_of_any_bytes_is_read_or_said_to_be_wrong(answer: bytes) -> None:
    entry = {
        "PodUID": "1-2", "ContainerName": "main", "AllocResp": base64.b64encode(answer).decode(),
    }  # fmt: skip
    content = json.dumps({"Data": {"PodDeviceEntries": [entry]}}).encode()
    record = look(content, "1-2", "main")
    assert record.gave_anything <= ("not as a kubelet writes it" not in record.found)
    assert ": nothing" not in record.found
