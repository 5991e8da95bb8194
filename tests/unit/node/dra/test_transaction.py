"""Interrupt a claim's transaction at each of its effects, by a kill and restart or by an error.

Everything below the driver is simulated: NVML and nvidia-smi by :class:`Node`, the API server by a
document. The checkpoint, the kubelet's record and the CDI specs are real files.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from api.errors import NvshimError
from hooks.cdi.spec import Edits, SpecDevice, SpecFile
from hooks.config import Config
from hooks.node.drained import Drain
from integration import files
from integration.agent_errors import (
    DeviceDrained,
    FilesSilent,
    MigDeviceNotUndone,
    MigModeNotSwitched,
)
from integration.apiserver.client import ApiServer
from integration.cdi import writing
from integration.cdi.errors import CdiSpecUnwritten
from integration.devices import drain_marks as marks
from integration.node.mps.clients import MpsDaemon
from integration.node.options import DRA_DRIVER, Options
from integration.node.service import Context
from integration.node.services.dra import cdi, metadata, mig_create, sharing_setup
from integration.node.services.dra.devices import devices_of
from integration.node.services.dra.discovery import DeviceDiscovery, NodeDevices
from integration.node.services.dra.driver import Driver
from integration.node.services.dra.plugin_devices import PluginDevices
from integration.node.services.dra.sharing import OURS
from integration.node.services.dra.transaction import ClaimTransactions
from integration.node.state import claims_file
from integration.node.values.claims import Claim, Reference
from integration.nvml.mig_parts import GpuParts, Instance, Parts, Profile
from integration.nvml.nvidia_smi import SmiFailed
from integration.nvml.snapshot import NodeSnapshot
from tests.harness.node_state import publish
from tests.harness.raising import is_error, raises
from tests.unit.node.dra.test_slices import GPUS, NODE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

REFERENCE: Final = Reference("default", "uid", "claim")
WHOLE, OTHER, CUT = GPUS
PART: Final = f"{CUT.lower()}-mig-1g10gb-19-2"
INVENTORY: Final = replace(NODE, mig_devices=())
PROFILE: Final = Profile(
    19, "1g.10gb", 7, tuple((n, 1) for n in range(7)), (9856, 16, 1, 1, 0, 0, 0)
)
UUID: Final = "MIG-90000000-0000-4000-8000-00000000000b"
SLICED: Final = {"timeSlice": "Long"}


class Killed(BaseException):
    """The agent is killed here."""


class Node:
    """A node with two whole GPUs and one for MIG; it interrupts the agent's work."""

    def __init__(self, directory: Path) -> None:
        self.config = Config(
            state=str(directory / "state"),
            kubelet_root=str(directory / "kubelet"),
            drained=str(directory / "drained"),
            cdi_spec_dirs=(str(directory / "cdi"),),
        )
        self.instances: dict[int, Instance] = {}
        self.devices: dict[int, str] = {}
        self.slices: dict[str, str] = {}
        self.document: dict[str, Any] = {}
        self.describes = False
        # The number, from 1, of the effect's start or end at which the work is interrupted.
        self.ends_at = 0
        self.is_killed = True
        self.effects = 0
        self.hang: Callable[[], object] | None = None  # instead, if the effect is on a file

    def effect(
        self, do: Callable[..., Any], error: Exception, *, fails_after: bool = False
    ) -> Callable[..., Any]:
        """Return a function at whose start and end the agent may be killed.

        Args:
            error: raised at its start where the agent is not killed.
            fails_after: whether it may also be raised at the end, after the work is done.
        """

        def tick() -> None:
            self.effects += 1
            if self.effects != self.ends_at:
                return
            if self.hang is None:
                raise Killed if self.is_killed else error
            if not isinstance(error, SmiFailed):
                self.hang()

        def run(*arguments: Any, **more: Any) -> Any:
            tick()
            result = do(*arguments, **more)
            if self.is_killed or fails_after:
                tick()
            return result

        return run

    def allocate(self, device: str, sharing: dict[str, str] | None = None) -> None:
        result = {"driver": DRA_DRIVER, "pool": "node-1", "device": device, "request": "gpu"}
        parameters = {"apiVersion": OURS, "kind": "DeviceSharing", **(sharing or {})}
        config = [{"opaque": {"driver": DRA_DRIVER, "parameters": parameters}}] if sharing else []
        devices = {"results": [result], "config": config}
        self.document = {
            "metadata": {"uid": "uid"},
            "status": {"allocation": {"devices": devices}},
        }

    def parts(self) -> Parts:
        there = tuple(self.instances.values())
        of = {uuid: (CUT, number) for number, uuid in self.devices.items()}
        return Parts({CUT: GpuParts((PROFILE,), there)}, instance_of=of)

    def smi(self, _driver: Any, _config: Any, arguments: Any, *_: Any, **__: Any) -> str:
        """Stand in for nvidia-smi."""
        match [*arguments]:
            case ["mig", "-i", _, "-cgi", place, "-C"]:
                profile, start = map(int, place.split(":"))
                self.instances[1] = Instance(1, profile, start, 1)
                self.devices[1] = UUID
            case ["mig", "-i", _, "-gi", _, "-dci"]:
                self.devices.clear()
            case ["mig", "-i", _, "-gi", _, "-dgi"]:
                self.instances.clear()
            case ["compute-policy", "-i", uuid, flag]:
                self.slices[uuid] = flag
                if flag.endswith("=0"):
                    del self.slices[uuid]
        return ""

    def discovered(self, made: Any) -> NodeDevices:
        found = devices_of(INVENTORY, parts=self.parts(), made=made, on_demand=True)
        there = (*GPUS[:2], *self.devices.values())
        specs = {uuid: SpecDevice(uuid, Edits(env=(f"DEVICE={uuid}",))) for uuid in there}
        template = cdi.SpecTemplate(SpecFile("0.6.0", "k8s.x/claim", ()), specs, {}, "0.6.0")
        return NodeDevices({each.name: each for each in found}, template, self.parts())

    def left(self) -> dict[str, Any]:
        """Return everything that claims have on the node."""
        specs = {}
        for name in os.listdir(self.config.cdi_spec_dirs[0]):
            with open(f"{self.config.cdi_spec_dirs[0]}/{name}", encoding="utf-8") as file:
                specs[name] = json.load(file)["devices"]
        claims = claims_file.load(self.config, DRA_DRIVER).values()
        return {
            "claims": [
                (each.devices, each.phase, each.previous, each.has_metadata) for each in claims
            ],
            "specs": specs,
            "metadata": self.metadata(),
            "instances": dict(self.instances),
            "devices": dict(self.devices),
            "notes": [note["uuid"] for note in self._notes()],
            "slices": dict(self.slices),
        }

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of requests, as containers would find it, by its path there."""
        found = {}
        for name in os.listdir(self.config.cdi_spec_dirs[0]):
            if name.startswith(f"{DRA_DRIVER}_metadata_"):
                with open(f"{self.config.cdi_spec_dirs[0]}/{name}", encoding="utf-8") as file:
                    ((mount,),) = (
                        each["containerEdits"]["mounts"] for each in json.load(file)["devices"]
                    )
                with open(mount["hostPath"], encoding="utf-8") as file:
                    found[mount["containerPath"]] = json.load(file)["requests"]
        return found

    def _notes(self) -> list[dict[str, Any]]:
        try:
            found: list[dict[str, Any]] = claims_file.read_record(self.config, "dra-mig.json")[
                "made"
            ]
        except (OSError, ValueError):
            return []
        return found


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(tmp_path)
    os.makedirs(node.config.cdi_spec_dirs[0])

    async def read(*_: Any) -> dict[str, Any]:
        return node.document

    async def none(*_: Any) -> dict[str, str]:
        return {}

    async def discover(_self: Any, _inventory: Any, made: Any, *_: Any) -> NodeDevices:
        return node.discovered(made)

    monkeypatch.setattr(ClaimTransactions, "_read", read)
    monkeypatch.setattr(PluginDevices, "allocated", none)
    monkeypatch.setattr(DeviceDiscovery, "_discover", discover)
    failed, full = SmiFailed("a test's error"), OSError(errno.EIO, "a test's error")
    unwritten = CdiSpecUnwritten("to write", found="a test's error")
    replace_file = node.effect(files.replace_file, full)
    monkeypatch.setattr(claims_file, "replace_file", replace_file)
    monkeypatch.setattr(cdi, "write", node.effect(writing.write, unwritten))
    monkeypatch.setattr(cdi, "remove_file", node.effect(files.remove_file, full))
    monkeypatch.setattr(metadata, "write", node.effect(writing.write, unwritten))
    monkeypatch.setattr(metadata, "remove_file", node.effect(files.remove_file, full))
    monkeypatch.setattr(sharing_setup, "run_nvidia_smi", node.effect(node.smi, failed))
    mig_smi = node.effect(node.smi, failed, fails_after=True)
    monkeypatch.setattr(mig_create, "run_nvidia_smi", mig_smi)
    monkeypatch.setattr(mig_create, "ask_parts", lambda _: node.parts())
    monkeypatch.setattr(mig_create, "inventory_of", lambda *_, **__: INVENTORY)
    monkeypatch.setattr(mig_create, "create", lambda *_: None)
    return node


async def started(node: Node) -> Driver:
    """Start an agent, which takes over what an earlier one left."""
    options = Options(
        "", 60, node_name="node-1", pod_resources="", cri_sockets=(), dra_mig=True,
        dra_metadata=node.describes,
    )  # fmt: skip
    driver = Driver(Context(node.config, options, lambda *_, **__: None), ApiServer("", 0, ""))
    publish(driver._context.state.node, NodeSnapshot(INVENTORY))
    await driver.start()
    return driver


async def settled(driver: Driver) -> None:
    """Wait until the driver has nothing left to do by itself."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.mig.tidy)
        with anyio.fail_after(20):
            await driver.transactions.recover()
            while driver.mig.creator.orphans(driver.table.claims):
                await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    async with driver.transactions.locks.hold(CUT):
        pass


