"""The real Prometheus scrapes the real agent, and a node that has all there can be."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.request import urlopen

import pytest
import yaml

from integration.containers.bundles import TASKS, Pod
from integration.node.holders.values import Holding, Ledger
from integration.node.services.metrics.text import METRICS, OPENMETRICS, collect, write
from integration.simulated import Scenario, SimulatedNode
from tests.harness.exposition import read_told
from tests.harness.node_agent import agent_process
from tests.harness.pages import read_page
from tests.harness.prometheus import Programs, Prometheus, Promtool
from tests.harness.promql import queries
from tests.harness.waiting import eventually
from tests.unit.node.metrics.nodes import changed, container, large
from tools.reference.metrics import MONITORING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from integration.node.services.metrics.snapshot import Snapshot

HOSTILE: Final = 'a"} 1\nnvshim_gpu_up{gpu="evil"} 0\n# \\'
# What only a node that is in trouble has.
_OF_TROUBLE: Final = (" == 0", " == 1", "!~", '!="healthy"', "> 0")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    directory = str(tmp_path_factory.mktemp("gpus") / "node")
    with SimulatedNode.create(directory, Scenario.load("mig")) as node:
        yield node


def agent(
    node: SimulatedNode, address: str, state: str = "/nonexistent"
) -> AbstractContextManager[subprocess.Popen[str]]:
    return agent_process(
        "--config", node.config_path, "--cdi-spec", "none", "--device-plugin", "no",
        "--kernel-log", "none", "--log-format", "json", "--metrics", address,
        "--containerd-state", state,
    )  # fmt: skip


def status_of(node: SimulatedNode) -> dict[str, Any]:
    with open(f"{node.state}/node.json", encoding="utf-8") as file:
        status: dict[str, Any] = json.load(file)
    return status


def said(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """The first line of the log about something."""
    assert process.stderr is not None
    for line in process.stderr:
        document: dict[str, Any] = json.loads(line)
        if event in document["event"]:
            return document
    raise AssertionError(event)


@contextmanager
def exporter(snapshot: Snapshot) -> Iterator[str]:
    """Another node, that tells what the agent would; but for allocations, always the same."""
    told = collect(snapshot)
    allocations = [each for each in METRICS if each.name.startswith("nvshim_allocation")]
    fixed = write([each for each in told if each[0] not in allocations], OPENMETRICS)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            snapshot.state.counters.allocated("nvidia.com/gpu", 0.004, "ok")
            again = [each for each in collect(snapshot) if each[0] in allocations]
            text = fixed.removesuffix(b"# EOF\n") + write(again, OPENMETRICS)
            self.send_response(200)
            self.send_header("Content-Type", OPENMETRICS.type)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def everything() -> Snapshot:
    """A large node, with a container of a name that nobody should have."""
    snapshot = large()
    uuid = snapshot.state.ledger.value.holdings[0].devices[0]
    hostile = Holding(container(999, name=HOSTILE, pod=Pod("evil", HOSTILE)), (uuid,))
    snapshot.state.counters.registered("nvidia.com/gpu", "ok")
    ledger = Ledger(
        10.0, (*snapshot.state.ledger.value.holdings, hostile), snapshot.state.ledger.value.unknown
    )
    return changed(snapshot, ledger=ledger)


def config(directory: Path) -> dict[str, Any]:
    """The job of the manifests; who is there is told by a file instead of Kubernetes."""
    with open(os.path.join(MONITORING, "scrape.yaml"), encoding="utf-8") as file:
        (job,) = yaml.safe_load(file)["scrape_configs"]
    del job["kubernetes_sd_configs"]
    job["file_sd_configs"] = [{"files": [str(directory / "targets.json")]}]
    rules = [os.path.join(MONITORING, name) for name in ("alerts.yaml", "dcgm-names.yaml")]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    return {"global": every, "rule_files": rules, "scrape_configs": [job]}


def tell_of(directory: Path, targets: dict[str, str]) -> None:
    """Write what Kubernetes would tell of the pods."""
    found = [
        {
            "targets": [address],
            "labels": {
                "__meta_kubernetes_pod_label_app_kubernetes_io_name": label,
                "__meta_kubernetes_pod_container_port_name": "metrics",
                "__meta_kubernetes_pod_node_name": node,
            },
        }
        for node, address in targets.items()
        for label in ("node-agent", "another")
    ]
    (directory / "targets.new").write_text(json.dumps(found))
    (directory / "targets.new").rename(directory / "targets.json")


def test_prometheus_knows_what_the_agent_knows(gpus: SimulatedNode, tmp_path: Path) -> None:
    programs = Programs.of_debian()
    state = tmp_path / "containerd"
    (state / TASKS / "k8s.io").mkdir(parents=True)
    # Prometheus looks for targets five seconds after its start: the others start meanwhile.
    with (
        Prometheus(programs, str(tmp_path / "prometheus"), config(tmp_path)) as prometheus,
        exporter(everything()) as other,
        agent(gpus, "127.0.0.1:0", str(state)) as process,
    ):
        address = said(process, "serving metrics")["address"]
        tell_of(tmp_path, {"real": address, "full": other})
        with urlopen(f"http://{address}/metrics", timeout=20) as answer:
            text = answer.read().decode()
        assert Promtool(programs)("check", "metrics", stdin=text) == (True, "")
        told = {name for family in read_told(text).values() for name, _ in family.series}
        assert told <= {name for family in METRICS for name in family.samples}
        eventually(
            lambda: len(prometheus.query("count_over_time(up[1m]) > 1 and up == 1")) == 2,
            "two scrapes of both", timeout=30,
        )  # fmt: skip
        _the_agent_is_known(prometheus, gpus)
        _what_happens_is_told(prometheus, gpus, state / TASKS / "k8s.io" / "one")
        _a_hostile_name_is_a_name(prometheus)
        _nothing_is_lost(prometheus)
        _every_query_has_an_answer(prometheus)
        _the_rules_work(prometheus)
        _a_driver_that_hangs_is_told_of_in_time(prometheus, gpus)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        gone = 'nvshim_gpu_info{instance="real"}'
        eventually(lambda: not prometheus.query(gone), "series go with the agent", timeout=20)
        assert prometheus.query('up{job="nvshim",instance="real"}')[0][1] == 0


def there(prometheus: Prometheus, expression: str) -> list[tuple[dict[str, str], float]]:
    """The series of an expression. A scrape that was late takes them away until the next one."""
    return eventually(lambda: prometheus.query(expression), expression)


def _the_agent_is_known(prometheus: Prometheus, gpus: SimulatedNode) -> None:
    told = there(prometheus, 'nvshim_mig_info{instance="real"}')
    expected = status_of(gpus)["migDevices"]
    assert expected
    assert {labels["mig_uuid"] for labels, _ in told} == set(expected)
    assert {labels["job"] for labels, _ in told} == {"nvshim"}
    (driver,) = there(prometheus, 'nvshim_driver_info{instance="real"}')
    assert driver[0]["version"] == gpus.driver_version
    assert there(prometheus, 'nvshim_looks_total{instance="real"}')
    # Of an agent that has begun a moment ago, with a time of its own clock.
    (since,) = there(prometheus, 'time() - process_start_time_seconds{instance="real"}')
    assert 0 < since[1] < 300


def _what_happens_is_told(prometheus: Prometheus, gpus: SimulatedNode, bundle: Path) -> None:
    """On a GPU that is in no MIG mode: a container, a process of none, and an error."""
    uuid = status_of(gpus)["gpus"][3]
    annotations = {"namespace": "team-b", "name": "notebook"}
    spec = {
        "annotations": {
            **{f"io.kubernetes.cri.sandbox-{key}": value for key, value in annotations.items()},
            "io.kubernetes.cri.container-name": "jupyter",
        }
    }
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps(spec))
    grant = {"grant": {"gpus": [{"uuid": uuid}], "mig_devices": []}}
    (bundle / "nvidia.json").write_text(json.dumps(grant))
    write_state(gpus, "processes", f"3 {os.getpid()} {1 << 30} 60 1 2 3\n")
    write_state(gpus, "events", "3 8 79\n")
    of = 'instance="real",gpu="3"'
    for query, expected in (
        (f"nvshim_container_device_info{{{of}}}", 1),
        (f"nvshim_container_gpu_memory_used_bytes{{{of},container='jupyter'}}", 0),
        (f"nvshim_device_containers{{{of}}}", 1),
        (f"nvshim_outside_gpu_memory_used_bytes{{{of}}}", 1 << 30),
        (f"nvshim_gpu_utilization_ratio{{{of}}}", 0.6),
        (f"nvshim_gpu_xid_errors_total{{{of},xid='79'}}", 1),
        (f"time() - nvshim_gpu_xid_last_timestamp_seconds{{{of}}} < bool 300", 1),
        (f"nvshim_device_health{{{of},state='unhealthy'}}", 1),
        (f"nvshim_device_last_xid{{{of}}}", 79),
    ):
        eventually(
            lambda query=query, expected=expected: (  # type: ignore[misc]
                [value for _, value in prometheus.query(query)] == [expected]
            ),
            f"{query} is {expected}", timeout=40,
        )  # fmt: skip
    (held,) = there(prometheus, f"nvshim_container_device_info{{{of}}}")
    assert (held[0]["namespace"], held[0]["pod"], held[0]["uuid"]) == ("team-b", "notebook", uuid)
    for name in os.listdir(bundle):
        os.unlink(bundle / name)
    bundle.rmdir()
    gone = f"nvshim_container_device_info{{{of}}}"
    eventually(lambda: not prometheus.query(gone), "a series goes with its container", timeout=20)


def write_state(gpus: SimulatedNode, name: str, text: str) -> None:
    with open(f"{gpus.state}/nvml-{name}", "a", encoding="utf-8") as file:
        file.write(text)


def _a_driver_that_hangs_is_told_of_in_time(prometheus: Prometheus, gpus: SimulatedNode) -> None:
    write_state(gpus, "faults", "any=hang\n")
    down = 'nvshim_nvml_up{instance="real"} == 0'
    eventually(lambda: prometheus.query(down), "NVML is down", timeout=30)
    assert there(prometheus, 'up{instance="real"} == 1')
    assert there(prometheus, 'nvshim_gpu_info{instance="real"}')
    gone = 'nvshim_gpu_power_watts{instance="real"}'
    eventually(lambda: not prometheus.query(gone), "what only NVML knows is not told", timeout=20)
    os.unlink(f"{gpus.state}/nvml-faults")


def _a_hostile_name_is_a_name(prometheus: Prometheus) -> None:
    evil = 'nvshim_container_info{namespace="evil"}'
    (info,) = eventually(lambda: prometheus.query(evil), "the hostile container")
    assert info[0]["pod"] == HOSTILE
    assert info[0]["container"] == HOSTILE
    assert prometheus.query('nvshim_gpu_up{gpu="evil"}') == []


def _nothing_is_lost(prometheus: Prometheus) -> None:
    names = set(prometheus.get("label/__name__/values"))
    missing = {name for family in METRICS for name in family.samples} - names
    assert missing == set()
    in_types = {
        name: entries[0]["type"]
        for name, entries in prometheus.get("metadata", limit="500").items()
    }
    assert in_types["nvshim_gpu_energy_joules"] == "counter"
    added = 'scrape_samples_post_metric_relabeling{instance="full"} > 6000'
    eventually(lambda: prometheus.query(added), "all series are taken")


def _every_query_has_an_answer(prometheus: Prometheus) -> None:
    of_the_page = re.findall(r"```promql\n(.*?)```", read_page("docs/metrics.md"), re.DOTALL)
    assert of_the_page
    of_the_board = [
        re.sub(r"\$(instance|gpu|namespace)", ".*", query.replace("$__rate_interval", "1m"))
        for query in queries()
    ]
    for text in (*of_the_page, *of_the_board):
        if not any(word in text for word in _OF_TROUBLE):
            # A scrape that was late, on a busy machine, is made up for by the next one.
            eventually(lambda text=text: prometheus.query(text), text)  # type: ignore[misc]
        else:
            prometheus.query(text)
    # Prometheus says which are none.
    with pytest.raises(OSError, match="400"):
        prometheus.query("sum by (gpu (nvshim_gpu_up)")


def _the_rules_work(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = prometheus.get("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    eventually(lambda: all(rule["health"] != "unknown" for rule in rules()), "rules are evaluated")
    assert [rule["lastError"] for rule in rules() if rule["health"] != "ok"] == []
    told = [alert for rule in rules() for alert in rule.get("alerts", ())]
    assert {"NvshimContainerStale", "NvshimPartDown"} <= {
        alert["labels"]["alertname"] for alert in told
    }
    for alert in told:
        assert not re.search(r"<no value>|<error|\{\{", json.dumps(alert["annotations"])), alert
    assert there(prometheus, 'DCGM_FI_DEV_GPU_UTIL{Hostname="full",gpu="3"}')[0][1] == 50


def test_a_port_that_is_taken_is_said_and_had_when_it_is_free(gpus: SimulatedNode) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    port = server.server_address[1]
    try:
        with agent(gpus, f"127.0.0.1:{port}") as process:
            fault = said(process, "NVSHIM-E2786")
            assert fault["part"] == "metrics"
            eventually(lambda: "E2786" in str(status_of(gpus)["faults"]), "it is in the status")
            server.server_close()
            said(process, "serving metrics")
            eventually(lambda: "E2786" not in str(status_of(gpus)["faults"]), "it is over")
            with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=20) as answer:
                assert answer.read() == b"ok\n"
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=20) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 0
    finally:
        server.server_close()


def test_an_address_that_is_none_is_refused_before_anything_is_begun(gpus: SimulatedNode) -> None:
    with agent(gpus, "unix:/run/metrics.sock") as process:
        assert process.wait(timeout=20) == 1
        assert process.stderr is not None
        assert process.stderr.read().startswith("NVSHIM-E2785 metrics-address-invalid: ")
