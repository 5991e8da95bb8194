"""Doing something in a thread for which nobody has to wait who waits no more.

Neither does the process: a thread that waits for another's server, or for a file system that hangs,
must not keep the agent from ending when it is told to. anyio's own threads would: Python waits for
them at its end, also for one whose call was abandoned.
"""

from __future__ import annotations

import asyncio
import threading
from contextvars import copy_context
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run_detached"]

T = TypeVar("T")


async def run_detached(
    do: Callable[..., T], *arguments: object, drop: Callable[[T], object] = lambda _: None
) -> T:
    """Do something in a thread of its own.

    Args:
        do: what. Once this is cancelled it goes on, unheard.
        arguments: of that.
        drop: is given what that returns if nobody hears it.

    Returns:
        What it returns. What it raises is raised.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(found: T | None, failed: BaseException | None) -> None:
        if future.cancelled():
            if failed is None:
                drop(found)  # type: ignore[arg-type] # it is what was returned
        elif failed is not None:
            future.set_exception(failed)
        else:
            future.set_result(found)  # type: ignore[arg-type] # likewise

    def run() -> None:
        found, failed = None, None
        try:
            found = do(*arguments)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            failed = error
        try:
            loop.call_soon_threadsafe(tell, found, failed)
        except RuntimeError:  # the event loop has ended, and the process does
            if failed is None:
                drop(found)  # type: ignore[arg-type] # it is what was returned

    context = copy_context()
    threading.Thread(target=context.run, args=(run,), name="run_detached", daemon=True).start()
    return await future
