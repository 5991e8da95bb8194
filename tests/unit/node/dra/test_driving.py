"""The driver, where something fails that nobody has thought of, or meets something else."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from hooks.cdi.spec import Edits
from hooks.config import Config
from integration.agent_errors import DeviceTaken, DraStateUnwritten, MpsNotReady
from integration.apiserver.client import ApiServer
from integration.node.mps.clients import MpsDaemon
from integration.node.options import DRA_DRIVER, Options
from integration.node.service import Context
from integration.node.services.dra.cdi import Template, keep
from integration.node.services.dra.driver import Driver
from integration.node.state import claims_file as state
from integration.node.state.topic import Topic
from integration.node.values.claims import Claim, ClaimDevice, Reference, Sharing
from integration.node.values.service_name import ServiceName
from tests.harness.node_state import publish
from tests.unit.node.dra.test_slices import DEVICES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


REFERENCE: Final = Reference("default", "uid", "claim")
RESULT: Final = {
    "driver": DRA_DRIVER, "pool": "node-1", "device": DEVICES[0].name, "request": "gpu",
}  # fmt: skip
ALLOCATED: Final = {
    "metadata": {"uid": "uid"},
    "status": {"allocation": {"devices": {"results": [RESULT]}}},
}


def driver_of(directory: Path) -> Driver:
    config = Config(state=str(directory), kubelet_root=str(directory))
    options = Options("", 60, node_name="node-1", pod_resources="", cri_sockets=())
    api = ApiServer("", 0, "")
    driver = Driver(Context(config, options, lambda *_, **__: None), api)
    driver._devices = {device.name: device for device in DEVICES}
    return driver


@pytest.mark.parametrize("step", ["_plugin_gave", "_save", "_heed_engine", "_keep_spec"])
async def test_what_fails_leaves_a_claim_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    driver = driver_of(tmp_path)

    async def read(_reference: Reference) -> dict[str, Any]:
        return ALLOCATED

    times: list[str] = []

    async def fail(*_: Any, **__: Any) -> None:
        times.append(step)
        if len(times) == 1:
            raise RuntimeError("nobody has thought of it")

    monkeypatch.setattr(driver, "_read", read)
    monkeypatch.setattr(driver, step, fail)
    with pytest.raises(RuntimeError):
        await driver.prepare(REFERENCE)
    assert driver._claims == {}
    assert driver._state.claimed_devices.value == ()


@pytest.mark.parametrize(("name", "is_taken"), [("nvidia.com/gpu", True), ("claims/one", False)])
async def test_what_the_device_plugin_shares_by_mps_is_no_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_taken: bool
) -> None:
    driver = driver_of(tmp_path)

    async def answer(*_: Any, **__: Any) -> dict[str, Any]:
        return ALLOCATED

    monkeypatch.setattr(driver, "_read", answer)
    monkeypatch.setattr(driver, "_keep_spec", answer)
    publish(driver._state.mps_daemons, {name: MpsDaemon(name, (DEVICES[0].uuid,))})
    taken = pytest.raises(DeviceTaken, match=r"which shares nvidia.com/gpu by MPS")
    with taken if is_taken else nullcontext():
        await driver.prepare(REFERENCE)


async def test_what_is_taken_back_while_it_is_prepared_is_taken_back_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, goes_on, done = driver_of(tmp_path), anyio.Event(), list[str]()

    async def read(_reference: Reference) -> dict[str, Any]:
        await goes_on.wait()
        return ALLOCATED

    async def nothing(*_: Any, **__: Any) -> None:
        pass

    async def do(what: str) -> None:
        await getattr(driver, what)(REFERENCE)
        done.append(what)

    monkeypatch.setattr(driver, "_read", read)
    monkeypatch.setattr(driver, "_keep_spec", nothing)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(do, "prepare")
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(do, "unprepare")  # whoever has it taken back: the kubelet, or the sweep
        await anyio.wait_all_tasks_blocked()
        goes_on.set()
    assert done == ["prepare", "unprepare"]
    assert driver._claims == {}


async def test_a_spec_that_could_not_be_kept_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(tmp_path)
    state.save(driver._config, [Claim(uid, "default", uid, ()) for uid in ("one", "two")])
    full = {"one"}

    async def keep(claim: Claim, **_: Any) -> None:
        if claim.uid in full:
            raise DraStateUnwritten(f"to keep {claim.uid}", found="No space left on device")

    monkeypatch.setattr(driver, "_keep_spec", keep)
    monkeypatch.setattr("integration.node.services.dra.driver._LOOK_AGAIN", 0.01)
    await driver.begin()
    assert "cannot keep one" in driver._state.faults.lines["dra specs"]
    full.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.keep)
        with anyio.fail_after(20):
            while "dra specs" in driver._state.faults.lines:
                await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


async def test_what_is_settled_on_a_full_disk_counts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, claim = driver_of(tmp_path), Claim("uid", "default", "claim", ())
    driver._claims["uid"] = claim

    async def full() -> None:
        raise DraStateUnwritten("to write it", found="No space left on device")

    monkeypatch.setattr(driver, "_save", full)
    await driver._settle([(claim, None)])
    assert driver._claims == {}


def with_mps(uid: str, daemon: str) -> Claim:
    sharing = Sharing(daemon=f"claims/{daemon}")
    device = ClaimDevice("gpu", "node-1", "gpu-0", "GPU-0", "GPU-0", sharing=sharing)
    return Claim(uid, "default", "claim", (device,))


async def test_a_daemon_that_pods_have_goes_on_where_a_claim_cannot_have_another(
    tmp_path: Path,
) -> None:
    driver = driver_of(tmp_path)
    before, now = with_mps("uid", "before"), with_mps("uid", "now")
    driver._applying.begin([before])
    posted: list[set[str]] = []
    driver._state.claim_daemons = Topic(
        driver._state.claim_daemons.value,
        ServiceName.DRA,
        "which daemons were asked for, each time",
        on_publish=lambda daemons: posted.append(set(daemons or ())),
    )
    driver._applying._claims["uid"] = now
    await driver._applying.put_back("uid", before)
    assert posted
    assert all(each == {"claims/before"} for each in posted)


def test_a_spec_is_left_as_it_is_while_it_is_not_known_where_mps_is(tmp_path: Path) -> None:
    claim = with_mps("uid", "one")
    device = SimpleNamespace(edits=Edits())
    template = Template(None, {"GPU-0": device}, {}, "0.5.0")  # type: ignore[arg-type,dict-item]
    with pytest.raises(MpsNotReady, match="where MPS has its files is not known"):
        keep(Config(state=str(tmp_path)), "driver", claim, template, "")
