"""Hostile images that try to make a placement read, write or wait for files outside of them.

Each image is a directory on a real file system, next to a canary: a tree that the image's links
point to, by absolute paths, by "..", and through procfs. The test runs a whole placement into the
image and compares every byte, mode, owner and change time of the canary. A control shows that the
same traps catch a program that joins paths.

A placement may succeed inside the image or fail with one of our errors. It must not block, escape
or leave partial results.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from itertools import count
from typing import TYPE_CHECKING, Final

import pytest

from hooks.errors import RootfsError
from hooks.image.layout import read_layout
from hooks.image.placement import place
from hooks.image.rootfs import Rootfs
from hooks.plan import CachedLibrary, Link, Mount, Plan
from hooks.words import Arch
from tests.security.conftest import THOROUGH
from tests.unit.hooks.image.images import debian, link, put, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

pytestmark = [
    pytest.mark.security,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: what root may do is at stake"),
]

REPOSITORY: Final = os.path.dirname(os.path.abspath(__file__)).rsplit("/tests/", 1)[0]
MULTIARCH: Final = "/usr/lib/x86_64-linux-gnu"

# The directories and files that a placement reads or writes.
DIRECTORIES: Final = (
    "/etc",
    "/etc/ld.so.conf.d",
    "/usr",
    "/usr/lib",
    MULTIARCH,
    "/usr/lib64",
    "/lib64",
    "/opt",
)
FILES: Final = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d/00-containerd-shim-nvidia.conf",
    "/etc/ld-musl-x86_64.path",
    f"{MULTIARCH}/libcuda.so.535.1",
    f"{MULTIARCH}/libcuda.so.1",
    f"{MULTIARCH}/libc.so.6",
    "/usr/lib64/ld-linux-x86-64.so.2",
    "/lib/ld-musl-x86_64.so.1",
    "/usr/bin/nvidia-smi",
)


class Trap:
    """An image, and next to it the canary that must not change."""

    def __init__(self, directory: str) -> None:
        self.canary = f"{directory}/canary"
        self.image = f"{directory}/image"
        # It looks like a root, so that links to it or to a part of it work.
        for path in ("/etc/ld.so.conf.d/x.conf", f"{MULTIARCH}/libc.so.6", "/etc/ld.so.cache"):
            put(self.canary, path, b"canary")
        os.mkdir(self.image)
        debian(self.image)
        self.before = self.fingerprint()

    def fingerprint(self) -> object:
        """Return all properties of the canary that a write would change."""
        times = {
            path: os.lstat(self.canary + path).st_ctime_ns for path in ("", *tree(self.canary))
        }
        return tree(self.canary), times

    def plan(self, home: str) -> Plan:
        """Return a plan that writes to every kind of place."""
        return Plan(
            mounts=(
                Mount("/etc/hostname", f"{home}/libcuda.so.535.1"),
                Mount("/etc/hostname", "/usr/bin/nvidia-smi"),
                Mount("/etc", "/usr/share/nvidia"),
            ),
            links=(Link(f"{home}/libcuda.so.1", "libcuda.so.535.1"),),
            libraries=(CachedLibrary("libcuda.so.1", f"{home}/libcuda.so.1", Arch.X86_64),),
            library_directories=("/opt/nvidia/lib",),
        )

    def spring(self) -> RootfsError | None:
        """Run a placement as the engine does; return its error, or None."""
        with Rootfs.open(self.image) as rootfs:
            layout = read_layout(rootfs, (Arch.X86_64, Arch.I386))
            # Also the directories that a loader can be configured to search.
            homes = (layout.library_directory(Arch.X86_64), MULTIARCH, "/usr/lib64")
            refusal = None
            for home in dict.fromkeys(homes):
                try:
                    place(rootfs, self.plan(home), layout, f"{self.image}-staging")
                except RootfsError as error:
                    refusal = error
            return refusal

    def sprung(self) -> bool:
        return self.fingerprint() != self.before


@pytest.fixture
def trap(tmp_path: Path) -> Trap:
    return Trap(str(tmp_path))


def exchange_for_link(trap: Trap, path: str, target: str) -> None:
    """Replace ``path`` in the image with a link."""
    whole = trap.image + path
    if os.path.islink(whole) or os.path.isfile(whole):
        os.unlink(whole)
    elif os.path.isdir(whole):
        shutil.rmtree(whole)
    link(trap.image, path, target)


WAYS_OUT: Final = {
    "absolute": "{canary}{path}",
    "absolute, to nothing yet": "{canary}/new",
    "up and up": "../../../../../../../../../../../../../..{canary}{path}",
    "up from the image": "{up}canary{path}",
    "through procfs": "/proc/self/root{canary}{path}",
    "through a working directory": "/proc/self/cwd",
    "through a descriptor": "/proc/self/fd/0",
    "to the root": "/",
    "to itself": "{path}",
    "to its directory": ".",
    "to nothing": "/nowhere/at/all",
    "to a place of the machine": "/tmp",
}


def pairs(paths: Iterable[str], ways: Iterable[str]) -> list[tuple[str, str]]:
    """Return each path with a third of the ways out, in turn; with all of them if thorough."""
    every = 1 if THOROUGH else 3
    return [
        (path, way)
        for first, path in enumerate(paths)
        for number, way in enumerate(ways, start=first)
        if number % every == 0
    ]


@pytest.mark.parametrize(("path", "way"), pairs((*DIRECTORIES, *FILES), WAYS_OUT))
def test_a_link_at_any_place_leads_nowhere_outside(trap: Trap, path: str, way: str) -> None:
    up = "../" * path.count("/")
    target = WAYS_OUT[way].format(canary=trap.canary, path=path, up=up)
    exchange_for_link(trap, path, target)
    trap.spring()
    assert not trap.sprung()


def test_links_at_all_places_at_once_lead_nowhere_outside(trap: Trap) -> None:
    for path in reversed((*DIRECTORIES, *FILES)):
        exchange_for_link(trap, path, f"{trap.canary}{path}")
    trap.spring()
    assert not trap.sprung()


@pytest.mark.parametrize("path", ["/etc", MULTIARCH, "/etc/ld.so.cache"])
def test_the_trap_does_catch_who_joins_paths(trap: Trap, path: str) -> None:
    """The control: without the rootfs object the canary changes."""
    exchange_for_link(trap, path, f"{trap.canary}{path}")
    file = path if path.endswith("cache") else f"{path}/x"
    with open(f"{trap.image}{file}", "wb") as opened:
        opened.write(b"escaped")
    assert trap.sprung()


def test_links_inside_are_followed_inside(trap: Trap) -> None:
    """An image that is unusual and not hostile is not refused."""
    os.rename(f"{trap.image}/etc", f"{trap.image}/config")
    os.symlink("../../../config", f"{trap.image}/etc")
    assert trap.spring() is None
    assert os.path.isfile(f"{trap.image}/config/ld.so.cache")
    assert os.path.isfile(f"{trap.image}/config/ld.so.conf.d/00-containerd-shim-nvidia.conf")
    assert not trap.sprung()


def huge(path: str) -> None:
    with open(path, "wb") as file:
        file.truncate(5 << 30)


THINGS: Final = {
    "a FIFO": os.mkfifo,
    "a character device": lambda path: os.mknod(path, 0o20666, os.makedev(1, 5)),
    "a terminal": lambda path: os.mknod(path, 0o20666, os.makedev(5, 0)),
    "a block device": lambda path: os.mknod(path, 0o60666, os.makedev(7, 0)),
    "five sparse gigabytes": huge,
    "an empty directory": os.mkdir,
}


@pytest.mark.parametrize(("path", "thing"), pairs((*FILES, *DIRECTORIES), THINGS))
def test_what_is_no_file_blocks_nothing_and_costs_nothing(
    trap: Trap, path: str, thing: str
) -> None:
    exchange_for_link(trap, path, "x")
    os.unlink(trap.image + path)
    THINGS[thing](trap.image + path)
    before = tree(trap.image)
    start = time.monotonic()
    refusal = trap.spring()
    assert time.monotonic() - start < 5
    if refusal is not None:
        assert tree(trap.image).keys() >= before.keys()
    # The five gigabytes were not copied or filled with zeros.
    for name in tree(trap.image):
        assert os.lstat(trap.image + name).st_blocks * 512 < 1 << 20, name
    assert not trap.sprung()


@pytest.mark.parametrize("path", DIRECTORIES)
def test_a_missing_directory_is_made(trap: Trap, path: str) -> None:
    exchange_for_link(trap, path, "x")
    os.unlink(trap.image + path)
    assert trap.spring() is None
    assert os.readlink(f"{trap.image}{MULTIARCH}/libcuda.so.1") == "libcuda.so.535.1"


def test_hard_links_to_the_outside_are_not_written_through(trap: Trap) -> None:
    """An image cannot contain one, but a shared volume can."""
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", f"{MULTIARCH}/libcuda.so.1"):
        if os.path.exists(trap.image + path):
            os.unlink(trap.image + path)
        os.link(f"{trap.canary}/etc/ld.so.cache", trap.image + path)
    content = tree(trap.canary)
    trap.spring()
    assert tree(trap.canary) == content


def test_a_read_only_bind_mount_is_not_written_through(trap: Trap) -> None:
    before = tree(trap.image)
    subprocess.run(["mount", "--bind", trap.image, trap.image], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", trap.image], check=True)
        refusal = trap.spring()
        assert refusal is not None
        assert "read-only" in str(refusal)
    finally:
        subprocess.run(["umount", trap.image], check=True)
    assert tree(trap.image) == before


# Swaps a directory and a link to the canary atomically, as fast as possible.
FLIPPER: Final = """
import ctypes, os, sys
one, other, times = os.fsencode(sys.argv[1]), os.fsencode(sys.argv[2]), int(sys.argv[3])
renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
print("ready", flush=True)
for _ in range(times):
    if renameat2(-100, one, -100, other, 2):
        sys.exit(os.strerror(ctypes.get_errno()))
