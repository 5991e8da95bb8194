"""Run blocking calls in daemon threads that never delay the end of the process.

A thread that waits for a server, or for a file system that hangs, must not keep the agent from
ending. anyio's own threads would: Python joins them at exit, even after a call was abandoned.
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
    """Call something in a thread of its own.

    Args:
        do: when this is cancelled, it runs on and its result is dropped.
        arguments: of ``do``.
        drop: called with the result if nobody waits for it any more.

    Returns:
        What ``do`` returns. What it raises is raised here.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(found: T | None, failed: BaseException | None) -> None:
        if future.cancelled():
            if failed is None:
                drop(found)  # type: ignore[arg-type] # it is the result
        elif failed is not None:
            future.set_exception(failed)
        else:
            future.set_result(found)  # type: ignore[arg-type] # the same

    def run() -> None:
        found, failed = None, None
        try:
            found = do(*arguments)
        except BaseException as error:  # noqa: BLE001 - it is raised in the waiting task
            failed = error
        try:
            loop.call_soon_threadsafe(tell, found, failed)
        except RuntimeError:  # the event loop has ended, the process is about to
            if failed is None:
                drop(found)  # type: ignore[arg-type] # it is the result

    context = copy_context()
    threading.Thread(target=context.run, args=(run,), name="run_detached", daemon=True).start()
    return await future
