"""A whole release, made twice: `make test-release` runs what is here, and nothing else does."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from tests.harness.dist import CACHE
from tests.harness.own_process import restored
from tools.dist.inputs import Inputs
from tools.release.build import build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

if "NVSHIM_TEST_RELEASE" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

_ELSEWHERE: Final = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "12345"}


@dataclass(frozen=True, slots=True)
class Release:
    """A release that was made."""

    path: str  # its directory
    key: str  # that has signed it

    def one(self, ending: str) -> str:
        """The path of the file that ends so."""
        (name,) = (name for name in os.listdir(self.path) if name.endswith(ending))
        return os.path.join(self.path, name)


@contextmanager
def _other_circumstances() -> Iterator[None]:
    with restored():
        os.umask(0o077)
        os.environ.update(_ELSEWHERE)
        yield


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("key") / "key")
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path]
    subprocess.run(argv, check=True)
    return path


@pytest.fixture(scope="session")
def releases(key: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Release, Release]:
    """Two of the same commit, the second made elsewhere and under other circumstances."""
    first: Path = tmp_path_factory.mktemp("first")
    inputs = Inputs.of()
    build(str(first), inputs, cache=CACHE, key=key)
    second = tmp_path_factory.mktemp("second") / "a rather longer name"
    second.mkdir()
    with _other_circumstances():
        build(str(second), inputs, cache=CACHE, key=key)
    return Release(f"{first}/release", key), Release(f"{second}/release", key)


@pytest.fixture(scope="session")
def release(releases: tuple[Release, Release]) -> Release:
    return releases[0]
