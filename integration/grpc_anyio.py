"""Await a call of grpc.aio in an anyio task.

grpc.aio runs a call in its own task, and cancels that task when the call or its channel ends. The
waiting task then receives a bare CancelledError. anyio takes a cancellation that it did not send
for the end of the task, and silently cancels all other tasks of the group.

Source: grpc.aio ``UnaryUnaryCall.__await__``; anyio's asyncio backend, ``TaskGroup``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import anyio.lowlevel
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # the same


async def answer_of(call: Awaitable[Any]) -> Any:
    """Wait for a call's answer.

    Args:
        call: a call of grpc.aio.

    Raises:
        grpc.aio.AioRpcError: the call failed; its status is CANCELLED if the call was cancelled,
            but not this task.
    """
    try:
        return await call
    except asyncio.CancelledError:
        # A cancelled scope raises its own cancellation here, which it recognises.
        await anyio.lowlevel.checkpoint_if_cancelled()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # the event loop ends
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.CANCELLED,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details="the call was cancelled",
        ) from None
