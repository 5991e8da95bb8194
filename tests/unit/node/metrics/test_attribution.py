"""Pod labels from the engine, and jobs from a directory, in dcgm-exporter's series."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest

from hooks.config import Config
from hooks.schema import WrongValue
from integration.containers.bundles import Pod
from integration.node.holders.values import Holding, Ledger
from integration.node.options import DCGM, OPTIONS, Options
from integration.node.service import Context
from integration.node.services.metrics import jobs, service
from integration.node.services.metrics.dcgm import TAKEN
from integration.node.services.metrics.jobs import read_jobs
from integration.node.services.metrics.pod_labels import PodLabels
from integration.node.services.metrics.server import Request
from integration.node.services.metrics.service import Scrapes
from integration.nvml.values import GpuSample, Sample
from tests.harness.cri_server import CriServer
from tests.harness.exposition import read_told
from tests.harness.node_state import publish
from tests.harness.waiting import until
from tests.unit.node.metrics.nodes import container, gpu_uuid, large

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CriServer]:
    with CriServer(str(tmp_path / "engine.sock"), "2.1.9", cdi=True) as engine:
        engine.pods = {"uid-1": {"app": "web", "team/x": "blue", "pod": "odd"}, "uid-2": {}}
        yield engine


async def test_labels_that_were_asked_for_are_told_and_the_engine_is_asked_for_new_pods(
    engine: CriServer,
) -> None:
    labels = PodLabels(["app", "team/x", "team-x", "9", "pod"], TAKEN, ["/none", engine.path])
    assert labels.names == ("app", "team_x", "_9")
    assert await labels.of(set()) == {}
    assert engine.asked == 0
    for _ in range(2):
        assert await labels.of({"uid-1", "uid-2"}) == {
            "uid-1": ("web", "blue", ""), "uid-2": ("", "", ""),
        }  # fmt: skip
    assert engine.asked == 1
    assert await labels.of({"uid-3"}) == {"uid-3": ("", "", "")}
    assert engine.asked == 2


@pytest.mark.parametrize("key", ["__name__", "_", "", "a\n"])
def test_no_key_of_a_label_is_a_name_that_prometheus_reserves(key: str) -> None:
    (kind,) = (each.kind for each in OPTIONS if each.field == "metrics_pod_labels")
    assert kind.parse("app,app.kubernetes.io/name") == ("app", "app.kubernetes.io/name")
    with pytest.raises(WrongValue):
        kind.check(["app", key])


async def test_an_engine_that_does_not_answer_is_asked_again(engine: CriServer) -> None:
    labels = PodLabels(["app"], (), [engine.path])
    engine.__exit__(None, None, None)
    assert await labels.of({"uid-1"}) == {}
    engine.__enter__()
    assert await labels.of({"uid-1"}) == {"uid-1": ("web",)}


def test_jobs_are_the_lines_of_files_that_have_a_name_of_a_device(tmp_path: Path) -> None:
    for name, content in (
        ("0", b"17\n 18 \n\n17\n"), ("1.3", b"\xff\n"), ("2", b""), ("gpu", b"1"), ("3.", b"1"),
        ("8", b"a\x01\na\x02\n" + b"x" * 256 + b"y\n" + b"x" * 257 + b"\n" + b"z" * 256 + b"\n"),
        ("4", b"".join(b"%d\n" % n for n in range(1000))),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
    (tmp_path / "5").mkdir()
    os.mkfifo(tmp_path / "6")  # its other end stays closed
    os.symlink("0", tmp_path / "7")
    found = read_jobs(str(tmp_path))
    assert {name: found[name] for name in ("0", "1.3", "2")} == {
        "0": ("17", "18"), "1.3": ("\ufffd",), "2": (),
    }  # fmt: skip
    assert len(found["4"]) == 64
    # Others would be cut or changed, so that two series could collide.
    assert found["8"] == ("z" * 256,)
    assert {*found} - {"6", "7"} == {"0", "1.3", "2", "4", "8"}
    assert not found.get("6")
    assert "7" not in found, "it could be any file of the node"
    assert read_jobs(str(tmp_path / "none")) == {}


class Nvml:
    async def sample(self, *, max_age: float, profile: bool = False) -> Sample:
        return Sample(max_age, gpus=(GpuSample(gpu_uuid(0), temperature_celsius=61),))


async def jobs_of(scrapes: Scrapes, **headers: str) -> list[str | None]:
    """Scrape; return the jobs of the series of a temperature."""
    scrapes._cache.clear()
    answer = await scrapes.answer(Request("GET", "/metrics", headers))
    series = read_told(answer.content.decode())["DCGM_FI_DEV_GPU_TEMP"].series
    return [dict(labels).get("hpc_job") for _, labels in series]


async def test_jobs_on_a_file_system_that_hangs_cost_one_thread_and_half_of_a_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, reads = threading.Event(), list[str]()

    def hang(directory: str) -> dict[str, tuple[str, ...]]:
        reads.append(directory)
        end.wait(20)
        return {"0": ("17",)}

    monkeypatch.setattr(jobs, "read_jobs", hang)
    monkeypatch.setattr(service, "_FOR_ATTRIBUTION", 3600)
    options = replace(Options("", 60), metrics_names=(DCGM,), metrics_jobs=str(tmp_path))
    context = Context(Config(state=str(tmp_path)), options, lambda *_, **__: None)
    publish(context.state.sampler, Nvml())
    publish(context.state.node, large(gpus=1, mig=0, containers=0).state.node.value)
    scrapes = Scrapes(context)
    with anyio.fail_after(20):
        for _ in range(3):
            found = await jobs_of(scrapes, **{"x-prometheus-scrape-timeout-seconds": "0.4"})
            assert found == [None]
        assert reads == [str(tmp_path)]
        end.set()
        await until(lambda: not scrapes._jobs._one.locked(), "the first thread has ended")
        assert await jobs_of(scrapes) == ["17"]


async def test_a_scrape_has_labels_of_the_pod_and_a_series_for_each_job(
    engine: CriServer, tmp_path: Path
) -> None:
    (tmp_path / "0").write_text("17\n18\n")
    options = Options("", 60)
    options = replace(
        options, metrics_names=(DCGM,), metrics_pod_labels=("app",), metrics_jobs=str(tmp_path),
        cri_sockets=(engine.path,),
    )  # fmt: skip
    context = Context(Config(state=str(tmp_path)), options, lambda *_, **__: None)
    publish(context.state.sampler, Nvml())
    publish(context.state.node, large(gpus=1, mig=0, containers=0).state.node.value)
    held = Holding(container(1, pod=Pod("team-a", "training", "uid-1")), (gpu_uuid(0),))
    publish(context.state.ledger, Ledger(1.0, (held,)))
    scrapes = Scrapes(context)

    async def told() -> list[tuple[str | None, str | None]]:
        scrapes._cache.clear()
        answer = await scrapes.answer(Request("GET", "/metrics"))
        series = read_told(answer.content.decode())["DCGM_FI_DEV_GPU_TEMP"].series
        labels = [dict(of) for _, of in series]
        return [(each.get("app"), each.get("hpc_job")) for each in labels]

    assert await told() == [("web", "17"), ("web", "18")]
    os.unlink(tmp_path / "0")
    assert await told() == [("web", None)]
