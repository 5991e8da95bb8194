"""The driver, where something fails that nobody has thought of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hooks.config import Config
from integration.node.api_server import ApiServer
from integration.node.components import Context
from integration.node.dra.claims import Reference
from integration.node.dra.driving import Driver
from integration.node.options import DRA_DRIVER, Options
from tests.unit.node.dra.test_slices import DEVICES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("step", ["_plugin_gave", "_save", "_heed_engine", "_keep_spec"])
async def test_what_fails_leaves_a_claim_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    config = Config(state=str(tmp_path), kubelet_root=str(tmp_path))
    options = Options("", 60, node_name="node-1", pod_resources="", cri_sockets=())
    api = ApiServer("", 0, "")
    driver = Driver(Context(config, options, lambda *_, **__: None), api)
    driver._devices = {device.name: device for device in DEVICES}
    result = {"driver": DRA_DRIVER, "pool": "node-1", "device": DEVICES[0].name, "request": "gpu"}
    devices = {"devices": {"results": [result]}}

    async def read(_reference: Reference) -> dict[str, Any]:
        return {"metadata": {"uid": "uid"}, "status": {"allocation": devices}}

    times: list[str] = []

    async def fail(*_: Any, **__: Any) -> None:
        times.append(step)
        if len(times) == 1:
            raise RuntimeError("nobody has thought of it")

    monkeypatch.setattr(driver, "_read", read)
    monkeypatch.setattr(driver, step, fail)
    with pytest.raises(RuntimeError):
        await driver.prepare(Reference("default", "uid", "claim"))
    assert driver._claims == {}
    assert driver._board.claimed == ()
