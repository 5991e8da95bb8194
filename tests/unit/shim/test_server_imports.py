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
    "api.proto.cgroups_v1_pb2", "api.proto.cgroups_v2_pb2", "argparse", "grpc", "hooks.engine",
    "hooks.node.inventory", "prometheus_client", "pynvml", "rich", "shim.resources", "shim.stats",
    "shim.stdio.log_file", "shim.stdio.logger",
    "shim.sandbox", "shim.namespaces", "structlog", "tomllib", "urllib.parse",
}  # fmt: skip

# 279 when this was written; the libraries' own share is theirs to say.
MOST_MODULES = 300


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    script = f"""
import sys
sys.path += [{REPOSITORY!r}, {_SITE!r}]
import shim.server
import anyio._backends._asyncio
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
