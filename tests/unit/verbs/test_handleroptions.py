"""What the verbs themselves read of a handler's options, and the file that those are in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from api.proto import runc_options_pb2, runtimeoptions_pb2
from shim.errors import HandlerOptionsMalformed
from shim.handleroptions import LONGEST_FILE, read_file, text_option

if TYPE_CHECKING:
    from pathlib import Path


def _any(message: runc_options_pb2.Options | runtimeoptions_pb2.Options) -> tuple[str, bytes]:
    return message.DESCRIPTOR.full_name, message.SerializeToString()


@pytest.mark.parametrize(
    ("options", "cgroup"),
    [
        ([], ""),
        ([("", b"")], ""),
        ([("types.example/Other", b"\x1a\x01x")], ""),
        ([_any(runc_options_pb2.Options(shim_cgroup="/shims"))], "/shims"),
        ([_any(runc_options_pb2.Options(binary_name="crun"))], ""),
        ([_any(runtimeoptions_pb2.Options(config_body=b'ShimCgroup = "/shims"\n'))], "/shims"),
        ([_any(runtimeoptions_pb2.Options(config_body=b'shimcgroup = "/shims"\n'))], "/shims"),
        ([_any(runtimeoptions_pb2.Options(config_body=b"SystemdCgroup = true\n"))], ""),
        ([_any(runtimeoptions_pb2.Options(config_body=b'X = "ShimCgroup"\n'))], ""),
        ([_any(runtimeoptions_pb2.Options(config_path="/no/such/file"))], ""),
    ],
)
def test_a_text_is_read_from_either_kind_of_options(
    options: list[tuple[str, bytes]], cgroup: str
) -> None:
    assert text_option(options, "ShimCgroup") == cgroup


def test_a_text_is_read_from_the_file_that_the_options_name(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text('ShimCgroup = "/shims"\n')
    link = tmp_path / "options.toml"  # as a ConfigMap's files are
    link.symlink_to("real.toml")
    options = _any(runtimeoptions_pb2.Options(config_path=str(link)))
    assert text_option([options], "ShimCgroup") == "/shims"


@pytest.mark.parametrize(
    "options",
    [
        ("containerd.runc.v1.Options", b"\x1a\xff"),
        ("runtimeoptions.v1.Options", b"ShimCgroup"),
        ("runtimeoptions.v1.Options", b"\x1a\x0bShimCgroup="),
    ],
)
def test_malformed_options_are_a_typed_error(options: tuple[str, bytes]) -> None:
    with pytest.raises(HandlerOptionsMalformed):
        text_option([options], "ShimCgroup")


def test_what_is_no_readable_file_is_said_in_words(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    huge = tmp_path / "huge"
    with open(huge, "wb") as file:
        file.truncate(LONGEST_FILE + 1)
    for path, found in (
        (tmp_path / "missing", "cannot be read: no such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "fifo", "not a regular file"),
        (huge, "more than"),
        ("relative.toml", "not an absolute path"),
        ("/nul\0byte", "not an absolute path"),
    ):
        with pytest.raises(ValueError, match=found):
            read_file(str(path))
