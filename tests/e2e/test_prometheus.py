"""The real Prometheus scrapes the real agent, and a node with every metric."""

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

import bcrypt
import pytest
import yaml

from integration.containers.bundles import TASKS, Pod
from integration.node.holders.values import Holding, Ledger
from integration.node.services.metrics.text import METRICS, OPENMETRICS, collect, write
from integration.simulated import Scenario, SimulatedNode
from tests.harness.api_server import CERTIFICATE, KEY
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
# Metrics that only a failing node has.
_OF_TROUBLE: Final = (" == 0", " == 1", "!~", '!="healthy"', "> 0")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedNode]:
    directory = str(tmp_path_factory.mktemp("gpus") / "node")
    with SimulatedNode.create(directory, Scenario.load("mig")) as node:
        yield node


def agent(
    node: SimulatedNode, address: str, state: str = "/nonexistent", *more: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    return agent_process(
        "--config", node.config_path, "--cdi-spec", "none", "--device-plugin", "no",
        "--kernel-log", "none", "--log-format", "json", "--metrics", address,
        "--containerd-state", state, *more,
    )  # fmt: skip


def status_of(node: SimulatedNode) -> dict[str, Any]:
    with open(f"{node.state}/node.json", encoding="utf-8") as file:
        status: dict[str, Any] = json.load(file)
    return status


def said(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """Return the first log line of an event."""
    assert process.stderr is not None
    for line in process.stderr:
        document: dict[str, Any] = json.loads(line)
        if event in document["event"]:
            return document
    raise AssertionError(event)


@contextmanager
def exporter(snapshot: Snapshot) -> Iterator[str]:
    """Serve another node's metrics, as the agent would; only allocations change."""
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
    """Return a large node, with a hostile container name."""
    snapshot = large()
    uuid = snapshot.state.ledger.value.holdings[0].devices[0]
    hostile = Holding(container(999, name=HOSTILE, pod=Pod("evil", HOSTILE)), (uuid,))
    snapshot.state.counters.registered("nvidia.com/gpu", "ok")
    ledger = Ledger(
        10.0, (*snapshot.state.ledger.value.holdings, hostile), snapshot.state.ledger.value.unknown
    )
    return changed(snapshot, ledger=ledger)


def config(directory: Path) -> dict[str, Any]:
    """Return the manifests' job; a file lists the targets instead of Kubernetes."""
    with open(os.path.join(MONITORING, "scrape.yaml"), encoding="utf-8") as file:
        (job,) = yaml.safe_load(file)["scrape_configs"]
    del job["kubernetes_sd_configs"]
    job["file_sd_configs"] = [{"files": [str(directory / "targets.json")]}]
    rules = [os.path.join(MONITORING, "alerts.yaml")]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    return {"global": every, "rule_files": rules, "scrape_configs": [job]}


def tell_of(directory: Path, targets: dict[str, str]) -> None:
    """Write the pods' targets, as Kubernetes would discover them."""
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
    # Prometheus discovers targets five seconds after its start; the others start meanwhile.
    with (
        Prometheus(programs, str(tmp_path / "prometheus"), config(tmp_path)) as prometheus,
        exporter(everything()) as other,
        agent(gpus, "127.0.0.1:0", str(state)) as process,
    ):
        address = said(process, "serving metrics")["address"]
        tell_of(tmp_path, {"real": address, "full": other})
        with urlopen(f"http://{address}/metrics", timeout=60) as answer:
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
        assert process.wait(timeout=60) == 0
        gone = 'nvshim_gpu_info{instance="real"}'
        eventually(lambda: not prometheus.query(gone), "series go with the agent")
        assert prometheus.query('up{job="nvshim",instance="real"}')[0][1] == 0


def there(prometheus: Prometheus, expression: str) -> list[tuple[dict[str, str], float]]:
    """Return the series of an expression. A late scrape removes them until the next one."""
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
    # The agent has just started, and reports the time of its own clock.
    (since,) = there(prometheus, 'time() - process_start_time_seconds{instance="real"}')
    assert 0 < since[1] < 300


def _what_happens_is_told(prometheus: Prometheus, gpus: SimulatedNode, bundle: Path) -> None:
    """On a GPU without MIG mode: a container, a process outside of containers, and an error."""
    uuid = status_of(gpus)["gpus"][3]
    write_bundle(bundle, "notebook", "jupyter", gpus=[{"uuid": uuid}])
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
    eventually(lambda: not prometheus.query(gone), "a series ends with its container")


def write_bundle(bundle: Path, pod: str, container: str, **grant: list[dict[str, str]]) -> None:
    """Write what containerd and the shim store for a container of a pod in team-b."""
    annotations = {"namespace": "team-b", "name": pod}
    spec = {
        "annotations": {
            **{f"io.kubernetes.cri.sandbox-{key}": value for key, value in annotations.items()},
            "io.kubernetes.cri.container-name": container,
        }
    }
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps(spec))
    whole: dict[str, Any] = {"grant": {"gpus": [], "mig_devices": []} | grant}
    (bundle / "nvidia.json").write_text(json.dumps(whole))


def write_state(gpus: SimulatedNode, name: str, text: str) -> None:
    with open(f"{gpus.state}/nvml-{name}", "a", encoding="utf-8") as file:
        file.write(text)


def _a_driver_that_hangs_is_told_of_in_time(prometheus: Prometheus, gpus: SimulatedNode) -> None:
    write_state(gpus, "faults", "any=hang\n")
    down = 'nvshim_nvml_up{instance="real"} == 0'
    eventually(lambda: prometheus.query(down), "NVML is down")
    assert there(prometheus, 'up{instance="real"} == 1')
    assert there(prometheus, 'nvshim_gpu_info{instance="real"}')
    gone = 'nvshim_gpu_power_watts{instance="real"}'
    eventually(lambda: not prometheus.query(gone), "values from NVML are missing")
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
    eventually(lambda: prometheus.query(added), "all series are stored")


def _every_query_has_an_answer(prometheus: Prometheus) -> None:
    of_the_page = re.findall(r"```promql\n(.*?)```", read_page("docs/metrics.md"), re.DOTALL)
    assert of_the_page
    of_the_board = [
        re.sub(r"\$(instance|gpu|namespace)", ".*", query.replace("$__rate_interval", "1m"))
        for query in queries()
    ]
    for text in (*of_the_page, *of_the_board):
        if not any(word in text for word in _OF_TROUBLE):
            # On a busy machine a late scrape is repaired by the next one.
            eventually(lambda text=text: prometheus.query(text), text)  # type: ignore[misc]
        else:
            prometheus.query(text)
    # Prometheus reports invalid queries.
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
            with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
                assert answer.read() == b"ok\n"
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=60) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    finally:
        server.server_close()


