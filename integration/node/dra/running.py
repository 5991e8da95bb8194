"""The driver of this node, from what an agent before this one has left until the agent ends."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import anyio

from integration.node.api_server import api_server_of
from integration.node.dra.driving import Driver
from integration.node.dra.serving import Serving
from integration.node.dra.stale import Stale

if TYPE_CHECKING:
    from integration.node.components import Context

__all__ = ["drive"]


async def drive(context: Context) -> None:
    """Be the driver, until cancelled."""
    for part in [name for name in context.board.faults if name.startswith("dra ")]:
        context.board.fault(part, "")
    with closing(api_server_of(context.options)) as api:
        async with anyio.create_task_group() as tasks:
            driver = Driver(context, api)
            await driver.begin()
            tasks.start_soon(driver.keep)
            tasks.start_soon(driver.hear_specs)
            tasks.start_soon(driver.on_demand.tidy)
            tasks.start_soon(driver.publisher.run)
            tasks.start_soon(Stale(context, driver.reader, driver.unprepare).run)
            serving = context.serving
            if serving is None:
                serving = Serving(context)
                tasks.start_soon(serving.run)
            await serving.work(driver)
