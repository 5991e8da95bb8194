"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.hooks.fake_node import MULTIARCH, Elves


@pytest.fixture(autouse=True)
def _no_configuration_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSHIM_CONFIG", raising=False)
    monkeypatch.delenv("NVIDIA_CTK_CONFIG_FILE_PATH", raising=False)
    monkeypatch.setattr("hooks.config.NVIDIA_PATH", "/nonexistent/nvidia.toml")


@pytest.fixture
def rootfs(tmp_path: Path, elves: Elves) -> Path:
    """Make a Debian-like image with only its loader and C library."""
    rootfs = tmp_path / "rootfs"
    elves.write(rootfs / "usr/lib64/ld-linux-x86-64.so.2", "ld-linux-x86-64.so.2")
    elves.write(rootfs / MULTIARCH / "libc.so.6", "libc.so.6")
    (rootfs / "lib64").symlink_to("usr/lib64")
    (rootfs / "lib").symlink_to("usr/lib")
    (rootfs / "etc").mkdir()
    return rootfs
