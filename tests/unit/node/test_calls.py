"""Cancelled calls, and their effect on tasks other than those that wait for them."""

from __future__ import annotations

import asyncio

import anyio
import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # as above
import pytest

from integration.grpc_anyio import answer_of

pytestmark = pytest.mark.anyio


async def _call_without_reason(begun: anyio.Event) -> None:
    """Make a call like grpc.aio's, which loses the message of a cancellation."""
    try:
        begun.set()
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        raise asyncio.CancelledError from None


async def test_who_gives_up_a_call_ends_no_task_but_its_own() -> None:
    begun, gone_on = anyio.Event(), anyio.Event()
    scope = anyio.CancelScope()

    async def give_up() -> None:
        with scope:
            await answer_of(_call_without_reason(begun))

    async def go_on() -> None:
        await begun.wait()
        scope.cancel()
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        gone_on.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(give_up)
        tasks.start_soon(go_on)
    assert scope.cancelled_caught
    assert gone_on.is_set()


async def test_a_call_that_somebody_else_has_cancelled_is_an_error_of_that_call() -> None:
    begun, gone_on = anyio.Event(), anyio.Event()
    call = asyncio.ensure_future(_call_without_reason(begun))

    async def wait() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer_of(call)
        assert refused.value.code() is grpc.StatusCode.CANCELLED

    async def go_on() -> None:
        await begun.wait()
        call.cancel()
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        gone_on.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        tasks.start_soon(go_on)
    assert gone_on.is_set()
