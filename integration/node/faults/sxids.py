"""Errors of NVSwitches (SXids) in the kernel's log.

The driver writes several lines for an error. The first tells how serious it is, and names the
switch's port. The others contain registers and are not read::

    nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up
    nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Severity 5 Engine instance 28 …
    nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Data {0x80000000, …}

Rules
- The words of the line decide, since there are hundreds of numbers, and the same number may be
  fatal or not. A line without a severity, for example that a switch is too warm, is logged and
  counted.
- A fatal error of a port that leads to a GPU stops everything that runs on that GPU, and the GPU
  cannot be used again before a reset. So the error is fatal for the GPU. NVML knows which port
  leads to which GPU.
- A port of unknown destination may be a trunk between two baseboards, whose failure stops all GPUs
  until all of them and the switches are reset. The GPUs that it hits report Xid 74 or 45. So all
  GPUs become suspect, but remain available. GPUs in MIG mode use no NVLink.
- Errors that are not fatal stop nothing: they are logged and counted.
- NVIDIA's device plugin and its DRA driver ignore SXids; its health monitor for logs (NVSentinel)
  blames the GPU at the port.
- From B200 on, NVSwitches write no SXids.

Source: NVIDIA's Fabric Manager user guide, "NVSwitch SXid Errors"; intr_nvswitch.h and
error_nvswitch.h of NVIDIA's open kernel modules (NVSWITCH_REPORT_FATAL, NVSWITCH_PRINT_SXID); logs
of driver 570.195.
"""

from __future__ import annotations

import re
from typing import Final

from api.errors import one_line
from integration.nvml.values import GpuEvent, SwitchError, now
from shim.causes.kernel_log import text_of

SXID: Final = "sxid"
FATAL: Final = "fatal"

_SEVERITIES: Final = {"Fatal": FATAL, "Non-fatal": "non-fatal", "Correctable": "correctable"}
# A process may choose its own name, but in 15 characters the first part of this does not fit.
_LINE: Final = re.compile(
    r"(nvidia-nvswitch\d{1,3}): SXid "
    r"\(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\): "
    r"(\d{1,6}), (?:(Fatal|Non-fatal|Correctable), )?(?:Link (\d{1,3}) )?(.*)",
    re.ASCII,
)
_REGISTERS: Final = ("Severity ", "Data {")


def parse_switch_error(record: str) -> GpuEvent | None:
    """Return the error of an NVSwitch in a record of the kernel's log; None if there is none.

    Args:
        record: as for :func:`shim.causes.kernel_log.parse_record`.
    """
    line = _LINE.fullmatch(text_of(record).rstrip())
    if line is None or line[7].startswith(_REGISTERS):
        return None
    link = None if line[6] is None else int(line[6])
    return GpuEvent(
        now(),
        SXID,
        "",
        bus_id=f"{int(line[2], 16):04x}:{line[3].lower()}",
        switch=SwitchError(line[1], int(line[4]), _SEVERITIES.get(line[5], ""), link),
        source="kernel",
        text=one_line(line[7]),
    )


def is_fatal(event: GpuEvent) -> bool:
    """Whether an event is an error of an NVSwitch that stops what runs on GPUs."""
    return event.switch is not None and event.switch.severity == FATAL


def title_of(event: GpuEvent, error: SwitchError) -> str:
    """Return an error in words: its number, the switch and its port, and what the driver says."""
    port = "" if error.link is None else f", link {error.link}"
    return f"SXid {error.number} of {error.switch}{port}: {event.text}"
