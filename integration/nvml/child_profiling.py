"""Measure how busy the parts of GPUs are with NVML's GPM (Hopper and newer), in the child.

Rules
- A value is the mean since the question before: GPM compares two samples. So the first question
  about a GPU or GPU instance has no values. Questions within :data:`_SHORTEST` have one answer.
- Each GPU and GPU instance has two samples, which are filled in turn. They become invalid when NVML
  is initialised again, as happens now and then while a GPU is lost: then there are no values.
- The driver reuses the ids of GPU instances, so an instance's samples are also dropped when its MIG
  devices disappear or change. An instance that is destroyed and created again in the same form
  between two questions goes unnoticed: NVML does not know when it was created, and its UUID is a
  hash of the GPU and of its place there. So its first values may be wrong, once.
- A call or metric that fails is absent, never 0. So is a value that cannot be true.
- GPM has samples of GPU instances, not of compute instances. PCIe and NVLink values are the GPU's.
- Without GPM only the use of PCIe is known, which NVML measures for 20 ms in each direction.

Source: nvml.h, "GPM Functions" and nvmlGpmMetricId_t; nvmlDeviceGetPcieThroughput;
nvmlGpuInstanceInfo_t and nvmlComputeInstanceInfo_t; NVIDIA's open kernel modules, gpu_uuid.c,
nvGenerateSmcUuid.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from hooks.node.nvml_probe import GpuAsker

# The fields of Activity that are ratios, and those that are bytes per second; GPM's numbers.
_RATIOS = {
    "graphics": 1, "sm": 2, "sm_occupancy": 3, "tensor": 5, "dram": 10, "fp64": 11, "fp32": 12,
    "fp16": 13,
}  # fmt: skip
_RATES = {"pcie_sent": 20, "pcie_received": 21, "nvlink_sent": 61, "nvlink_received": 60}

# Percent and MiB/s. A busy GPU may have a little more than 100 %.
_MOST_PERCENT, _MOST_RATE = 101.0, float(1 << 24)
_MIB = 1 << 20

_SHORTEST = 0.2  # seconds; GPM needs more than 0.1

_SENT, _RECEIVED, _KB = 0, 1, 1000


class Profiler:
    """Asks GPM, and keeps its samples until the next question."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._windows: dict[tuple[str, int | None], _Window] = {}
        self._instances: dict[str, Mapping[int, object]] = {}

    def close(self) -> None:
        """Free the samples, before NVML is closed."""
        for window in self._windows.values():
            window.close()
        self._windows.clear()

    def gpu(self, asker: GpuAsker, uuid: str, handle: Any) -> dict[str, float]:
        """Return the known fields of :class:`~integration.nvml.values.Activity` of a GPU."""
        support = asker.ask("nvmlGpmQueryDeviceSupport", handle)
        if support is None or not support.isSupportedDevice:
            pairs = (("pcie_sent", _SENT), ("pcie_received", _RECEIVED))
            found = {
                name: asker.ask("nvmlDeviceGetPcieThroughput", handle, direction)
                for name, direction in pairs
            }
            return {name: value * _KB for name, value in found.items() if value is not None}
        window = self._windows.setdefault((uuid, None), _Window(self._nvml, _RATIOS | _RATES))
        return window.read(asker, lambda to: asker.ask("nvmlGpmSampleGet", handle, to))

    def follow(self, uuid: str, instances: Mapping[int, object]) -> None:
        """Forget the samples of GPU instances that no longer exist, or have other MIG devices.

        Args:
            uuid: the UUID of the GPU.
            instances: the MIG devices of each GPU instance, by its id.
        """
        before, self._instances[uuid] = self._instances.get(uuid, {}), instances
        for instance, devices in before.items():
            if instances.get(instance) != devices and (uuid, instance) in self._windows:
                self._windows.pop((uuid, instance)).close()

    def instance(self, asker: GpuAsker, uuid: str, handle: Any, instance: int) -> dict[str, float]:
        """Return the known fields of a GPU instance.

        Args:
            uuid: the UUID of the GPU; ``handle`` is that of the GPU, too.
        """
        window = self._windows.setdefault((uuid, instance), _Window(self._nvml, _RATIOS))
        return window.read(asker, lambda to: asker.ask("nvmlGpmMigSampleGet", handle, instance, to))


class _Window:
    """The time between two questions about a GPU or GPU instance.

    Args:
        metrics: GPM's numbers of the metrics, by field.
    """

    def __init__(self, nvml: Any, metrics: Mapping[str, int]) -> None:
        self._nvml, self._metrics = nvml, metrics
        self._newest: Any = None  # the sample of the last question
        self._spare: Any = None  # another one, to be filled next
        self._since = -_SHORTEST
        self._values: dict[str, float] = {}

    def close(self) -> None:
        """Free the samples."""
        for sample in (self._newest, self._spare):
            if sample is not None:
                with contextlib.suppress(self._nvml.NVMLError):
                    self._nvml.nvmlGpmSampleFree(sample)

    def read(self, asker: GpuAsker, fill: Callable[[Any], Any]) -> dict[str, float]:
        """Return the means since the previous question.

        Args:
            fill: fills a sample; returns None if that fails.
        """
        now = time.monotonic()
        if now - self._since < _SHORTEST:
            return self._values
        self._values = {}
        sample = self._spare or asker.ask("nvmlGpmSampleAlloc")
        if sample is None:
            return {}
        self._spare = sample
        if fill(sample) is None:
            return {}
        older, self._newest, self._since = self._newest, sample, now
        self._spare = older
        if older is not None:
            self._values = self._compare(asker, older, sample)
        return self._values

    def _compare(self, asker: GpuAsker, older: Any, newer: Any) -> dict[str, float]:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._metrics)
        request.sample1, request.sample2 = older, newer
        for number, metric in zip(self._metrics.values(), request.metrics, strict=False):
            metric.metricId = number
        if asker.ask("nvmlGpmMetricsGet", request) is None:
            return {}
        found = {}
        for name, metric in zip(self._metrics, request.metrics, strict=False):
            # NaN fails the comparisons.
            if metric.nvmlReturn:
                continue
            if name in _RATIOS and 0 <= metric.value <= _MOST_PERCENT:
                found[name] = min(metric.value / 100, 1.0)
            elif name in _RATES and 0 <= metric.value <= _MOST_RATE:
                found[name] = metric.value * _MIB
        return found
