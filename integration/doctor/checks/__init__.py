"""What can be wrong with a node: a table of pure functions.

Rules
- A row (:class:`~integration.doctor.findings.Check`) says what is wrong, what comes of it and what
  to do; its function says where. It is given the facts that its row names, and no others.
- A code is given once. When a check goes, its code goes with it.
- An error is what keeps containers from their GPUs, or lets them have what they must not, now. A
  warning hurts later: after a reload of systemd, a boot, an update. A note is worth knowing. A
  program with a known vulnerability is an error if a container can get out by it and nobody but its
  project maintains it; of a distribution's package, which may have the fix, it is a warning.
- On a healthy node no check says anything. What a node does not have (Docker, Kubernetes, MIG) is
  not wrong.

======  ====================================
codes   what they are about
======  ====================================
D00x    NVIDIA's driver and its devices
D01x    more of the driver: services, systemd
D02x    versions and vulnerabilities
D03x    containerd's configuration
D04x    handlers, Kubernetes, cgroup drivers
D05x    Docker, CRI-O, other injectors
D06x    CDI specs
D07x    our configuration
D08x    kernel, security modules, mounts
D09x    our installation and its processes
D10x    running containers, the node agent
======  ====================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from integration.doctor.checks.agent import AGENT
from integration.doctor.checks.cdi import CDI
from integration.doctor.checks.containerd import CONTAINERD
from integration.doctor.checks.containers import CONTAINERS
from integration.doctor.checks.driver import DRIVER
from integration.doctor.checks.engines import ENGINES
from integration.doctor.checks.handlers import HANDLERS
from integration.doctor.checks.installation import INSTALLATION
from integration.doctor.checks.machine import MACHINE
from integration.doctor.checks.policy import POLICY
from integration.doctor.checks.programs import PROGRAMS

if TYPE_CHECKING:
    from integration.doctor.findings import Check

__all__ = ["CHECKS"]

CHECKS: Final[tuple[Check, ...]] = (
    *DRIVER,
    *PROGRAMS,
    *CONTAINERD,
    *HANDLERS,
    *ENGINES,
    *CDI,
    *POLICY,
    *MACHINE,
    *INSTALLATION,
    *CONTAINERS,
    *AGENT,
)
"""Every check, in the order of the codes."""
