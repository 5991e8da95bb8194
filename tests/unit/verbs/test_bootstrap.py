"""Parsing the stdin of ``start``, and the format of its answer."""

from __future__ import annotations

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from hypothesis import given, settings
from hypothesis import strategies as st

from api.proto import bootstrap_pb2, runc_options_pb2, runtimeoptions_pb2
from shim.errors import InvalidInvocation
from shim.verbs.invocation import Invocation
from shim.verbs.start import answer, read_bootstrap, shim_cgroup
from tests.harness.raising import raises

_ADDRESS = "unix:///run/containerd/s/" + "0123456789abcdef" * 4
_FLAGS = Invocation(container_id="web-1", namespace="k8s.io")


def test_the_answer_survives_a_containerd_that_strips_white_space() -> None:
    result = answer(_ADDRESS, _params())
    assert result.strip(b" \t\n\v\f\r\x85\xa0") == result
    assert bootstrap_pb2.BootstrapResult.FromString(result).address == _ADDRESS


def _params(**changes: str | int) -> bootstrap_pb2.BootstrapParams:
    params = bootstrap_pb2.BootstrapParams(
        instance_id="web-1", namespace="k8s.io", containerd_grpc_address="/run/c.sock"
    )
    for name, value in changes.items():
        setattr(params, name, value)
    return params


def _any(message: runc_options_pb2.Options | runtimeoptions_pb2.Options) -> AnyMessage:
    return AnyMessage(type_url=message.DESCRIPTOR.full_name, value=message.SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        _params(instance_id="web-2").SerializeToString(),
        _params(namespace="default").SerializeToString(),
        _params().SerializeToString()[:-1],
        _any(runc_options_pb2.Options(binary_name="crun")).SerializeToString(),
        AnyMessage(type_url="web-1", value=b"k8s.ix").SerializeToString(),
    ],
)
def test_what_does_not_name_this_container_and_namespace_is_an_older_containerd(
    data: bytes,
) -> None:
    assert read_bootstrap(data, _FLAGS) is None


def test_a_later_containerd_may_say_more_than_we_know() -> None:
    # Fields 100 to 103, one of each wire type of proto3.
    unknown = b"\xa0\x06\x07" + b"\xa9\x06" + b"8" * 8 + b"\xb2\x06\x01x" + b"\xbd\x06" + b"4" * 4
    params = read_bootstrap(_params().SerializeToString() + unknown, _FLAGS)
    assert params is not None
    assert params.containerd_grpc_address == "/run/c.sock"


@pytest.mark.parametrize(
    "field", ["containerd_ttrpc_address", "containerd_grpc_address", "socket_dir"]
)
def test_a_path_with_a_zero_byte_is_refused(field: str) -> None:
    with raises(InvalidInvocation, match="zero byte"):
        read_bootstrap(_params(**{field: "/run\0"}).SerializeToString(), _FLAGS)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_older_containerd_with_or_without_options(data: bytes) -> None:
    assert read_bootstrap(data, _FLAGS) is None
    assert shim_cgroup(data, None) == ""


@pytest.mark.parametrize(
    ("options", "cgroup"),
    [
        (AnyMessage(), ""),
        (AnyMessage(type_url="types.example/Other", value=b"\x1a\x01x"), ""),
        (_any(runc_options_pb2.Options(shim_cgroup="/shims")), "/shims"),
        (_any(runc_options_pb2.Options(binary_name="crun")), ""),
        (_any(runtimeoptions_pb2.Options(config_body=b'shimcgroup = "/shims"\n')), "/shims"),
        # Create reads them, too, and reports the error.
        (_any(runtimeoptions_pb2.Options(config_body=b"ShimCgroup =")), ""),
        (_any(runtimeoptions_pb2.Options(config_path="/no/such/file")), ""),
        (AnyMessage(type_url="containerd.runc.v1.Options", value=b"\x1a\xff"), ""),
    ],
)
def test_the_cgroup_is_read_from_either_dialect(options: AnyMessage, cgroup: str) -> None:
    assert shim_cgroup(options.SerializeToString(), None) == cgroup
    params = _params()
    params.extensions.add(value=options)
    assert shim_cgroup(b"", params) == cgroup
