"""Library directories of images of different distributions, and of an empty image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hooks.image.layout import Layout, Libc, read_layout, staged_layout
from hooks.image.rootfs import Rootfs
from hooks.words import Arch
from tests.unit.hooks.image.images import alpine, debian, elf_header, fedora, link, put, scratch

BOTH = (Arch.X86_64, Arch.I386)
TMPFS = {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}
DEV = {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]}
VOLUME = {"type": "bind", "source": "/volume", "options": ["rbind"]}


def look(root: str, arches: Sequence[Arch] = BOTH, mounts: Sequence[dict[str, Any]] = ()) -> Layout:
    with Rootfs.open(root) as rootfs:
        return read_layout(rootfs, arches, mounts)


def found(layout: Layout) -> list[tuple[Libc, str, bool]]:
    return [(loader.libc, loader.directory, loader.searched) for loader in layout.loaders]


def old_debian(root: str) -> str:
    """Make an image from before merged /usr: the C library in /lib, /usr/lib still empty."""
    put(root, "/lib/x86_64-linux-gnu/libc.so.6", elf_header(Arch.X86_64))
    put(root, "/lib/x86_64-linux-gnu/ld-2.28.so", elf_header(Arch.X86_64))
    link(root, "/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/ld-2.28.so")
    os.makedirs(f"{root}/usr/lib")
    return root


def multilib_debian(root: str) -> str:
    debian(root)
    put(root, "/usr/lib/i386-linux-gnu/libc.so.6", elf_header(Arch.I386))
    put(root, "/usr/lib/ld-linux.so.2", elf_header(Arch.I386))
    return root


def arch_linux(root: str) -> str:
    """Make an image with /usr/lib for 64 bits, /usr/lib32 for 32, and links to /usr/lib."""
    os.makedirs(f"{root}/usr/lib")
    for name, target in (("lib", "usr/lib"), ("lib64", "usr/lib"), ("usr/lib64", "lib")):
        os.symlink(target, f"{root}/{name}")
    put(root, "/usr/lib/libc.so.6", elf_header(Arch.X86_64))
    put(root, "/usr/lib/ld-linux-x86-64.so.2", elf_header(Arch.X86_64))
    put(root, "/usr/lib32/libc.so.6", elf_header(Arch.I386))
    link(root, "/usr/lib/ld-linux.so.2", "../lib32/ld-linux.so.2")
    put(root, "/usr/lib32/ld-linux.so.2", elf_header(Arch.I386))
    return root


def nix(root: str) -> str:
    """Make an image with a loader at the usual path, but no C library at a usual path."""
    put(root, "/lib64/ld-linux-x86-64.so.2", elf_header(Arch.X86_64))
    return root


GLIBC, MUSL, NONE = Libc.GLIBC, Libc.MUSL, Libc.NONE


@pytest.mark.parametrize(
    ("make", "wide", "narrow"),
    [
        (debian, (GLIBC, "/usr/lib/x86_64-linux-gnu", True), (NONE, "/usr/lib32", False)),
        (old_debian, (GLIBC, "/usr/lib/x86_64-linux-gnu", True), (NONE, "/usr/lib32", False)),
        (
            multilib_debian,
            (GLIBC, "/usr/lib/x86_64-linux-gnu", True),
            (GLIBC, "/usr/lib/i386-linux-gnu", True),
        ),
        (fedora, (GLIBC, "/usr/lib64", True), (GLIBC, "/usr/lib", True)),
        (arch_linux, (GLIBC, "/usr/lib", True), (GLIBC, "/usr/lib32", True)),
        (alpine, (MUSL, "/usr/lib", True), (NONE, "/usr/lib32", False)),
        (nix, (GLIBC, "/usr/lib64", False), (NONE, "/usr/lib32", False)),
        (scratch, (NONE, "/usr/lib64", False), (NONE, "/usr/lib32", False)),
    ],
)
def test_libraries_go_where_the_loader_searches(
    tmp_path: Path,
    make: Callable[[str], str],
    wide: tuple[Libc, str, bool],
    narrow: tuple[Libc, str, bool],
) -> None:
    assert found(look(make(str(tmp_path)))) == [wide, narrow]


def test_two_architectures_never_share_a_directory(tmp_path: Path) -> None:
    """Their files have the same names, so one would hide the other."""
    root = alpine(str(tmp_path))
    link(root, "/usr/lib32", "lib")
    assert [directory for _, directory, _ in found(look(root))] == [
        "/usr/lib",
        "/.containerd-shim-nvidia/lib32",
    ]


def test_aarch64_is_found_at_its_own_paths(tmp_path: Path) -> None:
    root = str(tmp_path)
    put(root, "/lib/ld-linux-aarch64.so.1", elf_header(Arch.AARCH64))
    put(root, "/usr/lib/aarch64-linux-gnu/libc.so.6", elf_header(Arch.AARCH64))
    layout = look(root, (Arch.AARCH64,))
    assert found(layout) == [(GLIBC, "/usr/lib/aarch64-linux-gnu", True)]
    assert layout.library_directory(Arch.AARCH64) == "/usr/lib/aarch64-linux-gnu"


def test_a_c_library_of_another_machine_is_none(tmp_path: Path) -> None:
    root = debian(str(tmp_path))
    put(root, "/usr/lib/x86_64-linux-gnu/libc.so.6", elf_header(Arch.AARCH64))
    put(root, "/usr/lib64/libc.so.6", elf_header(Arch.X86_64))
    assert look(root).library_directory(Arch.X86_64) == "/usr/lib64"


def test_an_image_with_no_directory_at_all_gets_one(tmp_path: Path) -> None:
    assert found(look(str(tmp_path), [Arch.X86_64])) == [(NONE, "/usr/lib64", False)]


@pytest.mark.parametrize(
    ("links", "directory"),
    [
        # hostile or odd targets of the multiarch directory
        ({"/usr/lib/x86_64-linux-gnu": "/opt/libraries"}, "/opt/libraries"),
        ({"/usr/lib/x86_64-linux-gnu": "../../../../opt/libraries"}, "/opt/libraries"),
        ({"/usr/lib/x86_64-linux-gnu": "/proc/self"}, "/usr/lib64"),
        ({"/usr/lib/x86_64-linux-gnu": "/dev/shm"}, "/usr/lib64"),
        ({"/usr/lib/x86_64-linux-gnu": "/"}, "/usr/lib64"),
        ({"/usr/lib/x86_64-linux-gnu": "/nowhere"}, "/usr/lib64"),
        ({"/usr/lib/x86_64-linux-gnu": "x86_64-linux-gnu"}, "/usr/lib64"),
        ({"/usr/lib": "/nowhere", "/usr/lib64": "lib64"}, "/.containerd-shim-nvidia/lib64"),
        ({"/usr": "/proc/self/root/usr"}, "/.containerd-shim-nvidia/lib64"),
    ],
)
def test_links_are_followed_inside_and_never_below_mounts(
    tmp_path: Path, links: dict[str, str], directory: str
) -> None:
    root = str(tmp_path)
    for path in ("/opt/libraries", "/proc", "/dev/shm"):
        os.makedirs(root + path)
    for path, target in links.items():
        link(root, path, target)
    # The C library is at the link's target, so only the target itself can rule it out.
    put(root, "/opt/libraries/libc.so.6", elf_header(Arch.X86_64))
    put(root, "/lib64/ld-linux-x86-64.so.2", elf_header(Arch.X86_64))
    assert look(root, [Arch.X86_64]).library_directory(Arch.X86_64) == directory


def test_a_volume_over_the_loader_s_directory_is_no_place(tmp_path: Path) -> None:
    root = debian(str(tmp_path))
    volume = {"destination": "/lib/x86_64-linux-gnu/", "type": "bind", "source": "/volume"}
    layout = look(root, [Arch.X86_64], [volume])
    assert layout.library_directory(Arch.X86_64) == "/usr/lib64"
    assert layout.covers("/usr/lib/x86_64-linux-gnu/libcuda.so.1")
    assert not layout.covers("/usr/lib/x86_64-linux-gnu-2/libcuda.so.1")


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink(path, path),
        lambda path: os.symlink("/proc/self/exe", path),
        lambda path: subprocess.run(["truncate", "-s", "5G", path], check=True),
    ],
)
def test_something_else_in_the_place_of_the_loader_is_no_loader(
    tmp_path: Path, make: Callable[[str], object]
) -> None:
    root = debian(str(tmp_path))
    os.unlink(f"{root}/usr/lib64/ld-linux-x86-64.so.2")
    make(f"{root}/usr/lib64/ld-linux-x86-64.so.2")
    os.mkfifo(f"{root}/etc/ld.so.cache")
    layout = look(root, [Arch.X86_64])
    assert layout.loader(Arch.X86_64).libc is NONE
    assert not layout.has_cache


@pytest.mark.parametrize("path", ["/usr", "/usr/lib64", "/etc", "/lib64", "/usr/lib"])
def test_a_file_in_the_place_of_a_directory_is_no_error(tmp_path: Path, path: str) -> None:
    root = str(tmp_path)
    put(root, path, b"not a directory")
    layout = look(root)
    assert all(loader.libc is NONE for loader in layout.loaders)
    with Rootfs.open(root) as rootfs:
        for loader in layout.loaders:
            assert rootfs.landing(loader.directory) == loader.directory


def test_ldconfig_is_seen_through_links(tmp_path: Path) -> None:
    root = debian(f"{tmp_path}/image")
    assert not look(root).has_ldconfig
    link(root, "/usr/sbin/ldconfig", "/opt/ldconfig")
    assert not look(root).has_ldconfig
    put(root, "/opt/ldconfig")
    assert look(root).has_ldconfig


def test_the_cache_is_seen_through_a_link(tmp_path: Path) -> None:
    root = debian(str(tmp_path))
    assert not look(root).has_cache
    put(root, "/var/cache/ld.so.cache")
    link(root, "/etc/ld.so.cache", "../var/cache/ld.so.cache")
    assert look(root).has_cache


@pytest.fixture
def read_only(tmp_path: Path) -> Any:
    """Make a Debian-like image on a read-only mount."""
    root = f"{tmp_path}/image"
    os.mkdir(root)
    debian(root)
    for directory in ("run", "dev"):
        os.mkdir(f"{root}/{directory}")
    subprocess.run(["mount", "--bind", root, root], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", root], check=True)
        yield root
    finally:
        subprocess.run(["umount", root], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@needs_root
@pytest.mark.parametrize(
    ("mounts", "scratch"),
    [
        ([DEV, TMPFS], "/run"),
        ([DEV], "/dev"),
        ([], None),
        ([DEV, TMPFS | {"options": ["ro"]}], "/dev"),
        ([DEV, TMPFS | {"options": None}], "/run"),
        # a volume on the tmpfs is a host directory, in which we must not create anything
        ([DEV, TMPFS, TMPFS | {"type": "bind", "source": "/run"}], "/dev"),
        ([DEV | {"type": "bind", "source": "/dev"}], None),
        ([DEV, TMPFS, VOLUME | {"destination": "//run"}], "/dev"),
        ([DEV, TMPFS, VOLUME | {"destination": "/run/containerd-shim-nvidia/"}], "/dev"),
        ([DEV, TMPFS, VOLUME | {"destination": "/run/containerd-shim-nvidia/bin"}], "/dev"),
        ([DEV, TMPFS, VOLUME | {"destination": "/run/containerd-shim-nvidia-2"}], "/run"),
    ],
)
def test_libraries_move_to_a_tmpfs_if_the_rootfs_is_read_only(
    read_only: str, mounts: list[dict[str, Any]], scratch: str | None
) -> None:
    layout = look(read_only, BOTH, mounts)
    assert not layout.writable
    assert layout.scratch == scratch
    if scratch is not None:
        assert layout.library_directory(Arch.X86_64) == f"{scratch}/containerd-shim-nvidia/x86_64"
        assert layout.library_directory(Arch.I386) == f"{scratch}/containerd-shim-nvidia/i386"


def test_a_writable_rootfs_is_known_without_writing(tmp_path: Path) -> None:
    layout = look(debian(str(tmp_path)), mounts=[DEV, TMPFS])
    assert layout.writable
    assert layout.scratch is None


@pytest.mark.parametrize("destination", ["relative", "/../..", "/a\0b", "", "/\ud800", 7, None])
def test_an_odd_mount_of_the_spec_is_no_error(tmp_path: Path, destination: Any) -> None:
    layout = look(debian(str(tmp_path)), mounts=[{"destination": destination}])
    assert layout.library_directory(Arch.X86_64) == "/usr/lib/x86_64-linux-gnu"


def test_thousands_of_mounts_take_no_longer_than_their_number() -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    mounts = [{"destination": f"/volumes/{n}", "type": "tmpfs"} for n in range(500)]
    sys.setprofile(count)
    try:
        layout = staged_layout((Arch.X86_64,), [DEV, *mounts])
    finally:
        sys.setprofile(None)
    assert layout.scratch == "/dev"
    assert calls < 200 * len(mounts)


def test_a_mount_deeper_than_any_path_of_ours_is_not_walked_down(tmp_path: Path) -> None:
    """The API server limits the length of a volume's path only by that of the pod."""
    deep = VOLUME | {"destination": "/dev" + "/a" * 1000}
    with Rootfs.open(debian(str(tmp_path))) as rootfs:
        seen = read_layout(rootfs, (Arch.X86_64,), [DEV, deep])
    layout = staged_layout((Arch.X86_64,), [DEV, deep])
    assert layout.covered == seen.covered == ("/proc", "/sys", "/dev")
    assert layout.scratch == "/dev"


@pytest.mark.skipif(not shutil.which("gcc"), reason="stands for a machine with libraries")
def test_this_machine_s_own_directory_has_its_c_library() -> None:
    arch = Arch(os.uname().machine)
    layout = look("/", [arch])
    assert layout.loader(arch).searched
    assert os.path.isfile(os.path.join(layout.library_directory(arch), "libc.so.6"))
