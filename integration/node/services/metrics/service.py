"""The service that answers /metrics: one scrape after the other.

Rules
- The service queries NVML only for a scrape: without scrapes it does nothing.
- A scrape finishes within the timeout that Prometheus sends with it. If NVML does not answer in
  time, the response reports NVML as down and contains all other metrics.
- A scrape with a short timeout does not affect a scrape with a longer one, which does not reuse the
  response without NVML.
- Scrapes within :data:`FRESH` seconds share a response. On a node with many series they share it
  longer, so that writing takes at most the fraction :data:`SHARE` of the agent's time. A thread
  writes the response.
"""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import anyio
from anyio.abc import SocketStream
from anyio.streams.stapled import MultiListener
from prometheus_client.exposition import gzip_accepted

from api.errors import NvshimError, one_line
from integration.agent_errors import MetricsAddressUnusable
from integration.agent_status import late_after
from integration.backoff import Backoff
from integration.detached import run_detached
from integration.node.options import OWN
from integration.node.service import SERVICES, Context
from integration.node.services.metrics.address import Address, parse_address
from integration.node.services.metrics.agent import own_process
from integration.node.services.metrics.jobs import Jobs
from integration.node.services.metrics.metric import Metric, Rows
from integration.node.services.metrics.server import Request, Response, addresses_of, listen, serve
from integration.node.services.metrics.snapshot import Attribution, Snapshot
from integration.node.services.metrics.text import Form, choose, collect, write
from integration.node.usage import usage_by
from integration.nvml.values import Sample, now

if TYPE_CHECKING:  # they take memory
    from integration.node.services.metrics.pod_labels import PodLabels
    from integration.node.services.metrics.web import Web

FRESH: Final = 0.5
SHARE: Final = 0.1
"""The largest fraction of its time that the agent spends on writing, for each format."""

# Limit for a response that took long to write only because the node was busy.
_FRESH_AT_MOST: Final = 5.0

# The maximum seconds that a scrape waits for NVML, and the seconds of Prometheus' timeout that are
# reserved for everything else.
LONGEST_WAIT: Final = 8.0
_FOR_THE_REST: Final = 1.0
_SHORTEST_WAIT: Final = 0.1
_FOR_ATTRIBUTION: Final = 1.0
_TIMEOUT: Final = "x-prometheus-scrape-timeout-seconds"

_PART: Final = "metrics"
_WEB: Final = "metrics web configuration"

_INDEX: Final = b"""<!doctype html>
<html lang="en"><title>nvshim node</title>
<p>nvshim node: <a href="/metrics">metrics</a>, <a href="/healthz">healthz</a>,
<a href="/readyz">readyz</a></p></html>
"""


async def run(context: Context) -> None:
    """Serve /metrics at the address of the options, until cancelled.

    Raises:
        MetricsAddressInvalid: the address is not valid.
        WebConfigInvalid: the web configuration file is missing or wrong.
    """
    scrapes = Scrapes(context)
    web = _web(context, scrapes)
    listener = await _listen(context, parse_address(context.options.metrics))
    context.say("info", "serving metrics", address=", ".join(addresses_of(listener)))

    def failed(error: Exception) -> None:
        known = isinstance(error, NvshimError)
        line = str(error) if known else f"a scrape failed: {type(error).__name__}: {error}"
        context.say("error", one_line(line), part=_PART)

    if web is None:
        await serve(listener, scrapes.answer, failed)
    else:
        await serve(listener, web.answer, failed, web.wrap)


def _web(context: Context, scrapes: Scrapes) -> Web | None:
    """Return what protects the server, if the options have a file for it."""
    path = context.options.metrics_web_config
    if not path:
        return None
    from integration.node.services.metrics.web import Web  # noqa: PLC0415 - takes memory

    return Web(path, scrapes.answer, lambda line: context.fault(_WEB, line, part=_PART))


async def _listen(context: Context, address: Address) -> MultiListener[SocketStream]:
    """Listen at the address; report a fault and retry until it is free."""
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
class _CachedText:
    """The metrics as text, for the scrapes that share it."""

    until: float  # time up to which other scrapes may share it, by the monotonic clock
    waited: float  # seconds that NVML had to answer; inf if it answered
    text: bytes  # the metrics
    packed: bytes = b""  # the same with gzip; empty until a scraper accepts gzip


