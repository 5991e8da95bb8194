"""Import costs are summed by package."""

from __future__ import annotations

import pytest

from tests.bench.imports import by_package

IMPORTS = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |   zipimport
import time:       200 |        200 |     api.errors
import time:       300 |        500 |   shim.errors
import time:       400 |       1000 | shim
import time:        50 |         50 | os
"""


def test_modules_of_a_package_and_their_own_time_add_up() -> None:
    packages = by_package(IMPORTS)
    assert list(packages) == ["shim", "api", "zipimport", "os"]
    assert packages["shim"] == pytest.approx((2, 0.7))
