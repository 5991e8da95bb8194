"""The hand-written messages are those that protobuf would write and read."""

from __future__ import annotations

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from api.proto import bootstrap_pb2, runc_options_pb2, task_pb2, types_pb2
from shim import wire

_ADDRESS = "unix:///run/containerd/s/" + "0123456789abcdef" * 4
_WHITE_SPACE = b" \t\n\v\f\r\x85\xa0"


def test_the_bootstrap_result_is_what_protobuf_would_write() -> None:
    expected = bootstrap_pb2.BootstrapResult(version=3, address=_ADDRESS, protocol="ttrpc")
    assert wire.bootstrap_result(_ADDRESS) == expected.SerializeToString()


def test_the_bootstrap_result_survives_a_containerd_that_strips_white_space() -> None:
    result = wire.bootstrap_result(_ADDRESS)
    assert result.strip(_WHITE_SPACE) == result


@pytest.mark.parametrize(
    ("pid", "status", "exited_at"),
    [(4711, 137, 1_763_600_000_123_456_789), (0, 137, 1_000_000_000), (1 << 31, 0, 999)],
)
def test_the_delete_response_is_what_protobuf_would_write(
    pid: int, status: int, exited_at: int
) -> None:
    expected = task_pb2.DeleteResponse(pid=pid, exit_status=status)
    expected.exited_at.FromNanoseconds(exited_at)
    assert wire.delete_response(pid, status, exited_at) == expected.SerializeToString()


def test_the_runtime_info_is_what_protobuf_would_write() -> None:
    options = AnyMessage(type_url="a.Type", value=b"\x08\x01")
    features = AnyMessage(type_url="b/JSON", value=b"{}")
    info = types_pb2.RuntimeInfo(
        name="io.containerd.nvidia.v1",
        version=types_pb2.RuntimeVersion(version="1.2.3", revision="abc"),
        options=options,
        features=features,
    )
    written = wire.runtime_info(
        info.name,
        "1.2.3",
        "abc",
        options=wire.any_message("a.Type", b"\x08\x01"),
        features=wire.any_message("b/JSON", b"{}"),
    )
    assert written == info.SerializeToString()
    info.ClearField("options")
    info.ClearField("features")
    assert wire.runtime_info(info.name, "1.2.3", "abc") == info.SerializeToString()


def _params(**changes: str | int) -> bootstrap_pb2.BootstrapParams:
    params = bootstrap_pb2.BootstrapParams(
        instance_id="web-1",
        namespace="k8s.io",
        containerd_version="2.4.0",
        containerd_ttrpc_address="/run/c.sock.ttrpc",
        containerd_grpc_address="/run/c.sock",
        containerd_binary="/usr/bin/containerd",
        socket_dir="/run/other/s",
    )
    for name, value in changes.items():
        setattr(params, name, value)
    return params


def _read(data: bytes) -> wire.BootstrapParams | None:
    return wire.read_bootstrap(data, container_id="web-1", namespace="k8s.io")


def test_the_bootstrap_parameters_are_read_in_full() -> None:
    message = _params()
    options = AnyMessage(type_url="containerd.runc.v1.Options", value=b"\x1a\x01x")
    message.extensions.add(value=options)
    params = _read(message.SerializeToString())
    assert params is not None
    assert params.ttrpc_address == "/run/c.sock.ttrpc"
    assert params.grpc_address == "/run/c.sock"
    assert params.socket_dir == "/run/other/s"
    assert params.extensions == [("containerd.runc.v1.Options", b"\x1a\x01x")]
    assert not params.debug


@pytest.mark.parametrize(
    ("level", "debug"), [(0, False), (-4, True), (-8, True), (4, False), (12, False)]
)
def test_the_log_level_says_whether_to_debug(level: int, debug: bool) -> None:
    params = _read(_params(log_level=level).SerializeToString())
    assert params is not None
    assert params.debug is debug


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        _params(instance_id="web-2").SerializeToString(),
        _params(namespace="default").SerializeToString(),
        _params().SerializeToString()[:-1],
        AnyMessage(
            type_url="containerd.runc.v1.Options",
            value=runc_options_pb2.Options(binary_name="crun").SerializeToString(),
        ).SerializeToString(),
        AnyMessage(type_url="web-1", value=b"k8s.ix").SerializeToString(),
    ],
)
def test_what_does_not_name_this_container_and_namespace_is_an_older_containerd(
    data: bytes,
) -> None:
    assert _read(data) is None


def test_a_later_containerd_may_say_more_than_we_know() -> None:
    # Fields 100 to 103, one of each kind that proto3 has.
    unknown = b"\xa0\x06\x07" + b"\xa9\x06" + b"8" * 8 + b"\xb2\x06\x01x" + b"\xbd\x06" + b"4" * 4
    assert [n for n, _ in wire.fields(unknown)] == [100, 101, 102, 103]
    assert _read(_params().SerializeToString() + unknown) is not None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_a_value_error(data: bytes) -> None:
    try:
        for number, _ in wire.fields(data):
            assert number > 0
    except ValueError:
        pass
    assert _read(data) is None


@settings(max_examples=100, deadline=None)
@given(
    level=st.integers(-(1 << 31), (1 << 31) - 1),
    # A path with a zero byte is refused.
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
        min_size=3,
        max_size=3,
    ),
    cut=st.integers(0, 40),
)
def test_whatever_protobuf_writes_is_read(level: int, texts: list[str], cut: int) -> None:
    message = _params(
        log_level=level,
        containerd_ttrpc_address=texts[0],
        containerd_grpc_address=texts[1],
        socket_dir=texts[2],
    )
    data = message.SerializeToString()
    params = _read(data)
    assert params is not None
    assert [params.ttrpc_address, params.grpc_address, params.socket_dir] == texts
    assert params.debug is (level <= -4)
    _read(data[: len(data) - cut])  # a message that was cut off is no reason to raise
