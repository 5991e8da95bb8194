"""Read a process from procfs only. Opening its files could block."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from integration.containers.cgroups import cgroups_in
from integration.containers.node_processes import node_processes
from integration.containers.procfs import Procfs
from tests.harness.fuse import FILE, fuse
from tests.harness.launcher import REPOSITORY

ROOT: Final = pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces")
WAITS: Final = "import os, sys; fds = [os.open(p, os.O_RDONLY) for p in sys.argv[1:]];"
WAITS_ON: Final = WAITS + " print(1, flush=True); sys.stdin.read()"


@contextmanager
def process(*files: str, within: tuple[str, ...] = (), cwd: str = "/") -> Iterator[int]:
    """Start a process that has files open."""
    with subprocess.Popen(
        [*within, sys.executable, "-c", WAITS_ON, *files],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=cwd,
    ) as started:  # fmt: skip
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == b"1\n"
            text = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text("ascii")
            yield int(text.split()[0]) if text.split() else started.pid
        finally:
            started.kill()


def test_a_file_is_open_whatever_it_is_called_where_it_is(tmp_path: Path) -> None:
    lock, other = tmp_path / "lock", tmp_path / "other"
    other.mkdir()
    lock.touch()
    (other / "lock").touch()
    procfs = Procfs()
    with process(str(lock)) as has, process(str(other / "lock")) as namesake:
        assert procfs.has_open(has, str(lock))
        assert not procfs.has_open(namesake, str(lock))
        assert not procfs.has_open(has, str(tmp_path / "none"))
        (tmp_path / "none").touch()
        assert not procfs.has_open(has, str(tmp_path / "none"))


def test_a_process_without_a_command_line_has_no_options(tmp_path: Path) -> None:
    # One that has ended, and whose parent has not waited for it yet.
    for pid, words in ((7, b"containerd\0--config\0/etc/c.toml\0"), (8, b"")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / f"{pid}/status").write_text("Name:\tcontainerd\n", "ascii")
        (tmp_path / f"{pid}/comm").write_text("containerd\n", "ascii")
        (tmp_path / f"{pid}/cmdline").write_bytes(words)
    found = {each.pid: each for each in node_processes(str(tmp_path))}
    assert [found[pid].option("--config", "-c") for pid in (7, 8)] == ["/etc/c.toml", ""]


@ROOT
def test_a_file_is_open_in_a_namespace_where_it_is_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here/lock").touch()
    bind = f'mount --bind {tmp_path}/here {tmp_path}/there && exec "$@"'
    within = ("unshare", "--mount", "sh", "-c", bind, "sh")
    with process(f"{tmp_path}/there/lock", within=within) as pid:
        assert Procfs().has_open(pid, f"{tmp_path}/here/lock")


@ROOT
def test_a_file_that_has_the_name_and_number_of_ours_elsewhere_is_another(tmp_path: Path) -> None:
    def fill(place: str) -> str:
        return f"mount -t tmpfs tmpfs {place} && touch {place}/lock"

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here, there = f"{tmp_path}/here", f"{tmp_path}/there"
    within = ("unshare", "--mount", "sh", "-c", f'{fill(there)} && exec "$@"', "sh")
    subprocess.run(["sh", "-c", fill(here)], check=True)
    try:
        with process(f"{there}/lock", within=within) as pid, process(f"{here}/lock") as ours:
            procfs = Procfs()
            (number,) = [n for n, p in procfs.descriptors(pid).items() if p.endswith("/lock")]
            file = procfs.open_file(pid, number)
            assert file is not None
            assert file.inode == os.stat(f"{here}/lock").st_ino
            assert not procfs.has_open(pid, f"{here}/lock")
            assert procfs.has_open(ours, f"{here}/lock")
    finally:
        subprocess.run(["umount", "--lazy", here], check=True)


@ROOT
def test_a_path_leads_where_the_mounts_of_a_process_have_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "in").mkdir(parents=True)
    one, two = f"{tmp_path}/one/in", f"{tmp_path}/two/in"
    procfs = Procfs()
    with process() as ours:
        assert procfs.is_at(ours, one)
    same = ("unshare", "--mount", "sh", "-c", 'exec "$@"', "sh")
    with process(within=same) as pid:
        assert Procfs().is_at(pid, one)
    covered = f'mount --bind {tmp_path}/two {tmp_path}/one && exec "$@"'
    with process(within=("unshare", "--mount", "sh", "-c", covered, "sh")) as pid:
        assert not Procfs().is_at(pid, one)
        assert Procfs().is_at(pid, two)


@ROOT
@pytest.mark.parametrize(
    ("flags", "contained", "own"),
    [
        ((), False, True),
        (("--mount",), False, False),
        (("--pid", "--fork", "--kill-child"), False, True),
        (("--mount", "--pid", "--fork", "--kill-child"), True, False),
        (("--mount", "--user", "--map-root-user"), True, False),
    ],
)
def test_whose_a_process_is_is_told_by_its_namespaces(
    flags: tuple[str, ...], contained: bool, own: bool
) -> None:
    with process(within=("unshare", *flags) if flags else ()) as pid:
        assert Procfs().is_contained(pid) is contained
        assert Procfs().is_own(pid) is own


@ROOT
def test_a_process_of_another_user_is_not_the_nodes_own() -> None:
    with process(within=("setpriv", "--reuid=65534", "--clear-groups")) as pid:
        assert not Procfs().is_own(pid)
        assert Procfs().words(pid)


@ROOT
def test_a_file_that_is_called_as_ours_is_on_a_volume_that_does_not_answer(tmp_path: Path) -> None:
    ask = "import sys; from integration.containers.procfs import Procfs; p = Procfs();"
    ask += " print(p.has_open(int(sys.argv[1]), sys.argv[2]))"
    (tmp_path / FILE).touch()
    with (
        fuse(str(tmp_path / "volume")) as volume,
        process(f"{volume.mount_point}/{FILE}") as pid,
    ):
        volume.hang()
        done = subprocess.run(
            [sys.executable, "-c", ask, str(pid), str(tmp_path / FILE)],
            cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert not [line for line in volume.askers if os.getpid() in line]
        volume.go_on()
    assert done.stdout == "False\n"


# What ends a line for Python, and not for the kernel.
ENDS: Final = ["\r", "\v", "\f", "\x1c", "\x85", "\u2028"]


def write(proc: Path, pid: int, name: str, text: str) -> None:
    """Write a file of a process of a procfs, with the newlines as they are."""
    file = proc / str(pid) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(os.fsencode(text))


@pytest.mark.parametrize("end", ENDS)
def test_a_process_cannot_print_a_line_by_its_name(tmp_path: Path, end: str) -> None:
    users = "Uid:\t65534\t65534\t65534\t65534\n"
    write(tmp_path, 7, "status", f"Name:\t{end}Uid:0 0 0 0\nUmask:\t0022\n{users}")
    assert Procfs(str(tmp_path)).users(7) == [65534] * 4


@pytest.mark.parametrize("end", ENDS)
def test_a_process_cannot_print_a_line_by_a_file_that_it_maps(tmp_path: Path, end: str) -> None:
    path = f"/tmp/a{end}7f10-7f20 r--p 00000000 zz:00 5 /dev/nvidia0"
    write(tmp_path, 7, "maps", f"7f00-7f10 r--p 00000000 fe:00 4 {path}\n")
    (mapped,) = Procfs(str(tmp_path)).mappings(7)
    assert (mapped.inode, mapped.path) == (4, path)


@pytest.mark.parametrize("end", ENDS)
def test_a_process_cannot_print_a_line_by_its_cgroup(end: str) -> None:
    assert cgroups_in(f"0::/its/a{end}0::/pods/other\n") == (("", f"/its/a{end}0::/pods/other"),)


@pytest.mark.parametrize("point", ["/a\r-\vb\vc", "/a\v-\vb", "/a"])
def test_a_mount_has_any_name_and_source(tmp_path: Path, point: str) -> None:
    write(tmp_path, 7, "mountinfo", f"36 35 0:9 / {point} rw,noatime master:1 - fuse  rw,sync\n")
    (mount,) = Procfs(str(tmp_path)).mounts(7)
    assert (mount.id, mount.point, mount.kind, mount.source) == (36, point, "fuse", "")
    assert mount.options == ("noatime", "rw", "sync")


@ROOT
def test_a_process_that_is_called_as_a_line_of_roots_is_not_roots() -> None:
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\vUid:0 0 0 0'); print(1, flush=True)"
    with subprocess.Popen(
        ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c",
         f"{rename}; input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as started:  # fmt: skip
        assert started.stdout is not None
        assert started.stdout.readline() == b"1\n"
        assert not Procfs().is_own(started.pid, is_roots=True)
        started.communicate(b"\n")
