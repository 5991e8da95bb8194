"""Tests that need cgroup v2 and systemd; they run in a virtual machine (make test-vm).

The guest has the programs of a Debian release installed, and this checkout mounted read-only.
NVSHIM_TEST_VM is the guest's name, NVSHIM_TEST_NODE a simulated node's directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.vm.unit import ContainerdUnit

if "NVSHIM_TEST_VM" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def containerd_unit(shim_directory: str, shim_config: str) -> Iterator[ContainerdUnit]:
    """Run containerd by Debian's systemd unit, with our shim in its PATH."""
    with ContainerdUnit(shim_directory=shim_directory, shim_config=shim_config) as unit:
        unit.ctr("images", "import", os.environ["NVSHIM_TEST_IMAGES"])
        yield unit
