"""The simulated NVML's structures of GPUs and MIG devices, as pynvml reads them."""

from __future__ import annotations

import os
import re

import pytest

from integration.simulated import Scenario, SimulatedNode
from integration.simulated.capabilities import access_minor
from tests.unit.simulated.conftest import NOT_FOUND, NOT_SUPPORTED, AskNvml, MakeNode, Smi, without


def test_pci_info_in_all_its_versions(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    found = ask_nvml(
        two,
        """
        nvml, handle = CDLL("libnvidia-ml.so.1"), nvmlDeviceGetHandleByIndex(1)
        text = lambda value: value.decode() if isinstance(value, bytes) else value
        read = lambda info: {name: text(getattr(info, name)) for name, _ in info._fields_}
        class V1(Structure):
            _fields_ = [("busId", c_char * 16), ("domain", c_uint), ("bus", c_uint),
                        ("device", c_uint), ("pciDeviceId", c_uint), ("canary", c_uint * 2)]
        class Ext(Structure):  # older releases of pynvml lack it
            _fields_ = [*((name, c_uint) for name in (
                            "version", "domain", "bus", "device", "pciDeviceId", "pciSubSystemId",
                            "baseClass", "subClass")), ("busId", c_char * 32)]
        v1, v2, v3 = V1(canary=(7, 7)), nvmlPciInfo_v2_t(), nvmlPciInfo_t()
        ext = Ext(version=0x1000040)
        assert not nvml.nvmlDeviceGetPciInfo(handle, byref(v1))
        assert not nvml.nvmlDeviceGetPciInfo_v2(handle, byref(v2))
        assert not nvml.nvmlDeviceGetPciInfo_v3(handle, byref(v3))
        assert not nvml.nvmlDeviceGetPciInfoExt(handle, byref(ext))
        older = Ext(version=1)
        assert nvml.nvmlDeviceGetPciInfoExt(handle, byref(older)) == 25
        answer([read(v3), read(v2), read(ext), v1.busId.decode(), v1.pciDeviceId, list(v1.canary)])
        """,
    )
    same = {"domain": 0, "bus": 0x2A, "device": 0, "pciDeviceId": 0x233010DE}
    same["pciSubSystemId"] = 0x16C110DE
    assert found == [
        {**same, "busIdLegacy": "0000:2A:00.0", "busId": "00000000:2A:00.0"},
        {**same, "busId": "0000:2A:00.0", **{f"reserved{n}": 0 for n in range(4)}},
        {**same, "version": 0x1000040, "baseClass": 3, "subClass": 2, "busId": "00000000:2A:00.0"},
        "0000:2A:00.0",
        0x233010DE,
        [7, 7],
    ]


def test_memory_in_all_its_versions(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    found = ask_nvml(
        two,
        """
        handle = nvmlDeviceGetHandleByIndex(0)
        one = nvmlDeviceGetMemoryInfo(handle)
        two = nvmlDeviceGetMemoryInfo(handle, version=nvmlMemory_v2)
        bar = nvmlDeviceGetBAR1MemoryInfo(handle)
        answer([one.total, one.free, one.used, two.total, two.reserved, two.free, two.used,
                bar.bar1Total, bar.bar1Free, bar.bar1Used])
        """,
    )
    mib = 1 << 20
    total, reserved, bar = 81559 * mib, 551 * mib, 131072 * mib
    one = [total, total - reserved, reserved]
    assert found == [*one, total, reserved, total - reserved, 0, bar, bar - mib, mib]


def test_state_of_an_idle_gpu(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    found = ask_nvml(
        two,
        """
        h, u = nvmlDeviceGetHandleByIndex(0), nvmlDeviceGetUtilizationRates
        answer([u(h).gpu, u(h).memory, nvmlDeviceGetTemperature(h, NVML_TEMPERATURE_GPU),
                nvmlDeviceGetPowerUsage(h), nvmlDeviceGetEnforcedPowerLimit(h),
                nvmlDeviceGetPowerManagementLimitConstraints(h),
                nvmlDeviceGetMaxClockInfo(h, NVML_CLOCK_SM),
                nvmlDeviceGetClockInfo(h, NVML_CLOCK_MEM),
                nvmlDeviceGetEccMode(h), nvmlDeviceGetPersistenceMode(h),
                nvmlDeviceGetComputeMode(h), nvmlDeviceGetPerformanceState(h),
                nvmlDeviceGetCurrPcieLinkGeneration(h), nvmlDeviceGetCurrPcieLinkWidth(h)])
        """,
    )
    assert found == [
        0, 0, 30, 70000, 700000, [350000, 700000], 1980, 2619, [1, 1], 0, 0, 0, 5, 16,
    ]  # fmt: skip


def test_there_are_no_processes(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    found = ask_nvml(
        two,
        """
        h = nvmlDeviceGetHandleByIndex(0)
        kinds = ("Compute", "Graphics", "MPSCompute")
        calls = {f"{kind}{version}": f"nvmlDeviceGet{kind}RunningProcesses{version}"
                 for kind in kinds for version in ("", "_v2", "_v3")}
        answer({name: globals()[call](h) for name, call in calls.items() if call in globals()})
        """,
    )
    assert found.keys() >= {"Compute", "Graphics", "MPSCompute"}
    assert not any(found.values())


def test_where_a_gpu_hangs(ask_nvml: AskNvml, make_node: MakeNode) -> None:
    found = ask_nvml(
        make_node(Scenario.of(4)),
        """
        h = [nvmlDeviceGetHandleByIndex(i) for i in range(4)]
        answer([[nvmlDeviceGetTopologyCommonAncestor(h[0], other) for other in h],
                [list(nvmlDeviceGetMemoryAffinity(x, 1, 0)) for x in h],
                list(nvmlDeviceGetCpuAffinity(h[0], 2))])
        """,
    )
    levels, nodes, cpus = found
    assert levels == [0, 40, 50, 50]
    assert nodes == [[1], [1], [2], [2]]
    every, word = (1 << (os.cpu_count() or 1)) - 1, (1 << 64) - 1
    assert cpus == [every >> bits & word for bits in (0, 64)]


@pytest.mark.parametrize("model", ["a100", "t4", "rtx4090"])
def test_other_models_say_what_they_are(model: str, make_node: MakeNode, ask_nvml: AskNvml) -> None:
    node = make_node(Scenario.of(1, model))
    found = ask_nvml(
        node,
        """
        h = nvmlDeviceGetHandleByIndex(0)
        try: mig = nvmlDeviceGetMigMode(h)
        except NVMLError as error: mig = error.value
        answer([nvmlDeviceGetName(h), nvmlDeviceGetMemoryInfo(h).total >> 20, mig,
                nvmlDeviceGetMaxMigDeviceCount(h), nvmlDeviceGetEccMode(h)])
        """,
    )
    assert (
        found
        == {
            "a100": ["NVIDIA A100-SXM4-40GB", 40960, [0, 0], 7, [1, 1]],
            "t4": ["Tesla T4", 15360, NOT_SUPPORTED, 0, [1, 1]],
            "rtx4090": ["NVIDIA GeForce RTX 4090", 24564, NOT_SUPPORTED, 0, [0, 0]],
        }[model]
    )


# --- MIG


def test_mig_devices_and_their_structures(mig: SimulatedNode, ask_nvml: AskNvml) -> None:
    found = ask_nvml(
        mig,
        """
        read = lambda info: {name: getattr(info, name) for name, _ in info._fields_}
        gpu = nvmlDeviceGetHandleByIndex(1)
        device = nvmlDeviceGetMigDeviceHandleByIndex(gpu, 2)
        parent = nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device)
        instance = nvmlDeviceGetGpuInstanceById(gpu, nvmlDeviceGetGpuInstanceId(device))
        compute = nvmlGpuInstanceGetComputeInstanceById(
            instance, nvmlDeviceGetComputeInstanceId(device))
        gi, ci = nvmlGpuInstanceGetInfo(instance), nvmlComputeInstanceGetInfo(compute)
        answer({
            "name": nvmlDeviceGetName(device), "uuid": nvmlDeviceGetUUID(device),
            "index": nvmlDeviceGetIndex(device), "is": nvmlDeviceIsMigDeviceHandle(device),
            "parent": nvmlDeviceGetIndex(parent),
            "memory": nvmlDeviceGetMemoryInfo(device).total >> 20,
            "attributes": read(nvmlDeviceGetAttributes(device)),
            "gi": [gi.id, gi.profileId, gi.placement.start, gi.placement.size],
            "gi parent": nvmlDeviceGetIndex(cast(gi.device, c_nvmlDevice_t)),
            "ci": [ci.id, ci.profileId, ci.placement.start, ci.placement.size],
            "by uuid": nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(device))),
        })
        """,
    )
    instance = (mig.scenario.gpus[1].mig or ())[1]
    assert found == {
        "name": "NVIDIA A100-SXM4-40GB MIG 2c.3g.20gb",
        "uuid": instance.compute[1].uuid,
        "index": 2,
        "is": 1,
        "parent": 1,
        "memory": 19968,
        "attributes": {
            "multiprocessorCount": 28, "sharedCopyEngineCount": 3, "sharedDecoderCount": 2,
            "sharedEncoderCount": 0, "sharedJpegCount": 0, "sharedOfaCount": 0,
            "gpuInstanceSliceCount": 3, "computeInstanceSliceCount": 2, "memorySizeMB": 19968,
        },
        "gi": [2, 9, 4, 4],
        "gi parent": 1,
        "ci": [1, 1, 1, 2],
        "by uuid": 2,
    }  # fmt: skip


def test_mig_profiles_in_all_their_versions(mig: SimulatedNode, ask_nvml: AskNvml) -> None:
    found = ask_nvml(
        mig,
        """
        text = lambda value: value.decode() if isinstance(value, bytes) else value
        read = lambda info: [text(getattr(info, name)) for name, _ in info._fields_]
        gpu = nvmlDeviceGetHandleByIndex(1)
        instance = nvmlDeviceGetGpuInstanceById(gpu, 2)
        kind = NVML_GPU_INSTANCE_PROFILE_3_SLICE
        part, engine = NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE, 0
        answer([read(nvmlDeviceGetGpuInstanceProfileInfo(gpu, kind, version=v)) for v in (1, 2)]
             + [read(nvmlGpuInstanceGetComputeInstanceProfileInfo(
                         instance, part, engine, version=v)) for v in (1, 2)])
        """,
    )
    gpu_profile = [9, 0, 3, 2, 42, 3, 2, 0, 0, 0, 19968]
    compute_profile = [1, 2, 1, 28, 3, 2, 0, 0, 0]
    assert found == [
        gpu_profile,
        [0x02000098, *gpu_profile, "MIG 3g.20gb"],
        compute_profile,
        [0x02000088, *compute_profile, "MIG 2c.3g.20gb"],
    ]


def test_a_gpu_in_mig_mode_without_instances_has_no_devices(
    mig: SimulatedNode, ask_nvml: AskNvml
) -> None:
    code = """
        gpu = nvmlDeviceGetHandleByIndex(2)
        mode = nvmlDeviceGetMigMode(gpu)
        try: nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
        except NVMLError as error: answer([mode, error.value])
    """
    assert ask_nvml(mig, code) == [[1, 1], NOT_FOUND]


def test_a_mig_device_is_seen_with_its_capabilities_only(mig: SimulatedNode, smi: Smi) -> None:
    instances = mig.scenario.gpus[1].mig or ()
    away = f"{mig.dev}/nvidia-caps/nvidia-cap{access_minor(1, instances[0].id)}"
    with without(away):
        lines = smi(mig, "-L").stdout.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("GPU 1:"))
    assert [
        re.findall(r"Device +(\d): \(UUID: (\S+)\)", line)[0] for line in lines[start + 1 : -2]
    ] == [
        ("0", instances[1].compute[0].uuid),
        ("1", instances[1].compute[1].uuid),
    ]
