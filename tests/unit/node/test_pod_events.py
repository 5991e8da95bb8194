"""The Events on pods whose containers were hit by a fault or caused one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from hooks.config import Config
from integration.node.faults.fault_log import GPU_MEMORY, Entry, FaultLog
from integration.node.faults.hits import Hit
from integration.node.holders.values import Denied, Ledger
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services import pod_events
from integration.node.services.pod_events import notices_of_faults
from shim.causes.record import Fault, Whose
from shim.causes.xids import Action
from tests.harness.api_server import (
    ApiServer,
    denied,
    denied_by_webhook,
    refusal,
    webhook_failed,
)
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.causes.holders import holding

if TYPE_CHECKING:
    from integration.node.state.store import State
    from tests.harness.http_server import Request

A: Final = holding("a", pid=7).container


def said(*faults: Fault, since: float = 0.0) -> list[tuple[str, str]]:
    fault_log = FaultLog()
    for each in faults:
        fault_log.add(Hit(A, each))
    found = set(notices_of_faults(fault_log.entries, since))
    assert {(each.namespace, each.pod, each.pod_uid, each.container) for each in found} <= {
        ("research", "pod-a", "uid-a", "a")
    }
    return sorted((each.reason, each.message) for each in found)


def lost(at: float) -> Fault:
    return Fault(at, "xid", 79, "off the bus", "GPU-0", whose=Whose.DEVICE, sure=True)


def test_each_fault_is_said_once_however_often_and_by_however_many_processes() -> None:
    storm = [
        Fault(n, "xid", 31, "fault", "GPU-0", pid=n, whose=Whose.APPLICATION) for n in range(99)
    ]
    told = said(lost(0.0), *storm, lost(200.0))
    assert [reason for reason, _ in told] == ["GPUError", "GPUFailure"]


def test_the_same_fault_at_another_time_is_the_same_notice() -> None:
    """In a storm the oldest recorded fault is not always the first one."""
    fault_logs = [FaultLog(), FaultLog()]
    for at, fault_log in enumerate(fault_logs):
        fault_log.add(Hit(A, lost(float(at))))
    one, other = (list(notices_of_faults(each.entries, 0.0)) for each in fault_logs)
    assert one == other
    assert one[0].message != other[0].message


@pytest.mark.parametrize("pod", [{}, {"name": "pod-a"}, {"namespace": "research"}])
def test_a_fault_of_a_pod_that_a_damaged_file_does_not_name_is_not_said(
    pod: dict[str, str],
) -> None:
    assert list(notices_of_faults({("k8s.io", "id-a"): Entry((lost(5.0),), pod)}, 0.0)) == []


def test_what_is_old_or_no_fault_is_not_said() -> None:
    assert said(lost(5.0), since=10.0) == []
    full = Fault(20.0, GPU_MEMORY, name="full", whose=Whose.APPLICATION)
    assert said(full, since=10.0) == []
    over = Fault(20.0, "memory-limit", name="6.0 GiB", whose=Whose.APPLICATION, sure=True)
    (told,) = said(over, since=10.0)
    assert told[0] == "GPUMemoryLimit"


class Refusing(ApiServer):
    """A server that refuses Events in a namespace that is being deleted, or for another reason."""

    no = refusal(403, "unable to create new content in namespace ending")

    def answer(self, request: Request) -> tuple[int, Any]:
        if "/namespaces/ending/" in request.path:
            self.refused += 1
            return self.no
        return super().answer(request)

    refused = 0


@asynccontextmanager
async def telling(api: ApiServer) -> AsyncIterator[tuple[State, list[str]]]:
    lines: list[str] = []
    options = Options(
        "", 1, api_server="127.0.0.1", api_port=api.port, service_account=api.service_account
    )
    context = Context(Config(), options, lambda _, line, **__: lines.append(line))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pod_events.run, context)
        yield context.state, lines
        tasks.cancel_scope.cancel()


def names(api: ApiServer) -> list[str]:
    return [event["involvedObject"]["name"] for _, event in api.events]


@pytest.mark.anyio
async def test_an_event_that_is_refused_keeps_no_other_from_being_made(tmp_path: Path) -> None:
    denied = [Denied(where, where, "uid", "main", "why") for where in ("a", "ending", "z")]
    with Refusing(str(tmp_path / "account")) as api:
        async with telling(api) as (state, lines):
            publish(state.ledger, Ledger(denied=tuple(denied)))
            await until(lambda: names(api) == ["a", "z"], "the others are made")
            await until(lambda: len(lines) == 1, "it is said")
            assert "unable to create new content" in lines[0]
            publish(
                state.ledger, Ledger(denied=(denied[1], Denied("y", "y", "uid", "main", "why")))
            )
            await until(lambda: names(api) == ["a", "z", "y"], "no other is made twice")
            await until(lambda: api.refused == 2, "it is tried again")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("no", "told", "others"),
    [
        (denied(), "Check the ValidatingAdmissionPolicy no-slices", ["a", "z"]),
        (denied_by_webhook(), "Check the admission webhook slices.example.com", ["a", "z"]),
        (webhook_failed(), "Check the webhook slices.example.com", ["a", "z"]),
        (refusal(404, 'namespaces "ending" not found'), "Check that it exists", ["a", "z"]),
        (refusal(429), "Check the API server; the agent retries", ["a"]),
        (refusal(503), "Check the API server; the agent retries", ["a"]),
    ],
)
async def test_who_refuses_an_event_is_named_and_a_server_that_is_busy_is_left_alone(
    tmp_path: Path, no: Any, told: str, others: list[str]
) -> None:
    unsaid = [Denied(where, where, "uid", "main", "why") for where in ("a", "ending", "z")]
    with Refusing(str(tmp_path / "account")) as api:
        api.no = no
        async with telling(api) as (state, lines):
            publish(state.ledger, Ledger(denied=tuple(unsaid)))
            await until(lambda: len(lines) == 1, "it is said")
            assert told in lines[0]
            assert "ClusterRole" not in lines[0]
            assert names(api) == others


@pytest.mark.anyio
async def test_a_fault_is_told_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.time
    with ApiServer(str(tmp_path / "account")) as api:
        async with telling(api) as (state, _):
            publish(state.ledger, Ledger(denied=(Denied("a", "a", "uid", "main", "why"),)))
            await until(lambda: names(api) == ["a"], "it goes")
            monkeypatch.setattr(time, "time", lambda: clock() - 3600)
            fault_log = FaultLog()
            fault_log.add(Hit(A, lost(time.time())))
            publish(state.causes, dict(fault_log.entries))
            await until(lambda: names(api) == ["a", "pod-a"], "the fault has an Event")


class Unchanging(ApiServer):
    """A server that allows creating Events, but not changing them."""

    def answer(self, request: Request) -> tuple[int, Any]:
        if request.method == "PATCH":
            self.refused += 1
            return refusal(403, "cannot patch resource events")
        return super().answer(request)

    refused = 0


def unclear(at: float) -> Fault:
    """Return a fault for which only the driver reports that the device failed."""
    return Fault(at, "xid", 109, "timeout", "GPU-0", whose=Whose.UNCLEAR, action=Action.RESET)


@pytest.mark.anyio
async def test_what_the_driver_says_later_of_a_fault_is_in_the_same_event(tmp_path: Path) -> None:
    with ApiServer(str(tmp_path / "account")) as api:
        async with telling(api) as (state, lines):
            fault_log, at = FaultLog(), time.time()
            fault_log.add(Hit(A, replace(lost(at), action=Action.REBOOT)))
            fault_log.add(Hit(A, unclear(at)))
            publish(state.causes, dict(fault_log.entries))
            await until(lambda: len(api.events) == 2, "both are told")
            for action, count, word in (
                (Action.NOTHING, 2, ""),
                (Action.BUS_RESET, 3, " The GPU needs a reset of its bus."),
            ):
                fault_log.heed("GPU-0", action, at - 1)
                publish(state.causes, dict(fault_log.entries))
                await until(lambda c=count: [e["count"] for _, e in api.events] == [c] * 2, "said")  # type: ignore[misc]
                for _, event in api.events:
                    assert event["message"].endswith((f"fault.{word}", f"fault that is.{word}"))
            assert {event["reason"] for _, event in api.events} == {"GPUFailure"}
            # The same fault again is not reported.
            fault_log.add(Hit(A, replace(lost(at + 1), action=Action.BUS_RESET)))
            publish(state.causes, dict(fault_log.entries))
            publish(state.ledger, Ledger(denied=(Denied("z", "z", "uid", "main", "why"),)))
            await until(lambda: len(api.events) == 3, "the next one has an Event")
            assert [event["count"] for _, event in api.events] == [3, 3, 1]
            assert lines == []


@pytest.mark.anyio
async def test_an_agent_that_may_change_no_event_makes_no_second_one(tmp_path: Path) -> None:
    with Unchanging(str(tmp_path / "account")) as api:
        async with telling(api) as (state, lines):
            fault_log, at = FaultLog(), time.time()
            fault_log.add(Hit(A, replace(lost(at), action=Action.REBOOT)))
            publish(state.causes, dict(fault_log.entries))
            await until(lambda: names(api) == ["pod-a"], "it is told")
            fault_log.heed("GPU-0", Action.NOTHING, at - 1)
            publish(state.causes, dict(fault_log.entries))
            await until(lambda: api.refused == 1, "it is tried")
            publish(state.ledger, Ledger(denied=(Denied("z", "z", "uid", "main", "why"),)))
            await until(lambda: names(api) == ["pod-a", "z"], "the next one has an Event")
            assert api.refused == 1
            assert lines == []
