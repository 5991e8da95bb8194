"""The doctor's checks: a table of pure functions.

Rules
- ``checks.toml`` has each check's fault, effect and remedy; the check's function finds where the
  fault is. A function gets only the facts that its parameters name.
- A check runs only if the node has what it checks. A fact is None only for a parameter with a
  default.
- A code is never reused. When a check is removed, its code is retired.
- An error means that containers do not get their GPUs now, or get devices that they must not have.
  A warning means trouble later: after a reload of systemd, a reboot or an update. A note is worth
  knowing. A known vulnerability is an error if containers can escape through it and the program
  does not come from a distribution's package; otherwise, because the package may have the fix, it
  is a warning.
- On a healthy node no check reports anything. A component that the node does not have (Docker,
  Kubernetes, MIG) is not a fault.

======  ====================================
codes   subject
======  ====================================
D00x    NVIDIA's driver and its devices
D01x    the driver's services, links and platforms
D02x    versions and vulnerabilities
D03x    containerd's configuration
D04x    handlers, Kubernetes, cgroup drivers
D05x    Docker, CRI-O, other injectors
D06x    CDI specs
D07x    the shim's configuration
D08x    kernel, security modules, mounts
D09x    the shim's installation and processes
D10x    running containers, the node agent
======  ====================================
"""

from __future__ import annotations

from typing import Final

from integration.doctor.checks import (
    agent,
    cdi,
    containerd,
    containers,
    driver,
    engines,
    handlers,
    installation,
    machine,
    policy,
    programs,
)
from integration.doctor.findings import Check

__all__ = ["CHECKS"]

_MODULES: Final = (
    driver,
    programs,
    containerd,
    handlers,
    engines,
    cdi,
    policy,
    machine,
    installation,
    containers,
    agent,
)

CHECKS: Final = tuple(
    sorted(
        (each for module in _MODULES for each in vars(module).values() if isinstance(each, Check)),
        key=lambda check: check.code,
    )
)
"""Every check of these modules, ordered by code."""
