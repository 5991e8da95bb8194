"""The modules that a shim has loaded for a container without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
_SITE = os.path.join(REPOSITORY, ".cache", "site")

# Each belongs to another program, or to another event loop.
NEVER = {
    "anyio", "argparse", "asyncio", "grpc", "integration", "prometheus_client", "pynvml", "rich",
    "ssl", "structlog",
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    script = f"""
import sys
sys.path += [{REPOSITORY!r}, {_SITE!r}]
import _socket as socket
from shim.pod.server import Server, loop

async def serve():
    listener = socket.socket(socket.AF_UNIX)
    with loop.move_on_after(0.1):
        listener.bind("")  # to an address that the kernel chooses
        listener.listen()
        async with loop.create_task_group() as tasks:
            tasks.start_soon(Server([]).serve, listener)
            await loop.run_in_thread(list)

loop.run(serve)
import json
print(json.dumps(sorted(sys.modules)))
"""
    argv = ["/usr/bin/python3", "-ISc", script]
    return set(json.loads(subprocess.run(argv, capture_output=True, check=True).stdout))


def test_nothing_is_loaded_that_belongs_to_other_programs(loaded: set[str]) -> None:
    assert loaded & NEVER == set()


_BY_ITSELF = f"""
import json, sys
sys.path += [{REPOSITORY!r}, {_SITE!r}]
import shim.pod.server
"""


def _printed(script: str) -> Any:
    """Run a script in a process that starts like a shim; return its output."""
    argv = ["/usr/bin/python3", "-ISc", _BY_ITSELF + script]
    return json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)


_FAILING = """
import os, tempfile
from api.errors import describe_bug
from shim import loop
from shim.log import Log

async def fail():
    raise RuntimeError("unexpected")

async def main(log):
    async with loop.create_task_group() as group:
        loop.GuardedTasks(
            group, lambda error: log.error("it failed", traceback=describe_bug(error))
        ).start_soon(fail)

with tempfile.TemporaryDirectory() as directory:
    os.mkfifo(f"{directory}/log")
    log = Log(directory, debug=False)
    before = set(sys.modules)
    loop.run(main, log)
    after = set(sys.modules)
    told = os.read(os.open(f"{directory}/log", os.O_RDONLY | os.O_NONBLOCK), 4096).decode()
print(json.dumps([sorted(after - before), told]))
"""


def test_a_failure_that_nobody_foresaw_is_told_in_one_line_without_another_module() -> None:
    loaded, told = _printed(_FAILING)
    assert loaded == []
    assert told.count("\n") == 1
    assert "RuntimeError: unexpected" in told
    assert "in fail" in told


_CODEC = re.compile(r"""(?:code\(|encoding=)["']([\w-]+)["']""")

_CODING = """
from shim import resident
resident.load()
before = set(sys.modules)
for name in {names!r}:
    "a".encode(name).decode(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_every_codec_that_the_sources_name_is_loaded_ahead() -> None:
    texts = [
        path.read_text("utf-8")
        for room in ("api", "hooks", "shim")
        for path in Path(REPOSITORY, room).rglob("*.py")
    ]
    names = sorted({name for text in texts for name in _CODEC.findall(text)})
    assert "utf-8-sig" in names
    assert _printed(_CODING.format(names=names)) == []
