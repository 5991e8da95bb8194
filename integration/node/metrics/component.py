"""The part of the agent that serves /metrics (:mod:`.scrapes`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
from anyio.abc import SocketStream

from api.errors import NvshimError, one_line
from integration.node.backoff import Backoff
from integration.node.errors import MetricsAddressUnusable
from integration.node.metrics.address import Address, parse_address
from integration.node.metrics.server import addresses_of, listen, serve

if TYPE_CHECKING:
    from anyio.streams.stapled import MultiListener

    from integration.node.components import Context

_PART: Final = "metrics"


async def run(context: Context) -> None:
    """Serve /metrics where the options say, until cancelled.

    Raises:
        MetricsAddressInvalid: the address is none.
    """
    # In a thread, for it is large, and takes a while.
    scrapes = await anyio.to_thread.run_sync(import_module, "integration.node.metrics.scrapes")
    listener = await _listen(context, parse_address(context.options.metrics))
    context.say("info", "metrics are served", address=", ".join(addresses_of(listener)))

    def failed(error: Exception) -> None:
        known = isinstance(error, NvshimError)
        line = str(error) if known else f"a scrape failed: {type(error).__name__}: {error}"
        context.say("error", one_line(line), part=_PART)

    await serve(listener, scrapes.Scrapes(context).answer, failed)


async def _listen(context: Context, address: Address) -> MultiListener[SocketStream]:
    """Listen there as soon as one can; as long as one cannot, it is a fault."""
    backoff = Backoff()
    while True:
        try:
            listener = await listen(address)
        except MetricsAddressUnusable as error:
            context.fault(_PART, str(error), part=_PART)
            await anyio.sleep(backoff.pause())
        else:
            context.fault(_PART, "")
            return listener
