"""The runtime's options, in each form in which they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from api.proto import runc_options_pb2, runtimeoptions_pb2
from shim.errors import InvalidRuntimeOptions
from shim.options import RuntimeOptions, read_options

if TYPE_CHECKING:
    from pathlib import Path

_RUNC = "containerd.runc.v1.Options"
_TOML = "runtimeoptions.v1.Options"

_ALL = RuntimeOptions(
    binary_name="/usr/bin/crun",
    root="/run/x",
    systemd_cgroup=True,
    no_pivot_root=True,
    no_new_keyring=True,
    io_uid=1000,
    io_gid=1001,
)

_ALL_TOML = """
BinaryName = "/usr/bin/crun"
Root = "/run/x"
SystemdCgroup = true
NoPivotRoot = true
NoNewKeyring = true
IoUid = 1000
IoGid = 1001
CriuPath = ""
"""


def _any(url: str, value: bytes) -> AnyMessage:
    return AnyMessage(type_url=url, value=value)


@pytest.mark.parametrize("message", [None, AnyMessage()])
def test_no_options_are_the_defaults(message: AnyMessage | None) -> None:
    assert read_options(message) == RuntimeOptions("runc", "/run/containerd/runc")


@pytest.mark.parametrize("prefix", ["", "type.googleapis.com/"])
def test_options_of_runc_are_taken_whole(prefix: str) -> None:
    options = runc_options_pb2.Options(
        binary_name="/usr/bin/crun",
        root="/run/x",
        systemd_cgroup=True,
        no_pivot_root=True,
        no_new_keyring=True,
        io_uid=1000,
        io_gid=1001,
    )
    assert read_options(_any(prefix + _RUNC, options.SerializeToString())) == _ALL


def test_options_of_cri_are_a_toml_body() -> None:
    options = runtimeoptions_pb2.Options(config_body=_ALL_TOML.encode())
    assert read_options(_any(_TOML, options.SerializeToString())) == _ALL


def test_options_of_cri_may_be_a_path(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(_ALL_TOML)
    options = runtimeoptions_pb2.Options(config_path=str(path))
    assert read_options(_any(_TOML, options.SerializeToString())) == _ALL


@pytest.mark.parametrize(
    ("url", "value", "found"),
    [
        (_RUNC, b"\xff\xff", "cannot be decoded"),
        ("example.com/Else", b"", "not a type of options"),
        (_TOML, runtimeoptions_pb2.Options(config_body=b"= 1").SerializeToString(), "not TOML"),
        (_TOML, runtimeoptions_pb2.Options(config_body=b"\xff").SerializeToString(), "not TOML"),
        (
            _TOML,
            runtimeoptions_pb2.Options(config_body=b"BinaryNam = 'x'").SerializeToString(),
            "unknown key 'BinaryNam'",
        ),
        (
            _TOML,
            runtimeoptions_pb2.Options(config_body=b"SystemdCgroup = 1").SerializeToString(),
            "SystemdCgroup is a int, not a bool",
        ),
        (
            _TOML,
            runtimeoptions_pb2.Options(config_path="/no/such/file").SerializeToString(),
            "No such file",
        ),
    ],
)
def test_what_cannot_be_understood_is_said_in_one_line(url: str, value: bytes, found: str) -> None:
    with pytest.raises(InvalidRuntimeOptions) as caught:
        read_options(_any(url, value))
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
