"""Containers of one pod share a socket; all others have different ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shim import sockets
from shim.errors import BundleUnusable, SocketPathTooLong
from shim.verbs.start import group_of
from tests.harness.raising import raises

_RUNC = "io.containerd.runc.v2.group"
_CRI = "io.kubernetes.cri.sandbox-id"


@pytest.mark.parametrize(
    ("spec", "group"),
    [
        ({}, "own-id"),
        ({"annotations": None}, "own-id"),
        ({"annotations": {"other": "x"}}, "own-id"),
        ({"annotations": {_CRI: "pod"}}, "pod"),
        ({"annotations": {_RUNC: "group"}}, "group"),
        ({"annotations": {_CRI: "pod", _RUNC: "group"}}, "group"),
        ({"annotations": {_CRI: "pod", _RUNC: ""}}, "pod"),
        ({"annotations": {_CRI: 7}}, "own-id"),
        ({"annotations": [_CRI]}, "own-id"),
        ({"process": {"args": [_CRI, "pod"]}}, "own-id"),
    ],
)
def test_the_group_is_named_by_the_annotations(
    tmp_path: Path, spec: dict[str, Any], group: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(spec))
    assert group_of(str(tmp_path), "own-id") == group


def test_a_sandbox_has_no_spec_and_is_a_group_of_its_own(tmp_path: Path) -> None:
    assert group_of(str(tmp_path), "own-id") == "own-id"


def test_a_group_needs_a_readable_spec(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("elsewhere")
    with pytest.raises(BundleUnusable, match="symbolic links"):
        group_of(str(tmp_path), "own-id")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(f'{{"annotations": {{"{_CRI}": ')
    with pytest.raises(BundleUnusable, match="no JSON"):
        group_of(str(tmp_path), "own-id")


def test_the_socket_is_named_by_a_digest_of_containerd_namespace_and_group() -> None:
    expected = hashlib.sha256(b"/run/containerd/containerd.sock/k8s.io/pod").hexdigest()
    name = sockets.name_of("/run/containerd/containerd.sock", "k8s.io", "pod")
    assert sockets.path_of("/run/containerd/s", name) == f"/run/containerd/s/{expected}"


def test_a_path_longer_than_a_socket_can_have_is_refused() -> None:
    name = "0" * 64
    assert len(sockets.path_of("/" + "d" * 40, name)) == 106
    with raises(SocketPathTooLong, match="107 bytes"):
        sockets.path_of("/" + "d" * 41, name)


@pytest.mark.parametrize(
    ("wanted", "environment", "expected"),
    [
        ("/run/x", {"XDG_RUNTIME_DIR": "/run/user/7"}, ["/run/x"]),
        ("", {}, ["/run/containerd/s", "/run/user/7/containerd/s", "/tmp/containerd-s-7"]),
        (
            "",
            {"XDG_RUNTIME_DIR": "/home/u/.run"},
            [
                "/run/containerd/s",
                "/home/u/.run/containerd/s",
                "/run/user/7/containerd/s",
                "/tmp/containerd-s-7",
            ],
        ),
        (
            "",
            {"XDG_RUNTIME_DIR": "relative"},
            ["/run/containerd/s", "/run/user/7/containerd/s", "/tmp/containerd-s-7"],
        ),
    ],
)
def test_the_directory_is_containerds_or_one_of_the_users(
    wanted: str, environment: dict[str, str], expected: list[str]
) -> None:
    assert sockets.directories(wanted, environment, 7) == expected
