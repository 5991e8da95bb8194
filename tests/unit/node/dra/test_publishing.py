"""Publishing the slices of a node to an API server that others change, too."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, closing
from typing import TYPE_CHECKING, Any, Final

import anyio
import pytest

from hooks.config import Config
from integration.apiserver.client import ApiServer
from integration.node.options import DRA_DRIVER, Options
from integration.node.service import Context
from integration.node.services.dra.publishing import Publisher
from integration.node.services.dra.slices import MOST_DEVICES
from tests.harness.cluster import Cluster
from tests.harness.waiting import until
from tests.unit.node.dra.test_mig_layout import published
from tests.unit.node.dra.test_slices import many

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from integration.apiserver.client import Watch
    from tests.harness.http_server import Request

pytestmark = pytest.mark.anyio

NODE: Final = "node-1"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(str(tmp_path / "account"), node=NODE) as cluster:
        yield cluster


class Wiped(ApiServer):
    """A server whose client sees the deletion of a slice before the answer to its creation."""

    cluster: Cluster
    publisher: Publisher
    loop: asyncio.AbstractEventLoop
    wiped = 0

    def watch(self, path: str, version: str, query: Any) -> Watch:
        del version
        return super().watch(path, "1000000", query)  # its events have been sent before

    def call(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().call(method, *args, **kwargs)
        if method == "POST" and not self.wiped:
            type(self).wiped += 1
            self.cluster.wipe()
            name = found["metadata"]["name"]
            heard = threading.Event()
            self.loop.call_soon_threadsafe(self.publisher._hear, "DELETED", found)
            self.loop.call_soon_threadsafe(heard.set)
            assert heard.wait(60)
            assert name not in {each["metadata"]["name"] for each in self.cluster.slices()}
        return found


class Changed(Wiped):
    """A server whose client sees another client's change before the answer to its own."""

    changed = 0

    def call(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = ApiServer.call(self, method, *args, **kwargs)
        if method == "POST" and not self.changed:
            type(self).changed += 1
            name, spec = found["metadata"]["name"], {**found["spec"], "devices": []}
            with closing(ApiServer(self.host, self.port, self.service_account)) as other:
                later = other.call("PUT", f"{args[0]}/{name}", {**found, "spec": spec})
            heard = threading.Event()
            self.loop.call_soon_threadsafe(self.publisher._hear, "MODIFIED", later)
            self.loop.call_soon_threadsafe(heard.set)
            assert heard.wait(60)
        return found


@asynccontextmanager
async def publishing(
    cluster: Cluster, kind: type[ApiServer] = ApiServer, node: str = NODE
) -> AsyncIterator[tuple[Publisher, dict[str, str]]]:
    faults: dict[str, str] = {}

    def say(_level: str, event: str, **_fields: Any) -> None:
        faults[f"said {event}"] = event

    context = Context(Config(), Options("", 60), say)
    api = kind("127.0.0.1", cluster.port, cluster.service_account)
    publisher = Publisher(context, api, DRA_DRIVER, node, faults.__setitem__)
    if issubclass(kind, Wiped):
        kind.cluster, kind.publisher = cluster, publisher
        kind.loop = asyncio.get_running_loop()
    with closing(api):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.run)
            yield publisher, faults
            tasks.cancel_scope.cancel()


async def test_a_slice_that_is_deleted_before_it_is_heard_to_be_made_is_made_again(
    cluster: Cluster,
) -> None:
    async with publishing(cluster, Wiped) as (publisher, _):
        publisher.want(tuple(many(2)))
        await until(lambda: Wiped.wiped and len(cluster.published()) == 2)
        assert [method for method, _ in cluster.writes] == ["POST", "POST"]


async def test_a_change_that_is_heard_before_the_answer_to_an_earlier_write_is_undone(
    cluster: Cluster,
) -> None:
    async with publishing(cluster, Changed) as (publisher, _):
        publisher.want(tuple(many(2)))
        await until(lambda: Changed.changed and len(cluster.published()) == 2, timeout=5)