def test_an_address_that_is_none_is_refused_before_anything_is_begun(gpus: SimulatedNode) -> None:
    with agent(gpus, "unix:/run/metrics.sock") as process:
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None
        assert process.stderr.read().startswith("NVSHIM-E2785 metrics-address-invalid: ")


# -- dcgm-exporter's names ---------------------------------------------------------------------

_OURS: Final = '{instance=~".*",gpu=~"0",job="honoured"}'
# From dashboard 12239, public autoscalers and rules, and one of a MIG device.
_QUERIES: Final[tuple[tuple[str, list[float]], ...]] = (
    (f"avg(DCGM_FI_DEV_GPU_TEMP{_OURS})", [91]),
    (f"sum(DCGM_FI_DEV_POWER_USAGE{_OURS})", [448]),
    (f"DCGM_FI_DEV_SM_CLOCK{_OURS} * 1000000", [345e6]),
    (f"DCGM_FI_DEV_GPU_UTIL{_OURS}", [60]),
    (f"DCGM_FI_DEV_FB_USED{_OURS}", [71680]),
    (f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{_OURS}", [0.55]),
    ('avg(DCGM_FI_DEV_GPU_UTIL{pod=~"app-.*"})', [60]),
    ('avg(DCGM_FI_DEV_GPU_UTIL{namespace="team-b"}) > 50', [60]),
    ('avg(DCGM_FI_DEV_GPU_UTIL{exported_pod=~"app-.*"})', [60]),
    ('sum by (pod) (DCGM_FI_DEV_FB_USED{pod="app-1",container="main"})', [71680]),
    (f"DCGM_FI_DEV_FB_USED{_OURS} / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE) > 0.85",
     [71680 / (81559 - 551)]),
    (f"DCGM_FI_DEV_XID_ERRORS{_OURS} != 0", [31]),
    ('DCGM_FI_DEV_XID_ERRORS{job="honoured",err_code="31"} > 0', [31]),
    (f"DCGM_FI_DEV_GPU_TEMP{_OURS} > 90", [91]),
    (f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{_OURS} > 0", [1]),
    (f"DCGM_FI_DEV_ROW_REMAP_FAILURE{_OURS} > 0", [1]),
    ('DCGM_FI_DEV_GPU_UTIL{job="honoured"} * on (pod, namespace) group_left (node) kube_pod_info',
     [60]),
    ('avg by (namespace, pod) (avg_over_time(DCGM_FI_DEV_GPU_UTIL{pod="app-1"}[5s])) < 70', [60]),
    (f"DCGM_FI_DEV_GPU_UTIL_RATIO{_OURS} * 100", [60]),
    (f"DCGM_FI_DEV_FB_USED_BYTES{_OURS}", [70 << 30]),
    ('DCGM_FI_PROF_GR_ENGINE_ACTIVE{job="honoured",GPU_I_PROFILE="3g.40gb",pod="part"}', [0.25]),
    ('DCGM_FI_DEV_FB_USED{gpu="1",job="honoured",GPU_I_PROFILE="1g.10gb"}', [0]),
    ('DCGM_FI_DEV_GPU_UTIL{gpu="1"}', []),
)  # fmt: skip


@pytest.mark.thorough
def test_queries_for_dcgm_exporter_work_unchanged(tmp_path: Path) -> None:
    divided = {"index": 1, "mig": ["3g.40gb", "1g.10gb"]}
    scenario = Scenario.parse({"gpus": 2, "model": "h100", "gpu": [divided]})
    tasks = tmp_path / "containerd" / TASKS / "k8s.io"
    tasks.mkdir(parents=True)
    access = protected(tmp_path)
    pod = "".join(f', "{k}", "{v}", "", "")' for k, v in
                  (("pod", "app-1"), ("namespace", "team-b"), ("node", "n")))  # fmt: skip
    rules = {"record": "kube_pod_info", "expr": f"{'label_replace(' * 3}vector(1){pod}"}
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "kube", "rules": [rules]}]})
    )
    with (
        SimulatedNode.create(str(tmp_path / "node"), scenario) as node,
        agent(
            node, "127.0.0.1:0", str(tmp_path / "containerd"), "--metrics-names=dcgm,dcgm-4.9",
            f"--metrics-web-config={tmp_path}/web.yml",
        ) as process,
    ):  # fmt: skip
        target = {"targets": [said(process, "serving metrics")["address"]]}
        agents_own = {"labels": {"namespace": "gpu", "pod": "agent"}}
        every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        jobs = [
            {"job_name": "honoured", "honor_labels": True, "static_configs": [target]} | access,
            {"job_name": "renamed", "static_configs": [target | agents_own]} | access,
        ]
        document = {"global": every, "scrape_configs": jobs}
        document["rule_files"] = [str(tmp_path / "rules.yml")]
        with Prometheus(Programs.of_debian(), str(tmp_path / "prometheus"), document) as prometheus:
            _work(node, tasks)
            for query, values in _QUERIES:
                eventually(
                    lambda query=query, values=values: (  # type: ignore[misc]
                        [value for _, value in prometheus.query(query)] == pytest.approx(values)
                    ),
                    f"{query} is {values}", timeout=40,
                )  # fmt: skip
            types = prometheus.get("metadata", limit="500")
            assert types["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"][0]["type"] == "counter"
            assert types["DCGM_FI_DEV_GPU_UTIL"][0]["type"] == "gauge"