class Scrapes:
    """The responses to scrapes."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._cache: dict[Form, _CachedText] = {}
        self._one = anyio.Lock()
        self._samples: tuple[Sample | None, Sample | None] = (None, None)  # the last two
        self._names = context.options.metrics_names
        self._has_dcgm = self._names != (OWN,)
        self._pod_labels = self._labels_of_pods()
        self._jobs = Jobs(context.options.metrics_jobs)

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
        return Response(HTTPStatus.NOT_FOUND, b"try /metrics, /healthz or /readyz\n")

    async def _metrics(self, request: Request) -> Response:
        form = self._form(request.headers.get("accept", ""))
        started = time.monotonic()
        async with self._one:
            cached = self._cache.get(form)
            until = started + deadline(request.headers.get(_TIMEOUT, ""))
            wait = max(until - time.monotonic(), _SHORTEST_WAIT)
            # The text may be newer than this scrape, which has waited for the lock. Do not use it
            # if it gave NVML less time than this scrape has: it may report NVML as down.
            if cached is None or cached.until < started or cached.waited < wait:
                cached = await self._write(form, wait)
                self._cache[form] = cached
            packed = gzip_accepted(request.headers.get("accept-encoding", ""))
            if packed and not cached.packed:
                cached.packed = await run_detached(_packed, cached.text)
        headers: tuple[tuple[str, str], ...] = (("Vary", "Accept, Accept-Encoding"),)
        if packed:
            headers = (*headers, ("Content-Encoding", "gzip"))
        content = cached.packed if packed else cached.text
        return Response(HTTPStatus.OK, content, form.type, headers)

    async def _write(self, form: Form, wait: float) -> _CachedText:
        started = time.monotonic()
        attribution = await self._attribution(min(_FOR_ATTRIBUTION, wait / 2))
        sample = await self._sample(max(wait - (time.monotonic() - started), _SHORTEST_WAIT))
        if sample is not None and sample is not self._samples[1]:
            self._samples = (self._samples[1], sample)
        boot = time.time() - now()
        snapshot = Snapshot(
            self._context.state,
            boot=boot,
            sample=sample,
            waited=time.monotonic() - started,
            earlier=self._samples[0],
            services=tuple(SERVICES),
            process=own_process(),
        )
        known, writing = self._collect(snapshot, attribution), time.monotonic()
        text = await run_detached(write, known, form)
        taken = time.monotonic() - writing
        fresh = min(max(FRESH, taken / SHARE), _FRESH_AT_MOST)
        return _CachedText(started + fresh, wait if sample is None else math.inf, text)

    def _form(self, accept: str) -> Form:
        if self._has_dcgm:
            from integration.node.services.metrics.dcgm import FORM  # noqa: PLC0415 - takes memory

            return FORM
        return choose(accept)

    def _collect(self, snapshot: Snapshot, attribution: Attribution) -> list[tuple[Metric, Rows]]:
        known = collect(snapshot) if OWN in self._names else []
        if self._has_dcgm:
            from integration.node.services.metrics import dcgm  # noqa: PLC0415 - takes memory

            node = self._context.options.node_name
            known += dcgm.collect(snapshot, self._names, node, attribution)
        return known

    def _labels_of_pods(self) -> PodLabels | None:
        options = self._context.options
        if not self._has_dcgm or not options.metrics_pod_labels:
            return None
        from integration.node.services.metrics.dcgm import TAKEN  # noqa: PLC0415 - takes memory
        from integration.node.services.metrics.pod_labels import PodLabels  # noqa: PLC0415 - it too

        return PodLabels(options.metrics_pod_labels, TAKEN, options.cri_sockets)

    async def _attribution(self, wait: float) -> Attribution:
        """Return the labels of pods and jobs that the options ask for; none that take too long."""
        found = Attribution()
        try:
            with anyio.move_on_after(wait):
                if self._has_dcgm and self._context.options.metrics_jobs:
                    found = found._replace(jobs=await run_detached(self._jobs.read))
                if self._pod_labels is not None:
                    holdings = self._context.state.ledger.value.holdings
                    pods = {each.container.pod.uid for each in holdings if each.container.pod}
                    values = await self._pod_labels.of(pods - {""})
                    found = found._replace(labels=self._pod_labels.names, values=values)
        except Exception as error:  # noqa: BLE001 - the metrics do not need it
            self._context.say("error", one_line(f"pods and jobs: {error}"), part=_PART)
        return found

    async def _sample(self, wait: float) -> Sample | None:
        """Return NVML's values; None if it does not answer in time."""
        sample = None
        with anyio.move_on_after(wait):
            sample = await self._context.state.sampler.value.sample(max_age=FRESH, profile=True)
            try:
                await usage_by(self._context, sample)  # bring the usage in the state up to date
            except Exception as error:  # noqa: BLE001 - the other metrics do not need it
                self._context.say("error", one_line(f"usage: {error}"), part=_PART)
        return sample

    def _ready(self) -> Response:
        # From memory, not from a file: this must not hang with a file system.
        latest = self._context.state.counters.latest_check
        late = late_after(self._context.config, self._context.options.poll)
        if latest is not None and now() - latest < late:
            return Response(HTTPStatus.OK, b"ok\n")
        return Response(HTTPStatus.SERVICE_UNAVAILABLE, b"the last check of the node is too old\n")


def _packed(text: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush()


def deadline(timeout: str) -> float:
    """Return how long a scrape may wait for NVML, in seconds.

    Args:
        timeout: Prometheus' timeout of the scrape, in seconds; "" if it sent none.
    """
    try:
        seconds = float(timeout)
    except ValueError:
        return LONGEST_WAIT
    # NaN fails the comparison, too.
    if not seconds > 0:
        return LONGEST_WAIT
    return min(LONGEST_WAIT, max(seconds - _FOR_THE_REST, seconds / 2, _SHORTEST_WAIT))
