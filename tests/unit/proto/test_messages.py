"""The generated modules work with every implementation of protobuf."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness.launcher import REPOSITORY


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_every_implementation_of_protobuf_will_do(implementation: str) -> None:
    program = (
        "from google.protobuf.any_pb2 import Any\n"
        "from google.protobuf.internal import api_implementation\n"
        "from api.proto import task_pb2, task_types_pb2\n"
        "request = task_pb2.CreateTaskRequest(id='a', options=Any(type_url='u', value=b'v'))\n"
        "request.rootfs.add(type='bind', options=['ro'])\n"
        "read = task_pb2.CreateTaskRequest.FromString(request.SerializeToString())\n"
        "assert read.SerializeToString() == request.SerializeToString()\n"
        "print(api_implementation.Type(), read.options.value, task_types_pb2.Status.Name(4))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [implementation, "b'v'", "PAUSED"]
