"""A table of dcgm-exporter's names that the agent can serve, with its own names for the same.

Source: dcgm-exporter, etc/default-counters.csv.
"""

from __future__ import annotations

from typing import Final

from integration.node.services.metrics.dcgm import PREFIX, SERIES
from tools.reference.markdown import code, table

__all__ = ["OURS", "table_of_names"]

OURS: Final = {
    "DEV_SM_CLOCK": "nvshim_gpu_sm_clock_hertz / 1e6",
    "DEV_MEM_CLOCK": "nvshim_gpu_memory_clock_hertz / 1e6",
    "DEV_MEMORY_TEMP": "nvshim_gpu_memory_temperature_celsius",
    "DEV_GPU_TEMP": "nvshim_gpu_temperature_celsius",
    "DEV_POWER_USAGE": "nvshim_gpu_power_watts",
    "DEV_TOTAL_ENERGY_CONSUMPTION": "nvshim_gpu_energy_joules_total * 1000",
    "DEV_PCIE_REPLAY_COUNTER": "nvshim_gpu_pcie_replays_total",
    "DEV_GPU_UTIL": "nvshim_gpu_utilization_ratio * 100",
    "DEV_MEM_COPY_UTIL": "nvshim_gpu_memory_busy_ratio * 100",
    "DEV_ENC_UTIL": "nvshim_gpu_encoder_utilization_ratio * 100",
    "DEV_DEC_UTIL": "nvshim_gpu_decoder_utilization_ratio * 100",
    "DEV_XID_ERRORS": 'nvshim_device_last_xid{mig_uuid=""}',
    "DEV_FB_FREE": "(nvshim_gpu_memory_total_bytes - nvshim_gpu_memory_used_bytes"
    " - nvshim_gpu_memory_reserved_bytes) / 1048576",
    "DEV_FB_USED": "nvshim_gpu_memory_used_bytes / 1048576",
    "DEV_FB_RESERVED": "nvshim_gpu_memory_reserved_bytes / 1048576",
    "DEV_FB_TOTAL": "nvshim_gpu_memory_total_bytes / 1048576",
    "DEV_NVLINK_BANDWIDTH_TOTAL": "(rate(nvshim_gpu_nvlink_sent_bytes_total[1m])"
    " + rate(nvshim_gpu_nvlink_received_bytes_total[1m])) / 1024e3",
    "DEV_UNCORRECTABLE_REMAPPED_ROWS": 'nvshim_gpu_rows_remapped_total{type="uncorrected"}',
    "DEV_CORRECTABLE_REMAPPED_ROWS": 'nvshim_gpu_rows_remapped_total{type="corrected"}',
    "DEV_RETIRED_SBE": 'nvshim_gpu_pages_retired_total{type="corrected"}',
    "DEV_RETIRED_DBE": 'nvshim_gpu_pages_retired_total{type="uncorrected"}',
    "DEV_RETIRED_PENDING": "nvshim_gpu_pages_pending",
    "DEV_ROW_REMAP_FAILURE": "nvshim_gpu_rows_failed",
    "DEV_ROW_REMAP_PENDING": "nvshim_gpu_rows_pending",
    "DEV_ECC_SBE_VOL_TOTAL": 'nvshim_gpu_ecc_errors_total{type="corrected"}',
    "DEV_ECC_DBE_VOL_TOTAL": 'nvshim_gpu_ecc_errors_total{type="uncorrected"}',
    "PROF_GR_ENGINE_ACTIVE": "nvshim_gpu_graphics_active_ratio",
    "PROF_SM_ACTIVE": "nvshim_gpu_sm_active_ratio",
    "PROF_SM_OCCUPANCY": "nvshim_gpu_sm_occupancy_ratio",
    "PROF_PIPE_TENSOR_ACTIVE": "nvshim_gpu_tensor_active_ratio",
    "PROF_DRAM_ACTIVE": "nvshim_gpu_dram_active_ratio",
    "PROF_PIPE_FP64_ACTIVE": "nvshim_gpu_fp64_active_ratio",
    "PROF_PIPE_FP32_ACTIVE": "nvshim_gpu_fp32_active_ratio",
    "PROF_PIPE_FP16_ACTIVE": "nvshim_gpu_fp16_active_ratio",
    "PROF_PCIE_TX_BYTES": "nvshim_gpu_pcie_sent_bytes_per_second",
    "PROF_PCIE_RX_BYTES": "nvshim_gpu_pcie_received_bytes_per_second",
    "PROF_NVLINK_TX_BYTES": "nvshim_gpu_nvlink_sent_bytes_per_second",
    "PROF_NVLINK_RX_BYTES": "nvshim_gpu_nvlink_received_bytes_per_second",
}
"""The agent's own series, in the unit of releases up to 4.8, by that name."""


def table_of_names() -> str:
    """Return theirs and ours, as Markdown."""
    rows = [
        (code(PREFIX + each.old), each.unit, each.new and code(PREFIX + each.new),
         code(OURS[each.old]) if each.old in OURS else "")
        for each in SERIES
    ]  # fmt: skip
    return table(("up to 4.8", "in", "since 4.9", "here"), rows)
