"""dcgm-exporter's series: the expected lines come from its real output, and are not computed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from integration.containers.bundles import Pod
from integration.node.holders.values import Holding, Ledger
from integration.node.options import DCGM, DCGM_4_5, DCGM_4_9
from integration.node.services.metrics import dcgm
from integration.node.services.metrics.text import write
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import Activity, DeviceSample, GpuEvent, GpuSample, Sample
from tests.unit.node.inventories import node_with
from tests.unit.node.metrics.nodes import ACTIVITY, changed, container, gpu_uuid, large, mig_uuid

if TYPE_CHECKING:
    from integration.node.services.metrics.snapshot import Snapshot

UUID = gpu_uuid(0)
MIB = 1 << 20
WHOLE = GpuSample(
    UUID,
    81559 * MIB,
    1000 * MIB,
    42,
    7,
    1,
    2,
    312.5,
    1234.567,
    61,
    1_980_000_000,
    2_619_000_000,
    3,
    1,
    rows_pending=True,
    rows_failed=False,
    memory_reserved_bytes=551 * MIB,
    memory_temperature_celsius=70,
    pcie_replays=4,
    rows_corrected=5,
    rows_uncorrected=6,
    nvlink_sent_bytes=4_096_000,
    nvlink_received_bytes=2_048_000,
    pages_corrected=8,
    pages_uncorrected=9,
    pages_pending=False,
    activity=ACTIVITY,
)
# Ten seconds before: since then it sent 2,048,000 and received 1,024,000 bytes.
BEFORE = replace(WHOLE, nvlink_sent_bytes=2_048_000, nvlink_received_bytes=1_024_000)
LABELS = (
    f'gpu="0",UUID="{UUID}",pci_bus_id="00000000:00:00.0",device="nvidia0",'
    'modelName="NVIDIA H100 80GB HBM3",hostname="node-1",DCGM_FI_DRIVER_VERSION="550.163.01",'
    'container="main",namespace="team-a",pod="training"'
)

OLD = f"""
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS}}} 1980
# TYPE DCGM_FI_DEV_MEM_CLOCK gauge
DCGM_FI_DEV_MEM_CLOCK{{{LABELS}}} 2619
# TYPE DCGM_FI_DEV_MEMORY_TEMP gauge
DCGM_FI_DEV_MEMORY_TEMP{{{LABELS}}} 70
# TYPE DCGM_FI_DEV_PCIE_REPLAY_COUNTER counter
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{LABELS}}} 4
# TYPE DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL counter
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{LABELS}}} 0.3
# TYPE DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS counter
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{{LABELS}}} 6
# TYPE DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS counter
DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS{{{LABELS}}} 5
# TYPE DCGM_FI_DEV_RETIRED_SBE counter
DCGM_FI_DEV_RETIRED_SBE{{{LABELS}}} 8
# TYPE DCGM_FI_DEV_RETIRED_DBE counter
DCGM_FI_DEV_RETIRED_DBE{{{LABELS}}} 9
# TYPE DCGM_FI_DEV_RETIRED_PENDING counter
DCGM_FI_DEV_RETIRED_PENDING{{{LABELS}}} 0
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{{LABELS}}} 61
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{{{LABELS}}} 312.5
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{LABELS}}} 1234567
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 42
# TYPE DCGM_FI_DEV_MEM_COPY_UTIL gauge
DCGM_FI_DEV_MEM_COPY_UTIL{{{LABELS}}} 7
# TYPE DCGM_FI_DEV_ENC_UTIL gauge
DCGM_FI_DEV_ENC_UTIL{{{LABELS}}} 1
# TYPE DCGM_FI_DEV_DEC_UTIL gauge
DCGM_FI_DEV_DEC_UTIL{{{LABELS}}} 2
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{{LABELS},err_code="0",err_msg="No Error"}} 0
# TYPE DCGM_FI_DEV_FB_FREE gauge
DCGM_FI_DEV_FB_FREE{{{LABELS}}} 80008
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{{LABELS}}} 1000
# TYPE DCGM_FI_DEV_FB_RESERVED gauge
DCGM_FI_DEV_FB_RESERVED{{{LABELS}}} 551
# TYPE DCGM_FI_DEV_FB_TOTAL gauge
DCGM_FI_DEV_FB_TOTAL{{{LABELS}}} 81559
# TYPE DCGM_FI_DEV_ROW_REMAP_FAILURE gauge
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{LABELS}}} 0
# TYPE DCGM_FI_DEV_ROW_REMAP_PENDING gauge
DCGM_FI_DEV_ROW_REMAP_PENDING{{{LABELS}}} 1
# TYPE DCGM_FI_DEV_ECC_SBE_VOL_TOTAL counter
DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{{{LABELS}}} 3
# TYPE DCGM_FI_DEV_ECC_DBE_VOL_TOTAL counter
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS}}} 1
# TYPE DCGM_FI_PROF_GR_ENGINE_ACTIVE gauge
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{LABELS}}} 0.9
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{{{LABELS}}} 0.8
# TYPE DCGM_FI_PROF_SM_OCCUPANCY gauge
DCGM_FI_PROF_SM_OCCUPANCY{{{LABELS}}} 0.7
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{LABELS}}} 0.6
# TYPE DCGM_FI_PROF_DRAM_ACTIVE gauge
DCGM_FI_PROF_DRAM_ACTIVE{{{LABELS}}} 0.5
# TYPE DCGM_FI_PROF_PIPE_FP64_ACTIVE gauge
DCGM_FI_PROF_PIPE_FP64_ACTIVE{{{LABELS}}} 0.4
# TYPE DCGM_FI_PROF_PIPE_FP32_ACTIVE gauge
DCGM_FI_PROF_PIPE_FP32_ACTIVE{{{LABELS}}} 0.3
# TYPE DCGM_FI_PROF_PIPE_FP16_ACTIVE gauge
DCGM_FI_PROF_PIPE_FP16_ACTIVE{{{LABELS}}} 0.2
# TYPE DCGM_FI_PROF_PCIE_TX_BYTES gauge
DCGM_FI_PROF_PCIE_TX_BYTES{{{LABELS}}} 1000000000
# TYPE DCGM_FI_PROF_PCIE_RX_BYTES gauge
DCGM_FI_PROF_PCIE_RX_BYTES{{{LABELS}}} 2000000000
# TYPE DCGM_FI_PROF_NVLINK_TX_BYTES gauge
DCGM_FI_PROF_NVLINK_TX_BYTES{{{LABELS}}} 3000000000
# TYPE DCGM_FI_PROF_NVLINK_RX_BYTES gauge
DCGM_FI_PROF_NVLINK_RX_BYTES{{{LABELS}}} 4000000000
"""

LABELS_4_9 = LABELS.replace("DCGM_FI_DRIVER_VERSION", "DCGM_FI_SYSTEM_DRIVER_VERSION")
NEW = f"""
# TYPE DCGM_FI_DEV_SM_CLOCK_HERTZ gauge
DCGM_FI_DEV_SM_CLOCK_HERTZ{{{LABELS_4_9}}} 1980000000
# TYPE DCGM_FI_DEV_MEMORY_CLOCK_HERTZ gauge
DCGM_FI_DEV_MEMORY_CLOCK_HERTZ{{{LABELS_4_9}}} 2619000000
# TYPE DCGM_FI_DEV_MEMORY_TEMP_CELSIUS gauge
DCGM_FI_DEV_MEMORY_TEMP_CELSIUS{{{LABELS_4_9}}} 70
# TYPE DCGM_FI_DEV_PCIE_REPLAY_TOTAL counter
DCGM_FI_DEV_PCIE_REPLAY_TOTAL{{{LABELS_4_9}}} 4
# TYPE DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND counter
DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND{{{LABELS_4_9}}} 307200
# TYPE DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL counter
DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL{{{LABELS_4_9}}} 6
# TYPE DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL counter
DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL{{{LABELS_4_9}}} 5
# TYPE DCGM_FI_DEV_GPU_TEMP_CELSIUS gauge
DCGM_FI_DEV_GPU_TEMP_CELSIUS{{{LABELS_4_9}}} 61
# TYPE DCGM_FI_DEV_BOARD_POWER_WATTS gauge
DCGM_FI_DEV_BOARD_POWER_WATTS{{{LABELS_4_9}}} 312.5
# TYPE DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL counter
DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL{{{LABELS_4_9}}} 1234.567
# TYPE DCGM_FI_DEV_GPU_UTIL_RATIO gauge
DCGM_FI_DEV_GPU_UTIL_RATIO{{{LABELS_4_9}}} 0.42
# TYPE DCGM_FI_DEV_MEMORY_UTIL_RATIO gauge
DCGM_FI_DEV_MEMORY_UTIL_RATIO{{{LABELS_4_9}}} 0.07
# TYPE DCGM_FI_DEV_ENC_UTIL_RATIO gauge
DCGM_FI_DEV_ENC_UTIL_RATIO{{{LABELS_4_9}}} 0.01
# TYPE DCGM_FI_DEV_DEC_UTIL_RATIO gauge
DCGM_FI_DEV_DEC_UTIL_RATIO{{{LABELS_4_9}}} 0.02
# TYPE DCGM_FI_DEV_XID_ERROR gauge
DCGM_FI_DEV_XID_ERROR{{{LABELS_4_9},err_code="0",err_msg="No Error"}} 0
# TYPE DCGM_FI_DEV_FB_FREE_BYTES gauge
DCGM_FI_DEV_FB_FREE_BYTES{{{LABELS_4_9}}} 83894468608
# TYPE DCGM_FI_DEV_FB_USED_BYTES gauge
DCGM_FI_DEV_FB_USED_BYTES{{{LABELS_4_9}}} 1048576000
# TYPE DCGM_FI_DEV_FB_RESERVED_BYTES gauge
DCGM_FI_DEV_FB_RESERVED_BYTES{{{LABELS_4_9}}} 577765376
# TYPE DCGM_FI_DEV_FB_CAPACITY_BYTES gauge
DCGM_FI_DEV_FB_CAPACITY_BYTES{{{LABELS_4_9}}} 85520809984
# TYPE DCGM_FI_DEV_ROW_REMAP_FAILED gauge
DCGM_FI_DEV_ROW_REMAP_FAILED{{{LABELS_4_9}}} 0
# TYPE DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO gauge
DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO{{{LABELS_4_9}}} 0.9
# TYPE DCGM_FI_PROF_SM_UTIL_RATIO gauge
DCGM_FI_PROF_SM_UTIL_RATIO{{{LABELS_4_9}}} 0.8
# TYPE DCGM_FI_PROF_SM_OCCUPANCY_RATIO gauge
DCGM_FI_PROF_SM_OCCUPANCY_RATIO{{{LABELS_4_9}}} 0.7
# TYPE DCGM_FI_PROF_TENSOR_UTIL_RATIO gauge
DCGM_FI_PROF_TENSOR_UTIL_RATIO{{{LABELS_4_9}}} 0.6
# TYPE DCGM_FI_PROF_DRAM_UTIL_RATIO gauge
DCGM_FI_PROF_DRAM_UTIL_RATIO{{{LABELS_4_9}}} 0.5
# TYPE DCGM_FI_PROF_FP64_UTIL_RATIO gauge
DCGM_FI_PROF_FP64_UTIL_RATIO{{{LABELS_4_9}}} 0.4
# TYPE DCGM_FI_PROF_FP32_UTIL_RATIO gauge
DCGM_FI_PROF_FP32_UTIL_RATIO{{{LABELS_4_9}}} 0.3
# TYPE DCGM_FI_PROF_FP16_UTIL_RATIO gauge
DCGM_FI_PROF_FP16_UTIL_RATIO{{{LABELS_4_9}}} 0.2
# TYPE DCGM_FI_PROF_PCIE_TX_BYTES gauge
DCGM_FI_PROF_PCIE_TX_BYTES{{{LABELS_4_9}}} 1000000000
# TYPE DCGM_FI_PROF_PCIE_RX_BYTES gauge
DCGM_FI_PROF_PCIE_RX_BYTES{{{LABELS_4_9}}} 2000000000
# TYPE DCGM_FI_PROF_NVLINK_TX_BYTES gauge
DCGM_FI_PROF_NVLINK_TX_BYTES{{{LABELS_4_9}}} 3000000000
# TYPE DCGM_FI_PROF_NVLINK_RX_BYTES gauge
DCGM_FI_PROF_NVLINK_RX_BYTES{{{LABELS_4_9}}} 4000000000
"""

Line = tuple[str, frozenset[tuple[str, str]]]
Lines = dict[Line, float | str]


def lines_of(text: str) -> Lines:
    """Return the types by name, and the values by name and labels, whatever their order."""
    found: Lines = {}
    for line in text.strip().splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert (name, frozenset()) not in found, f"{name} is there twice"
            found[name, frozenset()] = kind
        elif not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()  # type: ignore[union-attr]
            key: Line = (name, frozenset(re.findall(r'(\w+)="((?:\\.|[^"\\])*)"', labels)))
            assert key not in found, f"{line} is there twice"
            found[key] = float(value)
    return found


def written(snapshot: Snapshot, *names: str) -> str:
    return write(dcgm.collect(snapshot, names, "node-1"), dcgm.FORM).decode()


def node(sample: GpuSample = WHOLE, *holdings: Holding, mig: int = 0) -> Snapshot:
    """Return a node with one GPU, held by the container main of the pod team-a/training."""
    held = Holding(container(1, pod=Pod("team-a", "training")), (UUID,))
    snapshot = large(gpus=1, mig=mig, containers=0)
    snapshot.state.counters.last_xids.clear()
    snapshot = replace(snapshot, earlier=Sample(10.0, gpus=(BEFORE,)))
    told = Sample(20.0, gpus=(sample,))
    return changed(snapshot, sample=told, ledger=Ledger(1.0, holdings or (held,)))


def values_of(snapshot: Snapshot, name: str) -> list[float | str]:
    """Return the values of a series of dcgm-exporter 4.6 to 4.8."""
    found = lines_of(written(snapshot, DCGM)).items()
    return [value for (other, labels), value in found if other == name and labels]


@pytest.mark.parametrize(("name", "expected"), [(DCGM, OLD), (DCGM_4_9, NEW)])
def test_names_types_labels_and_units_are_those_of_the_release(name: str, expected: str) -> None:
    assert lines_of(written(node(), name)) == lines_of(expected)


def test_the_node_has_the_label_of_the_release_or_both() -> None:
    old = lines_of(OLD.replace("hostname=", "Hostname="))
    assert lines_of(written(node(), DCGM_4_5)) == old
    both = lines_of(OLD.replace("hostname=", 'Hostname="node-1",hostname='))
    assert lines_of(written(node(), DCGM, DCGM_4_5)) == both


def test_both_spellings_are_written_side_by_side_and_no_name_twice() -> None:
    old = lines_of(OLD)
    names = {name for name, _ in old}  # both have four of the names
    new = {key: value for key, value in lines_of(NEW).items() if key[0] not in names}
    assert len(lines_of(NEW)) - len(new) == 8
    assert lines_of(written(node(), DCGM, DCGM_4_9)) == old | new


def test_what_nvml_does_not_say_is_absent_and_not_zero() -> None:
    expected = [name for name in lines_of(OLD) if "XID" in name[0]]
    assert [*lines_of(written(node(GpuSample(UUID)), DCGM))] == expected
    unwatched = changed(node(GpuSample(UUID)), unwatched={UUID: "not supported"})
    assert lines_of(written(unwatched, DCGM)) == {}
    assert lines_of(written(node(GpuSample(UUID, lost="gone")), DCGM)) == {}


def test_less_than_no_memory_is_never_free() -> None:
    for used, free in ((999 * MIB, [1]), (1001 * MIB, [])):
        sample = replace(WHOLE, memory_total_bytes=1551 * MIB, memory_used_bytes=used)
        assert values_of(node(sample), "DCGM_FI_DEV_FB_FREE") == free


@pytest.mark.parametrize(
    "earlier",
    [
        None,
        Sample(20.0, gpus=(BEFORE,)),
        Sample(10.0, failure="it hung"),
        Sample(10.0, gpus=(GpuSample(UUID),)),
        Sample(10.0, gpus=(replace(WHOLE, nvlink_sent_bytes=1 << 40),)),
    ],
    ids=["first scrape", "same sample", "failed before", "not reported before", "driver reloaded"],
)
def test_a_rate_that_is_not_known_is_absent(earlier: Sample | None) -> None:
    name = "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"
    assert values_of(node(), name)
    assert values_of(replace(node(), earlier=earlier), name) == []


def test_the_last_xid_stays() -> None:
    snapshot = changed(node(), unwatched={UUID: "events have ended"})
    for when, xid in ((5.0, 79), (9.0, 31), (7.0, 48)):
        snapshot.state.counters.add_event(GpuEvent(when, "xid", UUID, xid=xid))
    [[labels, value]] = [
        (dict(key[1]), value)
        for key, value in lines_of(written(snapshot, DCGM)).items()
        if key[0] == "DCGM_FI_DEV_XID_ERRORS" and key[1]
    ]
    assert (value, labels["err_code"], labels["err_msg"]) == (31, "31", "memory page fault")


def test_a_gpu_in_mig_mode_has_series_for_its_instances() -> None:
    parts = (
        DeviceSample(mig_uuid(0, 0), 10 * MIB, 0, MIB),
        DeviceSample(mig_uuid(0, 1), 10 * MIB, MIB, MIB, Activity(graphics=0.25)),
    )
    held = Holding(container(1, pod=Pod("team-a", "training")), (mig_uuid(0, 1),), (UUID,))
    found = lines_of(written(node(replace(WHOLE, gpu_percent=None, mig=parts), held, mig=2), DCGM))
    whose = LABELS.partition(",container")
    ours = [
        f'{whose[0]},GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"',
        f'{"".join(whose)},GPU_I_PROFILE="1g.10gb",GPU_I_ID="8"',
    ]
    expected = [
        f"DCGM_FI_DEV_FB_USED{{{ours[0]}}} 0", f"DCGM_FI_DEV_FB_USED{{{ours[1]}}} 1",
        f"DCGM_FI_DEV_FB_FREE{{{ours[0]}}} 9", f"DCGM_FI_DEV_FB_FREE{{{ours[1]}}} 8",
        *(f"DCGM_FI_DEV_GPU_TEMP{{{each}}} 61" for each in ours),
    ]  # fmt: skip
    names = {"DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_GPU_TEMP"}
    values = {key: value for key, value in found.items() if key[0] in names and key[1]}
    assert values == lines_of("\n".join(expected))
    assert "DCGM_FI_DEV_GPU_UTIL" not in {name for name, _ in found}
    # The instance's own activity; PCIe is the whole GPU's.
    [active] = [value for (name, of), value in found.items() if "GR_ENG" in name and of]
    assert active == 0.25
    assert "DCGM_FI_PROF_PCIE_TX_BYTES" not in {name for name, of in found if of}


def test_compute_instances_of_one_gpu_instance_are_one_series() -> None:
    snapshot = node(
        replace(WHOLE, mig=tuple(DeviceSample(mig_uuid(0, n), 9 * MIB) for n in (0, 1))),
        Holding(container(1, pod=Pod("team-a", "training")), (mig_uuid(0, 0),), (UUID,)),
        mig=2,
    )
    inventory = snapshot.state.node.value.inventory
    assert inventory is not None
    devices = tuple(
        replace(each, gpu_instance=2, compute_instance=n, profile="1c.3g.20gb")
        for n, each in enumerate(inventory.mig_devices)
    )
    snapshot = changed(snapshot, node=NodeSnapshot(replace(inventory, mig_devices=devices)))
    found = lines_of(written(snapshot, DCGM))
    labels = f'{LABELS},GPU_I_PROFILE="3g.20gb",GPU_I_ID="2"'
    [key] = [key for key in found if key[0] == "DCGM_FI_DEV_FB_TOTAL" and key[1]]
    assert key in lines_of(f"DCGM_FI_DEV_FB_TOTAL{{{labels}}} 9")


def test_of_several_containers_one_is_named() -> None:
    def held(name: str, *devices: str) -> Holding:
        return Holding(container(1, pod=Pod("team-a", name)), devices)

    snapshot = node(
        WHOLE, held("watches-all", UUID, gpu_uuid(1)), held("a", UUID), held("b", UUID),
        Holding(container(2, name="zoo"), (UUID,)),
    )  # fmt: skip
    assert set(re.findall(r'pod="(.*?)"', written(snapshot, DCGM))) == {"b"}
    alone = node(WHOLE, Holding(container(2, name="zoo"), (UUID,)))
    assert "pod=" not in written(alone, DCGM)
    assert "container=" not in written(alone, DCGM)


def test_a_gpu_that_the_inventory_does_not_have_is_left_out() -> None:
    assert lines_of(written(node(GpuSample("GPU-new", 1, 1)), DCGM)) == {}
    without = changed(node(), node=NodeSnapshot(node_with()))
    assert lines_of(written(without, DCGM)) == {}
