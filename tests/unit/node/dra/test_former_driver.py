"""Slices that were published under an earlier driver name."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from hooks.config import Config
from integration.apiserver.client import ApiServer
from integration.node.options import DRA_DRIVER, Options
from integration.node.service import Context
from integration.node.services.dra.former_driver import FormerSlices
from integration.node.services.dra.publishing import Publisher
from integration.node.services.dra.slices import VERSIONS, Counting, Owner, changes, contents
from integration.node.state import claims_file as state
from tests.harness.api_server import denied, refusal
from tests.harness.cluster import Cluster
from tests.harness.waiting import until
from tests.unit.node.dra.test_mig_layout import published
from tests.unit.node.dra.test_publishing import NODE, cluster
from tests.unit.node.dra.test_slices import many

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

__all__ = ["cluster"]
pytestmark = pytest.mark.anyio

OLD: Final = "gpu.example.com"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state=str(tmp_path), proc=str(tmp_path))


@asynccontextmanager
async def an_agent(cluster: Cluster, config: Config, name: str) -> AsyncIterator[list[str]]:
    """Run an agent that publishes under a driver name; yield its log."""
    said: list[str] = []
    context = Context(config, Options("", 60), lambda _, line, **__: said.append(line))
    with closing(ApiServer("127.0.0.1", cluster.port, cluster.service_account)) as api:
        former = FormerSlices(context, api, name, NODE)
        await former.start()
        publisher = Publisher(context, api, name, NODE, lambda *_: None, before=former.remove)
        publisher.want(tuple(many(2)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.run)
            yield said
            tasks.cancel_scope.cancel()


def drivers(cluster: Cluster) -> list[str]:
    return sorted(each["spec"]["driver"] for each in cluster.slices())


def put(cluster: Cluster, driver: str, devices: Any, node: str = NODE) -> None:
    """Create slices like those of our driver, under a driver name."""
    listed = contents(devices, VERSIONS[0], Counting.APART)
    for write in changes((), listed, Owner(driver, node, "uid")):
        cluster.put(write.body)


async def test_they_go_before_ours_are_written_and_are_not_looked_for_again(
    cluster: Cluster, config: Config
) -> None:
    async with an_agent(cluster, config, OLD):
        await until(lambda: drivers(cluster) == [OLD])
    assert state.drivers(config) == (OLD,)
    put(cluster, OLD, published(3))
    put(cluster, OLD, published(3), node="node-2")
    async with an_agent(cluster, config, DRA_DRIVER):
        await until(lambda: DRA_DRIVER in drivers(cluster))
        left = {each["spec"]["nodeName"]: each["spec"]["driver"] for each in cluster.slices()}
        assert left == {NODE: DRA_DRIVER, "node-2": OLD}
        assert state.drivers(config) == (DRA_DRIVER,)
    put(cluster, OLD, published(3))
    cluster.wipe()
    put(cluster, OLD, published(3))
    async with an_agent(cluster, config, DRA_DRIVER):
        await until(lambda: DRA_DRIVER in drivers(cluster))
        assert OLD in drivers(cluster), "that name is no longer ours"


async def test_who_has_the_name_by_now_keeps_its_slices(cluster: Cluster, config: Config) -> None:
    state.save_drivers(config, [OLD])
    devices = [replace(each, attributes={"uuid": {"string": each.uuid}}) for each in many(2)]
    put(cluster, OLD, devices)
    put(cluster, OLD, [])
    async with an_agent(cluster, config, DRA_DRIVER):
        await until(lambda: DRA_DRIVER in drivers(cluster))
        assert drivers(cluster) == [DRA_DRIVER, OLD, OLD]


async def test_what_may_not_be_deleted_is_left_to_the_kubelet(
    cluster: Cluster, config: Config
) -> None:
    state.save_drivers(config, [OLD])
    put(cluster, OLD, published(3))
    cluster.refuse = lambda method, _: denied() if method == "DELETE" else None
    async with an_agent(cluster, config, DRA_DRIVER) as said:
        await until(lambda: DRA_DRIVER in drivers(cluster))
        assert OLD in drivers(cluster)
        assert any("ValidatingAdmissionPolicy no-slices" in each for each in said)
        assert len([how for how, _ in cluster.writes if how == "DELETE"]) == 1


@pytest.mark.parametrize("code", [404, 503])
async def test_a_kubelet_that_is_faster_is_no_failure_and_a_server_that_fails_is_asked_again(
    cluster: Cluster, config: Config, code: int
) -> None:
    state.save_drivers(config, [OLD])
    put(cluster, OLD, published(3))
    answers = [refusal(code, "not found")]

    def refuse(method: str, _path: str) -> tuple[int, Any] | None:
        if method == "DELETE" and answers:
            cluster.wipe() if code == 404 else None
            return answers.pop()
        return None

    cluster.refuse = refuse
    async with an_agent(cluster, config, DRA_DRIVER) as said:
        await until(lambda: drivers(cluster) == [DRA_DRIVER])
        assert "deleted former slices" in said
        assert not answers


async def test_names_that_cannot_be_read_or_written_keep_no_agent_from_publishing(
    cluster: Cluster, config: Config, tmp_path: Path
) -> None:
    (tmp_path / "dra-drivers.json").write_text('{"format": 1, "boot": "", "names": 3}\n')
    assert state.drivers(config) == ()
    (tmp_path / "dra-drivers.json").unlink()
    (tmp_path / "dra-drivers.json").mkdir()
    async with an_agent(cluster, config, DRA_DRIVER) as said:
        await until(lambda: drivers(cluster) == [DRA_DRIVER])
        assert any("E2777" in each for each in said)
