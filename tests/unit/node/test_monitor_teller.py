"""When the events of both sources are sent, and with which fields."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import Config
from integration.containers.procfs import Procfs
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.monitor import service as component
from integration.node.services.monitor.service import EventForwarder
from integration.node.state.store import State
from integration.nvml.snapshot import NodeSnapshot
from integration.nvml.values import GpuEvent, SwitchError
from tests.harness.node_state import publish
from tests.unit.node.inventories import inventory

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

pytestmark = pytest.mark.anyio

WHOLE, DIVIDED = "GPU-0", "GPU-1"


def xid(gpu: str, source: str = "kernel", **more: Any) -> GpuEvent:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return GpuEvent(now, "xid", gpu, xid=31, source=source, **more)


def told(stream: MemoryObjectReceiveStream[GpuEvent]) -> list[GpuEvent]:
    """Return the events that are in the stream now, without waiting."""
    found: list[GpuEvent] = []
    while True:
        try:
            found.append(stream.receive_nowait())
        except anyio.WouldBlock:
            return found


@pytest.mark.parametrize(
    ("event", "reads_log", "at_once"),
    [
        (xid(WHOLE), True, True),
        (xid(DIVIDED), True, False),  # NVML names the instance
        (xid(DIVIDED, gpu_instance=2), True, True),
        (xid("GPU-nobody-knows"), True, False),
        (xid(WHOLE, "nvml"), True, False),  # the log names the process
        (xid(WHOLE, "nvml"), False, True),
    ],
)
async def test_an_event_to_which_nobody_adds_anything_is_told_at_once(
    event: GpuEvent, reads_log: bool, at_once: bool
) -> None:
    state = State()
    publish(state.node, NodeSnapshot(inventory=inventory()))
    with state.gpu_events.listen() as stream:
        EventForwarder(state, reads_log=reads_log).add(event)
        assert told(stream) == ([event] if at_once else [])


@pytest.mark.parametrize(
    ("event", "early"),
    [
        (replace(xid(WHOLE, "nvml"), xid=79), True),
        (replace(xid(WHOLE, "nvml"), xid=154), False),  # the log names the recovery action
        (replace(xid(WHOLE, "nvml"), xid=149), False),  # the log tells whether it is fatal
        (replace(xid(DIVIDED, "nvml"), xid=94), False),  # which instance?
        (replace(xid(DIVIDED, "nvml", gpu_instance=2), xid=94), True),
        (replace(xid(DIVIDED, "nvml"), xid=79), True),  # it affects all instances
        (replace(xid(DIVIDED), xid=79), True),
        (replace(xid(WHOLE), xid=79), False),  # it is sent immediately anyway
        (replace(xid("GPU-nobody-knows", "nvml"), xid=79), False),
    ],
)
async def test_an_event_that_waits_is_told_early_if_its_devices_are_known(
    event: GpuEvent, early: bool
) -> None:
    state = State()
    publish(state.node, NodeSnapshot(inventory=inventory()))
    with state.early_xids.listen() as stream:
        EventForwarder(state).add(event)
        assert told(stream) == ([event] if early else [])


async def test_where_a_process_was_is_known_though_it_is_gone_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(component, "Procfs", lambda: Procfs(str(tmp_path)))
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(f"7 (train) S 1 {'0 ' * 30}")
    (tmp_path / "7" / "cgroup").write_text("0::/kubepods/id-a\n")
    state = State()
    publish(state.node, NodeSnapshot(inventory=inventory()))
    with state.gpu_events.listen() as stream:
        forwarder = EventForwarder(state)
        event = xid(DIVIDED, pid=7)
        forwarder.add(event)
        (tmp_path / "7" / "cgroup").unlink()
        forwarder.add(replace(event, source="nvml", pid=0, gpu_instance=2))
        (found,) = told(stream)
    assert (found.cgroups, found.gpu_instance) == ("0::/kubepods/id-a\n", 2)


@pytest.mark.parametrize(("port", "gpu"), [(7, WHOLE), (8, ""), (None, "")])
def test_nvml_knows_the_gpu_at_the_port_of_a_switch(
    monkeypatch: pytest.MonkeyPatch, port: int | None, gpu: str
) -> None:
    node = inventory()
    context = Context(Config(), Options(), lambda *_, **__: None)
    publish(context.state.node, NodeSnapshot(inventory=node))
    links = [{"bus_id": "00000000:18:00.0", "links": [["00000000:C2:00.0", 2, 7]]}]
    answer = json.dumps({"gpus": links, "between": []}).encode()
    monkeypatch.setattr(context.topologies, "_ask", lambda: answer)
    error = SwitchError("nvidia-nvswitch0", 20034, "fatal", port)
    event = GpuEvent(1.0, "sxid", "", bus_id="0000:c2:00.0", switch=error)
    assert component._with_uuid(event, context).gpu == "", "NVML is not asked for it"
    context.topologies.find(node)
    assert component._with_uuid(event, context).gpu == gpu
