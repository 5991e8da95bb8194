"""Directories of an image whose libraries come before the driver's, for every loader."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hooks.image.ldcache import parse
from hooks.image.rootfs_errors import PathRefused
from hooks.plan import CachedLibrary, Mount, Plan
from hooks.words import Arch
from tests.unit.hooks.image.images import alpine, put, put_in, tree

COMPAT = "/usr/local/cuda-13.1/compat"
HOME = "/usr/lib/x86_64-linux-gnu"
FIRST = "/etc/ld.so.conf.d/00-compat-containerd-shim-nvidia.conf"
MUSL = "/etc/ld-musl-x86_64.path"
DRIVERS = CachedLibrary("libcuda.so.1", f"{HOME}/libcuda.so.535.1", Arch.X86_64)
IMAGES = CachedLibrary("libcuda.so.1", f"{COMPAT}/libcuda.so.590.1", Arch.X86_64)
PLAN = Plan(libraries=(IMAGES, DRIVERS), first_directories=(COMPAT,))
RUN = {"destination": "/run", "type": "tmpfs", "source": "tmpfs"}
WITHOUT = Plan(libraries=(DRIVERS,))


def cached(root: str) -> list[str]:
    with open(f"{root}/etc/ld.so.cache", "rb") as file:
        return [entry.path.decode() for entry in parse(file.read()).entries]


def text(root: str, path: str) -> str:
    with open(root + path) as file:
        return file.read()


def test_cache_leads_to_the_image_s_library_alone(root: str) -> None:
    put_in(root, PLAN)
    assert cached(root) == [f"{COMPAT}/libcuda.so.590.1"]


def test_later_ldconfig_searches_there_first(root: str) -> None:
    put_in(root, PLAN)
    assert text(root, FIRST) == f"{COMPAT}\n"
    assert min(os.listdir(f"{root}/etc/ld.so.conf.d")) == os.path.basename(FIRST)


def test_drop_in_is_included_where_none_is(root: str) -> None:
    put(root, "/etc/ld.so.conf", b"/opt/lib\n")
    put_in(root, PLAN)
    assert text(root, "/etc/ld.so.conf") == f"include {FIRST}\n/opt/lib\n"
    before = tree(root)
    put_in(root, PLAN)
    assert tree(root) == before


def test_second_start_without_it_takes_it_back(root: str) -> None:
    put_in(root, PLAN)
    put_in(root, WITHOUT)
    assert cached(root) == [f"{HOME}/libcuda.so.535.1"]
    assert text(root, FIRST) == ""
    before = tree(root)
    put_in(root, WITHOUT)
    assert tree(root) == before


def test_image_that_never_had_it_gets_no_drop_in(root: str) -> None:
    put_in(root, WITHOUT)
    assert not os.path.lexists(root + FIRST)


def test_musl_searches_there_first(tmp_path: Path) -> None:
    root = alpine(f"{tmp_path}/image")
    put_in(root, PLAN)
    assert text(root, MUSL).splitlines() == [COMPAT, "/lib", "/usr/local/lib", "/usr/lib"]
    before = tree(root)
    put_in(root, PLAN)
    assert tree(root) == before


def test_musl_s_own_path_stays_behind_it(tmp_path: Path) -> None:
    root = alpine(f"{tmp_path}/image")
    put(root, MUSL, b"/opt/lib:/usr/lib\n")
    put_in(root, PLAN)
    assert text(root, MUSL).splitlines()[:3] == [COMPAT, "/opt/lib", "/usr/lib"]


def test_directory_that_a_loader_would_read_otherwise_is_refused(root: str) -> None:
    with pytest.raises(PathRefused):
        put_in(root, Plan(libraries=(DRIVERS,), first_directories=("/usr/local/a b",)))


@pytest.fixture
def sealed(root: str) -> Iterator[str]:
    """The image, on a file system that takes no writes."""
    subprocess.run(["mount", "--bind", root, root], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
        yield root
    finally:
        subprocess.run(["umount", root], check=True)


def in_scratch() -> Plan:
    home = "/run/containerd-shim-nvidia/x86_64"
    ours = CachedLibrary("libcuda.so.1", f"{home}/libcuda.so.535.1", Arch.X86_64)
    mount = Mount("/etc/hostname", f"{home}/libcuda.so.535.1")
    return Plan(mounts=(mount,), libraries=(IMAGES, ours), first_directories=(COMPAT,))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_read_only_image_without_a_cache_is_told_by_the_environment(sealed: str) -> None:
    placed = put_in(sealed, in_scratch(), [RUN], library_path="/opt/own")
    (variable,) = placed.environment
    assert variable == (
        "LD_LIBRARY_PATH",
        f"/opt/own:{COMPAT}:/run/containerd-shim-nvidia/x86_64",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_read_only_image_with_a_cache_gets_one_over_it(root: str, sealed: str) -> None:
    subprocess.run(["mount", "-o", "remount,bind,rw", sealed], check=True)
    put(sealed, "/etc/ld.so.cache", b"")
    subprocess.run(["mount", "-o", "remount,bind,ro", sealed], check=True)
    put_in(sealed, in_scratch(), [RUN])
    with open(f"{root}-staging/etc/ld.so.cache", "rb") as file:
        assert [entry.path for entry in parse(file.read()).entries] == [
            f"{COMPAT}/libcuda.so.590.1".encode()
        ]
