"""Fixtures of the tests of images."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.hooks.image.images import debian


@pytest.fixture
def root(tmp_path: Path, usual_umask: None) -> str:
    """Make a Debian-like image."""
    return debian(f"{tmp_path}/image")
