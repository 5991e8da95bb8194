"""What the simulated NVML says, to pynvml and to the driver's own nvidia-smi."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from integration.simulated import Scenario, SimulatedNode, library
from integration.simulated.capabilities import access_minor
from integration.simulated.errors import LibraryNotBuilt
from tests.harness.nvshim import nvshim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.simulated.driver import DriverFiles
    from tests.unit.simulated.conftest import AskNvml, MakeNode

    Smi = Callable[..., subprocess.CompletedProcess[str]]

# nvmlReturn_t
INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 2, 3, 6, 7
DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH = 9, 13, 15, 25


@contextlib.contextmanager
def without(*paths: str) -> Iterator[None]:
    """Take files away for a while."""
    try:
        for path in paths:
            os.rename(path, path + ".away")
        yield
    finally:
        for path in paths:
            if os.path.exists(path + ".away"):
                os.rename(path + ".away", path)


# --- nvidia-smi


def test_nvidia_smi_lists_the_gpus(two: SimulatedNode, smi: Smi) -> None:
    done = smi(two, "-L")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        f"GPU {gpu.index}: NVIDIA H100 80GB HBM3 (UUID: {gpu.uuid})" for gpu in two.scenario.gpus
    ]


def test_nvidia_smi_tells_the_compute_mode_that_was_set(two: SimulatedNode, smi: Smi) -> None:
    path = f"{two.state}/nvml-compute-mode-{two.scenario.gpus[1].uuid}"
    with open(path, "w", encoding="ascii") as file:
        file.write("3")
    try:
        lines = smi(two, "-q", "-d", "COMPUTE").stdout.splitlines()
    finally:
        os.unlink(path)
    modes = [line.partition(":")[2].strip() for line in lines if "Compute Mode" in line]
    assert modes == ["Default", "Exclusive_Process"]


def test_nvidia_smi_lists_mig_devices(mig: SimulatedNode, smi: Smi) -> None:
    lines = smi(mig, "-L").stdout.splitlines()
    expected = []
    for gpu in mig.scenario.gpus:
        expected.append(f"GPU {gpu.index}: {gpu.model.name} (UUID: {gpu.uuid})")
        devices = [(i.device_name(c), c.uuid) for i in gpu.mig or () for c in i.compute]
        expected += [
            f"  MIG {name:11} Device {n:2}: (UUID: {uuid})"
            for n, (name, uuid) in enumerate(devices)
        ]
    assert lines == expected
    assert len(lines) == 4 + 7 + 3


def test_nvidia_smi_prints_its_table(two: SimulatedNode, smi: Smi) -> None:
    done = smi(two)
    assert done.returncode == 0
    assert f"Driver Version: {two.driver_version}" in done.stdout
    assert "CUDA Version: 12.2" in done.stdout
    assert done.stdout.count("0MiB / 81559MiB") == 2
    assert "No running processes found" in done.stdout


def test_nvidia_smi_answers_queries(two: SimulatedNode, smi: Smi) -> None:
    fields = "index,uuid,pci.bus_id,memory.total,compute_cap,serial,mig.mode.current"
    done = smi(two, f"--query-gpu={fields}", "--format=csv,noheader")
    gpu = two.scenario.gpus[1]
    assert done.stdout.splitlines()[1] == (
        f"1, {gpu.uuid}, 00000000:2A:00.0, 81559 MiB, 9.0, {gpu.serial}, Disabled"
    )


@pytest.mark.parametrize(
    ("model", "told", "driver", "least", "whole"),
    [
        ("h200", "NVIDIA H200, 143771 MiB, 9.0, 0x233510DE", "550.", "1g.18gb", "7g.141gb"),
        ("b200", "NVIDIA B200, 183359 MiB, 10.0, 0x290110DE", "570.", "1g.23gb", "7g.180gb"),
        ("gb200", "NVIDIA GB200, 189471 MiB, 10.0, 0x294110DE", "570.", "1g.23gb", "7g.186gb"),
        ("gb300", "NVIDIA GB300, 284208 MiB, 10.3, 0x31C210DE", "580.", "1g.35gb", "7g.278gb"),
    ],
)
def test_a_newer_model_is_what_nvidia_smi_prints_of_it(
    make_node: MakeNode, smi: Smi, model: str, told: str, driver: str, least: str, whole: str
) -> None:
    gpus = [{"index": 0, "mig": [least] * 7}, {"index": 1, "mig": [whole]}]
    node = make_node(Scenario.of(3, model, gpu=gpus))
    fields = "name,memory.total,compute_cap,pci.device_id,driver_version,pci.bus_id"
    line = smi(node, f"--query-gpu={fields}", "--format=csv,noheader").stdout.splitlines()[2]
    address = node.scenario.gpus[2].pci.upper()
    assert line == f"{told}, {node.driver_version}, 0000{address}"
    assert node.driver_version.startswith(driver)
    names = re.findall(r"^  MIG (\S+)", smi(node, "-L").stdout, re.MULTILINE)
    assert names == [least] * 7 + [whole]
    where = ("--config", node.config_path, "--containerd-state", node.dev)
    found = nvshim("list", *where, "-o", "json").items
    assert [row["profile"] for row in found if row["kind"] == "mig"] == names
    assert [row["fault"] for row in found] == [None] * 11


def test_nvidia_smi_prints_instances_and_what_room_is_left(mig: SimulatedNode, smi: Smi) -> None:
    instances = smi(mig, "mig", "-lgi").stdout
    assert re.search(r"\|   1  MIG 3g\.20gb +9 +2 +4:4 +\|", instances)
    assert len(re.findall(r"MIG \dg\.", instances)) == 9
    compute = smi(mig, "mig", "-lci").stdout
    assert re.search(r"\|   1 +2 +MIG 2c\.3g\.20gb +1 +1 +1:2 +\|", compute)
    profiles = smi(mig, "mig", "-lgip").stdout
    assert re.search(r"\|   0  MIG 1g\.5gb +19 +0/7 ", profiles)
    assert re.search(r"\|   2  MIG 7g\.40gb +0 +1/1 ", profiles)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory, two: SimulatedNode) -> Iterator[Path]:
    """A root with nvidia-smi, what it is linked with, and a /dev of its own, as a container's."""
    root = tmp_path_factory.mktemp("image")
    smi = os.path.join(two.driver_root, "usr/bin/nvidia-smi")
    done = subprocess.run(["ldd", smi], capture_output=True, text=True, check=True)
    for path in {smi, *re.findall(r"(/\S+)", done.stdout)} - {f"{smi}:"}:
        inside = "/usr/bin/nvidia-smi" if path == smi else path
        (root / inside[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / inside[1:])
    for name in os.listdir(two.driver_root + "/usr/lib"):
        nvml = Path(two.driver_root, "usr/lib", name, "libnvidia-ml.so.1")
        if nvml.exists():
            (root / "usr/lib" / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(nvml, root / "usr/lib" / name / nvml.name)
            shutil.copy(nvml, root / "lib" / name / nvml.name)
    (root / "dev").mkdir()
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize("granted", [[], [0], [1], [0, 1]])
def test_in_a_container_only_granted_gpus_are_seen(
    two: SimulatedNode, image: Path, granted: list[int]
) -> None:
    shutil.rmtree(image / "dev")
    (image / "dev").mkdir()
    os.mknod(image / "dev/nvidiactl", stat.S_IFCHR | 0o666, os.makedev(195, 255))
    for index in granted:
        os.mknod(image / f"dev/nvidia{index}", stat.S_IFCHR | 0o666, os.makedev(195, index))
    done = subprocess.run(
        ["chroot", image, "/usr/bin/nvidia-smi", "-L"], capture_output=True, text=True, check=False
    )
    uuids = [two.scenario.gpus[index].uuid for index in granted]
    assert re.findall(r"GPU (\d): .*UUID: (\S+)\)", done.stdout) == [
        (str(n), uuid) for n, uuid in enumerate(uuids)
    ]


def test_in_a_container_without_the_control_node_there_is_no_driver(image: Path) -> None:
    shutil.rmtree(image / "dev")
    (image / "dev").mkdir()
    done = subprocess.run(
        ["chroot", image, "/usr/bin/nvidia-smi", "-L"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "couldn't communicate with the NVIDIA driver" in done.stdout


# --- pynvml: identity


def test_versions(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    assert ask_nvml(
        two,
        """answer([nvmlSystemGetDriverVersion(), nvmlSystemGetNVMLVersion(),
                   nvmlSystemGetCudaDriverVersion(), nvmlSystemGetCudaDriverVersion_v2()])""",
    ) == [two.driver_version, f"12.{two.driver_version}", 12020, 12020]


def test_identity_of_each_gpu(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    found = ask_nvml(
        two,
        """
        def about(h):
            return [nvmlDeviceGetName(h), nvmlDeviceGetUUID(h), nvmlDeviceGetSerial(h),
                    nvmlDeviceGetIndex(h), nvmlDeviceGetMinorNumber(h), nvmlDeviceGetBrand(h),
                    nvmlDeviceGetArchitecture(h), list(nvmlDeviceGetCudaComputeCapability(h)),
                    nvmlDeviceGetNumGpuCores(h), nvmlDeviceGetVbiosVersion(h),
                    nvmlDeviceGetMigMode(h), nvmlDeviceIsMigDeviceHandle(h)]
        answer([about(nvmlDeviceGetHandleByIndex(i)) for i in range(nvmlDeviceGetCount())])
        """,
    )
    assert found == [
        ["NVIDIA H100 80GB HBM3", gpu.uuid, gpu.serial, gpu.index, gpu.index, 14, 9, [9, 0],
         16896, gpu.vbios, [0, 0], 0]
        for gpu in two.scenario.gpus
    ]  # fmt: skip


def test_a_gpu_is_found_by_uuid_serial_and_address(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    gpu = two.scenario.gpus[1]
    assert ask_nvml(
        two,
        f"""
        handles = [nvmlDeviceGetHandleByUUID({gpu.uuid!r}),
                   nvmlDeviceGetHandleBySerial({gpu.serial!r}),
                   nvmlDeviceGetHandleByPciBusId("00000000:2A:00.0"),
                   nvmlDeviceGetHandleByPciBusId("0000:2a:00.0")]
        answer([nvmlDeviceGetIndex(h) for h in handles])
        """,
    ) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("nvmlDeviceGetHandleByUUID('GPU-none')", NOT_FOUND),
        ("nvmlDeviceGetHandleBySerial('1')", NOT_FOUND),
        ("nvmlDeviceGetHandleByPciBusId('0000:01:00.0')", NOT_FOUND),
        ("nvmlDeviceGetHandleByPciBusId('nonsense')", INVALID_ARGUMENT),
        ("nvmlDeviceGetHandleByIndex(2)", INVALID_ARGUMENT),
        ("nvmlDeviceGetName(c_void_p(4096))", INVALID_ARGUMENT),
        ("nvmlDeviceGetName(None)", INVALID_ARGUMENT),
        ("nvmlDeviceGetMigDeviceHandleByIndex(nvmlDeviceGetHandleByIndex(0), 0)", NOT_FOUND),
        ("nvmlDeviceGetMigDeviceHandleByIndex(nvmlDeviceGetHandleByIndex(0), 7)",
         INVALID_ARGUMENT),
        ("nvmlDeviceGetAttributes(nvmlDeviceGetHandleByIndex(0))", NOT_SUPPORTED),
        ("nvmlDeviceGetMemoryInfo(nvmlDeviceGetHandleByIndex(0), version=1)", VERSION_MISMATCH),
        ("nvmlDeviceGetFanSpeed(nvmlDeviceGetHandleByIndex(0))", NOT_SUPPORTED),
        ("nvmlSystemGetProcessName(1)", NOT_FOUND),
    ],
)  # fmt: skip
def test_a_wrong_question_is_answered_with_its_error(
    two: SimulatedNode, ask_nvml: AskNvml, call: str, error: int
) -> None:
    assert ask_nvml(two, f"{call}\nanswer('no error')") == {"error": error}


def test_a_name_that_does_not_fit_is_not_written(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    code = """
        nvml, text = CDLL("libnvidia-ml.so.1"), create_string_buffer(b"?" * 30)
        handle = nvmlDeviceGetHandleByIndex(0)
        answer([nvml.nvmlDeviceGetName(handle, text, 21), text.raw[:2].decode(),
                nvml.nvmlDeviceGetName(handle, text, 22), text.value.decode()])
    """
    expected = [INSUFFICIENT_SIZE, "??", 0, "NVIDIA H100 80GB HBM3"]
    assert ask_nvml(two, code) == expected


def test_nothing_is_answered_before_init_and_after_shutdown(
    two: SimulatedNode, ask_nvml: AskNvml
) -> None:
    code = """
        nvml, count = CDLL("libnvidia-ml.so.1"), c_uint()
        ask = lambda: nvml.nvmlDeviceGetCount_v2(byref(count))
        answer([ask(), nvml.nvmlInit_v2(), nvml.nvmlInit_v2(), nvml.nvmlShutdown(), ask(),
                nvml.nvmlShutdown(), ask(), nvml.nvmlShutdown()])
    """
    assert ask_nvml(two, code, init=False) == [1, 0, 0, 0, 0, 0, 1, 1]


def test_every_error_has_words(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    words = ask_nvml(
        two,
        """
        nvml = CDLL("libnvidia-ml.so.1")
        nvml.nvmlErrorString.restype = c_char_p
        answer([nvml.nvmlErrorString(n).decode() for n in (0, 9, 18, 24, 999, -1)])
        """,
    )
    assert (
        words
        == ["Success", "Driver Not Loaded", "Driver/library version mismatch"]
        + ["Unknown Error"] * 3
    )


# --- pynvml: layouts of structures


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
        v1, v2, v3 = V1(canary=(7, 7)), nvmlPciInfo_v2_t(), nvmlPciInfo_t()
        assert not nvml.nvmlDeviceGetPciInfo(handle, byref(v1))
        assert not nvml.nvmlDeviceGetPciInfo_v2(handle, byref(v2))
        assert not nvml.nvmlDeviceGetPciInfo_v3(handle, byref(v3))
        answer([read(v3), read(v2), v1.busId.decode(), v1.pciDeviceId, list(v1.canary)])
        """,
    )
    same = {"domain": 0, "bus": 0x2A, "device": 0, "pciDeviceId": 0x233010DE}
    same["pciSubSystemId"] = 0x16C110DE
    assert found == [
        {**same, "busIdLegacy": "0000:2A:00.0", "busId": "00000000:2A:00.0"},
        {**same, "busId": "0000:2A:00.0", **{f"reserved{n}": 0 for n in range(4)}},
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
        answer([globals()[f"nvmlDeviceGet{kind}RunningProcesses{version}"](h)
                for kind in kinds for version in ("", "_v2", "_v3")])
        """,
    )
    assert found == [[]] * 9


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
    assert cpus == [(1 << (os.cpu_count() or 1)) - 1, 0]


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


# --- What can be seen


def test_a_gpu_without_a_node_is_not_seen(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    with without(f"{two.dev}/nvidia0"):
        found = ask_nvml(
            two,
            """
            h = nvmlDeviceGetHandleByIndex(0)
            answer([nvmlDeviceGetCount(), nvmlDeviceGetUUID(h), nvmlDeviceGetIndex(h),
                    nvmlDeviceGetMinorNumber(h)])
            """,
        )
    assert found == [1, two.scenario.gpus[1].uuid, 0, 1]


def test_a_node_with_wrong_numbers_is_no_gpu(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    path = f"{two.dev}/nvidia0"
    with without(path):
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(195, 7))
        try:
            assert ask_nvml(two, "answer(nvmlDeviceGetCount())") == 1
        finally:
            os.unlink(path)


def test_without_the_control_node_there_is_no_driver(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    with without(f"{two.dev}/nvidiactl"):
        assert ask_nvml(two, "answer('up')") == {"error": DRIVER_NOT_LOADED}


# --- Faults and events


@pytest.mark.parametrize(
    ("faults", "code", "expected"),
    [
        ("nvmlInit=error:18", "answer('up')", {"error": 18}),
        ("nvmlDeviceGetCount=error:15", "answer(nvmlDeviceGetCount())", {"error": GPU_IS_LOST}),
        ("nvmlDeviceGetCount=crash", "answer(nvmlDeviceGetCount())", {"signal": 11}),
        ("count=7", "answer(nvmlDeviceGetCount())", 7),
        ("count=7 nvmlSystemGetDriverVersion=error:999", "nvmlSystemGetDriverVersion()",
         {"error": 999}),
        ("nvmlDeviceGet=error:15", "answer(nvmlDeviceGetCount())", 2),
        ("driver=550.54.15", "answer(nvmlSystemGetDriverVersion())", "550.54.15"),
        ("nonsense", "answer(nvmlDeviceGetCount())", 2),
    ],
)  # fmt: skip
def test_faults_from_the_environment(
    two: SimulatedNode, ask_nvml: AskNvml, faults: str, code: str, expected: Any
) -> None:
    assert ask_nvml(two, code, faults=faults) == expected


def test_faults_from_the_nodes_state(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    path = Path(two.state, "nvml-faults")
    path.write_text("# count=9 is a comment\ncount=3\nnvmlSystemGetDriverVersion=error:4\n")
    try:
        assert ask_nvml(two, "answer(nvmlDeviceGetCount())") == 3
        assert ask_nvml(two, "nvmlSystemGetDriverVersion()") == {"error": 4}
    finally:
        path.unlink()


def test_a_function_fails_of_one_gpu_only(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    found = ask_nvml(
        two,
        """
        def of(index, question):
            try: return question(nvmlDeviceGetHandleByIndex(index))
            except NVMLError as error: return error.value
        answer([[of(index, nvmlDeviceGetName), of(index, nvmlDeviceGetBrand)] for index in (0, 1)])
        """,
        faults="gpu1.nvmlDeviceGetName=error:999",
    )
    name = two.scenario.gpus[0].model.name
    brand = two.scenario.gpus[0].model.brand.value
    assert found == [[name, brand], [999, brand]]


def test_a_function_that_a_driver_lacks_is_not_found(
    make_node: MakeNode, ask_nvml: AskNvml
) -> None:
    lacking = ["nvmlEventSetWait_v2", "nvmlDeviceGetBrand", "nvmlDeviceGetPowerSource"]
    node = make_node(Scenario.of(1, nvml_lacks=lacking))
    found = ask_nvml(
        node,
        """
        def of(question, *arguments):
            try: return question(*arguments)
            except NVMLError as error: return error.value
        gpu = nvmlDeviceGetHandleByIndex(0)
        answer([of(nvmlDeviceGetBrand, gpu), of(nvmlEventSetWait_v2, nvmlEventSetCreate(), 0),
                of(nvmlDeviceGetName, gpu)])
        """,
    )
    assert found == [FUNCTION_NOT_FOUND, FUNCTION_NOT_FOUND, node.scenario.gpus[0].model.name]
    assert SimulatedNode.open(node.directory).scenario == node.scenario


def test_nvmls_order_need_not_be_that_of_the_bus_nor_of_the_nodes(
    make_node: MakeNode, ask_nvml: AskNvml, smi: Smi
) -> None:
    places = ["0000:da:00.0", "0000:4b:00.0", "0000:31:00.0"]
    gpus = [{"index": n, "pci": pci, "minor": 2 - n} for n, pci in enumerate(places)]
    node = make_node(Scenario.of(3, "l40s", gpu=gpus))
    found = ask_nvml(
        node,
        """
        gpus = [nvmlDeviceGetHandleByIndex(n) for n in range(nvmlDeviceGetCount())]
        answer([[nvmlDeviceGetUUID(g), nvmlDeviceGetPciInfo(g).busId, nvmlDeviceGetMinorNumber(g)]
                for g in gpus])
        """,
    )
    uuids = [gpu.uuid for gpu in node.scenario.gpus]
    assert found == [[uuids[n], f"0000{pci}".upper(), 2 - n] for n, pci in enumerate(places)]
    assert [line.split("UUID: ")[1][:-1] for line in smi(node, "-L").stdout.splitlines()] == uuids
    for gpu in node.scenario.gpus:
        information = Path(node.proc, f"driver/nvidia/gpus/{gpu.pci}/information").read_text()
        assert f"GPU UUID: \t {gpu.uuid}\n" in information
        assert f"Device Minor: \t {gpu.minor}\n" in information
        assert os.stat(f"{node.dev}/nvidia{gpu.minor}").st_rdev == os.makedev(195, gpu.minor)


def test_an_init_that_hangs_can_be_killed(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        ask_nvml(two, "answer('up')", faults="nvmlInit=hang", timeout=1)


def test_a_slow_init_returns(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    before = time.monotonic()
    assert ask_nvml(two, "answer('up')", faults="nvmlInit=sleep:300") == "up"
    assert time.monotonic() - before >= 0.3


def test_an_event_reaches_those_who_registered_for_it(
    make_node: MakeNode, ask_nvml: AskNvml
) -> None:
    node = make_node(Scenario.load("two"))
    events = Path(node.state, "nvml-events")
    events.write_text("0 8 31\n")  # before the set was made
    found = ask_nvml(
        node,
        f"""
        def wait(timeout):
            try: event = nvmlEventSetWait_v2(events, timeout)
            except NVMLError as error: return error.value
            return [nvmlDeviceGetIndex(event.device), event.eventType, event.eventData,
                    event.gpuInstanceId, event.computeInstanceId]
        events = nvmlEventSetCreate()
        gpu, kind = nvmlDeviceGetHandleByIndex(1), nvmlEventTypeXidCriticalError
        nvmlDeviceRegisterEvents(gpu, kind, events)
        found = [wait(30)]
        with open({str(events)!r}, "a") as file:
            file.write("0 8 48\\n1 1 5\\n1 8 79\\n1 8 13 2 0\\nnonsense\\n1 8")
        found += [wait(1000), wait(1000), wait(30)]
        nvmlEventSetFree(events)
        answer(found)
        """,
    )
    none = 0xFFFFFFFF
    assert found == [10, [1, 8, 79, none, none], [1, 8, 13, 2, 0], 10]


# --- The library as a file


def test_it_exports_every_name_that_the_drivers_own_does(
    two: SimulatedNode, driver_files: DriverFiles
) -> None:
    real = set(library.exported_names(driver_files.nvml))
    ours = set(
        library.exported_names(
            f"{two.driver_root}/usr/lib/{driver_files.triplet}/libnvidia-ml.so.1"
        )
    )
    assert len(real) > 250
    assert real <= ours


def test_it_runs_on_images_with_an_older_glibc(
    two: SimulatedNode, driver_files: DriverFiles
) -> None:
    nvml = f"{two.driver_root}/usr/lib/{driver_files.triplet}/libnvidia-ml.so.1"
    done = subprocess.run(["nm", "-D", nvml], capture_output=True, text=True, check=True)
    versions = [(int(a), int(b)) for a, b in re.findall(r"@GLIBC_(\d+)\.(\d+)", done.stdout)]
    assert versions
    assert max(versions) <= (2, 28)


def test_it_compiles_without_a_warning(
    tmp_path: Path, driver_files: DriverFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "-Wall -Wextra -Werror -Wno-cast-function-type"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gcc = tmp_path / "gcc"
    gcc.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} {flags} "$@"\n')
    gcc.chmod(0o755)
    for scenario in (Scenario.of(0), Scenario.load("mig")):
        library.build_nvml(
            str(tmp_path / "nvml.so"),
            scenario,
            driver=driver_files.version,
            real=driver_files.nvml,
            node="/nowhere",
        )


def test_a_directory_with_odd_letters_is_looked_into(
    tmp_path: Path, two: SimulatedNode, ask_nvml: AskNvml
) -> None:
    with SimulatedNode.create(str(tmp_path / 'a "ü" \\7 %s'), Scenario.of(3)) as node:
        assert ask_nvml(node, "answer(nvmlDeviceGetCount())") == 3


def test_without_a_compiler_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LibraryNotBuilt, match="install the packages gcc and libc6-dev"):
        library.build_stand_in(str(tmp_path / "x.so"), "x.so.1")
