"""Passing calls on to the instance of the driver that is at work.

Each call has a connection of its own, since another instance may be at work with the next one. A
call that was not answered because that instance has ended is made again, to whoever is at work
then. Preparing a claim and taking it back bear that.

Source: grpc.aio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc  # type: ignore[import-untyped] # it ships no types
import grpc.aio  # type: ignore[import-untyped] # likewise

from integration.node.calls import answer_of
from integration.node.socket_server import serialize

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["Refused", "Relay"]

# What a call ends with whose server has ended.
_NO_ANSWER: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
# Channels that share connections share the pauses after failures too.
_OWN: Final = (("grpc.use_local_subchannel_pool", 1),)


class Refused(Exception):
    """What the instance at work answers with no message.

    Attributes:
        code: of gRPC.
        details: in words.
    """

    def __init__(self, error: Any) -> None:
        self.code, self.details = error.code(), error.details()
        super().__init__(self.details)


class Relay:
    """Leads to whoever is at work.

    Args:
        path: of the socket that whoever is at work serves.
    """

    def __init__(self, path: str) -> None:
        self._target = f"unix:{path}"

    async def call(self, method: str, request: Any, kind: Any, timeout: float | None) -> Any:
        """Pass a call on.

        Args:
            method: its full name.
            kind: the type of the answer.
            timeout: seconds that it may take; None for any.

        Returns:
            The answer; None if nobody is at work now.

        Raises:
            Refused: there is none, and there will be none.
        """
        async with grpc.aio.insecure_channel(self._target, options=_OWN) as channel:
            ask = channel.unary_unary(
                method, request_serializer=serialize, response_deserializer=kind.FromString
            )
            try:
                return await answer_of(ask(request, timeout=timeout))
            except grpc.RpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise Refused(error) from error
                return None

    async def stream(self, method: str, request: Any, kind: Any) -> AsyncGenerator[Any, None]:
        """Pass on what is told, until whoever tells it has ended.

        Raises:
            Refused: nothing is told, and nothing will be.
        """
        async with grpc.aio.insecure_channel(self._target, options=_OWN) as channel:
            ask = channel.unary_stream(
                method, request_serializer=serialize, response_deserializer=kind.FromString
            )
            try:
                async for message in ask(request):
                    yield message
            except grpc.RpcError as error:
                if error.code() not in _NO_ANSWER:
                    raise Refused(error) from error
