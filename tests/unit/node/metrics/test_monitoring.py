"""Alerts, dashboard and documentation, checked by promtool and against the existing metrics."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from integration.node.options import DCGM, DCGM_4_5, DCGM_4_9
from integration.node.services.metrics import dcgm
from integration.node.services.metrics.text import METRICS, PLAIN, collect, write
from tests.harness.kubectl import MANIFESTS
from tests.harness.pages import anchors, read_page
from tests.harness.prometheus import Programs, Promtool
from tests.harness.promql import dashboard, metrics_in, queries
from tests.unit.node.metrics.nodes import large
from tools.reference.dcgm import OURS
from tools.reference.metrics import MONITORING, alerts
from tools.reference.pages import FILES

if TYPE_CHECKING:
    from pathlib import Path

ALERTS: Final = alerts()
PAGE: Final = "docs/metrics.md"
THERE: Final = {name for family in METRICS for name in family.samples} | {"up"}


@pytest.fixture(scope="module")
def promtool() -> Promtool:
    return Promtool(Programs.of_debian())


def path_of(name: str) -> str:
    return os.path.join(MONITORING, name)


# -- exported metrics -------------------------------------------------------------------------


def test_promtool_finds_nothing_to_say_of_what_is_told(promtool: Promtool) -> None:
    told = write(collect(large()), PLAIN).decode()
    assert promtool("check", "metrics", stdin=told) == (True, "")


def test_promtool_reads_the_names_of_dcgm_exporter_and_dislikes_only_them(
    promtool: Promtool,
) -> None:
    names = (DCGM, DCGM_4_5, DCGM_4_9)
    told = write(dcgm.collect(large(), names, "node-1"), dcgm.FORM).decode()
    _, said = promtool("check", "metrics", stdin=told)
    assert {line.partition(" ")[2] for line in said.splitlines()} == {
        'counter metrics should have "_total" suffix',
        "label names should be written in 'snake_case' not 'camelCase'",
        "metric name should not include type 'counter'",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        "# HELP a_count A.\n# TYPE a_count gauge\na_count 1\n",
        "# HELP a_kilobytes A.\n# TYPE a_kilobytes gauge\na_kilobytes 1\n",
        'a{b="c} 1\n',
    ],
)
def test_promtool_would_find_what_is_wrong(promtool: Promtool, wrong: str) -> None:
    assert not promtool("check", "metrics", stdin=wrong)[0]


# -- names ------------------------------------------------------------------------------------


def names_in_page() -> set[str]:
    return set(re.findall(r"\b(?:nvshim|process)_\w+\b", read_page(PAGE)))


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (instance, gpu) (rate(a_b{c="d_e",f!~"}"}[5m])) / 2e6 > 0.5', {"a_b"}),
        ("a:b offset 5m and on (x_y) group_left (z) b unless c == bool 1", {"a:b", "b", "c"}),
        ('label_replace(a, "x", "$1", "y", "(.+)") or vector(0) # b\n', {"a"}),
        ("time() - sum without (g) (a) + histogram_quantile(0.9, b_bucket) + Inf",
         {"a", "b_bucket"}),
    ],
)  # fmt: skip
def test_names_are_found_in_an_expression(expression: str, names: set[str]) -> None:
    assert metrics_in(expression) == names


def test_every_name_of_alerts_and_dashboard_is_told() -> None:
    expressions = [*queries(), *(each["expr"] for each in ALERTS)]
    expressions += OURS.values()
    used = set().union(*(metrics_in(each) for each in expressions))
    assert used - THERE == set()
    # Most metrics should appear in a dashboard or an alert; the others could be dropped.
    assert len(used) > len(THERE) / 2


def test_a_name_that_is_not_told_would_be_found() -> None:
    assert metrics_in(queries()[0].replace("_info", "_inof")) - THERE == {"nvshim_build_inof"}


def test_every_name_of_the_page_is_told() -> None:
    names = names_in_page()
    assert names - THERE - {family.name for family in METRICS} == set()
    assert {family.name for family in METRICS} <= names


def test_every_label_that_is_chosen_by_is_one_of_the_metric() -> None:
    labels = {name: {*f.labels, "instance", "le"} for f in METRICS for name in f.samples}
    found = 0
    for expression in (*queries(), *(each["expr"] for each in ALERTS)):
        for name, matchers in re.findall(r"\b(nvshim_\w+|process_\w+)\{([^}]*)\}", expression):
            chosen = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            assert chosen <= labels[name], expression
            found += len(chosen)
    assert found > 50


# -- alerts -----------------------------------------------------------------------------------


def test_promtool_takes_the_rules(promtool: Promtool) -> None:
    path = path_of("alerts.yaml")
    taken, said = promtool("check", "rules", "--lint=all", "--lint-fatal", path)
    assert taken, said


def test_promtool_takes_the_job(promtool: Promtool, tmp_path: Path) -> None:
    with open(path_of("scrape.yaml"), encoding="utf-8") as file:
        document = yaml.safe_load(file)
    (job,) = document["scrape_configs"]
    # Debian builds Prometheus without Kubernetes service discovery.
    (discovery,) = job.pop("kubernetes_sd_configs")
    assert discovery["role"] == "pod"
    # Any user who may create pods may label them like ours.
    with open(os.path.join(MANIFESTS, "base", "kustomization.yaml"), encoding="utf-8") as file:
        assert discovery["namespaces"]["names"] == [yaml.safe_load(file)["namespace"]]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(document))
    taken, said = promtool("check", "config", "--syntax-only", str(tmp_path / "prometheus.yml"))
    assert taken, said
    (block,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", read_page(PAGE), re.DOTALL)
    assert yaml.safe_load(block)["scrape_configs"][0]["honor_labels"] is True


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_the_matter_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == PAGE
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(read_page(page))


GPU: Final = 'instance="n",gpu="0",uuid="GPU-a",pci_bus_id="b",model="m"'
MIG: Final = 'instance="n",gpu="0",uuid="GPU-a",mig="1",mig_uuid="MIG-a"'
POD: Final = 'instance="n",namespace="s",pod="p",container="c"'
# Series per minute that make each alert fire, with the minute; and series that almost do.
CASES: Final[dict[str, tuple[int, dict[str, str], dict[str, str]]]] = {
    "NvshimAgentsAbsent": (11, {}, {'up{job="nvshim",instance="n"}': "1x20"}),
    "NvshimAgentDown": (
        6, {'up{job="nvshim",instance="n"}': "0x20"}, {'up{job="other",instance="n"}': "0x20"},
    ),
    "NvshimAgentStalled": (
        60, {'nvshim_looks_total{instance="n",result="ok"}': "7x70"},
        {'nvshim_looks_total{instance="n",result="ok"}': "7x70",
         'nvshim_looks_total{instance="n",result="failed"}': "0+1x70"},
    ),
    "NvshimNodeFaulty": (
        16, {'nvshim_node_faults{instance="n"}': "2x20"},
        {'nvshim_node_faults{instance="n"}': "2x9 0 2x10"},
    ),
    "NvshimPartDown": (
        11, {'nvshim_part_up{instance="n",part="plugin"}': "0x20"},
        {'nvshim_part_up{instance="n",part="plugin"}': "0x5 1 0x9"},
    ),
    "NvshimNvmlDown": (
        6, {'nvshim_nvml_up{instance="n"}': "0x9",
            'nvshim_driver_info{instance="n",version="550"}': "1x9"},
        {'nvshim_nvml_up{instance="n"}': "0x9"},  # a node without a driver
    ),
    "NvshimEventsUnheard": (
        16, {f"nvshim_gpu_events_watched{{{GPU}}}": "0x20"},
        {f"nvshim_gpu_events_watched{{{GPU}}}": "1x20"},
    ),
    "NvshimGpuLost": (
        2, {f"nvshim_gpu_up{{{GPU}}}": "0x9"}, {f"nvshim_gpu_up{{{GPU}}}": "1x9"},
    ),
    "NvshimDeviceUnhealthy": (
        2, {f'nvshim_device_health{{{MIG},state="unhealthy"}}': "1x9"},
        {f'nvshim_device_health{{{MIG},state="unhealthy"}}': "0x9",
         f'nvshim_device_health{{{MIG},state="recovering"}}': "1x9"},
    ),
    "NvshimDeviceSuspect": (
        61, {f'nvshim_device_health{{{MIG},state="suspect"}}': "1x70"},
        {f'nvshim_device_health{{{MIG},state="suspect"}}': "1x50 0 1x20"},
    ),
    "NvshimXid": (
        9, {'nvshim_gpu_xid_last_timestamp_seconds{instance="n",gpu="0",xid="79"}': "0x20"},
        {'nvshim_gpu_xid_last_timestamp_seconds{instance="n",gpu="0",xid="31"}': "0x20",
         'nvshim_gpu_xid_last_timestamp_seconds{instance="n",gpu="1",xid="79"}': "-600x20"},
    ),
    "NvshimXidsMany": (
        20, {'nvshim_gpu_xid_errors_total{instance="n",gpu="0",xid="31",pod="p"}': "0+1x20",
             'nvshim_gpu_xid_errors_total{instance="n",gpu="0",xid="13"}': "0+1x20"},
        {'nvshim_gpu_xid_errors_total{instance="n",gpu="0",xid="31"}': "9x20"},
    ),
    "NvshimMemoryErrors": (
        9, {f'nvshim_gpu_ecc_errors_total{{{GPU},type="uncorrected"}}': "0x5 1x9"},
        {f'nvshim_gpu_ecc_errors_total{{{GPU},type="uncorrected"}}': "3x20",
         f'nvshim_gpu_ecc_errors_total{{{GPU},type="corrected"}}': "0+9x20"},
    ),
    "NvshimRowsFailed": (
        1, {f"nvshim_gpu_rows_failed{{{GPU}}}": "1x9"}, {f"nvshim_gpu_rows_failed{{{GPU}}}": "0x9"},
    ),
    "NvshimRowsPending": (
        61, {f"nvshim_gpu_rows_pending{{{GPU}}}": "1x70"},
        {f"nvshim_gpu_rows_pending{{{GPU}}}": "0x30 1x40"},
    ),
    "NvshimSlowedDown": (
        16, {f'nvshim_gpu_clocks_throttled{{{GPU},reason="hw_thermal_slowdown"}}': "1x20"},
        {f'nvshim_gpu_clocks_throttled{{{GPU},reason="gpu_idle"}}': "1x20"},
    ),
    "NvshimMemoryNearlyFull": (
        16, {f"nvshim_mig_memory_used_bytes{{{MIG}}}": "98x20",
             f"nvshim_mig_memory_total_bytes{{{MIG}}}": "100x20"},
        {f"nvshim_gpu_memory_used_bytes{{{GPU}}}": "96x20",
         f"nvshim_gpu_memory_total_bytes{{{GPU}}}": "100x20"},
    ),
    "NvshimHeldIdle": (
        200, {f"nvshim_gpu_utilization_ratio{{{GPU}}}": "0x200",
              'nvshim_device_containers{instance="n",gpu="0",uuid="GPU-a"}': "1x200"},
        {f"nvshim_gpu_utilization_ratio{{{GPU}}}": "0x200",
         'nvshim_device_containers{instance="n",gpu="0",uuid="GPU-a"}': "0x190 1x10"},
    ),
    "NvshimContainerStale": (
        16, {f"nvshim_container_stale{{{POD}}}": "1x20"},
        {f"nvshim_container_stale{{{POD}}}": "0x20"},
    ),
    "NvshimContainerOrphan": (
        16, {f"nvshim_container_orphan{{{POD}}}": "1x20"},
        {f"nvshim_container_orphan{{{POD}}}": "1x9 _x11"},
    ),
    "NvshimDeviceMissing": (
        2, {f"nvshim_container_devices_missing{{{POD}}}": "1x9"},
        {f"nvshim_container_devices_missing{{{POD}}}": "0x9"},
    ),
    "NvshimContainersUnreadable": (
        31, {'nvshim_containers_unreadable{instance="n"}': "1x40"},
        {'nvshim_containers_unreadable{instance="n"}': "0x40"},
    ),
    "NvshimDeviceUnheld": (
        61, {'nvshim_resource_devices_unheld{instance="n",resource="r"}': "2x70"},
        {'nvshim_resource_devices_unheld{instance="n",resource="r"}': "2x50 0 2x20"},
    ),
    "NvshimMpsDown": (
        6, {'nvshim_mps_daemon_up{instance="n",resource="r"}': "0x9"},
        {'nvshim_mps_daemon_up{instance="n",resource="r"}': "1x9"},
    ),
    "NvshimAllocationsFail": (
        9, {'nvshim_allocations_total{instance="n",resource="r",result="failed"}': "0x5 1x9"},
        {'nvshim_allocations_total{instance="n",resource="r",result="ok"}': "0+1x20"},
    ),
    "NvshimRegistrationsFail": (
        9, {'nvshim_kubelet_registrations_total{instance="n",resource="r",result="failed"}':
            "0+1x9"},
        {'nvshim_kubelet_registrations_total{instance="n",resource="r",result="failed"}':
         "0 1x9"},
    ),
}  # fmt: skip


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == {each["alert"] for each in ALERTS}


def rule_test(directory: Path, tests: list[dict[str, Any]]) -> str:
    path = directory / "test.yaml"
    document = {
        "rule_files": [path_of("alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": tests,
    }
    path.write_text(yaml.safe_dump(document))
    return str(path)


Case = tuple[str, dict[str, str], int, bool]


def firing(*cases: Case) -> dict[str, Any]:
    """Let promtool check whether alerts fire at a minute, each on its own node.

    All share one test case, because setting one up takes promtool far longer than one alert.
    """
    series, expected = [], []
    for alert, of_case, minute, fires in cases:
        node = f"{alert}-{fires}"
        series += [
            {"series": name.replace('instance="n"', f'instance="{node}"'), "values": values}
            for name, values in of_case.items()
        ]
        of = f'alertname="{alert}",alertstate="firing"'
        if of_case:
            of += f',instance="{node}"'
        samples = [{"labels": "{}", "value": 1}] if fires else []
        expected.append(
            {"expr": f"count(ALERTS{{{of}}})", "eval_time": f"{minute}m", "exp_samples": samples}
        )
    return {"interval": "1m", "input_series": series, "promql_expr_test": expected}


def test_each_alert_fires_when_it_should_and_not_when_it_nearly_should(
    promtool: Promtool, tmp_path: Path
) -> None:
    told: list[Case] = []
    absent: list[Case] = []
    for alert, (minute, fires, does_not) in CASES.items():
        (told if fires else absent).append((alert, fires, minute, True))
        told.append((alert, does_not, minute, False))
    tests = [firing(*told), firing(*absent)]
    passed, said = promtool("test", "rules", rule_test(tmp_path, tests))
    assert passed, said


def test_a_case_that_is_wrong_would_be_found(promtool: Promtool, tmp_path: Path) -> None:
    minute, fires, does_not = CASES["NvshimGpuLost"]
    test = firing(
        ("NvshimGpuLost", fires, minute, False), ("NvshimGpuLost", does_not, minute, True)
    )
    passed, said = promtool("test", "rules", rule_test(tmp_path, [test]))
    assert not passed
    assert said.count("exp:") == 2


def test_an_alert_names_what_it_is_of(promtool: Promtool, tmp_path: Path) -> None:
    labels = {"instance": "n", "gpu": "0", "uuid": "GPU-a", "mig": "1", "mig_uuid": "MIG-a"}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f'nvshim_device_health{{{MIG},state="unhealthy"}}', "values": "1x9"}
        ],
        "alert_rule_test": [{
            "eval_time": "5m", "alertname": "NvshimDeviceUnhealthy",
            "exp_alerts": [{
                "exp_labels": {**labels, "state": "unhealthy", "severity": "critical"},
                "exp_annotations": {
                    "summary": "A device of GPU 0 of n is unhealthy.",
                    "description": "MIG-a is no longer allocated to containers; `nvshim list "
                    "--health` on the node shows why.",
                    "runbook": "docs/metrics.md#nvshimdeviceunhealthy",
                },
            }],
        }],
    }  # fmt: skip
    passed, said = promtool("test", "rules", rule_test(tmp_path, [test]))
    assert passed, said


def test_the_operator_is_given_the_same_rules() -> None:
    name = "components/prometheus-operator/prometheus-rule.yaml"
    rule = yaml.safe_load(FILES[name]())
    with open(path_of("alerts.yaml"), encoding="utf-8") as file:
        assert rule["spec"] == yaml.safe_load(file)
    with open(os.path.join(MANIFESTS, name), encoding="utf-8") as file:
        assert file.read() == FILES[name]()


# -- dashboard --------------------------------------------------------------------------------


def test_the_dashboard_names_no_grafana_and_its_panels_do_not_overlap() -> None:
    document = dashboard()
    assert document["templating"]["list"][0]["type"] == "datasource"
    taken = set[tuple[int, int]]()
    for panel in document["panels"]:
        place = panel["gridPos"]
        squares = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not squares & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= squares
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'instance=~"$instance"' in target["expr"]
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids))
    variables = {each["name"] for each in document["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)", json.dumps(document)))
    assert used - variables == set()
