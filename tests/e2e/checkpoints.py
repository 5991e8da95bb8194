"""Shared by the checkpoint tests: options, a counting program, and what a bundle contains."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from api import typeurl
from api.proto import runc_options_pb2
from api.ttrpc import RemoteError
from tests.harness.shim import ShimByHand

# Counts in memory only, and exits with its own code. The parentheses are needed because dash would
# vfork: until the child has executed its program, CRIU cannot stop the parent and stops the child.
COUNT: Final = """
trap 'exit 7' TERM
i=0
while :; do i=$((i+1)); echo $i; echo $i >/dev/shm/i; (sleep 0.02); done
"""


def with_criu(criu: str, **more: Any) -> AnyMessage:
    more = {"binary_name": "runc", "criu_path": criu, **more}
    return typeurl.pack(runc_options_pb2.Options(**more))


def checkpointing(**options: Any) -> AnyMessage:
    return typeurl.pack(runc_options_pb2.CheckpointOptions(**options))


async def refusal(shim: ShimByHand, method: str, **fields: Any) -> tuple[int, str]:
    with pytest.raises(RemoteError) as caught:
        await shim.call(method, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return int(caught.value.status), message


def left_in(bundle: str) -> list[str]:
    """Return the files in a bundle that a checkpoint or restore leaves there temporarily."""
    return [n for n in sorted(os.listdir(bundle)) if "criu" in n or n.startswith(("log.", "exec."))]
