"""Errors of making device nodes and links: E253x."""

from __future__ import annotations

from api.errors import Status
from integration.errors import IntegrationError

# fmt: off
DevicesNotMade = IntegrationError.row("NVSHIM-E2536 devices-not-made", Status.FAILED_PRECONDITION,
    "A module, node or link could not be loaded or made; the others were.")
ModulesNotLoaded = IntegrationError.row(
    "NVSHIM-E2537 modules-not-loaded", Status.FAILED_PRECONDITION,
    "modprobe did not load the driver's own module.")