Allocation = tuple[str, "dict[str, str] | None"]

# What the claim had before, and what it gets.
TRANSACTIONS: Final[dict[str, tuple[Allocation | None, Allocation]]] = {
    "a GPU": (None, (WHOLE.lower(), None)),
    "a GPU with a time slice": (None, (WHOLE.lower(), SLICED)),
    "a MIG device": (None, (PART, None)),
    "another GPU than before": ((WHOLE.lower(), SLICED), (OTHER.lower(), None)),
    "another time slice": ((WHOLE.lower(), None), (WHOLE.lower(), SLICED)),
    "a MIG device after a GPU": ((WHOLE.lower(), SLICED), (PART, None)),
    "a GPU again": ((WHOLE.lower(), SLICED), (WHOLE.lower(), SLICED)),
}
each_transaction = pytest.mark.parametrize("name", TRANSACTIONS)
DESCRIBED: Final = tuple(
    f"{name}, with metadata" for name in ("another GPU than before", "a MIG device", "a GPU again")
)
each_that_is_killed = pytest.mark.parametrize("name", [*TRANSACTIONS, *DESCRIBED])


async def begun(node: Node, name: str) -> tuple[Driver, dict[str, Any]]:
    """Prepare a node for a transaction; return its driver and its state."""
    name, _, more = name.partition(", ")
    node.describes = bool(more)
    driver = await started(node)
    before, after = TRANSACTIONS[name]
    if before is not None:
        node.allocate(*before)
        await driver.transactions.prepare(REFERENCE)
    node.allocate(*after)
    node.effects = 0
    return driver, node.left()


