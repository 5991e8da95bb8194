"""A tree's manifest shows whether its files have changed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.errors import TreeDamaged, TreeUnreadable
from integration.tree import MANIFEST, Tree, own_tree, read_tree, verify
from tests.harness.raising import raises
from tools.dist.manifest import write_tree


def _make(path: Path, *, text: str = "import shim\n") -> Tree:
    (path / "bin").mkdir(parents=True)
    (path / "bin/nvshim").write_text("#!\n")
    (path / "bin/nvshim").chmod(0o755)
    (path / "lib/a").mkdir(parents=True)
    (path / "lib/a/b.py").write_text(text)
    (path / "lib/a/link").symlink_to("../../bin/nvshim")
    return write_tree(
        str(path), version="1.2.3", revision="abc", architecture="arm64", python="3.11.2"
    )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return _make(tmp_path / "tree")


def test_what_was_written_is_read_and_is_so(tree: Tree) -> None:
    assert read_tree(tree.path) == verify(tree.path) == tree
    assert tree.files.keys() == {"bin/nvshim", "lib/a/b.py", "lib/a/link"}
    assert tree.files["lib/a/link"] == "link:../../bin/nvshim"
    assert tree.programs == {"bin/nvshim"}
    assert (tree.version, tree.revision, tree.architecture) == ("1.2.3", "abc", "arm64")
    assert tree.name == f"1.2.3-{tree.digest[:8]}"


def test_the_same_files_have_one_digest_wherever_they_lie(tree: Tree, tmp_path: Path) -> None:
    assert _make(tmp_path / "b").digest == tree.digest


def test_other_files_have_another_digest(tree: Tree, tmp_path: Path) -> None:
    assert _make(tmp_path / "b", text="import hooks\n").digest != tree.digest


def _relink(path: Path) -> None:
    (path / "lib/a/link").unlink()
    (path / "lib/a/link").symlink_to("b.py")


def _file_for_link(path: Path) -> None:
    (path / "lib/a/link").unlink()
    (path / "lib/a/link").write_text("#!\n")


def _fifo_for_file(path: Path) -> None:
    (path / "lib/a/b.py").unlink()
    os.mkfifo(path / "lib/a/b.py")


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: (path / "lib/a/b.py").write_text("import os\n"), "lib/a/b.py is changed"),
        (lambda path: (path / "lib/a/b.py").unlink(), "lib/a/b.py is missing"),
        (lambda path: (path / "lib/more").write_text(""), "lib/more is not part of it"),
        (lambda path: (path / "bin/nvshim").chmod(0o644), "bin/nvshim is changed"),
        (lambda path: (path / "lib/a/b.py").chmod(0o755), "lib/a/b.py is changed"),
        (_relink, "lib/a/link is changed"),
        (_file_for_link, "lib/a/link is changed"),
        (lambda path: os.mkfifo(path / "lib/fifo"), "lib/fifo is not part of it"),
        (_fifo_for_file, "lib/a/b.py is changed"),  # and it is not opened
    ],
    ids=["text", "missing", "more", "no mode", "mode", "link", "no link", "fifo", "no file"],
)
def test_damage_is_found_and_named(tree: Tree, damage: Callable[[Path], Any], found: str) -> None:
    damage(Path(tree.path))
    with raises(TreeDamaged) as raised:
        verify(tree.path)
    assert raised.value.found == found


def test_of_much_damage_the_beginning_is_named(tree: Tree) -> None:
    for number in range(9):
        with open(os.path.join(tree.path, f"more{number}"), "w", encoding="ascii"):
            pass
    with raises(TreeDamaged, match=r"more4 is not part of it and 4 more\."):
        verify(tree.path)


def test_where_no_manifest_is_there_is_no_tree(tmp_path: Path) -> None:
    with raises(TreeUnreadable, match="no such file or directory"):
        read_tree(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"format": 2}, "format 2"),
        ({"version": "../x"}, "version"),
        ({"version": ""}, "version"),
        ({"revision": None}, "revision"),
        ({"architecture": "a\nb"}, "architecture"),
        ({"digest": "0" * 64}, "digest"),
        ({"files": {"../x": "sha256:" + "0" * 64}}, "'../x'"),
        ({"files": {"/x": "sha256:" + "0" * 64}}, "'/x'"),
        ({"files": {"a//b": "sha256:" + "0" * 64}}, "'a//b'"),
        ({"files": {"a": "link:../x"}}, "a is 'link:../x'"),
        ({"files": {"a": "link:/x"}}, "a is 'link:/x'"),
        ({"files": {"a": "sha256:0"}}, "a is 'sha256:0'"),
        ({"files": {"a": 5}}, ""),
        ({"files": []}, ""),
        ({"programs": ["no/such"]}, "a program that is not among the files"),
        ({"programs": 7}, ""),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    tree: Tree, change: dict[str, Any], found: str
) -> None:
    manifest = os.path.join(tree.path, MANIFEST)
    with open(manifest, encoding="utf-8") as file:
        content = json.load(file)
    with open(manifest, "w", encoding="utf-8") as file:
        json.dump({**content, **change}, file)
    with raises(TreeUnreadable) as raised:
        read_tree(tree.path)
    assert found in raised.value.found


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, '{"format": 1}', "\xff"])
def test_a_manifest_that_is_none_is_refused(tree: Tree, text: str) -> None:
    with open(os.path.join(tree.path, MANIFEST), "w", encoding="latin-1") as file:
        file.write(text)
    with raises(TreeUnreadable):
        read_tree(tree.path)


def test_a_checkout_is_no_tree() -> None:
    assert own_tree() == ""


def test_modes_beyond_that_of_a_program_do_not_matter(tree: Tree) -> None:
    path = os.path.join(tree.path, "lib/a/b.py")
    os.chmod(path, stat.S_IRUSR)
    verify(tree.path)
