"""The RPCs of the active driver: several claims at once, and calls during its shutdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from api.errors import NvshimError
from api.proto import dra_pb2 as pb
from hooks.config import Config
from integration.agent_errors import ClaimUnfinished, ResourceClaimUnusable
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.dra import rpc as answering
from integration.node.services.dra.rpc import ActiveDriver, DriverEnded
from integration.node.values.claims import Claim, Health

if TYPE_CHECKING:
    from collections.abc import Iterable

    from integration.node.values.claims import Reference

pytestmark = pytest.mark.anyio

CLAIMS = [pb.Claim(namespace="default", uid=f"uid-{n}", name=f"claim-{n}") for n in range(3)]


class Slow:
    """A driver that blocks until it is released, or until enough calls wait."""

    def __init__(self, together: int) -> None:
        self.goes_on = anyio.Event()
        self.asked: list[str] = []
        self._together = together

    async def prepare(self, reference: Reference) -> Claim:
        self.asked.append(reference.uid)
        if len(self.asked) == self._together:
            self.goes_on.set()
        await self.goes_on.wait()
        if reference.uid == "uid-1":
            raise ResourceClaimUnusable("the claim", found="does not exist")
        return Claim(reference.uid, reference.namespace, reference.name, ())

    async def unprepare(self, reference: Reference) -> None:
        await self.prepare(reference)

    def health(self) -> Iterable[Health]:
        return ()

    @property
    def transactions(self) -> Slow:
        return self


def context() -> Context:
    return Context(Config(), Options("", 60), lambda *_, **__: None)


async def test_the_claims_of_one_call_do_not_wait_for_each_other() -> None:
    slow = Slow(len(CLAIMS))
    async with anyio.create_task_group() as tasks:
        at_work = ActiveDriver(context(), slow, tasks)
        answer = await at_work.prepare(
            pb.NodePrepareResourcesRequest(claims=CLAIMS), knows_shares=True
        )
        assert {uid for uid, each in answer.claims.items() if each.error} == {"uid-1"}
        assert answer.claims.keys() == {"uid-0", "uid-1", "uid-2"}
        taken = await at_work.unprepare(pb.NodeUnprepareResourcesRequest(claims=CLAIMS))
        assert ResourceClaimUnusable.code in taken.claims["uid-1"].error
        assert not taken.claims["uid-2"].error


@pytest.mark.parametrize("what", ["prepare", "unprepare"])
async def test_what_takes_longer_than_a_kubelet_waits_is_said_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(answering, "_TO_ANSWER", 0.05)
    slow = Slow(100)

    async def ask() -> str:
        if what == "unprepare":
            taken = await at_work.unprepare(pb.NodeUnprepareResourcesRequest(claims=CLAIMS[:1]))
            return taken.claims["uid-0"].error
        request = pb.NodePrepareResourcesRequest(claims=CLAIMS[:1])
        return (await at_work.prepare(request, knows_shares=True)).claims["uid-0"].error

    async with anyio.create_task_group() as tasks:
        at_work = ActiveDriver(context(), slow, tasks)
        with anyio.fail_after(10):
            late = await ask()
        assert late.startswith(ClaimUnfinished.code)
        assert f"cannot {what} the claim default/claim-0" in late
        slow.goes_on.set()
        assert await ask() == ""
        assert slow.asked == ["uid-0"] * 2


@pytest.mark.parametrize("goes_on", [True, False])
async def test_what_is_under_way_at_the_end_is_finished_or_has_no_answer(
    monkeypatch: pytest.MonkeyPatch, *, goes_on: bool
) -> None:
    monkeypatch.setattr(answering, "TO_FINISH", 60.0 if goes_on else 0.0)
    slow, found = Slow(100), list[object]()
    request = pb.NodePrepareResourcesRequest(claims=CLAIMS[:1])

    async def ask(at_work: ActiveDriver) -> None:
        try:
            found.append((await at_work.prepare(request, knows_shares=True)).claims["uid-0"].error)
        except (DriverEnded, NvshimError) as error:
            found.append(type(error))

    async with anyio.create_task_group() as calls, anyio.create_task_group() as tasks:
        at_work = ActiveDriver(context(), slow, tasks)
        calls.start_soon(ask, at_work)
        await anyio.wait_all_tasks_blocked()
        at_work.end()
        tasks.cancel_scope.cancel()
        if goes_on:
            slow.goes_on.set()
    assert found == ([""] if goes_on else [DriverEnded])