async def test_a_node_that_was_made_anew_owns_the_slices(cluster: Cluster) -> None:
    def owners() -> list[str]:
        return [each["metadata"]["ownerReferences"][0]["uid"] for each in cluster.slices()]

    async with publishing(cluster) as (publisher, _):
        publisher.want(tuple(many(2)))
        await until(lambda: owners() == [cluster.node_uid])
        cluster.node_uid = "another"
        cluster.wipe()  # as garbage collection does when the owner is deleted
        await until(lambda: owners() == ["another"])


async def test_what_is_not_known_leaves_what_was_published(cluster: Cluster) -> None:
    async with publishing(cluster) as (publisher, _):
        publisher.want(tuple(many(2)))
        await until(lambda: len(cluster.published()) == 2)
        publisher.want(None)
        publisher.want(tuple(many(2)))
        publisher.want(())
        await until(lambda: not cluster.published())
        assert [method for method, _ in cluster.writes] == ["POST", "PUT"]


async def test_what_a_server_drops_is_sent_once(cluster: Cluster) -> None:
    cluster.drops = frozenset({"gpu.nvidia.com/brand"})
    async with publishing(cluster) as (publisher, _):
        publisher.want(tuple(many(1)))
        await until(lambda: len(cluster.published()) == 1)
        cluster.close_watches()
        await until(lambda: cluster.watches == 1)
        publisher.want(tuple(many(2)))
        await until(lambda: len(cluster.published()) == 2)
        assert [method for method, _ in cluster.writes] == ["POST", "PUT"]


async def test_a_busy_server_is_asked_again_and_an_absent_api_is_said(cluster: Cluster) -> None:
    cluster.refuse = lambda *_: 429
    async with publishing(cluster) as (publisher, faults):
        publisher.want(tuple(many(1)))
        await until(lambda: "429" in faults.get("slices", ""))
        cluster.refuse = lambda *_: None
        await until(lambda: len(cluster.published()) == 1)
        await until(lambda: not faults["slices"])
    cluster.versions = ("v1alpha3",)
    async with publishing(cluster) as (_, faults):
        await until(lambda: "it has v1alpha3" in faults.get("slices", ""))


async def test_what_a_server_drops_of_several_slices_is_sent_once(cluster: Cluster) -> None:
    cluster.drops = frozenset({"gpu.nvidia.com/brand"})
    async with publishing(cluster) as (publisher, _):
        publisher.want(tuple(many(MOST_DEVICES + 2)))
        await until(lambda: len(cluster.published()) == MOST_DEVICES + 2)
        written = len(cluster.slices())
        await until(lambda: cluster.watches == 1)
        cluster.close_watches()
        # One list and two watches; the first watch had all events.
        await until(
            lambda: sum(path.endswith("slices") for _, path in cluster.asked) >= 3 + written
        )
        publisher.want(tuple(many(1)))
        await until(lambda: len(cluster.published()) == 1)
        methods = [method for method, _ in cluster.writes]
        assert methods[: written + 1] == [*["POST"] * written, "DELETE"]


async def test_what_somebody_removes_each_time_is_not_written_for_ever(cluster: Cluster) -> None:
    async with publishing(cluster) as (publisher, faults):
        publisher.want(tuple(many(1)))
        await until(lambda: len(cluster.published()) == 1)
        said = "said another client keeps changing the node's slices"
        while said not in faults and len(cluster.writes) < 20:
            cluster.wipe()
            await until(lambda: cluster.slices() or said in faults)
        assert len(cluster.writes) == 1 + 5
        publisher.want(tuple(many(2)))
        await until(lambda: len(cluster.published()) == 2)


async def test_a_node_that_does_not_exist_is_said(cluster: Cluster) -> None:
    async with publishing(cluster, node="node-2") as (publisher, faults):
        publisher.want(tuple(many(1)))
        await until(lambda: "404" in faults.get("slices", ""))


