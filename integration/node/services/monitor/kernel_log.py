"""Following the kernel's log for Xids; what counts in it is in :mod:`shim.causes.kernel_log`.

- What was in the log before is not read: it may be of another driver, or of GPUs long replaced.
- A storm of lines is read a batch at a time. Those that the kernel has dropped meanwhile are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

from integration.agent_errors import KernelLogUnusable
from integration.nvml.values import GpuEvent, now
from shim.causes.kernel_log import Log, LoggedXid

_BATCH: Final = 512
_PAUSE: Final = 0.1


async def follow(path: str, told: Callable[[GpuEvent], None]) -> None:
    """Tell of each Xid from now on. Returns when the log ends, which the kernel's does not.

    Args:
        path: of the log: /dev/kmsg, or a pipe that has the same lines.
        told: is given each, of a GPU that has no UUID yet.

    Raises:
        KernelLogUnusable: it cannot be read.
    """
    try:
        with Log(path) as log:
            log.skip()
            while not log.has_ended:
                await anyio.wait_readable(log.fd)
                for _ in range(_BATCH):
                    found = log.read()
                    if found is None:
                        break
                    for xid in found:
                        told(_event_of(xid))
                # A storm must not keep this process busy, and nobody is waiting for so many.
                await anyio.sleep(_PAUSE)
    except OSError as error:
        raise KernelLogUnusable(
            f"Xids in the kernel's log {path}",
            found=str(error.strerror),
            do="give the agent the device and CAP_SYSLOG; without it, NVML tells of Xids, and "
            "nobody of the process that an Xid is for",
        ) from error


def _event_of(found: LoggedXid) -> GpuEvent:
    return GpuEvent(
        now(),
        "xid",
        "",
        bus_id=found.bus_id,
        xid=found.xid,
        gpu_instance=found.gpu_instance,
        compute_instance=found.compute_instance,
        pid=found.pid,
        process=found.process,
        source="kernel",
        text=found.text,
    )