async def whole(node: Node, name: str) -> tuple[dict[str, Any], int]:
    """Return what a transaction leaves, and how many effects it has; then undo it."""
    driver, _ = await begun(node, name)
    await driver.transactions.prepare(REFERENCE)
    left, effects = node.left(), node.effects
    await driver.transactions.unprepare(REFERENCE)
    await settled(driver)
    return left, effects


def is_empty(node: Node) -> bool:
    return not any(node.left().values())


@each_that_is_killed
async def test_a_prepare_that_is_killed_is_undone_or_completed_by_the_next_agent(
    node: Node, name: str
) -> None:
    after, effects = await whole(node, name)
    outcomes = set()
    for number in range(1, effects + 1):
        driver, before = await begun(node, name)
        node.ends_at = number
        with pytest.raises(Killed):
            await driver.transactions.prepare(REFERENCE)
        node.ends_at = 0
        driver = await started(node)
        await settled(driver)
        left = node.left()
        assert left in (before, after), f"killed at effect {number} of {effects}"
        outcomes.add("undone" if left == before else "completed")
        await driver.transactions.prepare(REFERENCE)
        assert node.left() == after, "the kubelet calls again"
        await driver.transactions.unprepare(REFERENCE)
        assert is_empty(node)
    assert outcomes == ({"undone", "completed"} if effects else set())


