"""Run blocking calls in daemon threads that never delay the exit of the process.

A thread that waits for a server or a hung file system must not keep the agent from exiting. anyio's
own threads would: Python joins them at exit, even after a call was abandoned.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

__all__ = ["run_detached"]

T = TypeVar("T")


async def run_detached(
    do: Callable[..., T], *arguments: object, drop: Callable[[T], object] = lambda _: None
) -> T:
    """Call a function in a new daemon thread.

    Args:
        do: the function. After a cancellation it continues, and its result is dropped.
        arguments: the arguments of ``do``.
        drop: called with the result after a cancellation, for example to close it.

    Returns:
        The result of ``do``. An exception in ``do`` is raised here.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, failed: BaseException | None) -> None:
        if future.cancelled():
            if failed is None:
                drop(result)  # type: ignore[arg-type] # set, since nothing failed
        elif failed is not None:
            future.set_exception(failed)
        else:
            future.set_result(result)  # type: ignore[arg-type] # the same

    def run() -> None:
        result, failed = None, None
        try:
            result = do(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting task
            failed = error
        try:
            loop.call_soon_threadsafe(deliver, result, failed)
        except RuntimeError:  # the event loop is closed; the process is about to exit
            if failed is None:
                drop(result)  # type: ignore[arg-type] # set, since nothing failed

    context = copy_context()
    threading.Thread(target=context.run, args=(run,), name="run_detached", daemon=True).start()
    return await future
