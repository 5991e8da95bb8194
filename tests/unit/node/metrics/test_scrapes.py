"""Scrapes run one at a time: concurrent ones share a result, and each ends before its timeout."""

from __future__ import annotations

import gzip
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from hooks.config import Config
from integration.node.options import Options
from integration.node.service import Context
from integration.node.services.metrics import service as module
from integration.node.services.metrics.server import Request
from integration.node.services.metrics.service import LONGEST_WAIT, Scrapes, deadline
from integration.nvml.values import GpuSample, Sample
from tests.harness.exposition import read_told
from tests.harness.node_state import publish
from tests.unit.node.metrics.nodes import gpu_uuid, large

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Nvml:
    """A stand-in for the sampler."""

    def __init__(self, pause: float = 0.0) -> None:
        self.asked = 0
        self.pause = pause

    async def sample(self, *, max_age: float, profile: bool = False) -> Sample:
        assert max_age >= 0
        self.asked += 1
        await anyio.sleep(self.pause)
        return Sample(1.0, "550", (GpuSample(gpu_uuid(0), power_watts=7.5),))


def context(tmp_path: Path, nvml: Nvml) -> Context:
    def say(*_: Any, **__: Any) -> None:
        return

    made = Context(Config(state=str(tmp_path)), Options("", 60), say)
    publish(made.state.sampler, nvml)
    return made


def scrape(**headers: str) -> Request:
    return Request("GET", "/metrics", {k.replace("_", "-"): v for k, v in headers.items()})


async def test_a_scrape_asks_nvml_and_is_told_the_answer(tmp_path: Path) -> None:
    scrapes = Scrapes(context(tmp_path, Nvml()))
    response = await scrapes.answer(scrape(accept="application/openmetrics-text"))
    assert response.type.startswith("application/openmetrics-text; version=1.0.0")
    told = read_told(response.content.decode())
    assert [*told["nvshim_gpu_power_watts"].series.values()] == [7.5]
    assert next(iter(told["process_resident_memory_bytes"].series.values())) > 1 << 20


async def test_the_names_are_those_that_were_chosen(tmp_path: Path) -> None:
    made = context(tmp_path, Nvml())
    chosen = replace(made.options, metrics_names=("own", "dcgm"))
    publish(made.state.node, large(gpus=1, mig=0, containers=0).state.node.value)
    for options, has_both in ((made.options, False), (chosen, True)):
        scrapes = Scrapes(replace(made, options=options))
        response = await scrapes.answer(scrape(accept="application/openmetrics-text"))
        assert (b"DCGM_FI_DEV_XID_ERRORS" in response.content) == has_both
        assert response.type.startswith("text/plain") == has_both
        assert b"nvshim_nvml_up" in response.content


async def test_it_is_packed_for_who_asks_for_that(tmp_path: Path) -> None:
    scrapes = Scrapes(context(tmp_path, Nvml()))
    packed = await scrapes.answer(scrape(accept_encoding="gzip"))
    plain = await scrapes.answer(scrape())
    assert ("Content-Encoding", "gzip") in packed.headers
    assert gzip.decompress(packed.content) == plain.content
    assert plain.type.startswith("text/plain; version=0.0.4")


async def test_scrapes_that_come_together_are_one(tmp_path: Path) -> None:
    nvml = Nvml(0.05)
    scrapes = Scrapes(context(tmp_path, nvml))
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(scrapes.answer, scrape())
    assert nvml.asked == 1


async def test_one_that_comes_later_is_told_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRESH", 0.0)
    monkeypatch.setattr(module, "SHARE", math.inf)
    nvml = Nvml()
    scrapes = Scrapes(context(tmp_path, nvml))
    for _ in range(2):
        await scrapes.answer(scrape())
    assert nvml.asked == 2


async def test_much_is_not_written_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRESH", 0.0)
    monkeypatch.setattr(module, "SHARE", 1e-6)  # as if sampling had taken very long
    nvml = Nvml()
    scrapes = Scrapes(context(tmp_path, nvml))
    first = await scrapes.answer(scrape())
    assert (await scrapes.answer(scrape())).content == first.content
    assert nvml.asked == 1


async def test_without_nvml_the_rest_is_told_in_time(tmp_path: Path) -> None:
    scrapes = Scrapes(context(tmp_path, Nvml(math.inf)))
    with anyio.fail_after(20):
        response = await scrapes.answer(scrape(x_prometheus_scrape_timeout_seconds="0.4"))
    assert b"\nnvshim_nvml_up 0.0\n" in response.content
    assert b"nvshim_gpu_power_watts" not in response.content


async def test_one_that_is_impatient_does_not_spoil_it_for_others(tmp_path: Path) -> None:
    scrapes = Scrapes(context(tmp_path, Nvml(0.5)))
    impatient = scrape(x_prometheus_scrape_timeout_seconds="0.1")
    assert b"\nnvshim_nvml_up 0.0\n" in (await scrapes.answer(impatient)).content
    assert b"\nnvshim_nvml_up 1.0\n" in (await scrapes.answer(scrape())).content


async def test_one_that_waits_for_another_is_not_late_for_that(tmp_path: Path) -> None:
    scrapes = Scrapes(context(tmp_path, Nvml(math.inf)))
    begun = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(scrapes.answer, scrape(x_prometheus_scrape_timeout_seconds="2"))
    assert anyio.current_time() - begun < 4 * deadline("2")


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("", LONGEST_WAIT), ("10", LONGEST_WAIT), ("5", 4.0), ("1.5", 0.75), ("0.01", 0.1),
     ("0", LONGEST_WAIT), ("-1", LONGEST_WAIT), ("nan", LONGEST_WAIT), ("inf", LONGEST_WAIT),
     ("soon", LONGEST_WAIT)],
)  # fmt: skip
def test_a_scrape_is_over_before_it_is_given_up(said: str, seconds: float) -> None:
    assert deadline(said) == seconds


async def test_an_agent_is_alive_and_not_ready_before_it_has_looked(tmp_path: Path) -> None:
    made = context(tmp_path, Nvml())
    scrapes = Scrapes(made)
    assert (await scrapes.answer(Request("GET", "/healthz"))).status == 200
    assert (await scrapes.answer(Request("GET", "/readyz"))).status == 503
    made.state.counters.checked(0.1, faults=True)
    assert (await scrapes.answer(Request("GET", "/readyz"))).status == 200
    made.state.counters.latest_check = time.clock_gettime(time.CLOCK_BOOTTIME) - 10_000
    assert (await scrapes.answer(Request("GET", "/readyz"))).status == 503
    assert b"/metrics" in (await scrapes.answer(Request("GET", "/"))).content
    assert (await scrapes.answer(Request("GET", "/metrics/"))).status == 404
