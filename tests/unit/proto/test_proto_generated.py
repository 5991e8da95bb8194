"""The modules beside the .proto files are the ones that the compiler makes of them."""

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
    argv = [sys.executable, "-m", "tests.tools.protos", "--output", str(directory)]
    subprocess.run(argv, cwd=REPOSITORY, check=True)
    return directory / "api" / "proto"


def test_there_are_sources() -> None:
    assert len(SOURCES) >= 8


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_generated_module_is_not_stale(source: Path, suffix: str, generated: Path) -> None:
    name = source.stem + suffix
    committed = source.with_name(name)
    assert committed.exists(), f"{name} is missing: run `make proto`"
    assert committed.read_bytes() == (generated / name).read_bytes(), (
        f"{name} is stale: run `make proto`"
    )


def test_no_generated_module_has_lost_its_source() -> None:
    expected = {source.stem + suffix for source in SOURCES for suffix in SUFFIXES}
    directory = Path(api.proto.__path__[0])
    assert {path.name for suffix in SUFFIXES for path in directory.glob(f"*{suffix}")} == expected
