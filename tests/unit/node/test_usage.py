"""The usage of each container: owners of processes, the join, and the share of energy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.containers.bundles import Container
from integration.containers.cgroups import cgroups_in, own_cgroup
from integration.containers.owners import Owners, owner_of
from integration.containers.procfs import Procfs
from integration.node.holders.energy import Meter
from integration.node.holders.values import DeviceUse, Holding, Ledger
from integration.node.usage import join, owners_of, usage_of
from integration.nvml.values import (
    COMPUTE,
    GRAPHICS,
    DeviceSample,
    GpuSample,
    ProcessUse,
    Sample,
)

if TYPE_CHECKING:
    from pathlib import Path


def container(name: str, pid: int = 0) -> Container:
    return Container(name, "ns", f"/tasks/ns/{name}", None, name, name, sandbox=False, pid=pid)


A: Final = container("a" * 12, 10)
B: Final = container("b" * 12, 20)
GPU: Final = "GPU-1"

# -- owners of processes ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "process", "is_its"),
    [
        ("0::/kubepods/podx/ID", "0::/kubepods/podx/ID", True),
        ("0::/kubepods/podx/ID", "0::/kubepods/podx/ID/below/it", True),
        ("0::/kubepods/podx/ID/init.scope", "0::/kubepods/podx/ID/user.slice/a", True),
        ("0::/kubepods/podx/ID", "0::/kubepods/podx/IDx", False),
        ("0::/kubepods/podx/ID", "0::/kubepods/podx", False),
        ("0::/system.slice/docker-ID.scope", "0::/system.slice/docker-ID.scope/x", True),
        ("0::/a.slice/cri-containerd:x:ID", "0::/a.slice/cri-containerd:x:ID", True),
        ("4:memory:/x/ID\n1:name=systemd:/x/ID", "4:memory:/\n1:name=systemd:/x/ID/y", True),
        ("4:memory:/x/ID\n0::/", "4:memory:/\n0::/", False),
        ("0::/../../podx/ID", "0::/../../podx/ID/x", True),
        ("0::/", "0::/", False),
        ("0::/..", "0::/..", False),
        ("0::/own:name:with:colons", "0::/own:name:with:colons/x", True),
        ("", "0::/x", False),
        # A hierarchy that no runtime manages: all processes are in containerd's cgroup there.
        ("4:memory:/x/ID\n13:misc:/containerd", "4:memory:/y\n13:misc:/containerd", False),
        ("4:memory:/own\n13:misc:/containerd", "4:memory:/y\n13:misc:/containerd", False),
        ("4:memory:/own\n13:misc:/containerd", "4:memory:/own/x\n13:misc:/containerd", True),
    ],
)
def test_a_process_is_its_cgroup_s(
    tmp_path: Path, init: str, process: str, *, is_its: bool
) -> None:
    shim = "4:memory:/\n13:misc:/containerd\n0::/shims"
    for pid, text in ((9, shim), (10, init), (11, process)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cgroup").write_text(text.replace("ID", A.id))
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) S {pid - 1} " + "0 " * 40)
    owners = Owners([A, container("none")], Procfs(str(tmp_path)))
    assert owners.of(11) == (A if is_its else None)
    assert owners.of(99) is None


def test_the_innermost_of_nested_containers_is_meant() -> None:
    outer, inner = f"/x/{A.id}", f"/x/{A.id}/docker/{B.id}"
    owners = {("", outer): A, ("", inner): B}
    assert owner_of([("", f"{inner}/y")], owners) is B
    assert owner_of([("", f"{outer}/y")], owners) is A


@given(st.text(), st.text(alphabet="/ab:.-", min_size=1))
def test_whatever_procfs_says_is_read(text: str, path: str) -> None:
    assert isinstance(cgroups_in(text), tuple)
    own = own_cgroup(f"/{path}", "ab")
    assert f"/{path}".startswith(own)
    assert owner_of([("", f"/{path}")], {}) is None


def test_nobody_is_looked_for_without_processes() -> None:
    assert owners_of(Sample(1.0), [A], "/nonexistent") == {}


def test_a_process_that_was_started_after_the_sample_used_nothing_of_it(tmp_path: Path) -> None:
    cgroup = f"0::/kubepods/{A.id}\n"
    for pid, started in ((A.pid, 1.0), (11, 50.0)):
        (tmp_path / str(pid)).mkdir()
        ticks = int(started * os.sysconf("SC_CLK_TCK"))
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (x) S 1 {'0 ' * 17}{ticks} {'0 ' * 9}")
        (tmp_path / str(pid) / "cgroup").write_text(cgroup)
    for when, owner in ((60.0, A), (40.0, None)):
        sample = Sample(when, processes=(ProcessUse(11, GPU, COMPUTE, 1 << 30),))
        assert owners_of(sample, [A], str(tmp_path)) == {11: owner}


# -- the join --------------------------------------------------------------------------------


def process(pid: int, device: str = GPU, **uses: int) -> ProcessUse:
    return ProcessUse(pid, device, COMPUTE, **uses)


def whole(uuid: str = GPU, joules: float | None = None) -> GpuSample:
    return GpuSample(uuid, energy_joules=joules)


def test_processes_are_summed_by_container_and_device() -> None:
    sample = Sample(
        1.0,
        gpus=(whole(), whole("GPU-2")),
        processes=(
            process(11, memory_bytes=100, sm_percent=30, memory_percent=5),
            process(12, memory_bytes=50, sm_percent=80),
            ProcessUse(12, GPU, GRAPHICS, memory_bytes=60, encoder_percent=7),
            process(13, "GPU-2"),
            process(21, memory_bytes=1),
            process(99, memory_bytes=5),
        ),
    )
    ledger = Ledger(holdings=(Holding(A, (GPU, "GPU-3")),), containers=(A, B))
    owners = {11: A, 12: A, 13: A, 21: B}
    assert join(sample, ledger, owners) == (
        DeviceUse(Holding(A, (GPU, "GPU-3")), GPU, (11, 12), 160, 100, 5, 7, None),
        DeviceUse(Holding(A, (GPU, "GPU-3")), "GPU-2", (13,)),
        # Held but unused, and unknown to NVML: only its memory, 0, is known.
        DeviceUse(Holding(A, (GPU, "GPU-3")), "GPU-3", (), 0),
        DeviceUse(Holding(B, ()), GPU, (21,), 1),
        DeviceUse(None, GPU, (99,), 5),
    )


def test_who_holds_and_does_nothing_uses_nothing_unless_nvml_is_silent() -> None:
    ledger = Ledger(holdings=(Holding(A, (GPU,)),))
    (idle,) = join(Sample(1.0, gpus=(whole(),)), ledger, {})
    assert (idle.memory_bytes, idle.sm_percent, idle.decoder_percent) == (0, 0, 0)
    # If it does not answer, or is partitioned, its memory is still known to be unused.
    for gpu in (GpuSample(GPU, lost="gone"), GpuSample(GPU, mig=(DeviceSample("MIG-1"),))):
        (use,) = join(Sample(1.0, gpus=(gpu,)), ledger, {})
        assert (use.memory_bytes, use.sm_percent) == (0, None)
    (unknown,) = join(Sample(1.0, failure="hangs"), ledger, {})
    assert unknown == DeviceUse(Holding(A, (GPU,)), GPU)


_PROCESSES: Final = st.lists(
    st.builds(
        ProcessUse,
        st.integers(1, 8),
        st.sampled_from([GPU, "GPU-2", "MIG-1"]),
        st.sampled_from([COMPUTE, GRAPHICS]),
        memory_bytes=st.none() | st.integers(0, 1000),
        sm_percent=st.none() | st.integers(0, 100),
    ),
    max_size=12,
)


@given(_PROCESSES, st.dictionaries(st.integers(1, 8), st.sampled_from([A, B, None])))
def test_no_process_is_lost_or_counted_twice(
    processes: list[ProcessUse], owners: dict[int, Container | None]
) -> None:
    ledger = Ledger(holdings=(Holding(A, (GPU,)),))
    uses = join(Sample(1.0, processes=tuple(processes)), ledger, owners)
    listed = [(pid, use.device) for use in uses for pid in use.processes]
    assert sorted(listed) == sorted({(each.pid, each.device) for each in processes})
    for use in uses:
        whose = use.holding.container if use.holding else None
        assert all(owners.get(pid) == whose for pid in use.processes)
        assert use.sm_percent is None or 0 <= use.sm_percent <= 100
    most: dict[tuple[int, str], int] = {}
    for each in processes:
        key = (each.pid, each.device)
        most[key] = max(most.get(key, 0), each.memory_bytes or 0)
    assert sum(use.memory_bytes or 0 for use in uses) == sum(most.values())


# -- energy ----------------------------------------------------------------------------------


def test_energy_is_shared_by_who_computed() -> None:
    meter = Meter()
    meter.update(Sample(10.0, gpus=(whole(joules=1000),)), {("/a", GPU): 50})
    assert meter.joules("/a", GPU) == 0
    busy = {("/a", GPU): 60, ("/b", GPU): 20, ("", GPU): 20}
    later = Sample(12.0, gpus=(whole(joules=1100),))
    meter.update(later, busy)
    meter.update(later, busy)  # once
    assert (meter.joules("/a", GPU), meter.joules("/b", GPU)) == (60, 20)
    meter.update(Sample(13.0, gpus=(whole(joules=1200),)), {})  # not attributed
    meter.update(Sample(14.0, failure="hangs"), {})
    meter.update(Sample(15.0, gpus=(whole(joules=5),)), busy)  # the driver was reloaded
    meter.update(Sample(16.0, gpus=(whole(joules=15),)), {("/b", GPU): 1})
    assert (meter.joules("/a", GPU), meter.joules("/b", GPU)) == (60, 30)
    meter.keep(["/b"])
    assert (meter.joules("/a", GPU), meter.joules("/b", GPU)) == (0, 30)


def test_after_a_long_time_only_the_end_of_it_is_attributed() -> None:
    meter = Meter()
    for when, joules in ((0.5, 0.0), (1200.5, 1200.0)):
        meter.update(Sample(when, gpus=(whole(joules=joules),)), {("/a", GPU): 10})
    assert meter.joules("/a", GPU) == 120


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1000), st.floats(0, 1e6), st.integers(0, 100), st.integers(0, 9)),
        max_size=10,
    )
)
def test_what_is_attributed_never_shrinks_and_is_no_more_than_was_drawn(
    steps: list[tuple[float, float, int, int]],
) -> None:
    meter, when, before, drawn, last = Meter(), 0.0, None, 0.0, (0.0, 0.0)
    for seconds, joules, one, other in steps:
        when += seconds
        drawn += max(0.0, joules - before) if before is not None else 0.0
        before = joules
        busy = {("/a", GPU): one, ("/b", GPU): other}
        meter.update(Sample(when, gpus=(whole(joules=joules),)), busy)
        now = (meter.joules("/a", GPU), meter.joules("/b", GPU))
        assert now >= last or now == pytest.approx(last)
        assert now[0] >= last[0]
        assert now[1] >= last[1]
        assert sum(now) <= drawn * (1 + 1e-9) + 1e-9
        last = now


def test_usage_has_energy_where_nvml_tells_who_computed() -> None:
    meter = Meter()
    mig = GpuSample("GPU-2", energy_joules=5.0, mig=(DeviceSample("MIG-1"),))
    ledger = Ledger(holdings=(Holding(A, (GPU,)), Holding(B, ("MIG-1",))), containers=(A, B))
    for when, joules in ((1.0, 10.0), (2.0, 30.0)):
        sample = Sample(
            when, gpus=(whole(joules=joules), mig), processes=(process(11, sm_percent=1),)
        )
        uses = usage_of(sample, ledger, {11: A}, meter)
    assert [use.energy_joules for use in uses] == [20.0, None]
    assert [each.container for each in ledger.holders("MIG-1")] == [B]
    gone = Ledger(containers=(B,))
    usage_of(Sample(3.0), gone, {}, meter)
    assert meter.joules(A.bundle, GPU) == 0
