"""Awaiting a call of grpc.aio in a task of anyio.

grpc.aio makes a call in a task of its own, and cancels that when the call or its channel ends; the
cancellation comes up bare where the call is awaited. anyio takes one that it has not sent, or does
not know again, for the end of the task, and cancels every other task of the group without a word.

Source: grpc.aio ``UnaryUnaryCall.__await__``; anyio's asyncio backend, ``TaskGroup``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import anyio.lowlevel
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # likewise


async def answer_of(call: Awaitable[Any]) -> Any:
    """Wait for a call's answer.

    Args:
        call: as grpc.aio returns it.

    Raises:
        grpc.aio.AioRpcError: there is none, with the status CANCELLED if the call was cancelled by
            another than whoever waits here.
    """
    try:
        return await call
    except asyncio.CancelledError:
        # A scope that was cancelled says so once more, in a way that it knows again.
        await anyio.lowlevel.checkpoint_if_cancelled()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # by the event loop's end
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.CANCELLED,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details="the call was cancelled",
        ) from None
