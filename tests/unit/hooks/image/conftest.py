"""What the tests of images share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.hooks.image.images import debian

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A Debian-like image."""
    return debian(f"{tmp_path}/image")
