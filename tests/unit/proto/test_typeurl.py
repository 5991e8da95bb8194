"""``Any`` as containerd writes it: bare type names, and JSON under containerd's own names."""

from __future__ import annotations

import json

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from hypothesis import given
from hypothesis import strategies as st

from api import typeurl
from api.errors import NvshimError, Status
from api.proto import events_pb2, runc_options_pb2, task_pb2
from api.ttrpc import TypeMismatch
from tests.harness.raising import raises

EXIT = events_pb2.TaskExit(container_id="web", pid=42, exit_status=7)

# Valid and invalid names of messages.
FORMS = {
    "containerd.events.TaskExit": True,
    "type.googleapis.com/containerd.events.TaskExit": True,
    "/containerd.events.TaskExit": True,
    "a/b/containerd.events.TaskExit": True,
    "containerd.events.TaskStart": False,
    "events.TaskExit": False,
    "containerd.events.TaskExit/": False,
    "xcontainerd.events.TaskExit": False,
    "types.containerd.io/opencontainers/runtime-spec/1/Spec": False,
    "": False,
}


def test_a_message_goes_by_its_bare_name() -> None:
    packed = typeurl.pack(EXIT)
    assert packed.type_url == "containerd.events.TaskExit"
    assert packed.value == EXIT.SerializeToString()


def test_a_message_may_go_by_a_name_that_is_given() -> None:
    assert typeurl.pack(EXIT, url="other").type_url == "other"


@pytest.mark.parametrize("url", FORMS)
def test_a_message_is_known_with_and_without_a_prefix(url: str) -> None:
    packed = AnyMessage(type_url=url, value=EXIT.SerializeToString())
    if FORMS[url]:
        assert typeurl.unpack(packed, events_pb2.TaskExit) == EXIT
    else:
        with raises(TypeMismatch, match=r"containerd\.events\.TaskExit"):
            typeurl.unpack(packed, events_pb2.TaskExit)


def test_what_pythons_own_pack_writes_is_understood() -> None:
    packed = AnyMessage()
    packed.Pack(EXIT)
    assert packed.type_url.startswith("type.googleapis.com/")
    assert typeurl.unpack(packed, events_pb2.TaskExit) == EXIT


def test_the_options_of_runc_come_through() -> None:
    options = runc_options_pb2.Options(binary_name="crun", systemd_cgroup=True)
    request = task_pb2.CreateTaskRequest(options=typeurl.pack(options))
    received = task_pb2.CreateTaskRequest.FromString(request.SerializeToString()).options
    assert typeurl.full_name(received) == "containerd.runc.v1.Options"
    assert typeurl.unpack(received, runc_options_pb2.Options) == options


def test_a_mismatch_says_what_was_asked_and_what_was_found() -> None:
    with raises(TypeMismatch) as caught:
        typeurl.unpack(typeurl.pack(EXIT), runc_options_pb2.Options)
    assert isinstance(caught.value, NvshimError)
    assert caught.value.status == Status.INVALID_ARGUMENT
    assert str(caught.value) == (
        "NVSHIM-E0016 type-mismatch: a value of type containerd.runc.v1.Options: "
        "type containerd.events.TaskExit. See that the client sends what this call takes"
    )


def test_bytes_that_are_not_of_the_type_are_a_mismatch() -> None:
    packed = AnyMessage(type_url="containerd.events.TaskExit", value=b"\xff\xff")
    with raises(TypeMismatch, match="2 bytes"):
        typeurl.unpack(packed, events_pb2.TaskExit)


def test_the_names_of_json_values_are_containerds() -> None:
    prefix = "types.containerd.io/opencontainers/runtime-spec/1/"
    assert (
        f"{prefix}Spec", f"{prefix}Process", f"{prefix}LinuxResources",
    ) == (typeurl.SPEC, typeurl.PROCESS, typeurl.LINUX_RESOURCES)  # fmt: skip


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        ),
        max_size=4,
    )
)
def test_a_json_value_survives_the_way(value: dict[str, object]) -> None:
    packed = typeurl.pack_json(value, typeurl.PROCESS)
    received = AnyMessage.FromString(packed.SerializeToString())
    assert typeurl.unpack_json(received) == value
    assert typeurl.unpack_json(received, typeurl.SPEC, typeurl.PROCESS) == value


def test_a_json_value_keeps_its_whole_name() -> None:
    assert typeurl.full_name(AnyMessage(type_url=typeurl.SPEC)) == typeurl.SPEC
    assert typeurl.is_json(AnyMessage(type_url=typeurl.SPEC))
    assert not typeurl.is_json(typeurl.pack(EXIT))


@pytest.mark.parametrize(
    ("url", "value", "found"),
    [
        (typeurl.PROCESS, b"", "not valid JSON"),
        (typeurl.PROCESS, b"{", "not valid JSON"),
        (typeurl.PROCESS, b"\xff", "not valid JSON"),
        (typeurl.PROCESS, b"[" * 100_000, "not valid JSON"),
        (typeurl.PROCESS, b"[1]", "list"),
        (typeurl.PROCESS, b"null", "NoneType"),
        (typeurl.SPEC, b"{}", "Spec"),
        ("containerd.events.TaskExit", b"{}", "TaskExit"),
        ("", b"{}", "unnamed"),
    ],
)
def test_what_is_no_json_object_of_that_name_is_a_mismatch(
    url: str, value: bytes, found: str
) -> None:
    with raises(TypeMismatch, match=found) as caught:
        typeurl.unpack_json(AnyMessage(type_url=url, value=value), typeurl.PROCESS)
    assert "\n" not in str(caught.value)


def test_text_in_json_is_written_as_text() -> None:
    packed = typeurl.pack_json({"args": ["grüß"]}, typeurl.PROCESS)
    assert packed.value == '{"args":["grüß"]}'.encode()
    assert json.loads(packed.value) == {"args": ["grüß"]}
