"""``-info``: the runtime info for containerd, whatever the low-level runtime does."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage

import shim
from api.proto import runc_options_pb2, runtimeoptions_pb2, types_pb2
from shim.verbs.info import FEATURES
from tests.unit.verbs.program import Program


def _options(message: runc_options_pb2.Options | runtimeoptions_pb2.Options) -> AnyMessage:
    return AnyMessage(type_url=message.DESCRIPTOR.full_name, value=message.SerializeToString())


def _ask(program: Program, stdin: bytes = b"") -> tuple[types_pb2.RuntimeInfo, str]:
    """Return the answer and stderr."""
    done = program.run("-info", stdin=stdin)
    assert done.returncode == 0, done.stderr
    info = types_pb2.RuntimeInfo.FromString(done.stdout)
    assert info.name == "io.containerd.nvidia.v1"
    assert info.version.version == shim.VERSION
    return info, done.stderr.decode()


def _features(info: types_pb2.RuntimeInfo) -> Any:
    assert info.features.type_url == FEATURES
    return json.loads(info.features.value)


def _runtime(directory: Path, script: str) -> str:
    path = directory / "runtime"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_runcs_own_word_on_its_features_is_handed_on(program: Program) -> None:
    info, said = _ask(program)
    told = subprocess.run(["runc", "features"], capture_output=True, check=True).stdout
    assert _features(info) == json.loads(told)
    assert "createRuntime" in _features(info)["hooks"]
    assert not info.HasField("options")
    assert said == ""


@pytest.mark.parametrize("form", ["docker", "cri body", "cri path"])
def test_the_runtime_that_the_options_name_is_asked(
    program: Program, short_path: Path, form: str
) -> None:
    binary = _runtime(short_path, '[ "$*" = features ] && echo \'{"ociVersionMax": "9.9"}\'')
    toml = f'binaryname = "{binary}"\n'.encode()
    if form == "docker":
        options = _options(runc_options_pb2.Options(binary_name=binary))
    elif form == "cri body":
        options = _options(runtimeoptions_pb2.Options(config_body=toml))
    else:
        (short_path / "options.toml").write_bytes(toml)
        path = str(short_path / "options.toml")
        options = _options(runtimeoptions_pb2.Options(config_path=path))
    info, said = _ask(program, options.SerializeToString())
    assert _features(info) == {"ociVersionMax": "9.9"}
    assert info.options == options
    assert said == ""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo unknown command features >&2; exit 1", "unknown command features"),
        ("echo garbage", "no JSON"),
        ("echo '[1]'", "not an object"),
        (":", "no JSON"),
        ("kill -9 $$", "exit status -9"),
        ("sleep 1000", "no end in time"),
        (None, "no such program"),
    ],
)
def test_a_runtime_that_does_not_tell_its_features_is_no_reason_to_fail(
    program: Program, short_path: Path, script: str | None, said: str
) -> None:
    binary = "/no/such/runtime" if script is None else _runtime(short_path, script)
    options = _options(runc_options_pb2.Options(binary_name=binary))
    began = time.monotonic()
    info, told = _ask(program, options.SerializeToString())
    assert time.monotonic() - began < 30
    assert not info.HasField("features")
    assert info.options == options
    assert said in told
    assert "NVSHIM-E1013" in told
    assert "\n" not in told


def test_options_of_a_type_that_nobody_knows_are_handed_back(program: Program) -> None:
    options = AnyMessage(type_url="example.v1.Options", value=b"\xff\xff")
    info, _ = _ask(program, options.SerializeToString())
    assert info.options == options
    assert "ociVersionMin" in _features(info)


@pytest.mark.parametrize(
    "stdin",
    [
        b"\xff\xff\xff",
        AnyMessage(type_url="containerd.runc.v1.Options", value=b"\x32\xff").SerializeToString(),
        _options(runtimeoptions_pb2.Options(config_body=b"BinaryName = ")).SerializeToString(),
    ],
    ids=["no message", "no options", "no TOML"],
)
def test_what_are_no_options_is_refused_in_a_line(program: Program, stdin: bytes) -> None:
    done = program.run("-info", stdin=stdin)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(b"NVSHIM-E1012")
    assert b"\n" not in done.stderr


def test_a_closed_stdin_is_no_options(program: Program) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", program.path, "-info"],
        capture_output=True,
        check=True,
    )
    assert types_pb2.RuntimeInfo.FromString(done.stdout).name == "io.containerd.nvidia.v1"


def test_a_person_at_a_terminal_need_not_end_the_input(program: Program) -> None:
    master, slave = os.openpty()
    try:
        done = subprocess.run(
            [program.path, "-info"], stdin=slave, capture_output=True, check=True, timeout=60
        )
    finally:
        os.close(master)
        os.close(slave)
    assert types_pb2.RuntimeInfo.FromString(done.stdout).HasField("features")