@each_transaction
async def test_a_prepare_whose_step_fails_is_rolled_back(node: Node, name: str) -> None:
    node.is_killed = False
    after, effects = await whole(node, name)
    for number in range(1, effects + 1):
        driver, before = await begun(node, name)
        node.ends_at = number
        try:
            await driver.transactions.prepare(REFERENCE)
        except NvshimError:
            await settled(driver)
            assert node.left() == before, f"failed at effect {number} of {effects}"
        else:  # an unused time slice may be reset later
            assert node.left()["claims"] == after["claims"]
            assert before["slices"]
            assert not after["slices"]
        node.ends_at = 0
        await driver.transactions.unprepare(REFERENCE)
        await settled(driver)
        assert is_empty(node)


class Limits:
    """Time limits of calls in threads that are over when a call hangs, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open: set[anyio.CancelScope] = set()
        self._loop = asyncio.get_running_loop()
        self._goes_on = threading.Event()
        monkeypatch.setattr(anyio, "fail_after", self._fail_after)

    @contextmanager
    def _fail_after(self, _seconds: float) -> Iterator[None]:
        with anyio.CancelScope() as scope:
            self._open.add(scope)
            try:
                yield
            finally:
                self._open.discard(scope)
        if scope.cancelled_caught:
            raise TimeoutError

    def hang(self) -> None:
        """Hang a thread, after which the limits are over."""
        goes_on = self._goes_on
        self._loop.call_soon_threadsafe(self._expire)
        assert goes_on.wait(60)

    def _expire(self) -> None:
        for scope in self._open:
            scope.cancel()

    async def go_on(self, driver: Driver) -> None:
        """Let the thread go on, and wait for its end."""
        self._goes_on.set()
        self._goes_on = threading.Event()
        for call in driver._context.files._calls.values():
            if call._ended is not None:
                assert await asyncio.to_thread(call._ended.wait, 60)


async def refusal(call: Awaitable[object]) -> NvshimError | None:
    """Return the error of a call; None if it succeeds."""
    try:
        await call
    except NvshimError as error:
        return error
    return None


def essence(left: dict[str, Any]) -> tuple[Any, Any]:
    """Return the claims and their CDI specs, without metadata, which may be left out."""
    specs = {name: each for name, each in left["specs"].items() if "_metadata_" not in name}
    return [claim[:3] for claim in left["claims"]], specs


HANGING: Final = ("a GPU", "another GPU than before", "a GPU again", *DESCRIBED[::2])


@pytest.mark.parametrize("name", HANGING)
async def test_a_prepare_whose_directory_hangs_is_refused_and_all_is_well_when_it_answers(
    node: Node, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    limits = Limits(monkeypatch)
    after, effects = await whole(node, name)
    for number in range(1, effects + 1):
        driver, before = await begun(node, name)
        node.hang, node.ends_at = limits.hang, number
        error = await refusal(driver.transactions.prepare(REFERENCE))
        assert error is None or is_error(error, FilesSilent), f"at effect {number} of {effects}"
        node.hang, node.ends_at = None, 0
        await limits.go_on(driver)
        await driver.table.catch_up()
        if driver.specs.has_pending:  # a new round of the driver
            await driver.specs.repair()
        await settled(driver)
        assert not driver.table.is_doubtful
        assert not driver.specs.has_pending
        claims, specs = essence(node.left())
        assert (claims, specs if claims else {}) in (essence(before), essence(after)), (
            f"at effect {number} of {effects}"
        )
        await driver.transactions.prepare(REFERENCE)
        assert essence(node.left()) == essence(after)
        await driver.transactions.unprepare(REFERENCE)
        await settled(driver)
        assert is_empty(node)


@pytest.mark.parametrize("name", HANGING)
async def test_an_unprepare_whose_directory_hangs_is_refused_and_then_done(
    node: Node, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    limits = Limits(monkeypatch)
    _, before = await whole(node, name)
    effects = node.effects - before  # of the unprepare
    refused = 0
    for number in range(1, effects + 1):
        driver, _ = await begun(node, name)
        await driver.transactions.prepare(REFERENCE)
        node.effects, node.hang, node.ends_at = 0, limits.hang, number
        if (error := await refusal(driver.transactions.unprepare(REFERENCE))) is not None:
            assert is_error(error, FilesSilent)
            refused += 1
            assert REFERENCE.uid in driver.table.claims, "it keeps its devices"
        node.hang, node.ends_at = None, 0
        await limits.go_on(driver)
        await driver.transactions.unprepare(REFERENCE)
        await settled(driver)
        assert is_empty(node)
    assert refused


async def test_while_the_directory_of_metadata_hangs_claims_without_it_go_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = await begun(node, "a GPU")
    limits = Limits(monkeypatch)
    directories = " or ".join(metadata.directories(node.config, DRA_DRIVER))
    with raises(FilesSilent):
        await driver._context.files.run(directories, "to read it", limits.hang)
    await driver.transactions.prepare(REFERENCE)
    await driver.transactions.unprepare(REFERENCE)
    await limits.go_on(driver)
    assert is_empty(node)


@each_that_is_killed
async def test_an_unprepare_that_is_killed_is_completed_by_the_next_call(
    node: Node, name: str
) -> None:
    number = 0
    while node.effects >= number:
        number += 1
        driver, _ = await begun(node, name)
        await driver.transactions.prepare(REFERENCE)
        node.effects, node.ends_at = 0, number
        with suppress(Killed):
            await driver.transactions.unprepare(REFERENCE)
        node.ends_at = 0
        effects = node.effects
        driver = await started(node)
        await settled(driver)
        await driver.transactions.unprepare(REFERENCE)
        await settled(driver)
        assert is_empty(node), f"killed at effect {number}"
        node.effects = effects
    assert number > 2


async def test_a_claim_that_is_not_completed_yet_keeps_its_devices(node: Node) -> None:
    driver, _ = await begun(node, "a GPU")
    node.ends_at = 4
    with pytest.raises(Killed):
        await driver.transactions.prepare(REFERENCE)
    node.ends_at = 0
    driver = await started(node)
    (claim,) = driver.table.claims.values()
    assert not claim.is_prepared
    assert [each.uuid for each in driver._context.state.claimed_devices.value or ()] == [WHOLE]
    assert [each.uuid for each in claims_file.held(node.config)] == [WHOLE]


async def test_a_gpu_that_is_marked_after_the_first_look_is_not_partitioned(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that changes a GPU marks it first, and reads the checkpoint second."""
    driver, before = await begun(node, "a MIG device")
    write = claims_file.save

    def save(*arguments: Any) -> None:
        write(*arguments)
        marks.put(node.config, Drain(CUT, reason="MIG layout"))
        monkeypatch.setattr(claims_file, "save", write)

    monkeypatch.setattr(claims_file, "save", save)
    with raises(DeviceDrained):
        await driver.transactions.prepare(REFERENCE)
    await settled(driver)
    assert node.left() == before


