"""The package's public interface: names, errors, and loaded modules."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import api.ttrpc
from api.errors import ErrorRow, NvshimError, Status
from api.ttrpc import errors
from api.ttrpc.errors import RemoteError, TtrpcError

KINDS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, ErrorRow) or (inspect.isclass(value) and issubclass(value, TtrpcError))
}

# Modules that the package must not load in a server: each slows down every cold start.
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
    assert KINDS.keys() <= {*api.ttrpc.__all__}
    assert sorted(errors.__all__) == sorted(KINDS)
    assert len(KINDS) == 16


def test_every_error_has_a_code_of_its_own() -> None:
    codes = {kind.code for kind in KINDS.values()}
    assert len(codes) == len(KINDS)
    assert all(code.startswith("NVSHIM-E00") for code in codes)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "RemoteError"])
def test_every_error_is_one_line_and_has_a_status(name: str) -> None:
    kind = KINDS[name]
    error = kind("a\ncall", found="a\tproblem", do="something")
    assert isinstance(error, NvshimError)
    assert str(error) == (f"{kind.code} {kind.slug}: a call: a problem. Something")
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
