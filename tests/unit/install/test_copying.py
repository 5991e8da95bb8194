"""Copying trees, and what is refused: archives that write elsewhere, changed trees."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from integration.install import copying
from integration.install.errors import (
    ArchiveRefused,
    InstallError,
    NoSpace,
    SourceBroken,
    SourceMissing,
    StepFailed,
)
from integration.tree import MANIFEST, Tree, read_tree, verify
from tests.harness.raising import raises
from tests.harness.trees import small_tree

TOP = "containerd-shim-nvidia-1.0"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return small_tree(str(tmp_path / "tree"))


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "target"
    path.mkdir()
    return str(path)


def _archive(tree: Tree, path: Path, *more: tarfile.TarInfo, mode: str = "w") -> str:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload] # a mode is a text
        archive.add(tree.path, TOP)
        for member in more:
            content = io.BytesIO(b"x" * member.size) if member.isreg() else None
            archive.addfile(member, content)
    return str(path)


def _member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0
) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, size
    return member


def test_a_copy_is_the_tree_and_nothing_that_lies_beside_it(tree: Tree, target: str) -> None:
    for name in ("bin/more", "lib/api/__pycache__"):
        with open(os.path.join(tree.path, name), "w"):
            pass
    os.chmod(f"{tree.path}/bin/nvshim", 0o6777)
    copying.copy_tree(tree, tree.path, target)
    copying.verify_copy(tree, target, "1.0-" + tree.digest[:8])
    assert verify(target).files == tree.files
    assert stat.S_IMODE(os.stat(f"{target}/bin/nvshim").st_mode) == 0o755
    assert stat.S_IMODE(os.stat(f"{target}/{MANIFEST}").st_mode) == 0o644


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_an_archive_unpacks_to_the_tree(tree: Tree, target: str, tmp_path: Path, mode: str) -> None:
    archive = _archive(tree, tmp_path / "a.tar", mode=mode)
    seen, size = copying.inspect_source(archive)
    assert (seen.digest, size > os.path.getsize("/bin/sleep")) == (tree.digest, True)
    unpacked = copying.unpack(archive, target)
    copying.verify_copy(seen, target, tree.name)
    assert unpacked.digest == tree.digest


@pytest.mark.parametrize(
    ("member", "found"),
    [
        (_member("/etc/x"), "leads out"),
        (_member(f"{TOP}/../x"), "leads out"),
        (_member(f"{TOP}/lib/../../../x"), "leads out"),
        (_member("elsewhere/x"), "more than one top directory"),
        (_member("x"), "more than one top directory"),
        (_member(f"{TOP}/x", tarfile.SYMTYPE, "/etc"), "leads out"),
        (_member(f"{TOP}/x", tarfile.SYMTYPE, "../.."), "leads out"),
        (_member(f"{TOP}/x", tarfile.LNKTYPE, f"{TOP}/tree.json"), "not a file, directory or link"),
        (_member(f"{TOP}/x", tarfile.CHRTYPE), "not a file, directory or link"),
        (_member(f"{TOP}/x", tarfile.BLKTYPE), "not a file, directory or link"),
        (_member(f"{TOP}/x", tarfile.FIFOTYPE), "not a file, directory or link"),
        (_member(f"{TOP}/runtime/lib/sleep/x"), "below a link"),
        (_member(f"{TOP}/bin/nvshim"), "twice"),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_an_archive_that_would_write_elsewhere_is_refused(
    tree: Tree, target: str, tmp_path: Path, member: tarfile.TarInfo, found: str
) -> None:
    archive = _archive(tree, tmp_path / "a.tar.gz", member)
    with raises(ArchiveRefused, SourceBroken, match=found):
        copying.unpack(archive, target)
    assert sorted(os.listdir(tmp_path)) == ["a.tar.gz", "target", "tree"]


def test_what_an_archive_has_besides_its_list_is_found(
    tree: Tree, target: str, tmp_path: Path
) -> None:
    archive = _archive(tree, tmp_path / "a.tar", _member(f"{TOP}/lib/api/more.py", size=3))
    copying.unpack(archive, target)
    with raises(SourceBroken, match=r"more\.py is not part of it"):
        copying.verify_copy(tree, target, tree.name)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_an_archive_that_is_cut_off_or_damaged_gives_the_whole_tree_or_none(
    tree: Tree, tmp_path: Path, kind: str
) -> None:
    with open(_archive(tree, tmp_path / f"a.tar.{kind}", mode=f"w:{kind}"), "rb") as file:
        content = file.read()
    damaged = str(tmp_path / "damaged")
    refused = 0
    for number, offset in enumerate(range(10, len(content), len(content) // 12)):
        flipped = bytes([content[offset] ^ 0xFF])
        for cut, wrong in enumerate(
            (content[:offset], content[:offset] + flipped + content[offset + 1 :])
        ):
            with open(damaged, "wb") as file:
                file.write(wrong)
            target = str(tmp_path / f"t{number}-{cut}")
            os.mkdir(target)
            try:
                # Some bytes do not matter: padding, and the name in gzip's header.
                copying.verify_copy(copying.unpack(damaged, target), target, tree.name)
            except InstallError:
                refused += 1
            else:
                assert verify(target).digest == tree.digest
    assert refused > 20


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: os.unlink(f"{tree}/lib/api/module0.py"),
        lambda tree: os.truncate(f"{tree}/lib/api/module0.py", 3),
        lambda tree: os.chmod(f"{tree}/bin/nvshim", 0o644),
        lambda tree: os.replace(f"{tree}/runtime/lib/sleep", f"{tree}/runtime/lib/program"),
    ],
    ids=["missing", "changed", "not executable", "a link"],
)  # fmt: skip
def test_a_tree_that_is_not_what_it_says_is_not_copied(
    tree: Tree, target: str, change: Callable[[str], object]
) -> None:
    def install() -> None:
        copying.copy_tree(read_tree(tree.path), tree.path, target)
        copying.verify_copy(tree, target, tree.name)

    change(tree.path)
    with raises(SourceBroken):
        install()


def test_what_is_no_tree_is_said_to_be_none(tmp_path: Path) -> None:
    with raises(SourceMissing, match=r"no tree\.json"):
        copying.inspect_source(str(tmp_path))
    with raises(SourceMissing, match="no such file"):
        copying.inspect_source(str(tmp_path / "nothing"))
    (tmp_path / "text").write_text("no archive")
    with raises(ArchiveRefused, match="damaged"):
        copying.inspect_source(str(tmp_path / "text"))
    (tmp_path / MANIFEST).write_text("{}")
    with raises(SourceBroken):
        copying.inspect_source(str(tmp_path))


def test_an_archive_that_cannot_be_read_here_is_one_line(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _archive(tree, tmp_path / "a.tar")
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/missing")
    with raises(StepFailed, match=r"cannot read .*a\.tar: .*missing.*: no such file"):
        copying.inspect_source(archive)
    monkeypatch.undo()
    denied = PermissionError(errno.EACCES, "Permission denied", archive)
    monkeypatch.setattr(tarfile, "open", Mock(side_effect=denied))
    with raises(StepFailed, match=r"cannot read \S+/a\.tar: permission denied"):
        copying.inspect_source(archive)


def test_an_archive_of_more_than_any_tree_has_is_refused(
    tree: Tree, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = _archive(tree, tmp_path / "a.tar")
    monkeypatch.setattr(copying, "LARGEST", 1000)
    with raises(ArchiveRefused, match="more than"):
        copying.unpack(archive, target)


def test_a_full_disk_is_called_one(
    tree: Tree, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with raises(NoSpace, match="no space left"):
        copying.copy_tree(tree, tree.path, target)
