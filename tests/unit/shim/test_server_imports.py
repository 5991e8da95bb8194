"""What a shim that serves a container without GPU has in memory, and what it has not."""

from __future__ import annotations

import json
import os
import subprocess

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
