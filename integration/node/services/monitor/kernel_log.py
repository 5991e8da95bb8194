"""Follow the kernel log for Xids, and for errors of NVSwitches.

:mod:`shim.causes.kernel_log` and :mod:`integration.node.faults.sxids` parse the lines.

- Lines from before the start are skipped: they may be about another driver, or replaced GPUs.
- In a storm the agent reads the lines in batches. Lines that the kernel drops meanwhile are lost.
  The pause between two batches is short: the line after the first may be the serious one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

from integration.agent_errors import KernelLogUnusable
from integration.node.faults.sxids import parse_switch_error
from integration.nvml.values import GpuEvent, now
from shim.causes.kernel_log import Log, parse_record

_BATCH: Final = 512
_PAUSE: Final = 0.02


async def follow(path: str, report: Callable[[GpuEvent], None]) -> None:
    """Report each error from now on. Return at the end of a pipe; the kernel log has no end.

    Args:
        path: /dev/kmsg, or a pipe with the same lines.
        report: called with each event. The event has the GPU's PCI address, and no UUID yet.

    Raises:
        KernelLogUnusable: the log cannot be read.
    """
    try:
        with Log(path) as log:
            log.skip()
            while not log.has_ended:
                await anyio.wait_readable(log.fd)
                for _ in range(_BATCH):
                    records = log.read()
                    if records is None:
                        break
                    for event in filter(None, map(_event_in, records)):
                        report(event)
                # A storm must not keep this process busy.
                await anyio.sleep(_PAUSE)
    except OSError as error:
        raise KernelLogUnusable(
            f"Xids in the kernel's log {path}",
            found=str(error.strerror),
            do="give the agent the device and CAP_SYSLOG; NVML reports Xids without the process "
            "that caused them",
        ) from error


def _event_in(record: str) -> GpuEvent | None:
    logged = parse_record(record)
    if logged is None:
        return parse_switch_error(record)
    return GpuEvent(
        now(),
        "xid",
        "",
        bus_id=logged.bus_id,
        xid=logged.xid,
        gpu_instance=logged.gpu_instance,
        compute_instance=logged.compute_instance,
        pid=logged.pid,
        process=logged.process,
        source="kernel",
        text=logged.text,
    )
