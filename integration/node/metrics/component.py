"""The part of the agent that serves /metrics (:mod:`.scrapes`), if the options say where."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from api.errors import NvshimError, one_line
from integration.node.backoff import Backoff
from integration.node.errors import MetricsAddressUnusable
from integration.node.metrics.address import parse_address

if TYPE_CHECKING:
    from anyio.abc import SocketStream
    from anyio.streams.stapled import MultiListener

    from integration.node.components import Context
    from integration.node.metrics.address import Address

__all__ = ["run"]

_PART: Final = "metrics"


async def run(context: Context) -> None:
    """Serve /metrics where the options say, until cancelled.

    Raises:
        MetricsAddressInvalid: the address is none.
    """
    if not context.options.metrics:
        await anyio.sleep_forever()
    # It is large, and imported by those only who want it: in a thread, for it takes a while.
    await anyio.to_thread.run_sync(import_module, "integration.node.metrics.scrapes")
    from integration.node.metrics.scrapes import Scrapes  # noqa: PLC0415 - as was said
    from integration.node.metrics.server import addresses_of, serve  # noqa: PLC0415 - likewise

    listener = await _listen(context, parse_address(context.options.metrics))
    context.say("info", "metrics are served", address=", ".join(addresses_of(listener)))
    scrapes = Scrapes(context)

    def failed(error: Exception) -> None:
        known = isinstance(error, NvshimError)
        line = str(error) if known else f"a scrape failed: {type(error).__name__}: {error}"
        context.say("error", one_line(line), part=_PART)

    await serve(listener, scrapes.answer, failed)


async def _listen(context: Context, address: Address) -> MultiListener[SocketStream]:
    """Listen there as soon as one can; as long as one cannot, it is a fault."""
    from integration.node.metrics.server import listen  # noqa: PLC0415 - as above

    backoff, said = Backoff(), ""
    while True:
        try:
            listener = await listen(address)
        except MetricsAddressUnusable as error:
            if str(error) != said:
                said = str(error)
                context.say("error", said, part=_PART)
                context.board.fault(_PART, said)
            await anyio.sleep(backoff.pause())
        else:
            if said:
                context.board.fault(_PART, "")
            return listener
