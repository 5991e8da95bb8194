"""What depends on version 2 of cgroups and on systemd: run in a virtual machine (make test-vm).

The guest has the programs of a release of Debian, installed, and this checkout, read-only.
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
    """containerd as systemd runs it: Debian's unit, with our shim where it looks for shims."""
    with ContainerdUnit(shim_directory=shim_directory, shim_config=shim_config) as unit:
        unit.ctr("images", "import", os.environ["NVSHIM_TEST_IMAGES"])
        yield unit
