"""What a shim that serves a container without GPU has in memory, and what it has not."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
_SITE = os.path.join(REPOSITORY, ".cache", "site")

# Each is for something that most shims never do, or belongs to another program.
NEVER = {
    "anyio", "api.proto.cgroups_v1_pb2", "api.proto.cgroups_v2_pb2", "argparse", "asyncio",
    "calendar", "concurrent.futures", "datetime", "grpc", "hooks.engine", "hooks.node.inventory",
    "prometheus_client", "pynvml", "rich", "shim.resources", "shim.stats", "shim.stdio.log_file",
    "shim.stdio.logger", "selectors", "shim.sandbox", "shim.namespaces", "signal", "socket", "ssl",
    "structlog", "tomllib", "traceback", "typing", "urllib.parse",
}  # fmt: skip

# 187 when this was written; the libraries' own share is theirs to say.
MOST_MODULES = 205


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    script = f"""
import sys
sys.path += [{REPOSITORY!r}, {_SITE!r}]
import api
api.alone = True
import _signal as signal
import _socket as socket
from shim.server import Server, aio

async def serve():
    listener = socket.socket(socket.AF_UNIX)
    with aio.move_on_after(0.1):
        listener.bind("")  # to a name that the kernel chooses
        listener.listen()
        with aio.open_signal_receiver(signal.SIGCHLD):
            async with aio.create_task_group() as tasks:
                tasks.start_soon(Server([]).serve, listener)
                await aio.run_in_thread(list)

aio.run(serve)
import json
print(json.dumps(sorted(sys.modules)))
"""
    argv = ["/usr/bin/python3", "-ISc", script]
    return set(json.loads(subprocess.run(argv, capture_output=True, check=True).stdout))


def test_nothing_is_loaded_that_most_shims_never_use(loaded: set[str]) -> None:
    assert loaded & NEVER == set()


def test_of_the_engine_only_the_glance_at_a_spec_is_loaded(loaded: set[str]) -> None:
    assert {m for m in loaded if m.startswith("hooks.")} == {
        "hooks.requests",
        "hooks.requests.glance",
    }


def test_the_number_of_modules_is_bounded(loaded: set[str]) -> None:
    assert len(loaded) <= MOST_MODULES


_BY_ITSELF = f"""
import ast, json, sys
sys.path += [{REPOSITORY!r}, {_SITE!r}]
import api
api.alone = True
import shim.server
"""


def _printed(script: str) -> Any:
    """What a process prints that has begun as a shim does."""
    argv = ["/usr/bin/python3", "-ISc", _BY_ITSELF + script]
    return json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)


# What is imported in a function, and yet not by a process that stays: the first where protobuf or
# the event loop is another, the second where Python was built without its own digests.
_ELSEWHERE = {"anyio", "google", "hashlib"}

_DEFERRED = """
from shim import resident
resident.load()
wanted = set()
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] not in ("api", "hooks", "shim"):
        continue
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                wanted.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                wanted.add(node.module)
                package = hasattr(sys.modules.get(node.module), "__path__")
                wanted.update(f"{node.module}.{alias.name}" for alias in node.names if package)
print(json.dumps(sorted(name for name in wanted if name not in sys.modules)))
"""


def test_what_functions_import_is_loaded_by_a_process_that_stays() -> None:
    missing = _printed(_DEFERRED)
    assert [name for name in missing if name.partition(".")[0] not in _ELSEWHERE] == []


_FAILING = """
import os, tempfile
from api import aio
from shim.log import Log
from shim.tasks import GuardedTasks

async def fail():
    raise RuntimeError("nobody foresaw it")

async def main(log):
    async with aio.create_task_group() as group:
        GuardedTasks(group, log).start_soon(fail)

with tempfile.TemporaryDirectory() as directory:
    os.mkfifo(f"{directory}/log")
    log = Log(directory, debug=False)
    before = set(sys.modules)
    aio.run(main, log)
    after = set(sys.modules)
    told = os.read(os.open(f"{directory}/log", os.O_RDONLY | os.O_NONBLOCK), 4096).decode()
print(json.dumps([sorted(after - before), told]))
"""


def test_a_failure_that_nobody_foresaw_is_told_in_one_line_without_another_module() -> None:
    loaded, told = _printed(_FAILING)
    assert loaded == []
    assert told.count("\n") == 1
    assert "RuntimeError: nobody foresaw it" in told
    assert "in fail" in told
