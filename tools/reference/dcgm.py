"""What dcgm-exporter calls what, and how Prometheus makes its series of ours.

Dashboards and alerts that name DCGM_FI_… need not be changed at once: recording rules give the
series those names, units and labels. The agent itself has one name for each thing.

Source: dcgm-exporter, etc/default-counters.csv and internal/pkg/rendermetrics.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import yaml

from tools.reference.markdown import code, table

__all__ = ["NAMES", "WITHOUT", "Name", "rules", "table_of_names"]


class Name(NamedTuple):
    """A metric of dcgm-exporter's."""

    dcgm: str  # its name there
    ours: str  # the series that it is
    factor: str  # what ours is multiplied by for its unit there
    unit: str  # there
    minus: str = ""  # a series that is taken from it, if any

    @property
    def expression(self) -> str:
        """It, in PromQL."""
        series = f"({self.ours} - {self.minus})" if self.minus else self.ours
        return f"{series} {self.factor}".strip()


_MIB: Final = "/ 1048576"

NAMES: Final = (
    Name("DCGM_FI_DEV_SM_CLOCK", "nvshim_gpu_sm_clock_hertz", "/ 1e6", "MHz"),
    Name("DCGM_FI_DEV_MEM_CLOCK", "nvshim_gpu_memory_clock_hertz", "/ 1e6", "MHz"),
    Name("DCGM_FI_DEV_GPU_TEMP", "nvshim_gpu_temperature_celsius", "", "°C"),
    Name("DCGM_FI_DEV_POWER_USAGE", "nvshim_gpu_power_watts", "", "W"),
    Name(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "nvshim_gpu_energy_joules_total", "* 1000", "mJ"
    ),
    Name("DCGM_FI_DEV_GPU_UTIL", "nvshim_gpu_utilization_ratio", "* 100", "%"),
    Name("DCGM_FI_DEV_MEM_COPY_UTIL", "nvshim_gpu_memory_busy_ratio", "* 100", "%"),
    Name("DCGM_FI_DEV_ENC_UTIL", "nvshim_gpu_encoder_utilization_ratio", "* 100", "%"),
    Name("DCGM_FI_DEV_DEC_UTIL", "nvshim_gpu_decoder_utilization_ratio", "* 100", "%"),
    Name("DCGM_FI_DEV_FB_USED", "nvshim_gpu_memory_used_bytes", _MIB, "MiB"),
    Name(
        "DCGM_FI_DEV_FB_FREE", "nvshim_gpu_memory_total_bytes", _MIB, "MiB",
        minus="nvshim_gpu_memory_used_bytes",
    ),
    Name("DCGM_FI_DEV_FB_TOTAL", "nvshim_gpu_memory_total_bytes", _MIB, "MiB"),
    Name("DCGM_FI_DEV_XID_ERRORS", 'nvshim_device_last_xid{mig_uuid=""}', "", "the last number"),
    Name(
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", 'nvshim_gpu_ecc_errors_total{type="corrected"}', "", ""
    ),
    Name(
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 'nvshim_gpu_ecc_errors_total{type="uncorrected"}', "", ""
    ),
    Name("DCGM_FI_DEV_ROW_REMAP_PENDING", "nvshim_gpu_rows_pending", "", "0 or 1"),
    Name("DCGM_FI_DEV_ROW_REMAP_FAILURE", "nvshim_gpu_rows_failed", "", "0 or 1"),
)  # fmt: skip

WITHOUT: Final = (
    ("DCGM_FI_DEV_MEMORY_TEMP", "temperature of the memory"),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER, DCGM_FI_DEV_PCIE_TX_THROUGHPUT, …_RX_…", "PCIe"),
    ("DCGM_FI_DEV_NVLINK_…", "NVLink"),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS, …_CORRECTABLE_…", "how many rows were replaced"),
    ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "licences of vGPUs"),
    ("DCGM_FI_PROF_…", "what the profiler's counters say, which need rights of their own"),
)
"""What has no series here."""

# Its labels, of ours. Its Hostname is the node: what instance is here.
_LABELS: Final = (
    ("UUID", "uuid"), ("modelName", "model"), ("hostname", "instance"),
    ("Hostname", "instance"),  # before dcgm-exporter 4.6, whose dashboards are still about
)  # fmt: skip


def rules() -> str:
    """The file of recording rules."""
    made = [{"record": name.dcgm, "expr": _relabelled(name.expression)} for name in NAMES]
    document = {"groups": [{"name": "nvshim-dcgm-names", "rules": made}]}
    head = (
        "# What dcgm-exporter calls the same, for dashboards and alerts that name it so. Made by\n"
        "# `make reference`. Only where dcgm-exporter does not run: it would be told twice.\n"
    )
    text: str = yaml.safe_dump(document, sort_keys=False, width=98, allow_unicode=True)
    return head + text


def _relabelled(expression: str) -> str:
    for theirs, ours in _LABELS:
        expression = f'label_replace({expression}, "{theirs}", "$1", "{ours}", "(.+)")'
    # "nvidia0", as it calls a device.
    return f'label_replace({expression}, "device", "nvidia$1", "gpu", "(.+)")'


def table_of_names() -> str:
    """Theirs and ours, as Markdown."""
    rows = [(code(each.dcgm), each.unit, code(each.expression)) for each in NAMES]
    without = ", ".join(code(names) for names, _ in WITHOUT)
    return f"{table(('dcgm-exporter', 'in', 'here'), rows)}\nNot here: {without}.\n"
