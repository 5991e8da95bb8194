"""A bundle's files are read and written completely, and never through a link."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim import bundle, files
from shim.errors import BundleUnusable
from tests.harness.own_process import restored


def test_what_is_written_has_mode_0600_and_nothing_else_appears(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    with restored():
        os.umask(0)
        files.write(str(path), b"one")
        files.write(str(path), b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["options.json"]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    link = tmp_path / "address"
    link.symlink_to(victim)
    with pytest.raises(BundleUnusable):
        files.read(str(link), 100)
    files.write(str(link), b"ours")
    assert victim.read_bytes() == b"untouched"
    assert files.read(str(link), 100) == b"ours"


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "address").mkdir()
    with pytest.raises(BundleUnusable, match="cannot write"):
        files.write(str(tmp_path / "address"), b"x")
    assert os.listdir(tmp_path) == ["address"]


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", ".", "missing"):
        with pytest.raises(BundleUnusable):
            files.read(str(tmp_path / name), 100)


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 101)
    with pytest.raises(BundleUnusable, match="more than 100 bytes"):
        files.read(str(tmp_path / "f"), 100)
    assert files.read(str(tmp_path / "f"), 101) == b"x" * 101


def test_a_spec_is_written_back_with_its_mode_and_unknown_members(tmp_path: Path) -> None:
    config = tmp_path / bundle.CONFIG
    config.write_text('{"ociVersion": "9", "unknown": {"a": [1, "\\ud800", null]}}')
    config.chmod(0o640)
    spec = bundle.read_spec(str(tmp_path))
    spec["process"] = {}
    bundle.write_spec(str(tmp_path), spec)
    written = json.loads(config.read_text())
    assert written == {
        "ociVersion": "9",
        "unknown": {"a": [1, "\ud800", None]},
        "process": {},
    }
    assert stat.S_IMODE(config.stat().st_mode) == 0o640


_MALFORMED = ["", "{", "[", "[]", '"text"', "{} x", '{"a":}', "\ufeff{}", "[" * 100_000]


@pytest.mark.parametrize("text", _MALFORMED)
def test_a_malformed_spec_is_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / bundle.CONFIG).write_text(text)
    with pytest.raises(BundleUnusable, match=r"config\.json: ") as caught:
        bundle.read_spec(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_spec_that_is_not_utf8_is_malformed(tmp_path: Path) -> None:
    (tmp_path / bundle.CONFIG).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(BundleUnusable, match="no JSON"):
        bundle.read_spec(str(tmp_path))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4), st.sampled_from([None, 2]), st.booleans())
def test_json_is_parsed_as_the_json_module_would(
    value: dict[str, Any],
    indent: int | None,
    ascii_only: bool,
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    content = f" \n{text}\t ".encode(errors="surrogatepass")
    try:
        content.decode()
    except UnicodeDecodeError:
        return
    assert files.parse_object(content, "f") == json.loads(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"binary": "crun", "root": "/r/n", "systemd_cgroup": true}', ("crun", "/r/n", True)),
        ('{"binary": "/b/runc", "root": "/r", "later": 1}', ("/b/runc", "/r", False)),
    ],
)
def test_the_runtime_record_is_read(
    tmp_path: Path, text: str, expected: tuple[str, str, bool]
) -> None:
    (tmp_path / bundle.OPTIONS).write_text(text)
    record = bundle.read_runtime_record(str(tmp_path))
    assert record is not None
    assert (record.binary, record.root, record.systemd_cgroup) == expected


@pytest.mark.parametrize("text", ["{}", '{"binary": "runc", "root": "relative"}', '{"binary": 1}'])
def test_a_runtime_record_without_binary_or_absolute_root_is_refused(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / bundle.OPTIONS).write_text(text)
    with pytest.raises(BundleUnusable):
        bundle.read_runtime_record(str(tmp_path))


def test_what_is_not_there_yet_is_no_error(tmp_path: Path) -> None:
    assert bundle.read_runtime_record(str(tmp_path)) is None
    assert bundle.read_pid(str(tmp_path / bundle.INIT_PID)) == 0
    assert bundle.read_line(str(tmp_path / bundle.ADDRESS)) == ""
    bundle.remove_staging(str(tmp_path))


@pytest.mark.parametrize(("text", "pid"), [("4711", 4711), ("4711\n", 4711)])
def test_a_pid_file_is_read(tmp_path: Path, text: str, pid: int) -> None:
    (tmp_path / "p").write_text(text)
    assert bundle.read_pid(str(tmp_path / "p")) == pid


@pytest.mark.parametrize("text", ["", "-1", "1 2", "0x10", "²"])
def test_a_pid_file_with_anything_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(BundleUnusable):
        bundle.read_pid(str(tmp_path / "p"))


def test_a_tree_is_removed_without_following_its_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    staging = tmp_path / bundle.STAGING
    (staging / "a/b/c").mkdir(parents=True)
    (staging / "a/b/file").write_text("x")
    (staging / "a/out").symlink_to(outside)
    (staging / "file-out").symlink_to(outside / "kept")
    bundle.remove_staging(str(tmp_path))
    assert not staging.exists()
    assert (outside / "kept").read_text() == "kept"


def test_a_link_in_the_place_of_a_tree_is_removed_alone(tmp_path: Path) -> None:
    (tmp_path / "outside/in").mkdir(parents=True)
    (tmp_path / bundle.STAGING).symlink_to(tmp_path / "outside")
    bundle.remove_staging(str(tmp_path))
    assert not (tmp_path / bundle.STAGING).is_symlink()
    assert (tmp_path / "outside/in").is_dir()


def test_loggers_are_recorded_by_pid_and_start_time(tmp_path: Path) -> None:
    record = bundle.record_logger(str(tmp_path), 12, 3456)
    for name in ("logger.1", "logger.a.2", "logger.1.2.3", "exec.logger.7.8", "logger."):
        (tmp_path / name).touch()
    assert bundle.loggers_left(str(tmp_path)) == [(12, 3456)]
    files.remove(record)
    assert bundle.loggers_left(str(tmp_path)) == []
    assert bundle.loggers_left(str(tmp_path / "missing")) == []
