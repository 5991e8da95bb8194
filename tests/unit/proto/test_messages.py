"""Classes are made when they are asked for, and are the ones that protobuf itself would make."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from api import messages
from api.proto import task_pb2, task_types_pb2, types_pb2
from tests.harness.launcher import REPOSITORY


def _run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_asked_for_is_made_and_kept() -> None:
    assert task_pb2.CreateTaskRequest is task_pb2.CreateTaskRequest
    request = task_pb2.CreateTaskRequest(id="a")
    request.rootfs.add(type="bind", options=["ro"])
    request.options.type_url = "x"
    again = task_pb2.CreateTaskRequest.FromString(request.SerializeToString())
    assert again == request
    assert type(again.rootfs[0]) is types_pb2.Mount


def test_what_protobuf_itself_makes_is_the_same() -> None:
    program = (
        "from api.proto import task_pb2, types_pb2; from api.wellknown import Any\n"
        "request = task_pb2.CreateTaskRequest(); envelope = types_pb2.Envelope()\n"
        "from google.protobuf import any_pb2, empty_pb2, timestamp_pb2\n"
        "assert any_pb2.Any is Any\n"
        "assert type(request.options) is any_pb2.Any\n"
        "assert type(envelope.timestamp) is timestamp_pb2.Timestamp\n"
        "envelope.timestamp.FromNanoseconds(5)\n"
        "packed = any_pb2.Any(); packed.Pack(request)\n"
        "print(packed.type_url)"
    )
    assert _run(program) == "type.googleapis.com/containerd.task.v2.CreateTaskRequest"


def test_protobuf_may_have_made_them_first() -> None:
    program = (
        "from google.protobuf import any_pb2, empty_pb2, timestamp_pb2\n"
        "from api.proto import task_pb2; from api.wellknown import Any, Empty\n"
        "assert any_pb2.Any is Any and empty_pb2.Empty is Empty\n"
        "print(type(task_pb2.CreateTaskRequest().options) is Any)"
    )
    assert _run(program) == "True"


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_every_implementation_of_protobuf_will_do(implementation: str) -> None:
    program = (
        "import sys\n"
        "from api.proto import task_pb2, task_types_pb2, types_pb2\n"
        "from api.wellknown import Any, Empty\n"
        "from google.protobuf.internal import api_implementation\n"
        "request = task_pb2.CreateTaskRequest(id='a', options=Any(type_url='u', value=b'v'))\n"
        "read = task_pb2.CreateTaskRequest.FromString(request.SerializeToString())\n"
        "print(api_implementation.Type(), read.options.value, task_types_pb2.PAUSED,\n"
        "      task_types_pb2.Status.Name(4), Empty().ByteSize(),\n"
        "      hasattr(task_pb2, 'NoSuchMessage'))"
    )
    said = _run(program, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=implementation)
    assert said == f"{implementation} b'v' 4 PAUSED 0 False"


def test_enumerations_and_their_values_have_names() -> None:
    assert task_types_pb2.Status.Value("RUNNING") == task_types_pb2.RUNNING == 2


def test_a_name_that_is_not_there_is_an_attribute_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"task_pb2.* has no attribute 'Nothing'"):
        task_pb2.Nothing  # type: ignore[attr-defined] # noqa: B018


def test_a_map_has_entries() -> None:
    request = task_pb2.UpdateTaskRequest(id="a", annotations={"k": "v"})
    entry = task_pb2.UpdateTaskRequest.AnnotationsEntry  # type: ignore[attr-defined,unused-ignore]
    assert task_pb2.UpdateTaskRequest.FromString(request.SerializeToString()) == request
    assert entry.DESCRIPTOR.containing_type is task_pb2.UpdateTaskRequest.DESCRIPTOR


def test_a_class_that_is_not_ours_is_made_by_protobuf() -> None:
    from google.protobuf.wrappers_pb2 import StringValue  # noqa: PLC0415 - not to be there before

    assert messages.message_class(StringValue.DESCRIPTOR) is StringValue


def test_only_the_c_implementation_is_imported() -> None:
    program = (
        "import sys; from api.proto import task_pb2, events_pb2; task_pb2.CreateTaskRequest()\n"
        "heavy = {f'google.protobuf.{n}' for n in ('text_format', 'internal.python_message')}\n"
        "print(*heavy.intersection(sys.modules))"
    )
    assert _run(program) == ""


def test_a_process_of_ours_alone_can_do_without_protobufs_helpers() -> None:
    program = (
        "import sys, api; api.alone = True\n"
        "from api.proto import types_pb2\n"
        "envelope = types_pb2.Envelope()\n"
        "for moment in (0, 1, 5_000_000_123, -1):\n"
        "    envelope.timestamp.FromNanoseconds(moment)\n"
        "    assert envelope.timestamp.ToNanoseconds() == moment\n"
        "assert 0 <= envelope.timestamp.nanos < 10**9\n"
        "print(*{'calendar', 'datetime'}.intersection(sys.modules))"
    )
    assert _run(program) == ""
