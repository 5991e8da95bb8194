"""Conditions that refuse an installation, and leave the node unchanged."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from integration.install import checks, effects, installing, selftest
from integration.install.effects import Installer
from integration.install.errors import (
    InstallerBusy,
    LabelFailed,
    LinkTaken,
    NoRuntimeToTest,
    NoSpace,
    NotRoot,
    PlaceNotExecutable,
    PlaceReadOnly,
    PlaceUnsafe,
    SelfTestFailed,
    SourceBroken,
    SourceMissing,
    StepFailed,
)
from integration.install.installing import InstallOptions, collect, install
from integration.install.status import status
from integration.install.survey import take_survey
from integration.install.trees import problem_of
from integration.install_layout import InstallLayout
from integration.tree import MANIFEST, Tree
from shim import syscalls
from tests.harness.launcher import REPOSITORY
from tests.harness.own_process import restored
from tests.harness.raising import raises
from tests.harness.trees import small_tree
from tests.unit.install.nodes import PROGRAMS, Node, beside_engines
from tools.dist.manifest import write_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_a_self_test_that_fails_leaves_the_old_version_in_effect(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.install(node.old)

    def fails(tree: str, *_: object, **__: object) -> None:
        assert problem_of(tree) == ""
        assert take_survey(node.layout).current != os.path.basename(tree)
        raise SelfTestFailed("a test", found="nothing")

    monkeypatch.setattr(selftest, "run", fails)
    monkeypatch.setattr(installing, "find_runtime", lambda *_: "runc")
    with pytest.raises(SelfTestFailed):
        node.install(node.new, test=True)
    assert node.names == [node.old.name, "current"]
    node.install(node.new)
    with pytest.raises(SelfTestFailed):
        node.install(rollback=True, test=True)
    # It existed before, and stays.
    assert node.names == [node.old.name, node.new.name, "current", "previous"]
    assert node.said() == [PROGRAMS[0], "2.0"]


def _that_says(path: str, version: str, answer: object) -> Tree:
    """Make a tree whose ``nvshim config validate`` gives this answer."""
    of = small_tree(path, version)
    os.unlink(f"{path}/{MANIFEST}")
    with open(f"{path}/bin/nvshim", "w", encoding="utf-8") as file:
        file.write(f"#!/bin/sh\ncat <<end\n{json.dumps(answer)}\nend\n")
    return write_tree(
        path, version=version, revision=of.revision, architecture=of.architecture, python=of.python
    )


def test_a_version_that_cannot_read_the_configuration_is_not_switched_to(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "run", lambda *_, **__: None)
    monkeypatch.setattr(installing, "find_runtime", lambda *_: "runc")
    wrong = {"valid": False, "error": {"message": "NVSHIM-E0503: unknown key later"}}
    trees = [
        _that_says(f"{node.directory}/{version}", version, answer)
        for version, answer in (("1.5", wrong), ("2.5", {"valid": True}), ("1.4", wrong))
    ]
    # The first installation, and from a version to which it also is wrong: nothing gets worse.
    for tree in trees[:2]:
        assert node.install(tree, test=True)["current"] == tree.name
    for how in ({"rollback": True}, {"tree": trees[2]}):
        with pytest.raises(SelfTestFailed, match=r"configuration: .*unknown key later"):
            node.install(**how, test=True)
    assert node.names == [trees[0].name, trees[1].name, "current", "previous"]
    assert node.install(rollback=True)["current"] == trees[0].name
    assert node.install(trees[2], test=True)["current"] == trees[2].name


def test_without_a_runtime_there_is_no_self_test_and_no_installation(node: Node) -> None:
    shop = Installer(node.layout, runtime="no-such-runtime")
    with raises(NoRuntimeToTest, match="no-self-test"):
        node.install(node.old, test=True, installer=shop)
    assert node.names == []


def test_nothing_of_somebody_else_is_replaced_by_a_link(node: Node) -> None:
    os.mkdir(node.layout.bindir)
    makers: list[Callable[[str], object]] = [
        lambda path: open(path, "w").close(),
        lambda path: os.symlink("/usr/bin/true", path),
        os.mkdir,
    ]
    for make in makers:
        path = f"{node.layout.bindir}/nvshim"
        make(path)
        with raises(LinkTaken, match="nvshim"):
            node.install(node.old)
        assert node.names == []
        assert [
            p for p in status(node.layout, engines_root="/nowhere")["links"] if p["right"]
        ] == []
        os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def test_links_that_cannot_be_are_refused_before_anything_is_written(node: Node) -> None:
    os.symlink("nowhere", f"{node.directory}/dangling")
    for bindir in ("/etc/passwd", "/etc/passwd/bin", f"{node.directory}/dangling"):
        with raises(LinkTaken, match="is not a directory"):
            replace(node, layout=replace(node.layout, bindir=bindir)).install(node.old)
        assert node.names == []


def test_what_cannot_be_installed_leaves_no_prefix_and_is_named_as_it_was_given(
    node: Node,
) -> None:
    for source, found in (
        ("/dev/null", "not a directory or file"),
        ("/nowhere", "no such file"),
        (node.directory, "no tree.json"),
    ):
        with raises(SourceMissing, match=found):
            node.install(replace(node.old, path=source))
    os.unlink(f"{node.new.path}/tree.json")
    of = {"version": "2.0", "revision": "", "python": "3.11.2"}
    other = write_tree(node.new.path, architecture="s390x", **of)
    with raises(SourceBroken, match="it is for s390x, and this machine is"):
        node.install(other)
    with open(f"{node.new.path}/tree.json", "w") as file:
        file.write("{")
    with tarfile.open(f"{node.directory}/broken.tar", "w") as archive:
        archive.add(node.new.path, "top")
    with raises(SourceBroken, match=r"install \S+/broken.tar: tree.json: "):
        node.install(replace(node.old, path=f"{node.directory}/broken.tar"))
    assert not os.path.exists(node.layout.prefix)
    too_long = InstallLayout(f"{node.directory}/{'x' * 256}/y", "")
    with raises(PlaceUnsafe, match=r"cannot follow /.*: file name too long\. Choose another"):
        install(InstallOptions(too_long, source=node.old.path, test=False))


def test_a_disk_that_fails_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "makedirs", fail)
    with raises(StepFailed, match="put/output error"):
        node.install(node.old)
    assert not os.path.exists(node.layout.prefix)


def test_make_uninstall_finds_a_program_although_no_version_is_in_effect(node: Node) -> None:
    words = [f"PREFIX={node.layout.prefix}", f"BINDIR={node.layout.bindir}"]
    argv = ["make", "--silent", "-C", REPOSITORY, "uninstall", *words]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b""
    node.install(node.old)
    os.unlink(node.layout.path("current"))
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b"nvshim 1.0\n"


def test_a_second_installer_is_turned_away_and_a_dead_one_is_in_nobodys_way(node: Node) -> None:
    node.install(node.old)
    fd = os.open(node.layout.prefix, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        calls: list[Callable[[], object]] = [lambda: node.install(node.new), node.uninstall]
        for call in calls:
            with raises(InstallerBusy):
                call()
    finally:
        os.close(fd)
    assert node.install(node.new)["current"] == node.new.name


def test_an_installer_that_waited_while_the_prefix_was_removed_locks_the_new_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def is_still(fd: int, path: str) -> bool:
        asked.append(path)
        return len(asked) > 1

    monkeypatch.setattr(effects, "_is_same_directory", is_still)
    node.install(node.old)
    assert asked == [node.layout.prefix] * 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., str]]:
    path = str(tmp_path / "disk")
    os.mkdir(path)
    mounted = []

    def mount(size: str = "64m", flags: int = 0) -> str:
        syscalls.mount("tmpfs", path, "tmpfs", flags, f"size={size},mode=755")
        mounted.append(path)
        return path

    yield mount
    for each in mounted:
        syscalls.umount(each, syscalls.MNT_DETACH)


def test_a_place_that_is_no_place_is_refused_before_anything_is_written(
    node: Node, small_disk: Callable[..., str]
) -> None:
    disk = small_disk("64m", syscalls.MS_NOEXEC)
    layout = replace(node.layout, prefix=f"{disk}/opt")
    with raises(PlaceNotExecutable):
        install(InstallOptions(layout, source=node.old.path, test=False))
    syscalls.mount("", disk, "", syscalls.MS_REMOUNT | syscalls.MS_RDONLY)
    with raises(PlaceReadOnly):
        install(InstallOptions(layout, source=node.old.path, test=False))
    assert os.listdir(disk) == []
    links = replace(node.layout, bindir=f"{disk}/bin")
    with raises(PlaceReadOnly, match="no-links"):
        install(InstallOptions(links, source=node.old.path, test=False))


def test_a_disk_that_is_too_small_is_told_before_and_one_that_fills_up_is_left_as_it_was(
    node: Node, small_disk: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("32k")
    layout = InstallLayout(f"{disk}/opt", node.layout.bindir)
    wanted = InstallOptions(layout, source=node.old.path, test=False, installer=Installer(layout))
    with raises(NoSpace, match="MiB"):
        install(wanted)
    monkeypatch.setattr(checks, "check_space", lambda *_: None)
    with raises(NoSpace, match="no space left"):
        install(wanted)
    assert not os.path.exists(layout.prefix)


def test_a_prefix_that_others_may_change_is_refused(node: Node) -> None:
    os.mkdir(f"{node.directory}/open")
    os.chmod(f"{node.directory}/open", 0o777)
    layout = replace(node.layout, prefix=f"{node.directory}/open/opt")
    with raises(PlaceUnsafe, match="others may write"):
        install(InstallOptions(layout, source=node.old.path, test=False))
    os.chmod(f"{node.directory}/open", 0o755)
    os.chown(f"{node.directory}/open", 1000, 0)
    with raises(PlaceUnsafe, match="user 1000"):
        install(InstallOptions(layout, source=node.old.path, test=False))


def test_a_prefix_that_another_decides_the_way_to_is_neither_filled_nor_emptied(node: Node) -> None:
    theirs = f"{node.directory}/theirs"
    os.mkdir(theirs)
    os.symlink("../opt", f"{theirs}/link")
    os.symlink(f"{theirs}/link", f"{node.directory}/ours")
    os.chown(theirs, 1000, 1000)
    for prefix in (f"{theirs}/link", f"{node.directory}/ours"):
        other = replace(node, layout=replace(node.layout, prefix=prefix))
        calls: list[Callable[[], object]] = [
            lambda: other.install(node.old),  # noqa: B023 - called at once
            other.uninstall,
            lambda: collect(other.layout, keep=0, installer=Installer(other.layout)),  # noqa: B023 - as above
        ]
        for call in calls:
            with raises(PlaceUnsafe, match="user 1000"):
                call()
    os.chown(theirs, 0, 0)
    with raises(PlaceUnsafe, match="is a link to nothing"):
        replace(node, layout=replace(node.layout, prefix=f"{node.directory}/ours")).install(
            node.old
        )
    os.mkdir(node.layout.prefix)
    replace(node, layout=replace(node.layout, prefix=f"{node.directory}/ours")).install(node.old)
    assert node.names == [node.old.name, "current"]


def test_a_prefix_that_another_makes_at_this_moment_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: str) -> None:
        os.makedirs(path, exist_ok=True)
        os.chown(path, 1000, 1000)

    monkeypatch.setattr(effects, "_make_directory", make)
    with raises(PlaceUnsafe, match="user 1000"):
        node.install(node.old)


def test_a_person_is_shown_no_control_characters_of_what_lies_there(node: Node) -> None:
    os.makedirs(node.layout.path("a\x1b[31m\nb"))
    words = ["--prefix", node.layout.prefix, "--bindir", node.layout.bindir]
    nvshim = [sys.executable, "-m", "integration.cli"]
    done = subprocess.run(
        beside_engines("uninstall", *words), capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 2
    assert "\x1b" not in done.stdout
    node.install(node.old)
    collecting = [*nvshim, "install", "--collect", *words]
    done = subprocess.run(collecting, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert "is still current" in done.stdout


def test_a_prefix_that_a_loader_would_misread_is_refused(node: Node) -> None:
    layout = replace(node.layout, prefix=f"{node.directory}/a:b")
    with raises(PlaceUnsafe, match="loader"):
        install(InstallOptions(layout, source=node.old.path, test=False))


def test_a_damaged_version_is_not_switched_to(node: Node) -> None:
    node.install(node.old)
    node.install(node.new)
    os.unlink(f"{node.layout.prefix}/{node.old.name}/lib/api/module0.py")
    for how in ({"rollback": True}, {"use": "1.0"}):
        with raises(SourceBroken, match=r"module0\.py is missing"):
            node.install(**how)
    assert node.said() == [PROGRAMS[0], "2.0"]


def test_what_is_installed_is_for_everybody_to_look_at_whatever_the_umask(node: Node) -> None:
    with restored():
        os.umask(0o077)
        node.install(node.old)
        assert os.umask(0o077) == 0o077
    tree = f"{node.layout.prefix}/{node.old.name}"
    for path in (
        node.layout.prefix,
        tree,
        f"{tree}/lib/api",
        f"{tree}/bin/nvshim",
        node.layout.bindir,
    ):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o755


def test_only_root_installs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    calls: list[Callable[[], object]] = [lambda: node.install(node.old), node.uninstall]
    for call in calls:
        with raises(NotRoot, match="dry-run"):
            call()


def test_a_checkout_is_no_tree_to_install(node: Node) -> None:
    with raises(SourceMissing, match="make dist"):
        node.install()


def test_with_selinux_new_files_get_their_labels_or_nothing_is_switched(node: Node) -> None:
    programs, selinux = f"{node.directory}/programs", f"{node.directory}/selinux"
    for folder in (programs, selinux):
        os.mkdir(folder)
    with open(f"{selinux}/enforce", "w") as file:
        file.write("1")
    installer = Installer(node.layout, selinux=selinux, path=programs)
    assert len(node.install(node.new, installer=installer)["warnings"]) == 3
    node.uninstall()
    with open(f"{programs}/restorecon", "w") as file:
        file.write("#!/bin/sh\necho no policy >&2\nexit 1\n")
    os.chmod(f"{programs}/restorecon", 0o755)
    with raises(LabelFailed, match="no policy"):
        node.install(node.old, installer=installer)
    assert node.names == []
    with open(f"{programs}/restorecon", "w") as file:
        file.write(f'#!/bin/sh\necho "$@" >>{programs}/said\n')
    assert node.install(node.old, installer=installer)["warnings"] == []
    with open(f"{programs}/said") as file:
        said = file.read().splitlines()
    assert said == [
        f"-R {node.layout.prefix}/{node.old.name}",
        *(f"-R {node.layout.bindir}/{name}" for name in PROGRAMS),
    ]
