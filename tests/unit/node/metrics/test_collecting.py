"""The metrics of a node follow the conventions, omit unknown values and contain no duplicates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from integration.containers.bundles import Pod
from integration.node.device_health.device_state import Condition
from integration.node.holders.values import DeviceUse, Holding, Ledger, Unheld
from integration.node.services.metrics.snapshot import Snapshot
from integration.node.services.metrics.text import (
    METRICS,
    OPENMETRICS,
    PLAIN,
    Form,
    collect,
    write,
)
from integration.node.state.store import State
from integration.node.values.counters import OK
from integration.node.values.health import HealthState
from integration.nvml.values import GpuEvent, GpuSample, Sample, SwitchError
from tests.harness.exposition import read_told
from tests.unit.node.metrics.nodes import (
    BOOT,
    changed,
    container,
    gpu_uuid,
    holding,
    large,
    mig_uuid,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


def values(snapshot: Snapshot) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return each series, as a third-party parser reads it."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in read_told(write(collect(snapshot), OPENMETRICS).decode()).values():
        for (name, of), value in family.series.items():
            found.setdefault(name, {})[of] = value
    return found


def labels(**names: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(names.items()))


def of_gpu(index: int, **more: str) -> Mapping[str, str]:
    return {
        "gpu": str(index), "uuid": gpu_uuid(index), "pci_bus_id": f"0000:{index:02x}:00.0",
        "model": "NVIDIA H100 80GB HBM3", **more,
    }  # fmt: skip


NOTHING = Snapshot(State(), BOOT)


def test_every_family_is_told_of_a_node_that_has_everything() -> None:
    snapshot = large(gpus=2, mig=2, containers=4)
    missing = {name for family in METRICS for name in family.samples} - values(snapshot).keys()
    assert missing == set()


def test_what_is_counted_while_a_thread_writes_belongs_to_the_next_scrape() -> None:
    snapshot = large(gpus=1, mig=0, containers=1)
    collected, counters = collect(snapshot), snapshot.state.counters
    before = write(collected, PLAIN)
    counters.faulted("xid", 31, "application")
    counters.allocated("nvidia.com/other", 0.1, OK)
    switch = SwitchError("nvidia-nvswitch9", 11001, "fatal")
    counters.add_event(GpuEvent(1.0, "sxid", "", switch=switch))
    assert write(collected, PLAIN) == before
    assert write(collect(snapshot), PLAIN) != before


def test_an_agent_that_knows_nothing_yet_says_so() -> None:
    told = values(changed(NOTHING, services=("metrics",)))
    assert told["nvshim_nvml_up"] == {(): 0.0}
    assert told["nvshim_part_up"] == {labels(part="metrics"): 1.0}
    assert "nvshim_gpu_up" not in told
    assert "nvshim_last_good_look_timestamp_seconds" not in told


def test_units_are_base_units() -> None:
    told = values(large(gpus=1, mig=0, containers=1))
    of = labels(**of_gpu(0))
    assert told["nvshim_gpu_utilization_ratio"][of] == 0.5
    assert told["nvshim_gpu_memory_used_bytes"][of] == 1 << 35
    assert told["nvshim_gpu_sm_clock_hertz"][of] == 1.98e9
    assert told["nvshim_nvml_sample_timestamp_seconds"][()] == BOOT + 10
    throttled = told["nvshim_gpu_clocks_throttled"]
    assert {dict(of)["reason"] for of, yes in throttled.items() if yes} == {
        "sw_power_cap", "hw_thermal_slowdown",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [(0x200, {"board_limit"}), (0x400, {"reliability"}), (1 << 63, {"unknown"}), (0, set()),
     (0x1801, {"gpu_idle", "unknown"})],
)  # fmt: skip
def test_each_reason_of_low_clocks_is_told_also_one_that_a_later_driver_adds(
    bits: int, reasons: set[str]
) -> None:
    snapshot = large(gpus=1, mig=0, containers=1)
    assert snapshot.sample is not None
    gpus = tuple(replace(gpu, throttle_reasons=bits) for gpu in snapshot.sample.gpus)
    told = values(replace(snapshot, sample=replace(snapshot.sample, gpus=gpus)))
    throttled = told["nvshim_gpu_clocks_throttled"]
    assert {dict(of)["reason"] for of, yes in throttled.items() if yes} == reasons


def test_a_mig_device_is_told_with_its_gpu() -> None:
    told = values(large(gpus=2, mig=3, containers=0))
    part = {
        "gpu": "1", "uuid": gpu_uuid(1), "mig": "2", "mig_uuid": mig_uuid(1, 2),
    }  # fmt: skip
    assert told["nvshim_mig_memory_used_bytes"][labels(**part, profile="1g.10gb")] == 1 << 32
    assert told["nvshim_device_health"][labels(**part, state="healthy")] == 1


def test_without_nvml_what_is_known_otherwise_is_told_and_nothing_of_before() -> None:
    snapshot = large(gpus=2, mig=2, containers=4)
    for sample in (None, Sample(20.0, failure="it hangs")):
        told = values(changed(snapshot, sample=sample))
        assert told["nvshim_nvml_up"] == {(): 0.0}
        for gone in ("gpu_up", "gpu_power_watts", "mig_memory_used_bytes",
                     "container_gpu_memory_used_bytes", "outside_gpu_processes"):  # fmt: skip
            assert f"nvshim_{gone}" not in told
        assert len(told["nvshim_gpu_info"]) == 2
        assert len(told["nvshim_container_device_info"]) == 4
        assert len(told["nvshim_device_health"]) == 6 * len(HealthState)


def test_a_gpu_that_is_lost_is_down_and_has_no_values() -> None:
    snapshot = large(gpus=3, mig=0, containers=0)
    assert snapshot.sample is not None
    first, second, _ = snapshot.sample.gpus
    # NVML cannot open the second, no longer lists the third, and alone lists a fourth.
    gpus = (first, replace(second, lost="GPU is lost"), GpuSample("GPU-new"))
    told = values(changed(snapshot, sample=replace(snapshot.sample, gpus=gpus)))
    up = {dict(of)["uuid"]: value for of, value in told["nvshim_gpu_up"].items()}
    assert up == {gpu_uuid(0): 1, gpu_uuid(1): 0, gpu_uuid(2): 0, "GPU-new": 1}
    assert {dict(of)["uuid"] for of in told["nvshim_gpu_power_watts"]} == {gpu_uuid(0)}


def test_gpus_whose_uuid_nobody_knows_are_told_apart_by_their_place() -> None:
    snapshot = large(gpus=2, mig=0, containers=0)
    inventory = snapshot.state.node.value.inventory
    assert inventory is not None
    gpus = tuple(replace(gpu, uuid="") for gpu in inventory.gpus)
    seen = replace(snapshot.state.node.value, inventory=replace(inventory, gpus=gpus))
    told = values(changed(snapshot, node=seen, sample=None))
    assert {dict(of)["gpu"] for of in told["nvshim_gpu_info"]} == {"0", "1"}
    assert len(told["nvshim_device_containers"]) == 2


def test_what_nvml_does_not_say_is_absent_and_not_zero() -> None:
    snapshot = large(gpus=1, mig=0, containers=0)
    told = values(changed(snapshot, sample=Sample(1.0, gpus=(GpuSample(gpu_uuid(0)),))))
    assert told["nvshim_nvml_up"] == {(): 1.0}
    assert "nvshim_gpu_ecc_errors_total" not in told
    assert "nvshim_gpu_memory_used_bytes" not in told


def test_a_container_is_told_by_its_pod_or_by_its_own_name() -> None:
    in_pod = holding(1, gpu_uuid(0), gpu_uuid(0), orphan="nobody knows it")
    named = Holding(container(2, name="web"), (gpu_uuid(0),))
    nameless = Holding(container(3, name=""), (gpu_uuid(0),))
    told = values(changed(NOTHING, ledger=Ledger(1.0, (in_pod, named, nameless))))
    assert told["nvshim_container_orphan"] == {
        labels(namespace="team-a", pod="training-00001", container="main"): 1,
        labels(container="web"): 0,
        labels(container=f"{3:064x}"): 0,
    }


def test_a_container_is_found_by_its_ids() -> None:
    one = Holding(container(1, pod=Pod("team-a", "training", "uid-1")), (gpu_uuid(0),))
    told = values(changed(NOTHING, ledger=Ledger(1.0, (one,))))
    whose = {"namespace": "team-a", "pod": "training", "container": "main", "pod_uid": "uid-1"}
    ids = {"container_id": f"{1:064x}", "runtime_namespace": "k8s.io"}
    assert told["nvshim_container_info"] == {labels(**whose, **ids): 1}


def test_a_container_that_runs_without_what_it_was_given_is_told_of() -> None:
    given = [
        Unheld("team-a", "training", "main", "nvidia.com/gpu", gpu_uuid(n), pid=pid)
        for n, pid in enumerate((77, 77, 0))
    ]
    told = values(changed(NOTHING, ledger=Ledger(1.0, unheld=tuple(given))))
    whose = labels(namespace="team-a", pod="training", container="main")
    assert told["nvshim_container_devices_missing"] == {whose: 2}
    assert told["nvshim_resource_devices_unheld"] == {labels(resource="nvidia.com/gpu"): 3}


def test_two_containers_of_one_name_are_told_of_as_one() -> None:
    twins = (
        holding(1, gpu_uuid(0), gpu_uuid(0)),
        replace(holding(1, gpu_uuid(0), gpu_uuid(0), stale="gone"), container=replace(
            container(99, pod=Pod("team-a", "training-00001")))),
    )  # fmt: skip
    usage = tuple(DeviceUse(each, gpu_uuid(0), (n,), 100, 10) for n, each in enumerate(twins))
    snapshot = changed(large(gpus=1, mig=0, containers=0), ledger=Ledger(1.0, twins), usage=usage)
    told = values(snapshot)
    assert list(told["nvshim_container_gpu_memory_used_bytes"].values()) == [200]
    assert list(told["nvshim_container_gpu_processes"].values()) == [2]
    assert list(told["nvshim_container_stale"].values()) == [1]
    assert len(told["nvshim_container_info"]) == 2


def test_what_is_gone_is_told_no_more() -> None:
    snapshot = large(gpus=2, mig=0, containers=2)
    before = values(snapshot)
    after = values(
        changed(snapshot, ledger=Ledger(2.0, snapshot.state.ledger.value.holdings[:1]), usage=())
    )
    name = "nvshim_container_device_info"
    assert (len(before[name]), len(after[name])) == (2, 1)


def test_an_xid_is_told_with_the_container_that_caused_it() -> None:
    snapshot = large(gpus=1, mig=0, containers=1)
    told = values(changed(snapshot, xid_counts={
        (gpu_uuid(0), 31, "team-a/training-00000/main"): 3, (gpu_uuid(0), 31, ""): 1,
        (gpu_uuid(0), 79, "web"): 1, ("", 45, "a/b"): 1,
    }))["nvshim_gpu_xid_errors_total"]  # fmt: skip
    gpu = {"gpu": "0", "uuid": gpu_uuid(0)}
    assert told == {
        labels(**gpu, xid="31", namespace="team-a", pod="training-00000", container="main"): 3,
        labels(**gpu, xid="31"): 1,
        labels(**gpu, xid="79", container="web"): 1,
        labels(xid="45", container="a/b"): 1,
    }


def test_of_many_xids_each_is_counted_and_not_each_pod_told() -> None:
    xids = {(gpu_uuid(0), 31, f"team-a/job-{n}/main"): 1 for n in range(4000)}
    told = values(changed(large(gpus=1, mig=0, containers=0), xid_counts=xids))
    series = told["nvshim_gpu_xid_errors_total"]
    assert sum(series.values()) == 4000
    assert len(series) <= 600


def test_a_device_is_in_one_state() -> None:
    health = {
        "GPU-gone": Condition(HealthState.UNHEALTHY, since=BOOT, xid=79),
        "MIG-gone": Condition(HealthState.RECOVERING),
    }
    told = values(changed(NOTHING, health=health))
    state = {of: value for of, value in told["nvshim_device_health"].items() if value}
    assert state == {
        labels(uuid="GPU-gone", state="unhealthy"): 1,
        labels(mig_uuid="MIG-gone", state="recovering"): 1,
    }
    assert told["nvshim_device_last_xid"][labels(uuid="GPU-gone")] == 79
    assert list(told["nvshim_device_health_changed_timestamp_seconds"].values()) == [BOOT]


def test_events_that_cannot_be_had_are_said_of_one_gpu_or_of_all() -> None:
    snapshot = large(gpus=2, mig=0, containers=0)
    name = "nvshim_gpu_events_watched"
    one = values(changed(snapshot, unwatched={gpu_uuid(1): "not supported"}))[name]
    assert {dict(of)["gpu"]: yes for of, yes in one.items()} == {"0": 1, "1": 0}
    every = values(changed(snapshot, unwatched={"": "NVML failed"}))[name]
    assert set(every.values()) == {0}


def test_shares_are_counted_by_their_state() -> None:
    told = values(large(gpus=2, mig=7, containers=0))["nvshim_resource_devices"]
    shared = "nvidia.com/mig-1g.10gb.shared"
    assert told[labels(resource=shared, state="healthy")] == 7 * 48
    assert told[labels(resource=shared, state="unhealthy")] == 7 * 48
    assert told[labels(resource="nvidia.com/gpu", state="healthy")] == 0


@pytest.mark.parametrize("form", [PLAIN, OPENMETRICS])
def test_the_largest_node_fits_into_a_scrape(form: Form) -> None:
    text = write(collect(large()), form).decode()
    per_family = Counter(
        line.split("{")[0] for line in text.splitlines() if not line.startswith("#")
    )
    # No family has one series per share of a device, or per pair of anything.
    assert max(per_family.values()) <= 512
    assert len(text) < 2_000_000
