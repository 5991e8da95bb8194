from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks.config import Config
from hooks.errors import NvmlFailed
from hooks.node.driver import find_driver
from hooks.node.fingerprint import Fingerprint
from hooks.node.nvml import modules_directory, parse_report, probe_command
from tests.harness.launcher import REPOSITORY
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node, nvml_gpu, nvml_mig, uuid_of


def report(*gpus: Any, driver: Any = VERSION) -> bytes:
    return json.dumps({"driver": driver, "gpus": list(gpus)}).encode()


# Print the modules that pynvml loads, and check that ctypes.util is unchanged.
IMPORTED = """
import sys
sys.path += sys.argv[1:]
from hooks.node.nvml_probe import import_pynvml
assert import_pynvml() is import_pynvml()
print(*sys.modules)
from ctypes.util import find_library
assert find_library("c")
"""


def test_pynvml_is_imported_without_what_it_wants_on_windows() -> None:
    modules = (modules_directory(), REPOSITORY)
    argv = [sys.executable, "-I", "-S", "-c", IMPORTED, *modules]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert "pynvml" in loaded
    assert not {"ctypes.util", "shutil", "subprocess", "tempfile"} & set(loaded)


def test_report_is_read_with_names_as_procfs_writes_them() -> None:
    told = nvml_gpu(0, uuid=uuid_of(0).upper(), mig=True, mig_devices=[nvml_mig(0, 1, 0)])
    gpu = parse_report(report(told)).gpus[0]
    assert gpu.uuid == uuid_of(0)
    assert gpu.bus_id == "0000:10:00.0"
    assert gpu.mig_devices[0].gpu_instance == 1


def test_pci_domain_beyond_four_digits_keeps_them() -> None:
    told = nvml_gpu(0) | {"bus_id": "00010000:07:00.0"}
    assert parse_report(report(told)).gpus[0].bus_id == "10000:07:00.0"


@pytest.mark.parametrize(("told", "cuda"), [(12020, "12.2"), (13010, "13.1"), (None, "")])
def test_cuda_is_what_the_driver_supports(told: int | None, cuda: str) -> None:
    answer: dict[str, Any] = {"driver": VERSION, "gpus": [], "cuda": told}
    assert parse_report(json.dumps(answer).encode()).cuda == cuda
    assert parse_report(report()).cuda == ""


@pytest.mark.parametrize(
    ("told", "name"), [(8, "Ada Lovelace"), (13, "Rubin"), (0xFFFFFFFF, ""), (99, ""), (None, "")]
)
def test_architecture_is_nvidias_word_or_unknown(told: int | None, name: str) -> None:
    assert parse_report(report(nvml_gpu(0) | {"architecture": told})).gpus[0].architecture == name


@pytest.mark.parametrize(("told", "brand"), [(2, "tesla"), (14, "nvidia"), (99, ""), (None, "")])
def test_brand_is_a_word_as_images_write_it(told: int | None, brand: str) -> None:
    gpu = parse_report(report(nvml_gpu(0) | {"brand": told, "compute_capability": None})).gpus[0]
    assert (gpu.brand, gpu.compute_capability) == (brand, "")