def protected(directory: Path) -> dict[str, Any]:
    """Write a web configuration; return how Prometheus' jobs authenticate."""
    (directory / "tls.crt").write_text(CERTIFICATE)
    (directory / "tls.key").write_text(KEY)
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(10)).decode()
    document = {
        "tls_server_config": {"cert_file": "tls.crt", "key_file": "tls.key"},
        "basic_auth_users": {"prometheus": hashed},
    }
    (directory / "web.yml").write_text(yaml.safe_dump(document))
    return {
        "scheme": "https",
        "tls_config": {"ca_file": str(directory / "tls.crt")},
        "basic_auth": {"username": "prometheus", "password": "secret"},
    }


def _work(node: SimulatedNode, tasks: Path) -> None:
    """Put a pod on the whole GPU and one on a MIG device, and cause errors."""
    devices = status_of(node)["migDevices"]
    write_bundle(tasks / "one", "app-1", "main", gpus=[{"uuid": status_of(node)["gpus"][0]}])
    write_bundle(tasks / "two", "part", "main", mig_devices=[{"uuid": devices[0]}])
    write_state(node, "processes", f"0 {os.getpid()} {70 << 30} 60 1 2 3\n")
    write_state(
        node, "facts",
        "0 temperature 91\n0 gpm-5 55\n0 ecc-uncorrected 1\n0 rows-failed 1\n"
        + "".join(f"1 gpm-1-{instance} 25\n" for instance in range(3)),
    )  # fmt: skip
    write_state(node, "events", "0 8 31\n")
