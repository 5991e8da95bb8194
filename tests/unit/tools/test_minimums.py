"""The environments with the oldest and the newest dependencies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.launcher import REPOSITORY
from tests.minimums import declared, least


def test_each_package_that_the_product_needs_has_a_minimum() -> None:
    requirements = declared(Path(REPOSITORY, "pyproject.toml").read_text(encoding="utf-8"))
    pins = dict(pin.split("==") for pin in least(requirements))
    assert len(pins) == len(requirements)
    assert pins["protobuf"] == "7.35.1"
    assert {"anyio", "click", "grpcio", "nvidia-ml-py", "structlog"} <= pins.keys()


@pytest.mark.parametrize("requirement", ["anyio", "anyio<5", "anyio~=4.7", "anyio>=4.7,!=4.8"])
def test_a_requirement_without_a_plain_minimum_is_refused(requirement: str) -> None:
    with pytest.raises(ValueError, match="write NAME>=VERSION"):
        least([requirement])
