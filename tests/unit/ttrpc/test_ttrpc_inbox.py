"""The inbox of a stream: in order, limited, and counted for its connection."""

from __future__ import annotations

import anyio
import pytest

from api.ttrpc.inbox import ByteBudget, Inbox

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_messages_come_out_in_order_and_then_the_end() -> None:
    inbox = Inbox(ByteBudget())
    for message in (b"a", b"", b"c"):
        inbox.put(message)
    inbox.end()
    inbox.put(b"too late")
    assert [await inbox.get() for _ in range(3)] == [b"a", b"", b"c"]
    for _ in range(2):
        with pytest.raises(anyio.EndOfStream):
            await inbox.get()


async def test_the_first_end_counts() -> None:
    inbox = Inbox(ByteBudget())
    inbox.end(ValueError("why"))
    inbox.end()
    with pytest.raises(ValueError, match="why"):
        await inbox.get()


@pytest.mark.parametrize("put", [b"late", None])
async def test_a_reader_that_waits_is_woken(put: bytes | None) -> None:
    inbox = Inbox(ByteBudget())
    got: list[bytes | None] = []

    async def read() -> None:
        try:
            got.append(await inbox.get())
        except anyio.EndOfStream:
            got.append(None)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        assert got == []
        if put is None:
            inbox.end()
        else:
            inbox.put(put)
    assert got == [put]


@pytest.mark.parametrize(
    ("messages", "full"),
    [
        ([], False),
        ([b"x"] * 63, False),
        ([b"x"] * 64, True),
        ([bytes(1 << 20)], False),
        ([bytes((1 << 20) + 1)], True),
    ],
)
async def test_an_inbox_is_full_by_number_or_by_bytes(messages: list[bytes], *, full: bool) -> None:
    inbox = Inbox(ByteBudget())
    for message in messages:
        inbox.put(message)
    assert inbox.full is full


async def test_a_full_account_makes_its_inboxes_full_unless_empty() -> None:
    budget = ByteBudget(limit=10)
    one, other, empty = Inbox(budget), Inbox(budget), Inbox(budget)
    one.put(bytes(10))
    other.put(b"x")
    assert budget.full
    assert one.full
    assert other.full
    assert not empty.full
    one.clear()
    assert not other.full


async def test_room_is_made_by_the_reader() -> None:
    inbox = Inbox(ByteBudget())
    for _ in range(64):
        inbox.put(b"x")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(inbox.get)
        with anyio.fail_after(20):
            assert await inbox.room()


async def test_the_account_is_even_when_all_is_read_or_dropped() -> None:
    budget = ByteBudget(limit=0)
    read, dropped = Inbox(budget), Inbox(budget)
    for inbox in (read, dropped):
        inbox.put(b"abc")
        inbox.put(b"de")
    assert budget.full
    await read.get()
    await read.get()
    dropped.clear()
    dropped.clear()
    dropped.put(b"dropped")
    assert not budget.full
