"""The files of faults: what is written when the agent stops."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import Config
from integration.node.faults.fault_log import Entry, FaultLog
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.causes import files
from shim.causes.record import Fault, read_causes
from tests.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.anyio

KEY = "k8s.io", "c0"


def fault(xid: int) -> Fault:
    return Fault(1.0, "xid", xid, gpu="GPU-0")


async def test_a_write_under_way_at_the_end_does_not_replace_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), list[int]()
    write = files._write_all

    def slow(state: str, pending: Mapping[Any, Entry], failed: dict[Any, str]) -> None:
        if not begun.is_set():
            begun.set()
            goes_on.wait(60)
        write(state, pending, failed)
        ended.append(1)

    monkeypatch.setattr(files, "_write_all", slow)
    monkeypatch.setattr(files, "_SHUTDOWN", 60.0)
    fault_log = FaultLog()

    def occurs(xid: int) -> None:
        fault_log.entries[KEY] = Entry((fault(xid),))
        fault_log.unwritten.add(KEY)
        ours.changed()

    context = Context(Config(state=str(tmp_path)), Options(), lambda *_, **__: None)
    ours = files.Files(context, fault_log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.keep)
        occurs(13)
        await until(begun.is_set, "the first write has started")
        occurs(31)
        tasks.cancel_scope.cancel()
        threading.Timer(0.1, goes_on.set).start()
    await until(lambda: len(ended) == 2, "both writes have ended")
    assert [each.code for each in read_causes(str(tmp_path), *KEY)] == [31]


async def test_a_fault_that_occurs_as_the_agent_stops_is_written(tmp_path: Path) -> None:
    fault_log = FaultLog()
    context = Context(Config(state=str(tmp_path)), Options(), lambda *_, **__: None)
    ours = files.Files(context, fault_log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ours.keep)
        await anyio.wait_all_tasks_blocked()
        fault_log.entries[KEY] = Entry((fault(13),))
        fault_log.unwritten.add(KEY)
        ours.changed()
        tasks.cancel_scope.cancel()
    assert [each.code for each in read_causes(str(tmp_path), *KEY)] == [13]