@pytest.mark.parametrize("after_the_first_look", [False, True])
@pytest.mark.parametrize("device", [WHOLE.lower(), PART])
async def test_a_gpu_that_was_drained_by_its_address_goes_to_no_claim(
    node: Node, monkeypatch: pytest.MonkeyPatch, device: str, *, after_the_first_look: bool
) -> None:
    driver = await started(node)
    uuid = CUT if device == PART else WHOLE
    (address,) = (gpu.bus_id for gpu in INVENTORY.gpus if gpu.uuid == uuid)
    write = claims_file.save

    def save(*arguments: Any) -> None:
        write(*arguments)
        marks.put(node.config, Drain(address))
        monkeypatch.setattr(claims_file, "save", write)

    if after_the_first_look:
        monkeypatch.setattr(claims_file, "save", save)
    else:
        marks.put(node.config, Drain(address))
    node.allocate(device)
    with raises(DeviceDrained):
        await driver.transactions.prepare(REFERENCE)
    assert driver.table.claims == {}


@pytest.mark.parametrize("is_there", [True, False], ids=["lost", "removed"])
async def test_the_time_slice_of_a_gpu_that_is_gone_is_not_reset_again_and_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    asked: list[str] = []

    def smi(_driver: Any, _config: Any, arguments: Any, *_: Any, **__: Any) -> str:
        asked.append(arguments[-1])
        raise SmiFailed("there is no such GPU")

    driver = await started(node)
    node.allocate(WHOLE.lower(), SLICED)
    await driver.transactions.prepare(REFERENCE)
    monkeypatch.setattr(sharing_setup, "run_nvidia_smi", smi)
    gpus = tuple(
        replace(gpu, lost="it fell off the bus") if gpu.uuid == WHOLE else gpu
        for gpu in INVENTORY.gpus
        if is_there or gpu.uuid != WHOLE
    )
    publish(driver._context.state.node, NodeSnapshot(replace(INVENTORY, gpus=gpus)))
    await driver.transactions.unprepare(REFERENCE)
    assert (asked, driver._context.state.faults.lines) == ([], {})
    publish(driver._context.state.node, NodeSnapshot(INVENTORY))
    node.allocate(OTHER.lower())  # once it is back, the next claim resets it
    await driver.transactions.prepare(REFERENCE)
    await driver.transactions.unprepare(REFERENCE)
    assert asked == ["--set-timeslice=0"]