"""


def race(
    trap: Trap, path: str, flips: int, attempt: Callable[[], object]
) -> tuple[int, list[RootfsError]]:
    """Repeat ``attempt`` while ``path`` is swapped; return how often, and the errors."""
    link(trap.image, "/.other", f"{trap.canary}{path}")
    argv = [sys.executable, "-c", FLIPPER, trap.image + path, f"{trap.image}/.other", str(flips)]
    attempts, refusals = 0, []
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as flipper:
        try:
            assert flipper.stdout is not None
            assert flipper.stdout.readline() == b"ready\n"
            while flipper.poll() is None:
                attempts += 1
                try:
                    attempt()
                except RootfsError as error:
                    refusals.append(error)
        finally:
            flipper.kill()
        assert flipper.wait() == 0
    return attempts, refusals


needs_exchange = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "renameat2"), reason="needs renameat2 of the C library"
)


@needs_exchange
@pytest.mark.parametrize("path", ["/etc", "/usr/lib", MULTIARCH, "/etc/ld.so.conf.d"])
def test_a_directory_that_becomes_a_link_at_any_moment_leads_nowhere(trap: Trap, path: str) -> None:
    numbers = count()

    def attempt() -> None:
        number = next(numbers)  # something new to write each time
        library = f"{MULTIARCH}/libcuda.so.{number}"
        plan = Plan(
            mounts=(Mount("/etc/hostname", library),),
            links=(Link(f"{MULTIARCH}/libcuda.so.1", f"libcuda.so.{number}"),),
            libraries=(CachedLibrary(f"libcuda.so.{number}", library, Arch.X86_64),),
            library_directories=(f"/opt/{number}",),
        )
        with Rootfs.open(trap.image) as rootfs:
            place(rootfs, plan, read_layout(rootfs, (Arch.X86_64,)), f"{trap.image}-staging")

    attempts, refusals = race(trap, path, 200_000 if THOROUGH else 50_000, attempt)
    assert attempts > 20
    assert not trap.sprung(), f"{attempts} attempts, {len(refusals)} refusals"


@needs_exchange
def test_the_race_does_catch_who_joins_paths(trap: Trap) -> None:
    """The control: with joined paths, one of these attempts writes outside."""

    def attempt() -> None:
        try:
            with open(f"{trap.image}/etc/ld.so.cache~", "wb") as file:
                file.write(b"escaped")
        except OSError:
            return

    race(trap, "/etc", 20_000, attempt)
    assert trap.sprung()


PLACEMENT: Final = """
import sys
from hooks.image.layout import read_layout
from hooks.image.placement import place
from hooks.plan import Arch, CachedLibrary, Link, Mount, Plan
from hooks.image.rootfs import Rootfs
home = "/usr/lib/x86_64-linux-gnu"
plan = Plan(
    mounts=(Mount("/etc/hostname", home + "/libcuda.so.535"), Mount("/etc", "/usr/share/new")),
    links=(Link(home + "/libcuda.so.1", "libcuda.so.535"), Link(home + "/file", "x")),
    libraries=(CachedLibrary("libcuda.so.1", home + "/libcuda.so.1", Arch.X86_64),),
    library_directories=("/opt/nvidia",),
)
open("/dev/null").close()
with Rootfs.open(sys.argv[1]) as rootfs:
    place(rootfs, plan, read_layout(rootfs, (Arch.X86_64,)), sys.argv[1] + "-staging")
