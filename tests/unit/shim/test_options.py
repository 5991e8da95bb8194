"""The runtime's options, in every encoding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

from api.proto import linux_runc_pb2, runc_options_pb2, runtimeoptions_pb2
from shim.errors import InvalidRuntimeOptions, SystemdNotRunning
from shim.runtime import options as options_module
from shim.runtime.options import RuntimeOptions, read_options, with_cgroup_driver
from tests.harness.raising import raises

_RUNC = "containerd.runc.v1.Options"
_TOML = "runtimeoptions.v1.Options"

# What clients of containerd 1 set for runtimes that they do not know, and the other options.
_SOME: dict[str, Any] = {
    "no_pivot_root": True,
    "no_new_keyring": True,
    "io_uid": 1000,
    "io_gid": 1001,
    "criu_image_path": "/checkpoints/c1",
    "criu_work_path": "/var/log/criu",
    "shim_cgroup": "/shims",
}
_MORE: dict[str, Any] = {
    "binary_name": "/usr/bin/crun",
    "root": "/run/x",
    "systemd_cgroup": True,
    "criu_path": "/opt/criu",
}
_ALL = RuntimeOptions(**_SOME, **_MORE)

_ALL_TOML = """
BinaryName = "/usr/bin/crun"
Root = "/run/x"
SystemdCgroup = true
NoPivotRoot = true
NoNewKeyring = true
IoUid = 1000
IoGid = 1001
CriuPath = "/opt/criu"
CriuImagePath = "/checkpoints/c1"
CriuWorkPath = "/var/log/criu"
ShimCgroup = "/shims"
"""


def _any(url: str, value: bytes) -> AnyMessage:
    return AnyMessage(type_url=url, value=value)


@pytest.mark.parametrize("message", [None, AnyMessage()])
def test_no_options_are_the_defaults(message: AnyMessage | None) -> None:
    assert read_options(message) == RuntimeOptions("runc", "/run/containerd/runc")


@pytest.mark.parametrize("prefix", ["", "type.googleapis.com/"])
def test_options_of_runc_are_taken_whole(prefix: str) -> None:
    options = runc_options_pb2.Options(**_SOME, **_MORE)
    assert read_options(_any(prefix + _RUNC, options.SerializeToString())) == _ALL


def test_options_that_clients_of_containerd_1_send_to_runtimes_they_do_not_know() -> None:
    options = linux_runc_pb2.CreateOptions(**_SOME)
    url = "containerd.linux.runc.CreateOptions"
    assert read_options(_any(url, options.SerializeToString())) == RuntimeOptions(**_SOME)
    with pytest.raises(InvalidRuntimeOptions):
        read_options(_any(url, b"\xff"))


def test_options_of_cri_are_a_toml_body() -> None:
    options = runtimeoptions_pb2.Options(config_body=_ALL_TOML.encode())
    assert read_options(_any(_TOML, options.SerializeToString())) == _ALL


def test_options_of_cri_may_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text(_ALL_TOML)
    path = tmp_path / "options.toml"  # a link, like the files of a ConfigMap
    path.symlink_to("real.toml")
    options = runtimeoptions_pb2.Options(config_path=str(path))
    assert read_options(_any(_TOML, options.SerializeToString())) == _ALL


def test_a_path_that_is_no_readable_file_is_said_in_words(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate((1 << 20) + 1)
    for path, found in (
        (tmp_path / "missing", "cannot be read: no such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
        (tmp_path / "huge", "more than 1048576 bytes"),
        ("relative.toml", "not an absolute path"),
        ("/nul\0byte", "not an absolute path"),
    ):
        options = runtimeoptions_pb2.Options(config_path=str(path))
        with pytest.raises(InvalidRuntimeOptions, match=found):
            read_options(_any(_TOML, options.SerializeToString()))


# Options that users copy from runc's handler in the defaults of containerd 1.6 and 2.x.
_DEFAULTS_TOML = """
BinaryName = ""
CriuImagePath = ""
CriuPath = ""
CriuWorkPath = ""
IoGid = 0
IoUid = 0
NoNewKeyring = false
NoPivotRoot = false
Root = ""
ShimCgroup = ""
SystemdCgroup = false
"""


def _toml(text: str) -> AnyMessage:
    return _any(_TOML, runtimeoptions_pb2.Options(config_body=text.encode()).SerializeToString())


@pytest.mark.parametrize(
    "text",
    [
        "",
        _DEFAULTS_TOML,
        'TypeUrl = "runtimeoptions.v1.Options"\nConfigPath = ""\nConfigBody = ""\n',
        'TaskApiAddress = "unix:///run/s"\nTaskApiVersion = 3\n',
        "IoUid = 0.0\n",
    ],
)
def test_what_changes_nothing_is_accepted(text: str) -> None:
    assert read_options(_toml(text)) == RuntimeOptions()


def test_keys_are_read_in_any_case_and_numbers_also_as_floats() -> None:
    text = 'binaryname = "crun"\nSYSTEMDCGROUP = true\niouid = 7.0\n'
    assert read_options(_toml(text)) == RuntimeOptions(
        binary_name="crun", systemd_cgroup=True, io_uid=7
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("IoUid = 1.5", "IoUid is a number, not a whole number"),
        ("IoUid = -1", "IoUid is -1"),
        ("IoGid = 4294967295", "IoGid is 4294967295"),
        ("IoUid = true", "IoUid is true or false, not a whole number"),
        ('Root = "run/x"', "not an absolute path"),
        ('BinaryName = "bin/runc"', "not a name or an absolute path"),
        ('BinaryName = "/usr/bin/runc\\u0000"', "a zero byte"),
        ("BinaryName = ['runc']", "BinaryName is a list"),
        ('Root = "/a"\nroot = "/b"', "Root is there twice"),
        ("[options]\nRoot = '/a'", "unknown key 'options'"),
        ("x = " + "[" * 100_000, "not TOML"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, found: str) -> None:
    with pytest.raises(InvalidRuntimeOptions) as caught:
        read_options(_toml(text))
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "systemd"),
    [
        ("kubepods-pod1.slice:cri-containerd:abc", True),
        ("system.slice:docker:abc", True),
        ("machine.slice::abc", True),
        ("/kubepods/pod1/abc", False),
        ("/kubepods.slice/pod1.slice/abc", False),
        ("kubepods:cri:abc", False),
        ("a.slice:b", False),
        ("a.slice:b:", False),
        ("a.slice:b:c:d", False),
        ("a.slice:b/c:d", False),
        ("", False),
        (7, False),
    ],
)
def test_systemd_makes_the_cgroups_that_are_named_as_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: object, *, systemd: bool
) -> None:
    spec = {"linux": {"cgroupsPath": path}}
    monkeypatch.setattr(options_module, "_SYSTEMD", str(tmp_path))
    assert with_cgroup_driver(RuntimeOptions(), spec).systemd_cgroup is systemd
    assert with_cgroup_driver(RuntimeOptions(systemd_cgroup=True), spec).systemd_cgroup
    assert not with_cgroup_driver(RuntimeOptions(), {"linux": None}).systemd_cgroup
    # Without systemd such a name is an ordinary path, as with containerd's own shim.
    monkeypatch.setattr(options_module, "_SYSTEMD", str(tmp_path / "missing"))
    assert not with_cgroup_driver(RuntimeOptions(), spec).systemd_cgroup
    with raises(SystemdNotRunning, match="SystemdCgroup"):
        with_cgroup_driver(RuntimeOptions(systemd_cgroup=True), spec)


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
            "SystemdCgroup is a whole number, not true or false",
        ),
        (
            _TOML,
            runtimeoptions_pb2.Options(config_path="/no/such/file").SerializeToString(),
            "no such file",
        ),
    ],
)
def test_what_cannot_be_understood_is_said_in_one_line(url: str, value: bytes, found: str) -> None:
    with pytest.raises(InvalidRuntimeOptions) as caught:
        read_options(_any(url, value))
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