async def test_a_claim_whose_daemon_ends_just_as_the_time_is_up_is_unprepared(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await started(node)
    node.allocate(WHOLE.lower(), SLICED)
    claim = await driver.transactions.prepare(REFERENCE)
    daemons = driver._context.state.mps_daemons

    async def wait(*_: Any, **__: Any) -> int:
        try:
            await anyio.sleep_forever()
        finally:
            publish(daemons, {})
        raise AssertionError

    name = f"claims/{claim.uid}"
    publish(daemons, {name: MpsDaemon(name, (), "it is draining")})
    monkeypatch.setattr(sharing_setup, "wait_any", wait)
    monkeypatch.setattr(sharing_setup, "_TO_END", 0.0)
    monkeypatch.setattr(
        sharing_setup, "daemons_of", lambda claims: dict.fromkeys((name,) * len(claims))
    )
    await driver.transactions.unprepare(REFERENCE)
    assert is_empty(node), "the time slice is reset, too"


async def test_a_claim_that_a_pod_gets_while_it_is_found_stale_is_not_unprepared(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await started(node)
    node.allocate(WHOLE.lower())
    claim = await driver.transactions.prepare(REFERENCE)
    stale = driver.stale
    pods = iter([False, True, False])

    async def found() -> list[Claim]:
        if next(pods):  # after the API server has answered that no pod of the node has it
            await driver.transactions.prepare(REFERENCE)
        return [claim]

    monkeypatch.setattr(stale, "_found", found)
    await stale.look()
    await stale.look()
    assert claim.uid in driver.table.claims
    await stale.look()
    assert is_empty(node)


async def until_idle(driver: Driver) -> None:
    """Wait until the driver has set all time slices that may be lost."""
    with anyio.fail_after(20):
        while driver.sharing._unsure & driver.sharing._gpus():
            await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("how", ["reset", "driver", "gpu", "agent"])
async def test_a_time_slice_that_the_driver_has_lost_is_set_again(node: Node, how: str) -> None:
    driver = await started(node)
    node.allocate(WHOLE.lower(), SLICED)
    await driver.transactions.prepare(REFERENCE)
    before = dict(node.slices)
    assert before
    if how == "agent":  # the driver was loaded again while no agent ran
        driver = await started(node)
    state = driver._context.state
    async with anyio.create_task_group() as tasks:
        if how != "agent":
            tasks.start_soon(driver.sharing.keep_slices)
            await anyio.wait_all_tasks_blocked()
        node.slices.clear()
        gone = replace(INVENTORY, gpus=tuple(g for g in INVENTORY.gpus if g.uuid != WHOLE))
        match how:
            case "reset":
                publish(state.nvml_pause, "GPU 0 is out of service")
                await anyio.wait_all_tasks_blocked()
                assert not node.slices, "nvidia-smi runs alone"
                publish(state.nvml_pause, "")
            case "driver" | "gpu":
                publish(state.node, NodeSnapshot(gone if how == "gpu" else None))
                await anyio.wait_all_tasks_blocked()
                publish(state.node, NodeSnapshot(INVENTORY))
            case _:
                tasks.start_soon(driver.sharing.keep_slices)
        await anyio.wait_all_tasks_blocked()
        await until_idle(driver)
        tasks.cancel_scope.cancel()
    assert node.slices == before


async def test_a_time_slice_that_cannot_be_set_again_is_a_fault_until_it_is(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smi(*_: Any, **__: Any) -> str:
        raise SmiFailed("the GPU is busy")

    driver = await started(node)
    node.allocate(WHOLE.lower(), SLICED)
    await driver.transactions.prepare(REFERENCE)
    faults, before = driver._context.state.faults, dict(node.slices)
    monkeypatch.setattr(sharing_setup, "_RETRY_AFTER", 0.01)
    async with anyio.create_task_group() as tasks:
        with monkeypatch.context() as patch:
            patch.setattr(sharing_setup, "run_nvidia_smi", smi)
            node.slices.clear()
            driver.sharing._unsure = {WHOLE}
            tasks.start_soon(driver.sharing.keep_slices)
            with anyio.fail_after(20):
                while "dra lost time slices" not in faults.lines:
                    await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(20):
            while faults.lines:
                await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert node.slices == before


async def test_a_lost_time_slice_is_set_again_by_the_claim_that_is_prepared_again(
    node: Node,
) -> None:
    driver = await started(node)
    node.allocate(WHOLE.lower(), SLICED)
    await driver.transactions.prepare(REFERENCE)
    driver, before = await started(node), dict(node.slices)
    node.slices.clear()
    await driver.transactions.prepare(REFERENCE)
    assert node.slices == before


async def test_a_device_on_a_gpu_that_nvml_does_not_list_is_not_forgotten(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = await begun(node, "a MIG device")
    await driver.transactions.prepare(REFERENCE)
    before = node.left()
    with monkeypatch.context() as patch:
        patch.setattr(mig_create, "ask_parts", lambda _: Parts())
        with raises(MigDeviceNotUndone):
            await driver.transactions.unprepare(REFERENCE)
    assert node.left() == before
    await driver.transactions.unprepare(REFERENCE)
    assert is_empty(node)


def test_a_mode_that_nvml_does_not_say_is_neither_switched_nor_taken_over(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gpu,) = (each for each in INVENTORY.gpus if each.uuid == CUT)
    ran: list[Any] = []
    monkeypatch.setattr(mig_create, "ask_parts", lambda _: Parts())
    monkeypatch.setattr(mig_create, "run_alone", lambda *arguments, **_: ran.append(arguments))
    modes = mig_create.MigModes(node.config)
    with raises(MigModeNotSwitched):
        modes.on(gpu, INVENTORY, "a claim")
    assert not ran
    assert not modes.switched
