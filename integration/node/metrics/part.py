"""One scrape after the other: what the agent knows, when Prometheus asks.

Rules
- NVML is asked when somebody scrapes, and then only: an agent that nobody asks has nothing to do.
- A scrape is over before Prometheus gives it up (it says when): without NVML's answer until then,
  what is known otherwise is told, and that NVML is not up.
- One that gives NVML less time than another does not spoil what the other is told.
- Scrapes that come together, or within :data:`FRESH` seconds, are told the same, and on a node of
  which much is told for longer: however many there are, writing takes a small part of the agent's
  time (:data:`SHARE`).
- What is told is written in pieces, between which the agent does what else there is to do.
"""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass
from http import HTTPStatus
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from api.errors import NvshimError, one_line
from integration.node.metrics.address import parse_address
from integration.node.metrics.errors import MetricsAddressUnusable
from integration.node.metrics.exchange import Refused, Request, Response, accepts_gzip

if TYPE_CHECKING:
    from anyio.abc import SocketStream
    from anyio.streams.stapled import MultiListener

    from integration.node.metrics.address import Address
    from integration.node.metrics.text import Form
    from integration.node.monitor.values import Sample
    from integration.node.parts import Context

__all__ = ["FRESH", "LONGEST_WAIT", "SHARE", "Scrapes", "deadline", "run"]

FRESH: Final = 0.5
SHARE: Final = 0.1
"""How much of its time the agent writes at most, for each form."""

# What took long to write because the node is busy is not told for ever.
_FRESH_AT_MOST: Final = 5.0

# Seconds that a scrape waits for NVML at most, and what is kept of the time that Prometheus gives
# it for everything else.
LONGEST_WAIT: Final = 8.0
_FOR_THE_REST: Final = 1.0
_SHORTEST_WAIT: Final = 0.1
_TIMEOUT: Final = "x-prometheus-scrape-timeout-seconds"

# A look that has not come for so many times the time between two is not going to come.
_LATE: Final = 3

# Seconds until a port that is taken is tried again: the first time, and at most.
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
_PART: Final = "metrics"

_INDEX: Final = b"""<!doctype html>
<html lang="en"><title>nvshim node</title>
<p>nvshim node: <a href="/metrics">metrics</a>, <a href="/healthz">healthz</a>,
<a href="/readyz">readyz</a></p></html>
"""


async def run(context: Context) -> None:
    """Serve /metrics where the options say, until cancelled.

    Args:
        context: of the agent.

    Raises:
        MetricsAddressInvalid: the address is none.
    """
    if not context.options.metrics:
        await anyio.sleep_forever()
    # All of it is imported by those only who want it, and what writes is large: not in the loop.
    from integration.node.metrics.server import addresses_of, serve  # noqa: PLC0415

    await anyio.to_thread.run_sync(import_module, "integration.node.metrics.text")
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
    from integration.node.metrics.server import listen  # noqa: PLC0415 - see above

    pause, said = _FIRST_PAUSE, ""
    while True:
        try:
            listener = await listen(address)
        except MetricsAddressUnusable as error:
            if str(error) != said:
                said = str(error)
                context.say("error", said, part=_PART)
                context.board.fault(_PART, said)
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            if said:
                context.board.fault(_PART, "")
            return listener


@dataclass(slots=True)
class _Told:
    """What a scrape was told.

    Attributes:
        until: how long it is told to others, by the monotonic clock.
        waited: seconds that NVML was given to answer; inf if it did.
        text: of the metrics.
        packed: the same by gzip; empty as long as nobody wanted that.
    """

    until: float
    waited: float
    text: bytes
    packed: bytes = b""


