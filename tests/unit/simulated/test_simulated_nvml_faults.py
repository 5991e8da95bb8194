"""The simulated NVML: hidden devices, faults and events, and its library file."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.simulated import Scenario, SimulatedNode, library
from integration.simulated.driver import DriverFiles
from integration.simulated.errors import LibraryNotBuilt
from tests.harness.raising import raises
from tests.unit.simulated.conftest import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    AskNvml,
    MakeNode,
    Smi,
    without,
)

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
    events.write_text("0 8 31\n")  # before the event set was created
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
    assert max(versions) <= (2, 17)


def test_it_compiles_without_a_warning(
    tmp_path: Path, driver_files: DriverFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "-Wall -Wextra -Werror -Wno-cast-function-type"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gcc = tmp_path / "gcc"
    gcc.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} {flags} "$@"\n')
    gcc.chmod(0o755)
    for name, scenario in (("none", Scenario.of(0)), ("mig", Scenario.load("mig"))):
        library.build_nvml(
            str(tmp_path / name),
            replace(scenario, nvml_lacks=("nvmlOfNoOtherScenario",)),  # it is not built yet
            driver=driver_files.version,
            real=driver_files.nvml,
            node="/nowhere",
            cache=str(tmp_path),
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
    with raises(LibraryNotBuilt, match="Install the packages gcc and libc6-dev"):
        library.build_stand_in(str(tmp_path / "x.so"), "x.so.1")
