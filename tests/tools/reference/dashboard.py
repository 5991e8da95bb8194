"""The dashboard for Grafana, from a table of what is to be seen on it.

Rules
- Every query is limited to the nodes that are chosen ($instance), and each datasource is the one
  that is chosen ($datasource): the file names no Grafana's own.
- Nothing is asked that the agent does not tell (a test has Prometheus answer each query).

Source: Grafana's "Dashboard JSON model".
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

__all__ = ["ROWS", "Panel", "dashboard", "queries"]

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
# Of Grafana 10.2; later ones bring it up to theirs when they read it.
_SCHEMA: Final = 39
_COLUMNS: Final = 24

_ON: Final = 'instance=~"$instance"'
_GPU: Final = f'{_ON},gpu=~"$gpu"'
_POD: Final = f'{_ON},namespace=~"$namespace"'
_NAMED: Final = "{{namespace}}/{{pod}}/{{container}}"
_OF_GPU: Final = "{{instance}} GPU {{gpu}}"
_OF_MIG: Final = "{{instance}} GPU {{gpu}}:{{mig}}"


class Panel(NamedTuple):
    """One picture."""

    title: str  # what it shows
    queries: tuple[tuple[str, str], ...]  # each with how its series are called
    unit: str = "short"  # Grafana's name of it
    kind: str = "timeseries"  # Grafana's name of the kind of panel
    width: int = 8  # of the 24 columns
    bad_above: float | None = None  # a value from which on a number is red; None for never
    help: str = ""  # what one should know of it


def _number(title: str, query: str, unit: str = "short", bad: float | None = None) -> Panel:
    return Panel(title, ((query, ""),), unit, "stat", 4, bad)


ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    ("Nodes", (
        _number("Nodes", f"count(nvshim_build_info{{{_ON}}})"),
        _number("GPUs", f"count(nvshim_gpu_info{{{_ON}}})"),
        _number("Containers with GPUs", f"count(nvshim_container_info{{{_ON}}}) or vector(0)"),
        _number("Devices not given", f'sum(nvshim_device_health{{{_ON},state!~"healthy|suspect"}})'
                " or vector(0)", bad=1),
        _number("GPUs lost", f"count(nvshim_gpu_up{{{_ON}}} == 0) or vector(0)", bad=1),
        _number("Nodes without NVML", f"count(nvshim_nvml_up{{{_ON}}} == 0) or vector(0)", bad=1),
        Panel("Utilisation", ((f"avg by (instance) (nvshim_gpu_utilization_ratio{{{_ON}}})",
                               "{{instance}}"),), "percentunit"),
        Panel("Memory in use", (((f"sum by (instance) (nvshim_gpu_memory_used_bytes{{{_ON}}})"
                                 f" / sum by (instance) (nvshim_gpu_memory_total_bytes{{{_ON}}})"),
                                 "{{instance}}"),), "percentunit"),
        Panel("Power", ((f"sum by (instance) (nvshim_gpu_power_watts{{{_ON}}})",
                         "{{instance}}"),), "watt"),
        Panel("Drivers", ((f"nvshim_driver_info{{{_ON}}}", ""),), kind="table", width=12),
        Panel("GPUs", ((f"nvshim_gpu_info{{{_ON}}}", ""),), kind="table", width=12),
    )),
    ("GPUs", (
        Panel("Utilisation", ((f"nvshim_gpu_utilization_ratio{{{_GPU}}}", _OF_GPU),),
              "percentunit"),
        Panel("Memory in use", ((f"nvshim_gpu_memory_used_bytes{{{_GPU}}}", _OF_GPU),), "bytes"),
        Panel("Memory read or written", ((f"nvshim_gpu_memory_busy_ratio{{{_GPU}}}", _OF_GPU),),
              "percentunit", help="Of the time; not how much of it is in use."),
        Panel("Power", ((f"nvshim_gpu_power_watts{{{_GPU}}}", _OF_GPU),), "watt"),
        Panel("Energy of an hour", (
            (f"increase(nvshim_gpu_energy_joules_total{{{_GPU}}}[1h])", _OF_GPU),), "joule"),
        Panel("Temperature", ((f"nvshim_gpu_temperature_celsius{{{_GPU}}}", _OF_GPU),), "celsius"),
        Panel("Clocks", (
            (f"nvshim_gpu_sm_clock_hertz{{{_GPU}}}", f"{_OF_GPU}, SM"),
            (f"nvshim_gpu_memory_clock_hertz{{{_GPU}}}", f"{_OF_GPU}, memory")), "hertz"),
        Panel("Encoder and decoder", (
            (f"nvshim_gpu_encoder_utilization_ratio{{{_GPU}}}", f"{_OF_GPU}, encoder"),
            (f"nvshim_gpu_decoder_utilization_ratio{{{_GPU}}}", f"{_OF_GPU}, decoder")),
              "percentunit"),
        Panel("Slowed down", ((
            f'nvshim_gpu_clocks_throttled{{{_GPU},reason!="gpu_idle"}} == 1',
            f"{_OF_GPU}, {{{{reason}}}}"),), help="Why clocks are low, other than for idleness."),
        Panel("Memory of MIG devices", (
            (f"nvshim_mig_memory_used_bytes{{{_GPU}}}", f"{_OF_MIG} {{{{profile}}}}"),), "bytes",
              width=12),
        Panel("Containers that hold a device", (
            (f"nvshim_device_containers{{{_GPU}}}", f"{_OF_GPU} {{{{mig}}}}"),), width=12),
    )),
    ("Containers", (
        Panel("Memory", ((f"nvshim_container_gpu_memory_used_bytes{{{_POD}}}", _NAMED),), "bytes"),
        Panel("Kernels run", ((f"nvshim_container_gpu_sm_utilization_ratio{{{_POD}}}", _NAMED),),
              "percentunit", help="Of the time, how long kernels of the container ran."),
        Panel("Memory read or written", (
            (f"nvshim_container_gpu_memory_busy_ratio{{{_POD}}}", _NAMED),), "percentunit"),
        Panel("Power", ((
            f"rate(nvshim_container_gpu_energy_joules_total{{{_POD}}}[$__rate_interval])",
            _NAMED),), "watt", help="The container's share of what its devices draw."),
        Panel("Encoder and decoder", (
            (f"nvshim_container_gpu_encoder_utilization_ratio{{{_POD}}}", f"{_NAMED}, encoder"),
            (f"nvshim_container_gpu_decoder_utilization_ratio{{{_POD}}}", f"{_NAMED}, decoder")),
              "percentunit"),
        Panel("Processes", ((f"nvshim_container_gpu_processes{{{_POD}}}", _NAMED),)),
        Panel("Who holds what", ((f"nvshim_container_device_info{{{_POD}}}", ""),),
              kind="table", width=12),
        Panel("To be drained, or without an owner", (
            (f"nvshim_container_stale{{{_POD}}} == 1", ""),
            (f"nvshim_container_orphan{{{_POD}}} == 1", "")), kind="table", width=12,
              help="Made with a driver that is no more; or nobody knows of them."),
        Panel("Memory of processes of no container", (
            (f"nvshim_outside_gpu_memory_used_bytes{{{_ON}}}", _OF_GPU),), "bytes", width=12),
        Panel("Processes of no container", (
            (f"nvshim_outside_gpu_processes{{{_ON}}}", _OF_GPU),), width=12),
    )),
    ("Health", (
        Panel("Devices by state", (
            (f"sum by (state) (nvshim_device_health{{{_ON}}})", "{{state}}"),)),
        Panel("Devices that are not healthy", (
            (f'nvshim_device_health{{{_GPU},state!="healthy"}} == 1', ""),), kind="table"),
        Panel("The XIDs that states are founded on", (
            (f"nvshim_device_last_xid{{{_GPU}}} > 0", ""),), kind="table"),
        Panel("XIDs", ((
            f"sum by (instance, gpu, xid) (increase(nvshim_gpu_xid_errors_total{{{_ON}}}[1h]))",
            f"{_OF_GPU}, XID {{{{xid}}}}"),), help="Within an hour."),
        Panel("XIDs since the agent began, and whose they were", (
            (f"nvshim_gpu_xid_errors_total{{{_ON}}}", ""),), kind="table"),
        Panel("Memory errors", ((
            f"increase(nvshim_gpu_ecc_errors_total{{{_GPU}}}[1h])", f"{_OF_GPU}, {{{{type}}}}"),),
              help="Within an hour."),
        Panel("To be reset or exchanged", (
            (f"nvshim_gpu_rows_pending{{{_GPU}}} == 1", ""),
            (f"nvshim_gpu_rows_failed{{{_GPU}}} == 1", "")), kind="table", width=12),
        Panel("GPUs whose errors would not be heard of", (
            (f"nvshim_gpu_events_watched{{{_GPU}}} == 0", ""),), kind="table", width=12),
    )),
    ("Device plugin", (
        Panel("Devices by resource and state", (
            (f"sum by (resource, state) (nvshim_resource_devices{{{_ON}}})",
             "{{resource}} {{state}}"),)),
        Panel("Allocations", (
            (("sum by (resource, result) "
             f"(rate(nvshim_allocations_total{{{_ON}}}[$__rate_interval]))"),
             "{{resource}} {{result}}"),), "ops"),
        Panel("Time of an allocation, 99th percentile", (
            (("histogram_quantile(0.99, sum by (le) "
             f"(rate(nvshim_allocation_duration_seconds_bucket{{{_ON}}}[$__rate_interval])))"),
             "p99"),), "s"),
        Panel("Given away, and held by nobody", (
            (f"nvshim_resource_devices_unheld{{{_ON}}}", "{{instance}} {{resource}}"),)),
        Panel("MPS", ((f"nvshim_mps_daemon_up{{{_ON}}}", "{{instance}} {{resource}}"),),
              help="Whether containers can use the control daemon."),
        Panel("Restarts of MPS", (
            (f"increase(nvshim_mps_daemon_restarts_total{{{_ON}}}[1h])",
             "{{instance}} {{resource}}"),), help="Within an hour."),
        Panel("Registrations", (
            (f"sum by (instance, result) (nvshim_kubelet_registrations_total{{{_ON}}})",
             "{{instance}} {{result}}"),), width=12),
        Panel("Lists of devices sent", (
            (f"sum by (instance) (nvshim_kubelet_device_lists_total{{{_ON}}})",
             "{{instance}}"),), width=12),
    )),
    ("Agents", (
        Panel("Parts that do not work", ((f"nvshim_part_up{{{_ON}}} == 0", ""),), kind="table"),
        Panel("Faults of nodes", ((f"nvshim_node_faults{{{_ON}}}", "{{instance}}"),)),
        Panel("Since the last good look", (
            (f"time() - nvshim_last_good_look_timestamp_seconds{{{_ON}}}", "{{instance}}"),), "s"),
        Panel("Waiting for NVML", (
            (f"nvshim_nvml_sample_duration_seconds{{{_ON}}}", "{{instance}}"),), "s"),
        Panel("Processor", (
            ((f"rate(process_cpu_seconds_total{{{_ON}}}[$__rate_interval])"
             f" and on (instance) nvshim_build_info{{{_ON}}}"), "{{instance}}"),), "percentunit"),
        Panel("Memory", (
            ((f"process_resident_memory_bytes{{{_ON}}} and on (instance)"
             f" nvshim_build_info{{{_ON}}}"), "{{instance}}"),), "bytes"),
    )),
)  # fmt: skip
"""What is to be seen, by rows."""

_VARIABLES: Final = (
    ("instance", "Node", "label_values(nvshim_build_info, instance)"),
    ("gpu", "GPU", 'label_values(nvshim_gpu_info{instance=~"$instance"}, gpu)'),
    (
        "namespace", "Namespace",
        'label_values(nvshim_container_info{instance=~"$instance"}, namespace)',
    ),
)  # fmt: skip


def queries() -> list[str]:
    """Every query of the dashboard."""
    return [query for _, panels in ROWS for panel in panels for query, _ in panel.queries]


def dashboard() -> str:
    """The dashboard's file."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        panels.append({
            "collapsed": False, "gridPos": place, "id": len(panels) + 1, "panels": [],
            "title": title, "type": "row",
        })  # fmt: skip
        top, left = top + 1, 0
        height = 0
        for panel in row:
            if left + panel.width > _COLUMNS:
                top, left, height = top + height, 0, 0
            height = max(height, 4 if panel.kind == "stat" else 8)
            place = {"h": height, "w": panel.width, "x": left, "y": top}
            panels.append(_panel(panel, len(panels) + 1, place))
            left += panel.width
        top += height
    document = {
        "annotations": {"list": []},
        "description": "What nvshim node tells of GPUs, of who has them, and of itself.",
        "editable": True,
        "graphTooltip": 1,
        "links": [],
        "panels": panels,
        "refresh": "1m",
        "schemaVersion": _SCHEMA,
        "tags": ["gpu", "nvidia", "nvshim"],
        "templating": {"list": [_DATASOURCES, *(_variable(*each) for each in _VARIABLES)]},
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "title": "GPUs (nvshim)",
        "uid": "nvshim-gpus",
        "version": 1,
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


_DATASOURCES: Final = {
    "current": {}, "hide": 0, "includeAll": False, "label": "Prometheus", "multi": False,
    "name": "datasource", "options": [], "query": "prometheus", "refresh": 1, "regex": "",
    "type": "datasource",
}  # fmt: skip


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "allValue": ".*", "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": _DATASOURCE, "definition": query, "hide": 0, "includeAll": True,
        "label": label, "multi": True, "name": name, "options": [],
        "query": {"query": query, "refId": name}, "refresh": 2, "regex": "", "sort": 3,
        "type": "query",
    }  # fmt: skip


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    table = panel.kind == "table"
    targets = [
        {
            "datasource": _DATASOURCE, "editorMode": "code", "expr": query,
            "format": "table" if table else "time_series",
            "instant": panel.kind != "timeseries", "legendFormat": legend or "__auto",
            "range": panel.kind == "timeseries", "refId": chr(ord("A") + at),
        }
        for at, (query, legend) in enumerate(panel.queries)
    ]  # fmt: skip
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.bad_above is not None:
        steps.append({"color": "red", "value": panel.bad_above})
    defaults: dict[str, Any] = {
        "unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps},
    }  # fmt: skip
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    elif panel.kind == "timeseries":
        defaults["min"] = 0
    made: dict[str, Any] = {
        "datasource": _DATASOURCE, "description": panel.help,
        "fieldConfig": {"defaults": defaults, "overrides": []}, "gridPos": place, "id": number,
        "options": _OPTIONS[panel.kind], "targets": targets, "title": panel.title,
        "type": panel.kind,
    }  # fmt: skip
    if table:
        unseen = ("Time", "Value", "__name__", "job", *(f"Value #{t['refId']}" for t in targets))
        transformations: list[dict[str, Any]] = [
            {"id": "organize", "options": {"excludeByName": dict.fromkeys(unseen, True)}}
        ]
        if len(targets) > 1:
            transformations.insert(0, {"id": "merge", "options": {}})
        if "xid" in panel.queries[0][0]:  # there the value is what matters
            del transformations[-1]["options"]["excludeByName"]["Value"]
        made["transformations"] = transformations
    return made


_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value", "graphMode": "none", "justifyMode": "auto", "orientation": "auto",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "table": {"cellHeight": "sm", "footer": {"show": False}, "showHeader": True},
}  # fmt: skip
