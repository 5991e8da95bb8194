"""Reading claims while the API server is busy or unreachable."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import pytest

from integration import detached
from integration.agent_errors import ApiServerSilent
from integration.apiserver.client import ApiServer
from integration.node.services.dra.claim_reader import ClaimReader
from integration.node.values.claims import Reference
from tests.harness.cluster import Cluster
from tests.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

MANY: Final = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(str(tmp_path / "account"), node="node-1") as cluster:
        yield cluster


@pytest.fixture
def reader(cluster: Cluster) -> Iterator[Callable[..., ClaimReader]]:
    """Make readers of claims. Their connections are closed at the end: errors refer to them."""
    with ExitStack() as opened:

        async def version() -> str:
            return "v1"

        def make(timeout: float = 10.0) -> ClaimReader:
            api = ApiServer("127.0.0.1", cluster.port, cluster.service_account, timeout=timeout)
            opened.callback(api.close)
            return ClaimReader(api, version)

        yield make


async def test_who_waits_for_a_silent_server_hears_it_together_and_keeps_no_thread_from_others(
    cluster: Cluster,
    reader: Callable[..., ClaimReader],
) -> None:
    goes_on, failed = threading.Event(), []

    def silent(*_: Any) -> None:
        goes_on.wait(60)

    cluster.refuse = silent
    claims = reader(timeout=1.0)

    async def read(number: int) -> None:
        with pytest.raises(ApiServerSilent):
            await claims.read(Reference("default", "uid", f"claim-{number}"))
        failed.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(MANY):
            tasks.start_soon(read, number)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(lambda: None)
        assert not failed, "a free thread was found before any call timed out"
    assert len(cluster.asked) <= 4
    goes_on.set()
    cluster.refuse = lambda *_: None
    cluster.claim("claim", [], uid="uid")
    found = await claims.read(Reference("default", "uid", "claim"))
    assert found["metadata"]["uid"] == "uid", "a later caller sends a new request"


@pytest.mark.parametrize("how", ["unknown", "silent"])
async def test_who_finds_no_address_hears_it_in_time_and_few_threads_look_for_it(
    cluster: Cluster, reader: Callable[..., ClaimReader], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A resolver may take minutes, and cannot be interrupted."""
    goes_on = threading.Event()
    most = threading.active_count() + 8 + detached._MOST_IDLE

    def resolve(*_: Any, **__: Any) -> Any:
        if how == "silent":
            goes_on.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    claims, failed = reader(timeout=0.1), list[str]()

    async def read(number: int) -> None:
        with pytest.raises(ApiServerSilent) as silent:
            await claims.read(Reference("default", "uid", f"claim-{number}"))
        failed.append(silent.value.code)

    for turn in range(4):
        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(read, 10 * turn + number)
        await until(lambda: threading.active_count() <= most, "the others have ended")
    goes_on.set()
    assert failed == [ApiServerSilent.code] * 40


async def test_what_is_prepared_waits_a_moment_for_the_server_and_then_not_at_all(
    cluster: Cluster,
    reader: Callable[..., ClaimReader],
) -> None:
    goes_on = threading.Event()

    def silent(*_: Any) -> None:
        goes_on.wait(60)

    cluster.refuse = silent
    claims = reader()
    for _ in range(5):
        with pytest.raises(ApiServerSilent):
            await claims.read(Reference("default", "uid", "claim"), is_prepared=True)
    assert len(cluster.asked) == 1, "it has just been silent"
    goes_on.set()


async def test_a_server_that_is_busy_is_asked_again(
    cluster: Cluster, reader: Callable[..., ClaimReader]
) -> None:
    cluster.claim("claim", [], uid="uid")
    cluster.refuse = lambda *_: 429 if len(cluster.asked) < 3 else None
    cluster.retry_after = 1
    found = await reader().read(Reference("default", "uid", "claim"))
    assert found["metadata"]["uid"] == "uid"
    assert len(cluster.asked) == 3