LIES: list[dict[str, Any]] = [
    {"index": -1}, {"index": True}, {"index": "0"}, {"index": 1 << 70}, {"uuid": "GPU-1"},
    {"uuid": uuid_of(0, "MIG")}, {"uuid": 7}, {"minor": "0"}, {"bus_id": "zz:00"}, {"bus_id": ""},
    {"name": "x" * 200}, {"name": "a\nb"}, {"lost": 3}, {"memory": "80"}, {"memory": -1},
    {"compute_capability": 9}, {"compute_capability": "9\n0"}, {"brand": "tesla"}, {"brand": -1},
    {"mig": 1}, {"mig_devices": {}}, {"mig_devices": [3]}, {"mig_devices": [{}] * 300},
    {"mig_devices": [nvml_mig(0, 1, 0) | {"uuid": uuid_of(1)}]},
    {"mig_devices": [nvml_mig(0, 1, 0) | {"gpu_instance": 1.5}]},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_field_that_cannot_be_is_not_believed(lie: dict[str, Any]) -> None:
    parse_report(report(nvml_gpu(0)))
    with pytest.raises(NvmlFailed):
        parse_report(report(nvml_gpu(0) | lie))


@pytest.mark.parametrize(
    "answer",
    [b"", b"  \n", b"{", b"[]", b"null", b"{}", b'{"gpus": 3}', b"[" * 99999, b"\xff", b" " * 2**21,
     report(driver=5), b'{"driver": "1", "gpus": [], "cuda": "12.2"}',
     report(*[nvml_gpu(0)] * 300), b'{"error": 3}'],
    ids=lambda a: a[:12].decode("latin-1"),
)  # fmt: skip
def test_answer_that_is_none_is_a_typed_error(answer: bytes) -> None:
    with pytest.raises(NvmlFailed):
        parse_report(answer)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["gpus", "driver", *nvml_gpu(0)]), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_a_report_or_a_typed_error(document: Any) -> None:
    try:
        parse_report(json.dumps(document).encode())
    except NvmlFailed:
        pass


