"""The service that answers /metrics: one scrape after the other.

Rules
- NVML is asked when somebody scrapes, and then only: an agent that nobody asks has nothing to do.
- A scrape is over before Prometheus gives it up (it says when): without NVML's answer until then,
  what is known otherwise is told, and that NVML is not up.
- One that gives NVML less time than another does not spoil what the other is told.
- Scrapes that come together, or within :data:`FRESH` seconds, are told the same, and on a node of
  which much is told for longer: however many there are, writing takes a small part of the agent's
  time (:data:`SHARE`). It is done in a thread.
"""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
from prometheus_client.exposition import gzip_accepted

from api.errors import NvshimError, one_line
from integration.agent_errors import MetricsAddressUnusable
from integration.agent_status import late_after
from integration.backoff import Backoff
from integration.node.service import SERVICES, Context
from integration.node.services.metrics.address import Address, parse_address
from integration.node.services.metrics.agent import own_process
from integration.node.services.metrics.server import Request, Response, addresses_of, listen, serve
from integration.node.services.metrics.snapshot import Moment
from integration.node.services.metrics.text import Form, choose, collect, write
from integration.node.usage import usage_by
from integration.nvml.values import Sample, now

if TYPE_CHECKING:
    from anyio.abc import SocketStream
    from anyio.streams.stapled import MultiListener

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

_PART: Final = "metrics"

_INDEX: Final = b"""<!doctype html>
<html lang="en"><title>nvshim node</title>
<p>nvshim node: <a href="/metrics">metrics</a>, <a href="/healthz">healthz</a>,
<a href="/readyz">readyz</a></p></html>
"""


async def run(context: Context) -> None:
    """Serve /metrics where the options say, until cancelled.

    Raises:
        MetricsAddressInvalid: the address is none.
    """
    listener = await _listen(context, parse_address(context.options.metrics))
    context.say("info", "metrics are served", address=", ".join(addresses_of(listener)))

    def failed(error: Exception) -> None:
        known = isinstance(error, NvshimError)
        line = str(error) if known else f"a scrape failed: {type(error).__name__}: {error}"
        context.say("error", one_line(line), part=_PART)

    await serve(listener, Scrapes(context).answer, failed)


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


@dataclass(slots=True)
class _Told:
    """What a scrape was told."""

    until: float  # how long it is told to others, by the monotonic clock
    waited: float  # seconds that NVML was given to answer; inf if it did
    text: bytes  # of the metrics
    packed: bytes = b""  # the same by gzip; empty as long as nobody wanted that


class Scrapes:
    """Answers to scrapes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._told: dict[Form, _Told] = {}
        self._one = anyio.Lock()

    async def answer(self, request: Request) -> Response:
        """Answer one request."""
        match request.path:
            case "/metrics":
                return await self._metrics(request)
            case "/healthz":
                return Response(HTTPStatus.OK, b"ok\n")
            case "/readyz":
                return self._ready()
            case "/":
                return Response(HTTPStatus.OK, _INDEX, "text/html; charset=utf-8")
        return Response(HTTPStatus.NOT_FOUND, b"there are /metrics, /healthz and /readyz\n")

    async def _metrics(self, request: Request) -> Response:
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
            packed = gzip_accepted(request.headers.get("accept-encoding", ""))
            if packed and not told.packed:
                told.packed = await anyio.to_thread.run_sync(_packed, told.text)
        headers: tuple[tuple[str, str], ...] = (("Vary", "Accept, Accept-Encoding"),)
        if packed:
            headers = (*headers, ("Content-Encoding", "gzip"))
        return Response(HTTPStatus.OK, told.packed if packed else told.text, form.type, headers)

    async def _tell(self, form: Form, wait: float) -> _Told:
        begun = time.monotonic()
        sample = await self._sample(wait)
        boot = time.time() - now()
        moment = Moment(
            self._context.state,
            boot=boot,
            sample=sample,
            waited=time.monotonic() - begun,
            services=tuple(SERVICES),
            process=own_process(),
        )
        known, writing = collect(moment), time.monotonic()
        text = await anyio.to_thread.run_sync(write, known, form)
        taken = time.monotonic() - writing
        fresh = min(max(FRESH, taken / SHARE), _FRESH_AT_MOST)
        return _Told(begun + fresh, wait if sample is None else math.inf, text)

    async def _sample(self, wait: float) -> Sample | None:
        """What NVML says; None if it does not in time."""
        sample = None
        with anyio.move_on_after(wait):
            sample = await self._context.state.sampler.value.sample(max_age=FRESH)
            try:
                await usage_by(self._context, sample)  # so that the state's is of now, too
            except Exception as error:  # noqa: BLE001 - the rest is known all the same
                self._context.say("error", one_line(f"usage: {error}"), part=_PART)
        return sample

    def _ready(self) -> Response:
        # By what the agent remembers, and no file: whatever hangs, this does not wait for it.
        looked = self._context.state.counters.latest_look
        late = late_after(self._context.config, self._context.options.poll)
        if looked is not None and now() - looked < late:
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
