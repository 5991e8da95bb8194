"""What can be wrong with a node: a table of pure functions.

Rules
- ``checks.toml`` says of each check what is wrong, what comes of it and what to do; its function
  says where. That is given the facts that its parameters name, no others.
- It is made if the node has what it is about: a fact is None only where the parameter says so.
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
"""Every check of these modules, in the order of the codes."""