class Scrapes:
    """Answers to scrapes.

    Args:
        context: of the agent.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told: dict[Form, _Told] = {}
        self._one = anyio.Lock()

    async def answer(self, request: Request) -> Response:
        """Answer one request.

        Args:
            request: any.

        Raises:
            Refused: there is nothing at its path.
        """
        match request.path:
            case "/metrics":
                return await self._metrics(request)
            case "/healthz":
                return Response(HTTPStatus.OK, b"ok\n")
            case "/readyz":
                return self._ready()
            case "/":
                return Response(HTTPStatus.OK, _INDEX, "text/html; charset=utf-8")
        raise Refused(HTTPStatus.NOT_FOUND, "there are /metrics, /healthz and /readyz")

    async def _metrics(self, request: Request) -> Response:
        from integration.node.metrics.text import choose  # noqa: PLC0415

        form = choose(request.headers.get("accept", ""))
        begun = time.monotonic()
        async with self._one:
            told = self._told.get(form)
            until = begun + deadline(request.headers.get(_TIMEOUT, ""))
            wait = max(until - time.monotonic(), _SHORTEST_WAIT)
            # Also one that was begun after this scrape came, while it waited for its turn; but none
            # of one who gave NVML less time: it would be down for all who ask besides.
            if told is None or told.until < begun or told.waited < wait:
                told = await self._tell(form, wait)
                self._told[form] = told
            packed = accepts_gzip(request.headers.get("accept-encoding", ""))
            if packed and not told.packed:
                told.packed = await anyio.to_thread.run_sync(_packed, told.text)
        headers: tuple[tuple[str, str], ...] = (("Vary", "Accept, Accept-Encoding"),)
        if packed:
            headers = (*headers, ("Content-Encoding", "gzip"))
        return Response(HTTPStatus.OK, told.packed if packed else told.text, form.type, headers)

    async def _tell(self, form: Form, wait: float) -> _Told:
        from integration.node.metrics.collecting import Moment, collect  # noqa: PLC0415
        from integration.node.metrics.own import own_process  # noqa: PLC0415
        from integration.node.metrics.text import write  # noqa: PLC0415
        from integration.node.parts import PARTS  # noqa: PLC0415

        begun = time.monotonic()
        sample = await self._sample(wait)
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        moment = Moment.of(
            self._context.board,
            boot=boot,
            sample=sample,
            waited=time.monotonic() - begun,
            parts=tuple(PARTS),
        )
        pieces, writing = [], time.monotonic()
        for piece in write(chain(collect(moment), own_process(boot)), form):
            pieces.append(piece)
            await anyio.lowlevel.checkpoint()
        taken = time.monotonic() - writing
        fresh = min(max(FRESH, taken / SHARE), _FRESH_AT_MOST)
        waited = wait if sample is None else math.inf
        return _Told(begun + fresh, waited, b"".join(pieces))

    async def _sample(self, wait: float) -> Sample | None:
        """What NVML says; None if it does not in time."""
        from integration.node.ledger.usage import usage_by  # noqa: PLC0415 - as the others

        sample = None
        with anyio.move_on_after(wait):
            sample = await self._context.board.sampler.sample(max_age=FRESH)
            try:
                await usage_by(self._context, sample)  # so that the board's is of now, too
            except Exception as error:  # noqa: BLE001 - the rest is known all the same
                self._context.say("error", one_line(f"usage: {error}"), part=_PART)
        return sample

    def _ready(self) -> Response:
        # By what the agent remembers, and no file: whatever hangs, this does not wait for it.
        looked = self._context.board.counters.latest_look
        late = _LATE * self._context.options.poll + self._context.config.nvml_timeout
        if looked is not None and time.clock_gettime(time.CLOCK_BOOTTIME) - looked < late:
            return Response(HTTPStatus.OK, b"ok\n")
        return Response(HTTPStatus.SERVICE_UNAVAILABLE, b"the node was not looked at lately\n")


def _packed(text: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush()


def deadline(said: str) -> float:
    """How long a scrape may wait for NVML, in seconds.

    Args:
        said: the seconds after which Prometheus gives the scrape up; "" if it did not say.
    """
    try:
        seconds = float(said)
    except ValueError:
        return LONGEST_WAIT
    # What is no number compares as false, too.
    if not seconds > 0:
        return LONGEST_WAIT
    return min(LONGEST_WAIT, max(seconds - _FOR_THE_REST, seconds / 2, _SHORTEST_WAIT))
