"""What is done in a thread for which nobody waits any more."""

from __future__ import annotations

import asyncio
import threading

from integration.detached import run_detached
from tests.harness.waiting import eventually


def test_what_comes_after_the_end_of_the_loop_is_dropped() -> None:
    goes_on, dropped = threading.Event(), list[str]()

    def late() -> str:
        goes_on.wait(60)
        return "a connection"

    async def leave() -> None:
        call = asyncio.ensure_future(run_detached(late, drop=dropped.append))
        await asyncio.sleep(0)
        call.cancel()

    asyncio.run(leave())
    goes_on.set()
    eventually(lambda: dropped == ["a connection"], "it is dropped")
