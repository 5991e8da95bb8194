"""The Node condition of the GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import Config
from hooks.node.drained import DRIVER, Drain
from integration.node import reporter
from integration.node.device_health import health_store
from integration.node.device_health.device_state import Condition
from integration.node.device_health.health_table import HealthTable, Place
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.node_condition import TYPE, condition_of, run
from integration.node.values.health import HealthState
from tests.harness.api_server import ApiServer, denied, denied_by_webhook, refusal, webhook_failed
from tests.harness.node_state import publish
from tests.harness.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.http_server import Request

ILL = Condition(HealthState.UNHEALTHY, reason="Xid 79")
BACK = Condition(HealthState.RECOVERING)
WELL = {"GPU-a": Condition(), "GPU-b": Condition(HealthState.SUSPECT, reason="Xid 8")}


def test_what_is_given_is_no_reason() -> None:
    assert condition_of([], WELL) == ("False", "AllInService", "all GPUs are in service")
    assert condition_of([], {}).status == "False"


def test_each_device_that_no_pod_can_have_is_named_once_with_its_reason() -> None:
    told = condition_of([], {**WELL, "GPU-d": BACK, "GPU-c": ILL})
    assert told == ("True", "Unhealthy", "GPU-c is unhealthy: Xid 79; GPU-d is recovering")
    told = condition_of([Drain("GPU-c", reason="fan")], {**WELL, "GPU-c": ILL})
    assert told == ("True", "Drained", "GPU-c is out of service fan")
    told = condition_of([Drain(DRIVER)], {"GPU-c": ILL})
    assert told[:2] == ("True", "DrainedAndUnhealthy")
    assert told.message.startswith("the driver is out of service without a word of why; GPU-c is ")


def test_a_gpu_that_is_out_of_service_by_its_address_is_named_once_by_its_uuid() -> None:
    address, ill = "0000:3b:00.0", {"GPU-c": ILL, "GPU-d": ILL}
    addresses = {"GPU-c": address, "GPU-d": "0000:5e:00.0"}
    by_address, by_uuid = Drain(address, address, "fan"), Drain("GPU-c", address, "cable")
    told = condition_of([by_address], ill, addresses)
    assert told.message == "GPU-c is out of service fan; GPU-d is unhealthy: Xid 79"
    told = condition_of([by_address, by_uuid], ill, addresses)
    assert told.message == "GPU-c is out of service fan and cable; GPU-d is unhealthy: Xid 79"
    assert condition_of([by_address], {}).message == f"{address} is out of service fan"


@pytest.mark.anyio
async def test_the_addresses_of_gpus_are_those_of_the_health_table(tmp_path: Path) -> None:
    address = "0000:3b:00.0"
    config = Config(state=str(tmp_path), drained=str(tmp_path / "drained"))
    places = {uuid: Place(uuid, uuid, address) for uuid in ("GPU-c", "GPU-before")}
    conditions = dict.fromkeys(places, Condition())
    health_store.write(config, HealthTable(places, conditions, frozenset({"GPU-before"})))
    (tmp_path / "drained").mkdir()
    (tmp_path / "drained" / address).write_text('{"reason": "fan"}')
    with ApiServer(str(tmp_path / "account")) as api:
        api.nodes["one"] = []
        options = Options(
            "", 1, api_server="127.0.0.1", api_port=api.port, service_account=api.service_account,
            node_name="one",
        )  # fmt: skip
        context = Context(config, options, lambda *_, **__: None)
        publish(context.state.health, {"GPU-c": ILL})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, context)
            await until(lambda: api.nodes["one"], "it is written")
            tasks.cancel_scope.cancel()
    assert api.nodes["one"][0]["message"] == "GPU-c is out of service fan"


@pytest.mark.anyio
async def test_a_node_that_is_registered_again_gets_the_condition_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "_CHECK_AFTER", 0.05)
    config = Config(state=str(tmp_path), drained=str(tmp_path / "drained"))
    with ApiServer(str(tmp_path / "account")) as api:
        api.nodes["one"] = []
        options = Options(
            "", 1, api_server="127.0.0.1", api_port=api.port, service_account=api.service_account,
            node_name="one",
        )  # fmt: skip
        context = Context(config, options, lambda *_, **__: None)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, context)
            await until(lambda: api.nodes["one"], "it is written")
            api.nodes["one"] = []
            await until(lambda: api.nodes["one"], "it is written again")
            tasks.cancel_scope.cancel()


def test_a_message_has_an_end() -> None:
    told = condition_of([Drain(f"GPU-{n:04}", reason="x" * 99) for n in range(64)], {})
    assert len(told.message) == 1025
    assert told.message.endswith("…")


class Denying(ApiServer):
    """An API server that refuses changes of Nodes while ``no`` is set."""

    no: tuple[int, Any] | None = None

    def answer(self, request: Request) -> tuple[int, Any]:
        return self.no if self.no and request.method == "PATCH" else super().answer(request)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("no", "name", "told"),
    [
        (denied(), "one", "Check the ValidatingAdmissionPolicy no-slices; the agent retries"),
        (denied_by_webhook(403), "one", "Check the admission webhook slices.example.com"),
        (webhook_failed(), "one", "Check the webhook slices.example.com"),
        (
            refusal(409, "the object has been modified"),
            "one",
            "the agent reads it again and retries",
        ),
        (refusal(429), "one", "Check the API server; the agent retries"),
        (None, "another", "Give --node-name as"),
    ],
)
async def test_who_refuses_the_condition_is_named_and_it_is_written_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no: Any, name: str, told: str
) -> None:
    monkeypatch.setattr(reporter, "_RETRY_AFTER", 0.05)
    lines: list[str] = []
    config = Config(drained=str(tmp_path / "drained"))
    with Denying(str(tmp_path / "account")) as api:
        api.no, api.nodes[name] = no, []
        options = Options(
            "", 1, api_server="127.0.0.1", api_port=api.port, service_account=api.service_account,
            node_name="one",
        )  # fmt: skip
        context = Context(config, options, lambda _, line, **__: lines.append(line))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, context)
            await until(lambda: any(told in each for each in lines), "it is named")
            api.no, api.nodes["one"] = None, []
            await until(lambda: api.nodes["one"], "it is written")
            tasks.cancel_scope.cancel()
        assert api.nodes["one"][0]["type"] == TYPE
        assert "ClusterRole" not in lines[0]
