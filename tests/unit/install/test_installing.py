"""Whole installations of trees that are no more than programs and a list."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from hooks.config import Config
from integration.install import checks, effects, installing, leaving, selftest, usage
from integration.install.effects import Workshop
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
    StillNamed,
)
from integration.install.installing import Installation, collect, install, uninstall
from integration.install.places import Place
from integration.install.status import status
from integration.install.survey import look
from integration.install.trees import problem_of
from integration.tree import Tree, write_tree
from shim import syscalls
from tests.harness.launcher import REPOSITORY
from tests.harness.trees import disk_of_its_own, small_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

PROGRAMS: Final = ["containerd-shim-nvidia-v1", "nvshim"]


@dataclass(frozen=True, slots=True)
class Node:
    """A place to install to, and two trees."""

    directory: str
    place: Place
    old: Tree
    new: Tree

    def install(self, tree: Tree | None = None, **how: Any) -> dict[str, Any]:
        dry_run = how.pop("dry_run", False)
        source = tree.path if tree else ""
        wanted = {"source": source, "test": False, "workshop": Workshop(self.place), **how}
        return install(Installation(self.place, **wanted), dry_run=dry_run)

    def uninstall(self, **how: Any) -> dict[str, Any]:
        return uninstall(self.place, workshop=Workshop(self.place), engines_root="/nowhere", **how)

    def status(self) -> dict[str, Any]:
        return status(self.place, verify=True, engines_root="/nowhere")

    def said(self) -> list[str]:
        """What the program says that is found by the links."""
        link = f"{self.place.bindir}/{PROGRAMS[0]}"
        return subprocess.run([link], capture_output=True, text=True, check=True).stdout.split()

    @property
    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self.place.prefix))
        return []


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with disk_of_its_own(f"{tmp_path}/node") as directory:
        yield Node(
            directory,
            Place(f"{directory}/opt", f"{directory}/bin"),
            small_tree(f"{directory}/old", "1.0", more=1),
            small_tree(f"{directory}/new", "2.0", more=1),
        )


@contextmanager
def _using(tree: str) -> Iterator[None]:
    with subprocess.Popen([f"{tree}/runtime/lib/sleep", "100"]) as process:
        try:
            while not os.readlink(f"/proc/{process.pid}/exe").endswith("busybox"):
                pass
            yield
        finally:
            process.kill()


def test_a_version_is_installed_upgraded_rolled_back_and_removed(node: Node) -> None:
    first = node.install(node.old)
    assert (first["current"], first["changed"]) == (node.old.name, True)
    assert node.said() == [PROGRAMS[0], "1.0"]
    assert node.status()["problems"] == []
    assert node.install(node.old)["changed"] is False
    second = node.install(node.new)
    assert (second["current"], second["previous"]) == (node.new.name, node.old.name)
    assert node.said() == [PROGRAMS[0], "2.0"]
    back = node.install(rollback=True)
    assert (back["current"], back["previous"]) == (node.old.name, node.new.name)
    assert node.said() == [PROGRAMS[0], "1.0"]
    assert node.install(use="2.0")["current"] == node.new.name
    answer = node.uninstall()
    assert (answer["complete"], answer["left"]) == (True, [])
    assert not os.path.exists(node.place.prefix)
    assert os.listdir(node.place.bindir) == []


def test_an_archive_is_installed_as_its_tree(node: Node) -> None:
    archive = f"{node.directory}/a.tar.gz"
    with tarfile.open(archive, "w:gz") as members:
        members.add(node.new.path, "containerd-shim-nvidia-2.0")
    node.install(source=archive)
    assert node.names == [node.new.name, "current"]
    assert node.said() == [PROGRAMS[0], "2.0"]


def test_a_dry_run_says_the_steps_and_takes_none(node: Node) -> None:
    answer = node.install(node.old, dry_run=True)
    assert answer["steps"][0] == f"copy {node.old.path} to {node.old.name} and verify it"
    assert not os.path.exists(node.place.prefix)
    node.install(node.old)
    assert node.uninstall(dry_run=True)["left"] != []
    assert node.names == [node.old.name, "current"]


def test_a_damaged_tree_that_is_in_effect_is_replaced_by_one_beside_it(node: Node) -> None:
    node.install(node.old)
    damaged = f"{node.place.prefix}/{node.old.name}/lib/api/module0.py"
    with open(damaged, "a") as file:
        file.write("#")
    assert [p for p in node.status()["problems"] if "module0.py is changed" in p]
    assert node.install(node.old)["current"] == f"{node.old.name}.2"
    assert os.path.exists(damaged)
    assert node.install(node.old, keep=0)["collected"] == [node.old.name]
    assert node.status()["problems"] == []


def test_a_tree_that_is_used_is_not_removed_before_its_last_process_ends(node: Node) -> None:
    node.install(node.old)
    with _using(f"{node.place.prefix}/{node.old.name}"):
        answer = node.install(node.new, keep=0)
        assert answer["collected"] == []
        assert [each["name"] for each in answer["in_use"]] == [node.old.name]
        assert problem_of(f"{node.place.prefix}/{node.old.name}") == ""
        answer = node.uninstall()
        assert answer["complete"] is False
        assert answer["left"] == [f"{node.place.prefix}/{node.old.name}"]
    assert node.uninstall()["complete"] is True
    assert not os.path.exists(node.place.prefix)


def test_who_begins_to_use_a_tree_while_it_is_removed_keeps_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.install(node.old)
    path = f"{node.place.prefix}/{node.old.name}"
    looked = []

    def is_used(_: Workshop, seen: str) -> bool:
        looked.append(seen)
        return len(looked) == 2

    monkeypatch.setattr(Workshop, "_is_used", is_used)
    node.install(node.new, keep=0)
    assert looked[0] == path
    assert os.path.basename(looked[1]).startswith(".removing-")
    assert problem_of(path) == ""


def test_a_tree_that_a_killed_installer_set_aside_although_it_is_used_gets_its_name_back(
    node: Node,
) -> None:
    node.install(node.old)
    node.install(node.new)
    path, aside = (f"{node.place.prefix}/{name}" for name in (node.old.name, ".removing-00000001"))
    with _using(path):
        os.rename(path, aside)
        node.install(node.new)
        assert problem_of(path) == ""
    os.rename(path, aside)
    node.install(node.new)
    assert node.names == [node.new.name, "current", "previous"]


def test_what_an_installer_works_on_is_no_leftover_while_it_works(node: Node) -> None:
    node.install(node.old)
    os.mkdir(f"{node.place.prefix}/.incoming-00000001")
    assert "interrupted" in node.status()["problems"][0]
    with effects.locked(node.place.prefix, make=False):
        assert (node.status()["being_changed"], node.status()["problems"]) == (True, [])


def test_old_versions_are_collected_when_asked_and_the_previous_one_is_kept(node: Node) -> None:
    oldest = small_tree(f"{node.directory}/oldest", "0.5")
    for tree in (oldest, node.old):
        node.install(tree, keep=9)
    node.install(node.new, keep=9)
    assert len(look(node.place).installed) == 3
    shop = Workshop(node.place)
    assert collect(node.place, keep=1, workshop=shop)["collected"] == [oldest.name]
    assert collect(node.place, keep=1, workshop=shop)["changed"] is False
    assert collect(node.place, keep=0, workshop=shop)["collected"] == [node.old.name]


# -- what stands in the way ------------------------------------------------------------------


def test_a_self_test_that_fails_leaves_the_old_version_in_effect(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.install(node.old)

    def fails(tree: str, *_: object, **__: object) -> None:
        assert problem_of(tree) == ""
        assert look(node.place).current != os.path.basename(tree)
        raise SelfTestFailed("a test", found="nothing")

    monkeypatch.setattr(selftest, "run", fails)
    monkeypatch.setattr(installing, "find_runtime", lambda *_: "runc")
    with pytest.raises(SelfTestFailed):
        node.install(node.new, test=True)
    assert node.names == [node.old.name, "current"]
    node.install(node.new)
    with pytest.raises(SelfTestFailed):
        node.install(rollback=True, test=True)
    # It was there before, and stays.
    assert node.names == [node.old.name, node.new.name, "current", "previous"]
    assert node.said() == [PROGRAMS[0], "2.0"]


def test_without_a_runtime_there_is_no_self_test_and_no_installation(node: Node) -> None:
    shop = Workshop(node.place, runtime="no-such-runtime")
    with pytest.raises(NoRuntimeToTest, match="no-self-test"):
        node.install(node.old, test=True, workshop=shop)
    assert node.names == []


def test_nothing_of_somebody_else_is_replaced_by_a_link(node: Node) -> None:
    os.mkdir(node.place.bindir)
    makers: list[Callable[[str], object]] = [
        lambda path: open(path, "w").close(),
        lambda path: os.symlink("/usr/bin/true", path),
        os.mkdir,
    ]
    for make in makers:
        path = f"{node.place.bindir}/nvshim"
        make(path)
        with pytest.raises(LinkTaken, match="nvshim"):
            node.install(node.old)
        assert node.names == []
        assert [p for p in status(node.place, engines_root="/nowhere")["links"] if p["right"]] == []
        os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def test_links_that_cannot_be_are_refused_before_anything_is_written(node: Node) -> None:
    os.symlink("nowhere", f"{node.directory}/dangling")
    for bindir in ("/etc/passwd", "/etc/passwd/bin", f"{node.directory}/dangling"):
        with pytest.raises(LinkTaken, match="no directory"):
            replace(node, place=replace(node.place, bindir=bindir)).install(node.old)
        assert node.names == []


def test_what_cannot_be_installed_leaves_no_prefix_and_is_named_as_it_was_given(
    node: Node,
) -> None:
    for source, found in (
        ("/dev/null", "no directory or file"),
        ("/nowhere", "no such file"),
        (node.directory, "no tree.json"),
    ):
        with pytest.raises(SourceMissing, match=found):
            node.install(replace(node.old, path=source))
    os.unlink(f"{node.new.path}/tree.json")
    of = {"version": "2.0", "revision": "", "python": "3.11.2"}
    other = write_tree(node.new.path, architecture="s390x", **of)
    with pytest.raises(SourceBroken, match="it is for s390x, and this machine is"):
        node.install(other)
    with open(f"{node.new.path}/tree.json", "w") as file:
        file.write("{")
    with tarfile.open(f"{node.directory}/broken.tar", "w") as archive:
        archive.add(node.new.path, "top")
    with pytest.raises(SourceBroken, match=r"install \S+/broken.tar; found: tree.json: "):
        node.install(replace(node.old, path=f"{node.directory}/broken.tar"))
    assert not os.path.exists(node.place.prefix)
    with pytest.raises(StepFailed, match="no such file"):
        install(Installation(Place("/proc/x/y", ""), source=node.old.path, test=False))


def test_make_uninstall_finds_a_program_although_no_version_is_in_effect(node: Node) -> None:
    words = [f"PREFIX={node.place.prefix}", f"BINDIR={node.place.bindir}"]
    argv = ["make", "--silent", "-C", REPOSITORY, "uninstall", *words]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b""
    node.install(node.old)
    os.unlink(node.place.path("current"))
    assert subprocess.run(argv, capture_output=True, check=True).stdout == b"nvshim 1.0\n"


def test_a_second_installer_is_turned_away_and_a_dead_one_is_in_nobodys_way(node: Node) -> None:
    node.install(node.old)
    fd = os.open(node.place.prefix, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        calls: list[Callable[[], object]] = [lambda: node.install(node.new), node.uninstall]
        for call in calls:
            with pytest.raises(InstallerBusy):
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

    monkeypatch.setattr(effects, "_is_still", is_still)
    node.install(node.old)
    assert asked == [node.place.prefix] * 2


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
    place = replace(node.place, prefix=f"{disk}/opt")
    with pytest.raises(PlaceNotExecutable):
        install(Installation(place, source=node.old.path, test=False))
    syscalls.mount("", disk, "", syscalls.MS_REMOUNT | syscalls.MS_RDONLY)
    with pytest.raises(PlaceReadOnly):
        install(Installation(place, source=node.old.path, test=False))
    assert os.listdir(disk) == []
    links = replace(node.place, bindir=f"{disk}/bin")
    with pytest.raises(PlaceReadOnly, match="no-links"):
        install(Installation(links, source=node.old.path, test=False))


def test_a_disk_that_is_too_small_is_told_before_and_one_that_fills_up_is_left_as_it_was(
    node: Node, small_disk: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("1m")
    place = Place(f"{disk}/opt", node.place.bindir)
    wanted = Installation(place, source=node.old.path, test=False, workshop=Workshop(place))
    with pytest.raises(NoSpace, match="MiB"):
        install(wanted)
    monkeypatch.setattr(checks, "check_space", lambda *_: None)
    with pytest.raises(NoSpace, match="no space left"):
        install(wanted)
    assert not os.path.exists(place.prefix)


def test_a_prefix_that_others_may_change_is_refused(node: Node) -> None:
    os.mkdir(f"{node.directory}/open")
    os.chmod(f"{node.directory}/open", 0o777)
    place = replace(node.place, prefix=f"{node.directory}/open/opt")
    with pytest.raises(PlaceUnsafe, match="others may write"):
        install(Installation(place, source=node.old.path, test=False))
    os.chmod(f"{node.directory}/open", 0o755)
    os.chown(f"{node.directory}/open", 1000, 0)
    with pytest.raises(PlaceUnsafe, match="user 1000"):
        install(Installation(place, source=node.old.path, test=False))


def test_a_prefix_that_another_decides_the_way_to_is_neither_filled_nor_emptied(node: Node) -> None:
    theirs = f"{node.directory}/theirs"
    os.mkdir(theirs)
    os.symlink("../opt", f"{theirs}/link")
    os.symlink(f"{theirs}/link", f"{node.directory}/ours")
    os.chown(theirs, 1000, 1000)
    for prefix in (f"{theirs}/link", f"{node.directory}/ours"):
        other = replace(node, place=replace(node.place, prefix=prefix))
        calls: list[Callable[[], object]] = [
            lambda: other.install(node.old),  # noqa: B023 - called at once
            other.uninstall,
            lambda: collect(other.place, keep=0, workshop=Workshop(other.place)),  # noqa: B023 - likewise
        ]
        for call in calls:
            with pytest.raises(PlaceUnsafe, match="user 1000"):
                call()
    os.chown(theirs, 0, 0)
    with pytest.raises(PlaceUnsafe, match="leads to nothing"):
        replace(node, place=replace(node.place, prefix=f"{node.directory}/ours")).install(node.old)
    os.mkdir(node.place.prefix)
    replace(node, place=replace(node.place, prefix=f"{node.directory}/ours")).install(node.old)
    assert node.names == [node.old.name, "current"]


def test_a_prefix_that_another_makes_at_this_moment_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(path: str) -> None:
        os.makedirs(path, exist_ok=True)
        os.chown(path, 1000, 1000)

    monkeypatch.setattr(effects, "_make_directory", make)
    with pytest.raises(PlaceUnsafe, match="user 1000"):
        node.install(node.old)


def test_a_person_is_shown_no_control_characters_of_what_lies_there(node: Node) -> None:
    os.makedirs(node.place.path("a\x1b[31m\nb"))
    words = ["--prefix", node.place.prefix, "--bindir", node.place.bindir]
    nvshim = [sys.executable, "-m", "integration.cli"]
    done = subprocess.run(
        beside_engines("uninstall", *words), capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 2
    assert "\x1b" not in done.stdout
    node.install(node.old)
    collecting = [*nvshim, "install", "--collect", *words]
    done = subprocess.run(collecting, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert "is in effect, as it was" in done.stdout


def test_a_prefix_that_a_loader_would_misread_is_refused(node: Node) -> None:
    place = replace(node.place, prefix=f"{node.directory}/a:b")
    with pytest.raises(PlaceUnsafe, match="loader"):
        install(Installation(place, source=node.old.path, test=False))


def test_a_damaged_version_is_not_switched_to(node: Node) -> None:
    node.install(node.old)
    node.install(node.new)
    os.unlink(f"{node.place.prefix}/{node.old.name}/lib/api/module0.py")
    for how in ({"rollback": True}, {"use": "1.0"}):
        with pytest.raises(SourceBroken, match=r"module0\.py is missing"):
            node.install(**how)
    assert node.said() == [PROGRAMS[0], "2.0"]


def test_what_is_installed_is_for_everybody_to_look_at_whatever_the_umask(node: Node) -> None:
    umask = os.umask(0o077)
    try:
        node.install(node.old)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(umask)
    tree = f"{node.place.prefix}/{node.old.name}"
    for path in (
        node.place.prefix,
        tree,
        f"{tree}/lib/api",
        f"{tree}/bin/nvshim",
        node.place.bindir,
    ):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o755


def test_only_root_installs(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    calls: list[Callable[[], object]] = [lambda: node.install(node.old), node.uninstall]
    for call in calls:
        with pytest.raises(NotRoot, match="dry-run"):
            call()


def test_a_checkout_is_no_tree_to_install(node: Node) -> None:
    with pytest.raises(SourceMissing, match="make dist"):
        node.install()


def test_with_selinux_new_files_get_their_labels_or_nothing_is_switched(node: Node) -> None:
    programs, selinux = f"{node.directory}/programs", f"{node.directory}/selinux"
    for folder in (programs, selinux):
        os.mkdir(folder)
    with open(f"{selinux}/enforce", "w") as file:
        file.write("1")
    workshop = Workshop(node.place, selinux=selinux, path=programs)
    assert len(node.install(node.new, workshop=workshop)["warnings"]) == 3
    node.uninstall()
    with open(f"{programs}/restorecon", "w") as file:
        file.write("#!/bin/sh\necho no policy >&2\nexit 1\n")
    os.chmod(f"{programs}/restorecon", 0o755)
    with pytest.raises(LabelFailed, match="no policy"):
        node.install(node.old, workshop=workshop)
    assert node.names == []
    with open(f"{programs}/restorecon", "w") as file:
        file.write(f'#!/bin/sh\necho "$@" >>{programs}/said\n')
    assert node.install(node.old, workshop=workshop)["warnings"] == []
    with open(f"{programs}/said") as file:
        said = file.read().splitlines()
    assert said == [
        f"-R {node.place.prefix}/{node.old.name}",
        *(f"-R {node.place.bindir}/{name}" for name in PROGRAMS),
    ]


# -- a killed installer ----------------------------------------------------------------------

_CHANGES: Final = frozenset(
    {"os.rename", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown"}
)


def _killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do something in a child that is killed before its change of that number; whether it was.

    A file that is opened to be written counts as a change.
    """
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            writes = (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_ACCMODE
            )
            if event in _CHANGES or writes:
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        status = 1
        try:
            sys.addaudithook(hook)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without processes: to look at all of them a thousand times takes a minute."""
    monkeypatch.setattr(usage, "_pids", lambda _: [])
    monkeypatch.setattr(usage, "is_blind", lambda *_, **__: False)


def _every_death(work: Callable[[], object], check: Callable[[], None]) -> int:
    number = 0
    while _killed_at(number, work):
        check()
        number += 1
    return number


def _whole(node: Node, *versions: str) -> None:
    """One of these versions is in effect, and whole."""
    survey = look(node.place, check=problem_of)
    current = survey.named(survey.current)
    assert current is not None
    assert current.tree is not None
    assert current.problem == ""
    assert current.tree.version in versions
    assert [e.name for e in survey.installed if e.problem or e.tree is None] == []


def test_an_upgrade_that_is_killed_at_any_change_leaves_one_version_whole_and_is_repaired(
    node: Node, quiet: None
) -> None:
    node.install(node.old)

    def check() -> None:
        _whole(node, "1.0", "2.0")
        assert node.said()[1] in {"1.0", "2.0"}

    # Each begins where the one before was killed, which repairs what that has left.
    assert _every_death(lambda: node.install(node.new), check) > 20
    assert node.names == [node.old.name, node.new.name, "current", "previous"]
    assert sorted(os.listdir(node.place.bindir)) == PROGRAMS
    assert node.said() == [PROGRAMS[0], "2.0"]
    assert node.status()["problems"] == []
    assert look(node.place).previous == node.old.name


def test_each_death_of_a_first_installation_is_repaired_by_the_next_one(
    node: Node, quiet: None
) -> None:
    deaths = 0
    while _killed_at(deaths, lambda: node.install(node.old)):
        deaths += 1
        node.install(node.old)
        assert node.names == [node.old.name, "current"]
        assert sorted(os.listdir(node.place.bindir)) == PROGRAMS
        assert node.status()["problems"] == []
        shutil.rmtree(node.place.prefix)
        shutil.rmtree(node.place.bindir)
    assert deaths > 20


def test_an_uninstallation_that_is_killed_at_any_change_is_finished_by_the_next_one(
    node: Node, quiet: None
) -> None:
    deaths = 0
    while True:
        node.install(node.old)
        node.install(node.new)
        if not _killed_at(deaths, node.uninstall):
            break
        deaths += 1
        # As long as there is a program, it is one of a whole tree.
        if os.path.exists(f"{node.place.bindir}/{PROGRAMS[0]}"):
            _whole(node, "2.0")
        node.uninstall()
        assert not os.path.exists(node.place.prefix)
        assert os.listdir(node.place.bindir) == []
    assert deaths > 20


# -- what stays behind -----------------------------------------------------------------------


def test_a_purge_removes_what_has_our_names_and_nothing_else(tmp_path: Path) -> None:
    state, layers = tmp_path / "state", tmp_path / "containerd-shim-nvidia" / "layers"
    config = tmp_path / "etc" / "containerd-shim-nvidia" / "config.toml"
    for folder in (state / "cdi", layers, config.parent):
        folder.mkdir(parents=True, mode=0o700)
    (state / "inventory.json").write_text("{}")
    (state / "cdi" / "1-2.json").write_text("{}")
    (state / "mine").write_text("")
    gone_boot = layers / ("0" * 8 + "-" + "a" * 64)
    gone_boot.mkdir(mode=0o700)
    config.write_text("")
    settings = Config(state=str(state), layers=str(layers))
    assert leaving.purge(settings, in_use=True, config_path=str(config)) == [str(layers)]
    assert (config.exists(), (state / "inventory.json").exists()) == (True, True)
    assert not gone_boot.exists()
    gone = leaving.purge(settings, in_use=False, config_path=str(config))
    assert gone == [str(config)]
    assert sorted(os.listdir(state)) == ["mine"]
    assert sorted(os.listdir(tmp_path)) == ["etc", "state"]
    assert os.listdir(tmp_path / "etc") == []


def test_engines_that_name_the_shim_are_found_and_comments_are_not(tmp_path: Path) -> None:
    for name, text in {
        "etc/containerd/config.toml": "# runtime_type = 'io.containerd.nvidia.v1'\n",
        "etc/containerd/conf.d/99-x.toml": "runtime_type = 'io.containerd.nvidia.v1'\n",
        "etc/docker/daemon.json": '{"runtimes": {"runtimeType": "/x/containerd-shim-nvidia-v1"}}',
        "etc/crio/crio.conf.d/10-crun.conf": "[crio.runtime]\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert leaving.mentions(str(tmp_path)) == [
        f"{tmp_path}/etc/containerd/conf.d/99-x.toml", f"{tmp_path}/etc/docker/daemon.json",
    ]  # fmt: skip


def beside_engines(*words: str, **files: str) -> list[str]:
    """A command of nvshim, on a machine whose /etc has nothing but files of engines."""
    # The rest of /etc is of no use to it.
    lines = ["mount -t tmpfs -o mode=755 none /etc", f"cd {REPOSITORY}"]
    for name, text in files.items():
        path = {"containerd": "/etc/containerd/config.toml", "docker": "/etc/docker/daemon.json"}
        lines.append(f"mkdir -p {os.path.dirname(path[name])}; echo '{text}' >{path[name]}")
    script = "; ".join(["set -e", *lines, 'exec "$@"'])
    return [
        "unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh",
        sys.executable, "-m", "integration.cli", *words,
    ]  # fmt: skip


def test_what_an_engine_still_names_is_not_uninstalled_but_by_force(node: Node) -> None:
    node.install(node.old)
    shim = node.place.path("current/bin/containerd-shim-nvidia-v1")
    words = ("uninstall", "--prefix", node.place.prefix, "--bindir", node.place.bindir)
    before = (node.names, os.listdir(node.place.bindir))

    def done(*more: str, **engines: str) -> subprocess.CompletedProcess[str]:
        argv = beside_engines(*words, *more, **engines)
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    engines = {"containerd": f'runtime_path = "{shim}"', "docker": f'{{"path": "{shim}"}}'}
    refused = done(**engines)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("NVSHIM-E2637 still-named: ")
    for text in (
        "/etc/containerd/config.toml, /etc/docker/daemon.json",
        "first run nvshim configure containerd --remove, then run nvshim configure docker --remove",
        "--force",
    ):
        assert text in refused.stderr
    assert (node.names, os.listdir(node.place.bindir)) == before
    dry = done("--dry-run", docker=engines["docker"])
    assert dry.returncode == 3
    assert "run nvshim configure docker --remove, or its pods will fail" in dry.stdout
    # What another installation is named by does not keep this one.
    assert done(containerd='runtime_path = "/elsewhere/containerd-shim-nvidia-v1"').returncode == 0
    assert node.names == []
    node.install(node.old)
    forced = done("--force", **engines)
    assert forced.returncode == 0, forced.stderr
    assert node.names == []
    assert "/etc/docker/daemon.json still names the shim" in forced.stdout


def test_an_engine_names_the_shim_that_it_would_find(node: Node, tmp_path: Path) -> None:
    root = str(tmp_path / "machine")
    config = f"{root}/etc/containerd/config.toml"
    os.makedirs(os.path.dirname(config))
    with open(config, "w") as file:
        file.write('runtime_type = "io.containerd.nvidia.v1"\n')
    places = [
        replace(node, place=Place(f"{root}/{name}", f"{root}/{bindir}"))
        for name, bindir in (("first", "usr/local/bin"), ("second", "usr/bin"))
    ]
    for each in places:
        each.install(node.old)
    for each, named in ((places[1], False), (places[0], True)):
        do = functools.partial(
            uninstall, each.place, workshop=Workshop(each.place), engines_root=root
        )
        if named:
            with pytest.raises(StillNamed):
                do()
            os.unlink(config)
        assert do()["complete"] is True


def test_a_status_without_an_installation_says_so_and_which_engines_will_miss_it(
    node: Node, tmp_path: Path
) -> None:
    os.makedirs(tmp_path / "etc/docker")
    (tmp_path / "etc/docker/daemon.json").write_text('"io.containerd.nvidia.v1"')
    found = status(node.place, engines_root=str(tmp_path))["problems"]
    assert found == [
        f"nothing is installed below {node.place.prefix}",
        f"{tmp_path}/etc/docker/daemon.json names a shim that is not there",
    ]
