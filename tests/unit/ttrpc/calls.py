"""What tests of the server call, and how."""

from __future__ import annotations

from typing import Any

from google.protobuf.wrappers_pb2 import StringValue

from api.errors import NvshimError, Status
from api.ttrpc import (
    Context,
)

LARGE = "x" * (3 << 20)


class OutOfCheese(NvshimError):
    """A typed failure of a handler."""

    code = "NVSHIM-E9999"
    status = Status.FAILED_PRECONDITION


async def echo(_: Context, request: StringValue) -> StringValue:
    return StringValue(value=request.value)


async def say(client: Any, service: str, text: str = "hi", **options: Any) -> str:
    answer = await client.call(service, "Say", StringValue(value=text), StringValue, **options)
    return str(answer.value)
