"""The MPS control daemons that the agent's state requires."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import anyio.lowlevel
import pytest

from hooks.config import Config
from integration.agent_errors import FilesSilent
from integration.node import file_calls
from integration.node.file_calls import FileCalls
from integration.node.mps.claim_daemons import CLAIMS
from integration.node.mps.clients import MpsDaemon, unready
from integration.node.mps.paths import Places
from integration.node.mps.plan import ClaimDaemon
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.mps import daemon_supervisor, host_setup
from integration.node.services.mps import service as component
from integration.node.services.mps.daemon import Daemon
from integration.node.state.topic import version_of, wait_any
from integration.node.values.resources import MPS, Settings, SharedResource, Sharing
from integration.nvml.snapshot import NodeSnapshot
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.test_mps_plan import gpu, inventory_of, shared, uuid

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.node.mps.plan import Plan, Programs

pytestmark = pytest.mark.anyio

T = TypeVar("T")

NAME = "nvidia.com/gpu"


class Kept:
    """Stands in for a supervisor, and records its plan."""

    all: dict[str, Kept]

    def __init__(
        self,
        places: Places,
        _context: Context,
        _spared: object,
        on_change: Callable[[], None],
        _holder: object,
    ) -> None:
        self.places = places
        self.plan: Plan | None = None
        self.programs: Programs | None = None
        self.status = MpsDaemon(places.resource, (), "it begins")
        self.fault = ""
        self.left = False
        self.on_change = on_change
        self._gone = anyio.Event()
        Kept.all[places.resource] = self

    def set_plan(self, plan: Plan | None, programs: Programs | None) -> None:
        self.plan, self.programs = plan, programs
        if plan is None:
            self._gone.set()

    def say(self, unready: str, fault: str = "") -> None:
        self.status, self.fault = replace(self.status, unready=unready), fault
        self.on_change()

    def retry(self) -> None:
        """Do nothing: nothing fails."""

    async def run(self) -> None:
        await self._gone.wait()

    async def release(self) -> None:
        self.left = True


class AtOnce(FileCalls):
    """Makes each call at once; while a directory hangs, its calls fail."""

    hanging = ""

    async def run(self, directory: str, asked: str, do: Callable[..., T], *arguments: object) -> T:
        await anyio.lowlevel.checkpoint()
        if directory == self.hanging:
            raise FilesSilent(asked, found=f"the file system of {directory} does not answer")
        return do(*arguments)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(component, "DaemonSupervisor", Kept)
    Kept.all = {}
    context = Context(Config(), Options(spec="", poll=60), lambda *_, **__: None, files=AtOnce())
    sharing = Sharing(MPS, resources=(SharedResource(NAME, 3),))
    publish(context.state.settings, Settings(mps_root=str(tmp_path), sharing=sharing))
    publish(context.state.node, NodeSnapshot(inventory=inventory_of("", gpu(0))))
    publish(context.state.resources, (shared(0),))
    return context


def wanted(kept: Kept) -> bool:
    return kept.plan is not None


async def settled() -> None:
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def test_what_is_shared_is_kept_and_told_of(context: Context) -> None:
    state = context.state
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        await settled()
        kept = Kept.all[NAME]
        assert kept.plan is not None
        assert kept.programs == kept.plan.programs
        assert state.mps_daemons.value[NAME].unready == "it begins"
        kept.say("it ended", "it ended, says the fault")
        assert state.faults.lines["mps"] == "it ended, says the fault"
        # An impossible configuration is a fault, too.
        publish(state.node, NodeSnapshot(inventory=inventory_of("", gpu(0, mig=True))))
        await settled()
        assert "NVSHIM-E2736" in state.faults.lines["mps"]
        tasks.cancel_scope.cancel()
    assert state.mps_daemons.value == {}


async def test_nothing_is_done_before_anything_is_known(context: Context) -> None:
    publish(context.state.settings, None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        await settled()
        assert Kept.all == {}
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("reason", ["unshared", "no driver", "let go", "no GPU can be opened"])
async def test_what_is_not_wanted_any_more_is_drained(context: Context, reason: str) -> None:
    state = context.state
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        await settled()
        kept = Kept.all[NAME]
        inventory = state.node.value.inventory
        assert inventory is not None
        # While NVML does not answer, nothing changes.
        publish(state.resources, ())
        publish(state.node, NodeSnapshot(inventory=replace(inventory, nvml_failure="it hangs")))
        await settled()
        assert wanted(kept)
        publish(state.resources, (shared(0),))
        publish(state.node, NodeSnapshot(inventory=inventory))
        await settled()
        if reason == "unshared":
            publish(state.resources, (replace(shared(0), sharing=""),))
        elif reason == "no driver":
            publish(state.node, NodeSnapshot())
        elif reason == "let go":
            publish(state.nvml_pause, "GPU 0 is reset")
        else:
            publish(state.node, NodeSnapshot(inventory=inventory_of("", gpu(0, lost="it is lost"))))
        await settled()
        assert not wanted(kept)
        with anyio.fail_after(20):
            while state.mps_daemons.value:  # a thread first removes their directories
                await wait_any(state.mps_daemons, since=version_of(state.mps_daemons))
        tasks.cancel_scope.cancel()


async def test_what_a_predecessor_has_left_is_taken_away(context: Context) -> None:
    root = context.state.settings.value.mps_root if context.state.settings.value else ""
    left = Places(root, "nvidia.com/gpu.shared")
    os.makedirs(left.directory)
    Path(left.devices).write_text("[]")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        await settled()
        assert Kept.all[left.resource].plan is None
        assert Kept.all[NAME].plan is not None
        tasks.cancel_scope.cancel()
    assert Kept.all[NAME].left


async def test_gpus_in_use_are_told_while_another_daemon_is_added(context: Context) -> None:
    """A thread asks for them, and meanwhile the event loop goes on."""
    service = component._Mps(context)
    root = context.state.settings.value.mps_root if context.state.settings.value else ""

    class Adding:
        @property
        def plan(self) -> Plan | None:
            service._supervisors[Places(root, "another")] = cast("Any", None)
            return None

    service._supervisors[Places(root, NAME)] = cast("Any", Adding())
    assert service._in_use() == frozenset()


async def test_daemons_of_claims_are_kept_beside_those_of_resources(context: Context) -> None:
    state, name = context.state, f"{CLAIMS}/uid-1234"
    daemon = ClaimDaemon({uuid(1): 0}, 50, multi_user=False)
    publish(state.claim_daemons, {name: daemon})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        await settled()
        # A device that was just created is not listed yet, which is not a failure.
        assert set(Kept.all) == {NAME}
        assert state.mps_daemons.value.keys() == {NAME}
        publish(state.node, NodeSnapshot(inventory=inventory_of("", gpu(0), gpu(1))))
        await settled()
        plan = Kept.all[name].plan
        assert plan is not None
        assert (plan.devices, plan.percentage, plan.stays) == ((uuid(1),), 50, True)
        assert plan.others == {uuid(0)}
        # The control program here lacks the option.
        publish(state.claim_daemons, {f"{name}5": replace(daemon, multi_user=True)})
        await settled()
        assert state.mps_daemons.value[f"{name}5"].has_failed
        assert not wanted(Kept.all[name])
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("dra", [True, False])
async def test_what_a_predecessor_has_left_of_claims_stays_until_they_are_known(
    context: Context, *, dra: bool
) -> None:
    context = replace(context, options=replace(context.options, dra=dra))
    state, name = context.state, f"{CLAIMS}/uid-1234"
    root = Path(state.settings.value.mps_root if state.settings.value else "")
    for left in (name, "nvidia.com/left"):
        (root / left).mkdir(parents=True)
        (root / left / ".lock").touch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        await settled()
        assert set(Kept.all) == {NAME, "nvidia.com/left"} | (set() if dra else {name})
        publish(state.claim_daemons, {})
        await settled()
        assert not wanted(Kept.all[name])
        tasks.cancel_scope.cancel()


async def test_while_the_directory_of_mps_hangs_its_devices_are_refused_and_no_daemon_starts(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = anyio.Event()

    async def pause(_seconds: float) -> None:
        await again.wait()

    monkeypatch.setattr(anyio, "sleep", pause)
    state, files = context.state, cast("AtOnce", context.files)
    settings = state.settings.value
    assert settings is not None
    files.hanging = settings.mps_root
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        await settled()
        assert Kept.all == {}
        assert "NVSHIM-E2798" in state.faults.lines["mps"]
        assert f"the file system of {settings.mps_root}" in unready(
            NAME, (), state.mps_daemons.value
        )
        files.hanging = ""
        again.set()
        await settled()
        assert wanted(Kept.all[NAME])
        assert "mps" not in state.faults.lines
        files.hanging = settings.mps_root
        tasks.cancel_scope.cancel()
    assert Kept.all[NAME].left


@pytest.mark.parametrize("what", ["remove_shm", "remove"])
async def test_no_daemon_starts_where_files_of_the_last_one_may_still_be_removed(
    context: Context, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    begun, goes_on, said = threading.Event(), threading.Event(), list[str]()

    def hang(_: object) -> None:
        begun.set()
        goes_on.wait(60)

    def say(_level: str, line: str, **_: Any) -> None:
        said.append(line)

    monkeypatch.setattr(host_setup, what, hang)
    monkeypatch.setattr(file_calls, "LONGEST", 0.05)
    context = replace(context, say=say, files=FileCalls())
    state, name = context.state, f"{CLAIMS}/uid-1234"
    daemons = {name: ClaimDaemon({uuid(0): 0}, 50, multi_user=False)}
    publish(state.resources, ())
    publish(state.claim_daemons, daemons)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(component.run, context)
        await until(lambda: wanted(Kept.all[name]) if name in Kept.all else False)
        publish(state.claim_daemons, {})
        await until(begun.is_set)
        publish(state.claim_daemons, daemons)
        first = Kept.all[name]
        await until(lambda: any("does not answer" in line for line in said))
        await anyio.wait_all_tasks_blocked()
        assert Kept.all[name] is first
        goes_on.set()
        await until(lambda: Kept.all[name] is not first)
        assert wanted(Kept.all[name])
        assert "mps" not in state.faults.lines
        tasks.cancel_scope.cancel()


async def test_a_call_of_a_supervisor_that_hangs_is_a_failure_of_its_daemon(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_supervisor, "_TO_CALL", 0.01)
    goes_on, faults = threading.Event(), list[str]()

    def hang(_self: object) -> None:
        goes_on.wait(60)

    monkeypatch.setattr(Daemon, "find", hang)
    places = Places(str(tmp_path), NAME)
    failed = anyio.Event()

    def changed() -> None:
        if supervisor.fault:
            faults.append(supervisor.fault)
            failed.set()

    supervisor = daemon_supervisor.DaemonSupervisor(
        places, context, frozenset[str], changed, lambda *_: ""
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.run)
        await failed.wait()
        assert supervisor.status.has_failed
        assert f"the file system of {places.directory} does not answer" in faults[0]
        tasks.cancel_scope.cancel()
    with anyio.fail_after(20):
        await supervisor.release()
    goes_on.set()
