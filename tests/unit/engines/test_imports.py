"""The files that containerd would read on a node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from integration.engines.errors import ConfigInvalid, ConfigUnreadable
from integration.engines.files import Change, Need, apply
from integration.engines.imports import covers, load
from integration.engines.options import Options
from integration.engines.previous import without_nvshim
from integration.engines.undo import Record, View, Written, changes, read_record, without
from tests.harness.raising import raises


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_files_are_read_in_containerds_order_each_once(tmp_path: Path) -> None:
    root = write(tmp_path / "config.toml", 'imports = ["conf.d/*.toml", "one.toml"]')
    write(tmp_path / "conf.d/b.toml", "")
    write(tmp_path / "conf.d/a.toml", 'imports = ["../deep.toml"]')
    write(tmp_path / "conf.d/.hidden.toml", "")
    write(tmp_path / "conf.d/not.txt", "no TOML")
    write(tmp_path / "one.toml", 'imports = ["config.toml"]')
    write(tmp_path / "deep.toml", "version = 3")
    names = [os.path.relpath(file.path, tmp_path) for file in load(View(), root)]
    assert names == [
        "config.toml",
        "conf.d/.hidden.toml",
        "conf.d/a.toml",
        "conf.d/b.toml",
        "one.toml",
        "deep.toml",
    ]


def test_view_shows_what_is_not_written_yet_and_hides_what_is_to_go(tmp_path: Path) -> None:
    root = write(tmp_path / "config.toml", f'imports = ["{tmp_path}/conf.d/*.toml"]')
    gone = write(tmp_path / "conf.d/gone.toml", "")
    new = f"{tmp_path}/conf.d/new.toml"
    view = View().with_text(gone, None).with_text(new, "version = 2")
    assert [file.path for file in load(view, root)] == [root, new]
    assert not os.path.exists(new)


def test_pattern_covers_a_path_of_its_directory_only(tmp_path: Path) -> None:
    root = write(tmp_path / "config.toml", 'imports = ["/etc/c/conf.d/*.toml", "/etc/c/x.toml"]')
    (file,) = load(View({"/etc/c/x.toml": None}), root)[:1]
    assert covers(file, "/etc/c/conf.d/99-nvshim.toml")
    assert covers(file, "/etc/c/x.toml")
    assert not covers(file, "/etc/c/conf.d/deep/99-nvshim.toml")
    assert not covers(file, "/etc/c/conf.d/99-nvshim.conf")


@pytest.mark.parametrize(
    "text",
    ["version = 5", 'version = "2"', "version = true", "a = ", 'imports = "x"', "imports = [1]"],
)
def test_what_is_no_configuration_is_one_typed_line(tmp_path: Path, text: str) -> None:
    root = write(tmp_path / "config.toml", text)
    with raises(ConfigInvalid, match=r"config\.toml"):
        load(View(), root)


def test_what_cannot_be_read_is_one_typed_line(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    with raises(ConfigUnreadable):
        load(View(), str(tmp_path / "directory"))
    (tmp_path / "latin").write_bytes(b"# \xe9\n")
    with raises(ConfigUnreadable, match="UTF-8"):
        load(View(), str(tmp_path / "latin"))


@pytest.mark.parametrize(
    ("theirs", "after"),
    [
        ('["{ours}", "/b.toml"]', '["/b.toml"]'),
        ('[\n  "{ours}",\n]', "[\n]"),
        ('[\n  "/a.toml", # why\n  "{ours}",\n]', '[\n  "/a.toml", # why\n]'),
    ],
)
def test_import_goes_out_of_an_array_that_was_empty_and_was_edited_since(
    tmp_path: Path, theirs: str, after: str
) -> None:
    root, ours = f"{tmp_path}/config.toml", write(tmp_path / "conf.d/99-nvshim.toml", "version = 3")
    before, written = "version = 3\nimports = []\n", f'version = 3\nimports = ["{ours}"]\n'
    edits = View({root: before}).edited(root, written).edits[root]
    record = Record(
        f"{tmp_path}/record.json",
        "nvidia",
        files={root: Written(before, written, edits), ours: Written(None, "version = 3")},
    )
    write(tmp_path / "config.toml", f"version = 3\nimports = {theirs.format(ours=ours)}\n")
    for force in (False, True):
        view = without_nvshim(Options(config=root, force=force), record)
        assert view.text(root) == f"version = 3\nimports = {after}\n"
        assert view.text(ours) is None


def test_handler_that_is_replaced_goes_when_ours_is_imported_and_comes_back_before_ours_goes(
    tmp_path: Path,
) -> None:
    options = Options(config=f"{tmp_path}/config.toml", records=str(tmp_path))
    root = write(tmp_path / "config.toml", f'imports = ["{tmp_path}/conf.d/theirs.toml"]\n')
    theirs, ours = write(tmp_path / "conf.d/theirs.toml", "a = 1\n"), f"{tmp_path}/conf.d/ours.toml"
    desired = View().edited(theirs, "# a = 1\n", stood=True)
    desired = desired.edited(root, f'imports = ["{theirs}", "{ours}"]\n').with_text(ours, "a = 1\n")
    change = changes(options, Record(options.record), View(), desired, config=root, replaced=True)
    assert [file.path for file in change] == [options.record, ours, root, theirs]
    apply(Change("containerd", change, Need.RESTART, "", root))
    record = read_record(options.record)
    previous = without(record, force=False)
    change = changes(options, record, previous, previous, config=root)
    assert [file.path for file in change] == [theirs, root, ours, options.record]