async def test_another_server_may_speak_another_version(cluster: Cluster) -> None:
    cluster.versions = ("v1beta1",)
    async with publishing(cluster) as (publisher, _):
        publisher.want(tuple(many(1)))
        await until(lambda: len(cluster.published()) == 1)
        cluster.versions = ("v1",)
        cluster.wipe()
        cluster.close_watches()
        await until(lambda: len(cluster.published()) == 1)
        (found,) = cluster.slices()
        assert found["apiVersion"] == "resource.k8s.io/v1"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"versions": [None]},
        {"items": [{}], "metadata": {}},
        {"items": 3},
        {
            "items": [
                {
                    "metadata": {"name": "one"},
                    "spec": {
                        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
                        "devices": [{"taints": [{"timeAdded": "now"}]}],
                    },
                }
            ],
            "metadata": {"resourceVersion": "1"},
        },
    ],
    ids=["empty", "versions", "list", "items", "devices"],
)
async def test_an_answer_of_something_else_is_a_fault_and_no_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]
) -> None:
    answer, is_strange = cluster.answer, [True]

    def strange(request: Request) -> tuple[int, Any]:
        is_list = request.path.partition("?")[0].endswith("resourceslices")
        return (200, document) if is_strange and (is_list or not document.get("items")) else answer(
            request
        )  # fmt: skip

    monkeypatch.setattr(cluster, "answer", strange)
    async with publishing(cluster) as (publisher, faults):
        publisher.want(tuple(many(1)))
        await until(lambda: "E277" in faults.get("slices", ""))
        is_strange.clear()
        await until(lambda: len(cluster.published()) == 1)


async def test_a_change_that_is_none_of_a_slice_is_a_fault_and_no_end(cluster: Cluster) -> None:
    async with publishing(cluster) as (publisher, faults):
        publisher.want(tuple(many(1)))
        await until(lambda: len(cluster.published()) == 1)
        cluster.tell("MODIFIED", {"driver": DRA_DRIVER, "nodeName": NODE})
        await until(lambda: "a change of a slice" in faults.get("slices", ""))
        await until(lambda: not faults["slices"])


class Uncounted(Cluster):
    """A server without counters, which drops them silently."""

    def _kept(self, code: int, kind: str, body: Any) -> tuple[int, Any]:
        body["spec"].pop("sharedCounters", None)
        for device in body["spec"].get("devices", ()):
            device.get("basic", device).pop("consumesCounters", None)
        return super()._kept(code, kind, body)


class Beside(Cluster):
    """A server that requires counters in the slice of their devices, as 1.34 does."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.faults = self._wrong

    def _wrong(self, spec: dict[str, Any]) -> list[str]:
        there = {each["name"] for each in spec.get("sharedCounters", ())}
        taken = {
            each["counterSet"]
            for device in spec.get("devices", ())
            for each in device.get("consumesCounters", ())
        }
        return [] if taken == there else ["must be a counterSet in the ResourceSlice"]


PARTS: Final = tuple(published(3))
WHOLE: Final = {each.name for each in PARTS if each.part is None}


@pytest.mark.parametrize(
    ("kind", "names", "posts"),
    [
        (Cluster, {each.name for each in PARTS}, 4),
        (Beside, {each.name for each in PARTS}, 4 + 1),  # one was refused
        (Uncounted, WHOLE, 1),  # it replaces the slice that lost its counters
    ],
)
async def test_counters_go_where_the_server_has_them(
    tmp_path: Path, kind: type[Cluster], names: set[str], posts: int
) -> None:
    with kind(str(tmp_path / "of-a-kind"), node=NODE) as cluster:
        async with publishing(cluster) as (publisher, faults):
            publisher.want(PARTS)
            await until(lambda: cluster.published() == names)
            methods = [method for method, _ in cluster.writes]
            assert methods.count("POST") == posts
            publisher.want((*PARTS[1:],))
            await until(lambda: cluster.published() == names - {PARTS[0].name})
            assert not faults.get("slices")


async def test_no_part_is_published_without_counters_for_a_moment(tmp_path: Path) -> None:
    seen: set[str] = set()

    class Looked(Uncounted):
        def _kept(self, code: int, kind: str, body: Any) -> tuple[int, Any]:
            seen.update(each["name"] for each in body["spec"].get("devices", ()))
            return super()._kept(code, kind, body)

    with Looked(str(tmp_path / "looked"), node=NODE) as cluster:
        async with publishing(cluster) as (publisher, _):
            publisher.want(PARTS)
            await until(lambda: cluster.published() == WHOLE)
    assert seen == WHOLE
