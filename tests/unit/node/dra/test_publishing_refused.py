"""Refused slices: what a refusal reveals about the server, and when the agent retries."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.node.options import DRA_DRIVER
from integration.node.services.dra import publishing as module
from integration.node.services.dra.devices import Taint
from tests.harness.api_server import denied, denied_by_webhook, invalid, refusal, webhook_failed
from tests.harness.cluster import Cluster
from tests.harness.waiting import until
from tests.unit.node.dra.test_publishing import NODE, PARTS, WHOLE, Uncounted, cluster, publishing
from tests.unit.node.dra.test_slices import many

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["cluster"]
pytestmark = pytest.mark.anyio

TAINT: Final = Taint(f"{DRA_DRIVER}/unhealthy", "xid-79", "NoSchedule")
A_PART: Final = next(n for n, each in enumerate(PARTS) if each.part is not None)
ONE_TAINTED: Final = tuple(
    replace(each, taints=(TAINT,)) if n == A_PART else each for n, each in enumerate(PARTS)
)
NAMES: Final = {each.name for each in PARTS}


def writes_refused(
    answer: tuple[int, Any], times: int | None = None
) -> Callable[[str, str], tuple[int, Any] | None]:
    """Refuse calls that change slices, the first few times or always."""
    count = itertools.count()

    def refuse(method: str, _path: str) -> tuple[int, Any] | None:
        return answer if method != "GET" and (times is None or next(count) < times) else None

    return refuse


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
async def test_the_first_tainted_device_may_be_a_part(tmp_path: Path, version: str) -> None:
    with Cluster(str(tmp_path / "of-a-version"), node=NODE, versions=(version,)) as cluster:
        async with publishing(cluster) as (publisher, faults):
            publisher.want(ONE_TAINTED)
            await until(lambda: cluster.published() == NAMES, "all is published")
            assert set(cluster.taints()) == {PARTS[A_PART].name}
            cluster.wipe()  # as a kubelet does when it starts
            await until(lambda: cluster.published() == NAMES, "it is published again")
            publisher.want(PARTS)
            await until(lambda: not cluster.taints(), "the taint goes")
            assert not faults.get("slices")


@pytest.mark.parametrize("where", ["write", "watch"])
async def test_a_mistake_of_ours_is_told_as_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    broken = [True]

    def once(*given: Any, of: Callable[..., Any], **more: Any) -> Any:
        if broken:
            raise KeyError("devices")
        return of(*given, **more)

    async with publishing(cluster) as (publisher, faults):
        publisher.want(tuple(many(1)))
        await until(cluster.published)
        name = {"write": "changes", "watch": "_number"}[where]
        monkeypatch.setattr(module, name, partial(once, of=getattr(module, name)))
        publisher.want(tuple(many(2)))  # the watch reports what is written, too
        await until(lambda: "E2779" in faults.get("slices", ""), "it is told")
        assert "KeyError" in faults["slices"]
        broken.clear()
        await until(lambda: len(cluster.published()) == 2, "it goes on")
        await until(lambda: not faults["slices"])


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (denied(), "ValidatingAdmissionPolicy no-slices"),
        (denied(403), "ValidatingAdmissionPolicy no-slices"),
        (denied(401), "ValidatingAdmissionPolicy no-slices"),
        (denied_by_webhook(400), "admission webhook slices.example.com"),
        *(pytest.param(denied_by_webhook(code), "admission webhook slices.example.com",
                       marks=pytest.mark.thorough)
          for code in (403, 404, 409, 410, 422, 500)),
        (webhook_failed(), "webhook slices.example.com"),
        (refusal(422, "not by this proxy"), "what refuses it"),
        (refusal(503, "apiserver not ready", retry_after=1), "the API server; the agent retries"),
        (refusal(429, "Too many requests", retry_after=1), "the API server; the agent retries"),
    ],
)  # fmt: skip
async def test_a_denial_is_named_and_teaches_nothing_of_the_server(
    cluster: Cluster, answer: tuple[int, Any], named: str
) -> None:
    async with publishing(cluster) as (publisher, faults):
        cluster.refuse = writes_refused(answer)
        publisher.want(ONE_TAINTED)
        await until(lambda: named in faults.get("slices", ""), "it is named")
        assert "E2771" in faults["slices"]
        cluster.refuse = lambda *_: None
        await until(lambda: cluster.published() == NAMES, "all is published, parts too")
        assert set(cluster.taints()) == {PARTS[A_PART].name}
        await until(lambda: not faults["slices"], "the fault goes")
        assert not faults.get("counters")


async def test_a_denial_of_one_write_in_the_middle_teaches_nothing(cluster: Cluster) -> None:
    denials = [denied()]

    def refuse(method: str, _path: str) -> tuple[int, Any] | None:
        is_second = len([each for each in cluster.writes if each[0] == "POST"]) > 1
        return denials.pop() if method == "POST" and is_second and denials else None

    cluster.refuse = refuse
    async with publishing(cluster) as (publisher, faults):
        publisher.want(PARTS)
        await until(lambda: cluster.published() == NAMES, "all is published")
        assert not denials
        assert not faults.get("counters")


async def test_slices_that_are_wrong_are_sent_again_after_some_minutes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = invalid(("spec.devices[0].attributes[a].string", "Too long: at most 64 bytes"))
    cluster.refuse = writes_refused(wrong)
    async with publishing(cluster) as (publisher, faults):
        publisher.want(PARTS)
        await until(lambda: "E2778" in faults.get("slices", ""), "it is told")
        assert "at most 64 bytes" in faults["slices"]
        sent = len(cluster.writes)
        for _ in range(2):
            cluster.close_watches()
            await until(lambda: cluster.watches == 1)
        assert len(cluster.writes) == sent, "it is not sent again at each occasion"
        cluster.refuse = lambda *_: None
        publisher.want(tuple(many(1)))
        await until(lambda: len(cluster.published()) == 1, "what is other is sent at once")
        cluster.refuse = writes_refused(wrong, 1)
        monkeypatch.setattr(module, "_WRONG_PAUSE", 0.05)
        publisher.want(PARTS)
        await until(lambda: cluster.published() == NAMES, "it is sent again, with parts")
        await until(lambda: not faults["slices"])


async def test_a_server_keeps_no_taints_if_it_says_so(cluster: Cluster) -> None:
    cluster.refuse = writes_refused(invalid(("spec.devices[0].taints[0].effect", "not so")), 1)
    async with publishing(cluster) as (publisher, faults):
        publisher.want(ONE_TAINTED)
        await until(lambda: cluster.published() == NAMES - {PARTS[A_PART].name})
        said = "said the API server keeps none: devices with taints are left out"
        await until(lambda: said in faults, "it is told")


async def test_a_device_that_is_wrong_says_nothing_of_taints(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.refuse = writes_refused(invalid(("spec.devices[0].name", "not so")))
    async with publishing(cluster) as (publisher, faults):
        publisher.want(ONE_TAINTED)
        await until(lambda: "E2778" in faults.get("slices", ""), "it is told")
        assert len(cluster.writes) == 1, "it is not sent at once again"
        cluster.refuse = lambda *_: None
        publisher.want(tuple(many(1)))
        await until(lambda: len(cluster.published()) == 1, "what is other is sent at once")
        cluster.refuse = writes_refused(invalid(("spec.devices[0].name", "not so")), 1)
        monkeypatch.setattr(module, "_WRONG_PAUSE", 0.05)
        publisher.want(ONE_TAINTED)
        await until(lambda: cluster.published() == NAMES, "all is published")
        assert set(cluster.taints()) == {PARTS[A_PART].name}


class NoDryRun(Cluster):
    """A server with a webhook that does not support dry runs."""

    answer_to_it: tuple[int, Any] | None = refusal(
        400, 'admission webhook "old.x" does not support dry run'
    )

    def _made(self, body: Any) -> tuple[int, Any]:
        if self._is_trial and self.answer_to_it:
            return self.answer_to_it
        return super()._made(body)


async def test_a_webhook_that_takes_no_dry_run_keeps_no_other_device_back(tmp_path: Path) -> None:
    with NoDryRun(str(tmp_path / "no-dry-run"), node=NODE) as cluster:
        async with publishing(cluster) as (publisher, faults):
            publisher.want(ONE_TAINTED)
            await until(lambda: cluster.published() == NAMES - {PARTS[A_PART].name})
            await until(lambda: "said devices with taints are left out" in faults, "it is told")
            cluster.answer_to_it = None
            cluster.wipe()  # the next attempt tries again
            await until(lambda: cluster.published() == NAMES, "nothing was concluded")


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
async def test_parts_are_published_in_each_version_or_it_is_told_why_not(
    tmp_path: Path, version: str
) -> None:
    with Cluster(str(tmp_path / "keeps"), node=NODE, versions=(version,)) as cluster:
        async with publishing(cluster) as (publisher, faults):
            publisher.want(PARTS)
            await until(lambda: cluster.published() == NAMES)
            assert any(each["spec"].get("sharedCounters") for each in cluster.slices())
            assert not faults.get("counters")
    with Uncounted(str(tmp_path / "drops"), node=NODE, versions=(version,)) as cluster:
        async with publishing(cluster) as (publisher, faults):
            publisher.want(PARTS)
            await until(lambda: cluster.published() == WHOLE)
            await until(lambda: "E2797" in faults.get("counters", ""), "it is told")
            assert version in faults["counters"]
            assert "DRAPartitionableDevices" in faults["counters"]
            publisher.want(tuple(each for each in PARTS if each.part is None))
            await until(lambda: not faults["counters"], "without parts nothing is missing")
