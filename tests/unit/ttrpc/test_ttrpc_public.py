"""What the package shows to its users: names, errors, and how much it loads."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import api.ttrpc
from api.errors import NvshimError, Status
from api.ttrpc import errors
from api.ttrpc.errors import RemoteError, TtrpcError

LEAVES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, TtrpcError)
]

# What a server process may not load with the package: each costs time in every cold start.
UNWANTED = [
    "anyio", "asyncio", "dataclasses_json", "http", "urllib.request", "multiprocessing", "grpc",
    "structlog", "json", "logging.config", "xml", "unittest", "trio", "email",
]  # fmt: skip


def test_every_public_name_is_there_and_documented() -> None:
    for name in api.ttrpc.__all__:
        value = getattr(api.ttrpc, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name


def test_every_error_is_public() -> None:
    assert {leaf.__name__ for leaf in LEAVES} <= set(api.ttrpc.__all__)
    assert sorted(errors.__all__) == sorted(leaf.__name__ for leaf in LEAVES)


def test_every_error_has_a_code_of_its_own_that_the_tree_shows() -> None:
    assert errors.__doc__ is not None
    codes = [leaf.code for leaf in LEAVES]
    assert len(set(codes)) == len(codes)
    for leaf in LEAVES:
        assert leaf.code.startswith("NVSHIM-E00")
        line = next(line for line in errors.__doc__.splitlines() if f" {leaf.__name__} " in line)
        assert leaf.code.removeprefix("NVSHIM-") in line


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf is not RemoteError])
def test_every_error_is_one_line_and_has_a_status(leaf: type[TtrpcError]) -> None:
    error = leaf("a\ncall", found="a\tproblem", do="something")
    assert isinstance(error, NvshimError)
    assert str(error) == (f"{leaf.code} {leaf.slug()}: a call: a problem. Something")
    assert error.status != Status.OK


def test_a_remote_error_keeps_the_status_and_the_whole_message() -> None:
    error = RemoteError("a/B", status=Status.NOT_FOUND, message="line\n" * 500)
    assert error.status == Status.NOT_FOUND
    assert RemoteError.status == Status.UNKNOWN
    assert error.message == "line\n" * 500
    assert "\n" not in str(error)
    assert len(str(error)) < 1000


def test_a_remote_error_without_a_message_says_so() -> None:
    assert "status 5" in str(RemoteError("a/B", status=5, message=""))


def test_the_package_loads_nothing_that_a_server_does_not_need() -> None:
    program = "import sys, api.ttrpc; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert "api.ttrpc.connection" in loaded
    assert loaded.isdisjoint(UNWANTED)
