"""A snapshot of a very large node, as the services of the agent would collect it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hooks.node.gpus import Gpu, MigDevice
from integration.containers.bundles import Container, Pod
from integration.node.device_health.device_state import Condition
from integration.node.holders.values import DeviceUse, Holding, Ledger, Unheld
from integration.node.mps.clients import MpsDaemon
from integration.node.services.metrics.agent import own_process
from integration.node.services.metrics.snapshot import Snapshot
from integration.node.state.store import State
from integration.node.values.counters import FAILED, OK, REFUSED, Counters
from integration.node.values.health import HealthState
from integration.node.values.resources import TIME_SLICING, Device, Resource
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import (
    Activity,
    DeviceSample,
    Fabric,
    GpuEvent,
    GpuSample,
    Sample,
    SwitchError,
)
from tests.harness.node_state import publish, with_values
from tests.unit.node.inventories import DRIVER, node_with

BOOT = 1_700_000_000.0
ACTIVITY = Activity(0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 1e9, 2e9, 3e9, 4e9)


def gpu_uuid(index: int) -> str:
    return f"GPU-{index:08x}-7c6a-4a61-bc33-9cd9f5ff8d32"


def mig_uuid(gpu: int, index: int) -> str:
    return f"MIG-{gpu:04x}{index:04x}-7c6a-4a61-bc33-9cd9f5ff8d32"


def container(number: int, *, name: str = "main", pod: Pod | None = None) -> Container:
    return Container(
        id=f"{number:064x}",
        namespace="k8s.io",
        bundle="",
        pod=pod,
        name=name,
        group="",
        sandbox=False,
        pid=1000 + number,
    )


def holding(number: int, uuid: str, gpu: str, **more: Any) -> Holding:
    pod = Pod("team-a", f"training-{number:05d}")
    return Holding(container(number, pod=pod), (uuid,), (gpu,), **more)


def large(*, gpus: int = 16, mig: int = 7, containers: int = 500) -> Snapshot:
    """Build a snapshot with the maximum of everything."""
    boards = tuple(
        Gpu(
            index=n,
            minor=n,
            uuid=gpu_uuid(n),
            bus_id=f"0000:{n:02x}:00.0",
            model="NVIDIA H100 80GB HBM3",
            mig=bool(mig),
            compute_capability="9.0",
            brand="tesla",
        )
        for n in range(gpus)
    )
    parts = tuple(
        MigDevice(
            gpu=n, index=m, uuid=mig_uuid(n, m), gpu_instance=7 + m, compute_instance=0,
            profile="1g.10gb",
        )
        for n in range(gpus)
        for m in range(mig)
    )  # fmt: skip
    driver = replace(DRIVER, version="550.163.01")
    inventory = node_with(*boards, mig=parts, driver=driver, cuda_version="12.4")
    uuids = [*(each.uuid for each in boards), *(each.uuid for each in parts)]
    ledger = _ledger(gpus, mig, containers)
    state = State()
    state.counters = _counters()
    publish(state.node, NodeSnapshot(inventory, ("something",)))
    publish(state.health, {uuid: Condition(since=BOOT + 5) for uuid in uuids})
    publish(state.xid_counts, {(gpu_uuid(0), 31, "team-a/training-00000/main"): 2, ("", 79, ""): 1})
    publish(state.ledger, ledger)
    publish(
        state.usage,
        (
            *(
                DeviceUse(each, each.devices[0], (1, 2), 1 << 30, 50, 25, 0, 0, 12345.5)
                for each in ledger.holdings
            ),
            DeviceUse(None, gpu_uuid(0), (7,), 1 << 20),
        ),
    )
    publish(state.resources, _resources(gpus, mig))
    publish(
        state.mps_daemons,
        {"nvidia.com/gpu": MpsDaemon("nvidia.com/gpu", (gpu_uuid(0),), "it ended", restarts=3)},
    )
    state.faults.report("plugin", "no kubelet")
    sample = _sample(gpus, mig)
    return Snapshot(state, BOOT, sample, 0.01, ("plugin", "metrics"), own_process())


def changed(snapshot: Snapshot, **known: Any) -> Snapshot:
    """Return a copy with other topics, another sample or other services."""
    own = {name: known.pop(name) for name in ("sample", "services") if name in known}
    return replace(snapshot, state=with_values(snapshot.state, **known), **own)


def _sample(gpus: int, mig: int) -> Sample:
    return Sample(
        10.0,
        "550.163.01",
        tuple(
            GpuSample(
                gpu_uuid(n), 1 << 36, 1 << 35, 50, 25, 1, 0, 300.5, 1e6, 61, 1_980_000_000,
                2_619_000_000, 3, 0, False, False, 0x44,
                tuple(
                    DeviceSample(mig_uuid(n, m), 1 << 33, 1 << 32, activity=ACTIVITY)
                    for m in range(mig)
                ),
                memory_reserved_bytes=1 << 30, memory_temperature_celsius=70, pcie_replays=2,
                nvlink_sent_bytes=1 << 40, nvlink_received_bytes=1 << 41, rows_corrected=1,
                rows_uncorrected=0, pages_corrected=0, pages_uncorrected=1, pages_pending=True,
                activity=ACTIVITY,
                unrepairable_memory=False, channel_repair_pending=False, tpc_repair_pending=True,
                fabric=Fabric("completed", mig_uuid(0, 0).removeprefix("MIG-"), 1, "healthy"),
            )
            for n in range(gpus)
        ),
        notes=("one",),
    )  # fmt: skip


def _ledger(gpus: int, mig: int, containers: int) -> Ledger:
    holdings = []
    for number in range(containers):
        gpu = number % gpus
        uuid = mig_uuid(gpu, number % mig) if mig else gpu_uuid(gpu)
        stale = "driver 535 is gone" if number % 10 == 1 else ""
        holdings.append(holding(number, uuid, gpu_uuid(gpu), stale=stale))
    unheld = Unheld("team-a", "training-new", "main", "nvidia.com/gpu", gpu_uuid(0))
    missing = Unheld("team-a", "training-odd", "main", "nvidia.com/gpu", gpu_uuid(0), pid=77)
    return Ledger(10.0, tuple(holdings), ("one could not be read",), (unheld, missing))


def _resources(gpus: int, mig: int) -> tuple[Resource, ...]:
    devices = tuple(
        Device(
            f"{mig_uuid(n, m)}::{r}", mig_uuid(n, m), gpu_uuid(n), f"{n}:{m}", n,
            state=HealthState.UNHEALTHY if n == 1 else HealthState.HEALTHY,
        )
        for n in range(gpus)
        for m in range(mig)
        for r in range(48)
    )  # fmt: skip
    name = "nvidia.com/mig-1g.10gb.shared"
    return (
        Resource(name, devices, TIME_SLICING, 48, original="nvidia.com/mig-1g.10gb"),
        Resource("nvidia.com/gpu", ()),
    )


def _counters() -> Counters:
    counters = Counters()
    for result in (OK, REFUSED):
        counters.allocated("nvidia.com/gpu", 0.003, result)
    counters.registered("nvidia.com/gpu", FAILED)
    counters.updated("nvidia.com/gpu")
    counters.restarted("plugin")
    counters.checked(0.2, faults=False)
    counters.add_event(GpuEvent(9.0, "xid", gpu_uuid(0), xid=31))
    switch = SwitchError("nvidia-nvswitch0", 20034, "fatal", 28)
    counters.add_event(GpuEvent(9.0, "sxid", "", bus_id="0000:c2:00.0", switch=switch))
    counters.faulted("xid", 79, "device")
    return counters
