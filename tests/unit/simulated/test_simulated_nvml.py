"""The simulated NVML's answers to pynvml and to the driver's own nvidia-smi."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hooks.node.roots import cuda_of_branch
from integration.simulated import Scenario, SimulatedNode
from tests.harness.nvshim import nvshim
from tests.unit.simulated.conftest import (
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    VERSION_MISMATCH,
    AskNvml,
    MakeNode,
    Smi,
)

# --- nvidia-smi


def test_nvidia_smi_lists_the_gpus(two: SimulatedNode, smi: Smi) -> None:
    done = smi(two, "-L")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        f"GPU {gpu.index}: NVIDIA H100 80GB HBM3 (UUID: {gpu.uuid})" for gpu in two.scenario.gpus
    ]


def test_nvidia_smi_takes_a_gpu_by_all_its_names(two: SimulatedNode, smi: Smi) -> None:
    gpu = two.scenario.gpus[1]
    domain, bus, device = gpu.pci.removesuffix(".0").split(":")
    names = (
        *("1", gpu.uuid, gpu.pci, gpu.pci.upper(), f"0000{gpu.pci}", f"{domain}:{bus}:{device}"),
        *(f"{bus}:{device}.0", f"{bus}:{device}", f"0:{bus}:{device}.0"),
    )
    query = ("--query-gpu=index", "--format=csv,noheader")
    for name in names:
        assert smi(two, "-i", name, *query).stdout == "1\n", name
    found = [smi(two, "-i", name, *query) for name in ("2", "ff:00.0", f"{bus}:{device}.1")]
    assert {done.stdout for done in found} == {"No devices were found\n"}
    for name in (f"{gpu.pci}z", f"{bus}:", ":::"):
        assert "Invalid PCI bus id format" in smi(two, "-i", name, *query).stdout, name


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
    assert f"CUDA Version: {cuda_of_branch(two.driver_version)} " in done.stdout
    assert len(re.findall(r" 0MiB / +81559MiB ", done.stdout)) == 2
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
    """Make a root like a container's, with nvidia-smi, its libraries and its own /dev."""
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
    major, minor = map(int, cuda_of_branch(two.driver_version).split("."))
    cuda = major * 1000 + minor * 10
    assert ask_nvml(
        two,
        """answer([nvmlSystemGetDriverVersion(), nvmlSystemGetNVMLVersion(),
                   nvmlSystemGetCudaDriverVersion(), nvmlSystemGetCudaDriverVersion_v2()])""",
    ) == [two.driver_version, f"{major}.{two.driver_version}", cuda, cuda]


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


WRONG = (
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
)  # fmt: skip


def test_a_wrong_question_is_answered_with_its_error(two: SimulatedNode, ask_nvml: AskNvml) -> None:
    code = f"""
        told = {{}}
        for call in {[call for call, _ in WRONG]}:
            try: told[call] = eval(call)
            except NVMLError as error: told[call] = error.value
        answer(told)
    """
    assert ask_nvml(two, code) == dict(WRONG)


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
