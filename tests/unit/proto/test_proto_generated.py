"""The generated modules are up to date with their .proto files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import api.proto

SOURCES = sorted(Path(api.proto.__path__[0]).glob("*.proto"))
SUFFIXES = ("_pb2.py", "_pb2.pyi")
REPOSITORY = Path(api.proto.__path__[0]).parents[1]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("needs grpcio-tools")
    directory = tmp_path_factory.mktemp("generated")
    (directory / "api" / "proto").mkdir(parents=True)
    argv = [sys.executable, "-m", "tools.protos", "--output", str(directory)]
    subprocess.run(argv, cwd=REPOSITORY, check=True)
    return directory / "api" / "proto"


def test_there_are_sources() -> None:
    assert len(SOURCES) >= 8


def test_generated_modules_are_those_of_the_sources_and_none_is_stale(generated: Path) -> None:
    names = {source.stem + suffix for source in SOURCES for suffix in SUFFIXES}
    directory = Path(api.proto.__path__[0])
    assert {path.name for suffix in SUFFIXES for path in directory.glob(f"*{suffix}")} == names
    stale = [
        name for name in sorted(names)
        if (directory / name).read_bytes() != (generated / name).read_bytes()
    ]  # fmt: skip
    assert stale == [], "run `make proto`"
