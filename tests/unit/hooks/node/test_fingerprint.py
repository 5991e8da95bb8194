from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hooks.node.fingerprint import Fingerprint, first_change
from tests.unit.hooks.fake_node import put_link


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a driver root like a container's: links are absolute and stay within it."""
    root = tmp_path / "root"
    (root / "usr/lib/real").mkdir(parents=True)
    (root / "usr/lib/real/libx.so.1").write_text("x")
    (root / "usr/lib/current").symlink_to("/etc/alternatives/nvidia")
    (root / "etc/alternatives").mkdir(parents=True)
    (root / "etc/alternatives/nvidia").symlink_to("/usr/lib/real")
    (root / "usr/lib/libx.so.1").symlink_to("current/libx.so.1")
    (root / "lib").symlink_to("usr/lib")
    (root / "up").symlink_to("../../../../usr/lib/real")
    (root / "loop").symlink_to("/loop")
    (root / "dangling").symlink_to("/nowhere")
    return root


@pytest.mark.parametrize(
    ("path", "leads_to"),
    [
        ("/usr/lib/real/libx.so.1", "/usr/lib/real/libx.so.1"),
        ("/usr/lib/libx.so.1", "/usr/lib/real/libx.so.1"),
        ("/lib/libx.so.1", "/usr/lib/real/libx.so.1"),
        ("/lib//./current/libx.so.1", "/usr/lib/real/libx.so.1"),
        ("/up/libx.so.1", "/usr/lib/real/libx.so.1"),
        ("/usr/../lib/libx.so.1", "/usr/lib/real/libx.so.1"),
        ("/loop", None),
        ("/dangling", None),
        ("/usr/lib/none", None),
        ("/usr/lib/real/libx.so.1/below", None),
        ("/usr/lib/real", None),
    ],
)
def test_links_lead_where_a_process_with_that_root_would_go(
    root: Path, path: str, leads_to: str | None
) -> None:
    expected = None if leads_to is None else f"{root}{leads_to}"
    assert Fingerprint(str(root)).file(path) == expected


def test_what_is_no_regular_file_is_none(root: Path) -> None:
    os.mkfifo(root / "fifo")
    assert Fingerprint(str(root)).file("/fifo") is None
    assert Fingerprint(str(root)).directory("/fifo") is None
    assert Fingerprint(str(root)).directory("/lib") == f"{root}/usr/lib"


def test_root_of_the_host_is_a_root_like_another(root: Path) -> None:
    assert (
        Fingerprint("/").file(f"{root}/usr/lib/real/libx.so.1") == f"{root}/usr/lib/real/libx.so.1"
    )


CHANGES: dict[str, Callable[[Path], object]] = {
    "the file is rewritten": lambda root: (root / "usr/lib/real/libx.so.1").write_text("xx"),
    "the file is removed": lambda root: (root / "usr/lib/real/libx.so.1").unlink(),
    "the alternative is switched": lambda root: put_link(
        root / "etc/alternatives/nvidia", "/usr/lib"
    ),
    "the missing file appears": lambda root: (root / "usr/bin").mkdir(),
    "the directory gets a file": lambda root: (root / "usr/lib/real/liby.so").write_text(""),
    "the text changes": lambda root: (root / "text").write_text("b"),
    "the text disappears": lambda root: (root / "text").unlink(),
    "a name is added": lambda root: (root / "names/two").mkdir(),
    "a field changes": lambda root: (root / "fields").write_text("Minor: 2\nIRQ: 3\n"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_observations_hold_until(root: Path, change: str) -> None:
    (root / "names/one").mkdir(parents=True)
    (root / "text").write_text("a")
    (root / "fields").write_text("Minor: 1\nIRQ: 3\n")
    fingerprint = Fingerprint(str(root))
    assert fingerprint.file("/usr/lib/libx.so.1")
    assert fingerprint.file("/usr/bin/nvidia-smi") is None
    assert fingerprint.directory("/usr/lib/real")
    assert fingerprint.text(f"{root}/text") == "a"
    assert fingerprint.names(f"{root}/names") == ("one",)
    assert fingerprint.fields(f"{root}/fields", ["Minor", "Model"]) == {"Minor": "1", "Model": ""}
    seen = [(kind, path, value) for (kind, path), value in fingerprint.observations.items()]
    kept = json.loads(json.dumps(seen))

    (root / "fields").write_text("Minor: 1\nIRQ: 4\n")  # an extra line
    assert first_change(kept) is None
    CHANGES[change](root)
    assert first_change(kept) is not None


def test_unknown_kind_of_observation_is_not_true() -> None:
    assert first_change([("smell", "/", None)]) is not None
    assert first_change([("fields", "/etc/hostname", "no object")]) is not None


def test_file_that_is_no_text_is_read_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert Fingerprint("/").text(str(tmp_path / "bytes")) == "��"
    assert Fingerprint("/").text(str(tmp_path)) is None