"""

# strace: pid, call(first argument, the rest
CALL: Final = re.compile(r'^\d+ +(\w+)\((?:(AT_FDCWD|\d+), )?(?:"([^"]*)")?(.*)$')


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_the_kernel_is_only_ever_asked_for_single_names_or_by_openat2(
    trap: Trap, tmp_path: Path
) -> None:
    put(trap.image, f"{MULTIARCH}/file", b"replaced")
    log = f"{tmp_path}/strace"
    argv = [
        *("strace", "-f", "-s", "4096", "-e", "trace=%file", "-o", log),
        *(sys.executable, "-c", PLACEMENT, trap.image),
    ]
    subprocess.run(argv, check=True, env={"PYTHONPATH": REPOSITORY, "PYTHONDONTWRITEBYTECODE": "1"})
    with open(log, encoding="utf-8") as file:
        lines = file.read().splitlines()
    start = max(n for n, line in enumerate(lines) if '"/dev/null"' in line)
    calls = [match.groups() for match in map(CALL.match, lines[start + 1 :]) if match]
    names = [name for name, *_ in calls]
    assert {"openat2", "symlinkat", "renameat", "mkdirat"} <= set(names)
    opened = [call for call in calls if call[2] == trap.image]
    assert [name for name, *_ in opened] == ["openat"]
    for name, directory, path, rest in calls:
        if (
            path is None
            or path in {"", trap.image}
            or (directory, path[:6]) == ("AT_FDCWD", "/etc")
        ):
            continue
        if name == "openat2":
            assert "RESOLVE_NO_MAGICLINKS|RESOLVE_IN_ROOT" in rest
            assert not path.startswith("/")
        elif path.startswith("/"):
            # These are our own descriptors in procfs, and the sources of mounts.
            assert path.startswith("/proc/self/fd/") or path in {"/etc", "/etc/hostname"}, path
        else:
            assert "/" not in path, (name, path)
            assert name != "openat" or "O_NOFOLLOW" in rest, (path, rest)
