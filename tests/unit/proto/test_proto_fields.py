"""Field names and numbers match a table that was written from the upstream APIs."""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FieldDescriptor

from api.proto import (  # noqa: F401 - importing them registers the messages
    bootstrap_pb2,
    cgroups_v1_pb2,
    cgroups_v2_pb2,
    dra_health_pb2,
    dra_pb2,
    events_pb2,
    events_service_pb2,
    linux_runc_pb2,
    nri_pb2,
    pluginregistration_pb2,
    runc_options_pb2,
    runtimeoptions_pb2,
    task_pb2,
    task_types_pb2,
    ttrpc_pb2,
    types_pb2,
)

POOL = descriptor_pool.Default()
# Message: name, number and type of all its fields, so that an extra field is found, too.
FIELDS = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))

KINDS = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}
METHODS = (
    "State Create Start Delete Pids Pause Resume Checkpoint Kill Exec ResizePty CloseIO Update "
    "Wait Stats Connect Shutdown"
)
ANSWERED_WITH_NOTHING = {
    "Pause", "Resume", "Checkpoint", "Kill", "Exec", "ResizePty", "CloseIO", "Update", "Shutdown",
}  # fmt: skip


def test_the_fields_of_a_message_have_their_numbers_and_types() -> None:
    found = {name: POOL.FindMessageTypeByName(name).fields for name in FIELDS}
    assert {name: [field_of(each) for each in fields] for name, fields in found.items()} == FIELDS


def field_of(field: FieldDescriptor) -> str:
    repeated = "repeated " if field.is_repeated else ""
    return f"{field.name} {field.number} {repeated}{KINDS[field.type]}"


def test_the_status_of_a_process_has_its_numbers() -> None:
    values = task_types_pb2.Status.items()
    assert values == [
        ("UNKNOWN", 0), ("CREATED", 1), ("RUNNING", 2), ("STOPPED", 3), ("PAUSED", 4),
        ("PAUSING", 5),
    ]  # fmt: skip


def test_the_task_service_has_its_methods_and_answers() -> None:
    service = task_pb2.DESCRIPTOR.services_by_name["Task"]
    assert service.full_name == "containerd.task.v2.Task"
    assert [method.name for method in service.methods] == METHODS.split()
    empty = {
        method.name
        for method in service.methods
        if method.output_type.full_name == "google.protobuf.Empty"
    }
    assert empty == ANSWERED_WITH_NOTHING


def test_the_events_service_takes_envelopes() -> None:
    service = events_service_pb2.DESCRIPTOR.services_by_name["Events"]
    assert service.full_name == "containerd.services.events.ttrpc.v1.Events"
    (method,) = service.methods
    assert (method.name, method.input_type.name) == ("Forward", "ForwardRequest")
    assert method.output_type.full_name == "google.protobuf.Empty"


def test_bytes_written_down_from_the_wire_decode_to_what_they_say() -> None:
    # A Go client's request, decoded by hand: service "s", method "m", payload, 5 s, one pair.
    text = "0a 01 73 12 01 6d 1a 02 0a 00 20 80 e4 97 d0 12 2a 06 0a 01 6b 12 01 76"
    request = ttrpc_pb2.Request.FromString(bytes.fromhex(text))
    assert (request.service, request.method, request.payload) == ("s", "m", b"\n\x00")
    assert request.timeout_nano == 5_000_000_000
    assert [(pair.key, pair.value) for pair in request.metadata] == [("k", "v")]
