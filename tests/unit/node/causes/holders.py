"""Holders and events for tests of fault causes."""

from __future__ import annotations

from typing import Any

from integration.containers.bundles import Container, Pod
from integration.node.holders.values import Holding
from integration.nvml.values import GpuEvent


def holding(
    name: str, *devices: str, gpu: str = "GPU-0", pid: int = 1, bundle: str = ""
) -> Holding:
    pod = Pod("research", f"pod-{name}", f"uid-{name}")
    container = Container(
        f"id-{name}", "k8s.io", bundle or f"/b/{name}", pod, name, "p", sandbox=False, pid=pid
    )
    return Holding(container, devices or (gpu,), (gpu,))


def event(xid: int, pid: int = 0, gpu: str = "GPU-0", **more: Any) -> GpuEvent:
    return GpuEvent(100.0, "xid", gpu, xid=xid, pid=pid, source="kernel", **more)