# A libnvidia-ml with one GPU and one MIG device, which can be made to misbehave.
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef void *handle;
static int gpu, mig;
int nvmlInitWithFlags(unsigned f) {
#ifdef HANG
    for (;;) pause();
#endif
#ifdef CRASH
    abort();
#endif
#ifdef FAIL
    return 9; /* NVML_ERROR_DRIVER_NOT_LOADED */
#endif
    puts("noise from the driver"); fflush(stdout);
    return 0;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
const char *nvmlErrorString(int e) { return "Driver Not Loaded"; }
int nvmlSystemGetDriverVersion(char *v, unsigned n) { strncpy(v, VERSION, n); return 0; }
int nvmlSystemGetCudaDriverVersion(int *v) { *v = 12020; return 0; }
#ifndef REFUSES
#define REFUSES 0
#endif
int nvmlDeviceGetCudaComputeCapability(handle d, int *a, int *b) {
    *a = 9; *b = 0; return REFUSES; }
int nvmlDeviceGetBrand(handle d, unsigned *b) { *b = 14; return REFUSES; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, handle *d) { *d = &gpu; return 0; }
int nvmlDeviceGetUUID(handle d, char *u, unsigned n) {
    strncpy(u, d == &gpu ? "GPU-00000000-aaaa-bbbb-cccc-0123456789ab"
                         : "MIG-00000110-aaaa-bbbb-cccc-0123456789ab", n); return 0; }
int nvmlDeviceGetMinorNumber(handle d, unsigned *n) { *n = 0; return 0; }
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(handle d, struct pci *p) {
    memset(p, 0, sizeof *p); strcpy(p->bus_id, "00000000:10:00.0"); return 0; }
int nvmlDeviceGetName(handle d, char *s, unsigned n) {
    strncpy(s, d == &gpu ? "NVIDIA H100" : "NVIDIA H100 MIG 1g.10gb", n); return 0; }
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(handle d, struct memory *m) {
    m->total = 85899345920ull; m->free = m->used = 0; return 0; }
int nvmlDeviceGetMigMode(handle d, unsigned *now, unsigned *next) { *now = *next = 1; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(handle d, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(handle d, unsigned i, handle *m) {
    if (i) return 6; /* NVML_ERROR_NOT_FOUND */ *m = &mig; return 0; }
int nvmlDeviceGetGpuInstanceId(handle d, unsigned *n) { *n = 1; return 0; }
int nvmlDeviceGetComputeInstanceId(handle d, unsigned *n) { *n = 0; return 0; }
"""


def install_nvml(node: Node, *flags: str) -> None:
    source = node.write(node.base / "nvml.c", SOURCE)
    library = node.driver / MULTIARCH / f"libnvidia-ml.so.{VERSION}"
    command = ["gcc", "-shared", "-fPIC", "-w", f'-DVERSION="{VERSION}"', *flags, str(source)]
    subprocess.run([*command, "-Wl,-soname,libnvidia-ml.so.1", "-o", str(library)], check=True)


def run_probe(node: Node, timeout: float = 20.0) -> subprocess.CompletedProcess[bytes]:
    config = Config(
        **{
            **{name: getattr(node.config, name) for name in Config.__match_args__},
            "nvml_timeout": timeout,
        }
    )
    command = probe_command(config, find_driver(Fingerprint("/"), config))
    assert os.path.isabs(command[0])
    return subprocess.run(command, check=False, capture_output=True, env={}, timeout=30)


def test_child_reports_what_the_driver_roots_library_says(node: Node) -> None:
    install_nvml(node)
    done = run_probe(node)
    assert done.returncode == 0, done.stderr
    assert b"noise" not in done.stdout
    told = parse_report(done.stdout)
    assert (told.driver, told.cuda) == (VERSION, "12.2")
    assert (told.gpus[0].compute_capability, told.gpus[0].brand) == ("9.0", "nvidia")
    assert told.gpus[0].memory == 80 << 30
    assert (told.gpus[0].mig, told.gpus[0].bus_id) == (True, "0000:10:00.0")
    assert [(d.uuid, d.profile) for d in told.gpus[0].mig_devices] == [
        (uuid_of(0x110, "MIG"), "1g.10gb")
    ]


@pytest.mark.parametrize("word", [2, 3, 13, 21, 25, 26])
def test_gpu_of_which_something_is_not_to_be_had_is_not_lost(node: Node, word: int) -> None:
    install_nvml(node, f"-DREFUSES={word}")
    told = parse_report(run_probe(node).stdout)
    assert (told.gpus[0].lost, told.notes) == ("", ())
    assert [(gpu.uuid, gpu.brand, gpu.compute_capability) for gpu in told.gpus] == [
        (uuid_of(0), "", "")
    ]


def test_gpu_that_says_it_is_lost_in_any_call_is(node: Node) -> None:
    install_nvml(node, "-DREFUSES=15")
    (gpu,) = parse_report(run_probe(node).stdout).gpus
    assert (gpu.uuid, gpu.bus_id, gpu.lost) == (uuid_of(0), "0000:10:00.0", "GPU is lost")


def test_child_says_why_nvml_failed(node: Node) -> None:
    install_nvml(node, "-DFAIL")
    done = run_probe(node)
    assert done.returncode == 1
    with pytest.raises(NvmlFailed, match="Driver Not Loaded"):
        parse_report(done.stdout)


def test_child_ends_itself_when_nvml_hangs(node: Node) -> None:
    install_nvml(node, "-DHANG")
    began = time.monotonic()
    done = run_probe(node, timeout=0.5)
    assert done.returncode == -signal.SIGALRM
    assert time.monotonic() - began < 30
    with pytest.raises(NvmlFailed):
        parse_report(done.stdout)


def test_crash_of_nvml_ends_the_child_alone(node: Node) -> None:
    install_nvml(node, "-DCRASH")
    done = run_probe(node)
    assert done.returncode == 1
    with pytest.raises(NvmlFailed, match="NVML crashes when it is asked"):
        parse_report(done.stdout)


def test_library_without_functions_is_a_failure_that_is_said(node: Node) -> None:
    done = run_probe(node)
    assert done.returncode == 1
    with pytest.raises(NvmlFailed, match="NVMLError"):
        parse_report(done.stdout)


def test_driver_without_nvml_is_a_failure_that_is_said(node: Node) -> None:
    Path(node.driver, MULTIARCH, f"libnvidia-ml.so.{VERSION}").unlink()
    with pytest.raises(NvmlFailed, match="libnvidia-ml"):
        parse_report(run_probe(node).stdout)
