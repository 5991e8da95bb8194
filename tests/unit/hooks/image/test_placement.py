"""A plan's files in a writable image: what is written, what is kept, and what is taken back."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hooks.image.ldcache import Cache, parse, serialise
from hooks.image.placement import Placed
from hooks.image.rootfs_errors import DirectoryInTheWay, FileTooLarge, PathRefused
from hooks.plan import CachedLibrary, Device, Link, Mount, Plan
from hooks.words import Arch
from tests.unit.hooks.image.images import alpine, debian, fedora, link, put, put_in, scratch, tree

HOME = "/usr/lib/x86_64-linux-gnu"
CACHE = "/etc/ld.so.cache"
DROP_IN = "/etc/ld.so.conf.d/00-containerd-shim-nvidia.conf"


def driver_plan(home: str = HOME, **more: Any) -> Plan:
    """One library with its links, as a plan has dozens."""
    library = f"{home}/libcuda.so.535.1"
    return Plan(
        mounts=(Mount("/etc/hostname", library),),
        links=(
            Link(f"{home}/libcuda.so.1", "libcuda.so.535.1"),
            Link(f"{home}/libcuda.so", "libcuda.so.1"),
        ),
        libraries=(CachedLibrary("libcuda.so.1", f"{home}/libcuda.so.1", Arch.X86_64),),
        **more,
    )


def cached(root: str) -> dict[str, str]:
    with open(root + CACHE, "rb") as file:
        return {e.soname.decode(): e.path.decode() for e in parse(file.read()).entries}


def a_cache(*sonames: str) -> bytes:
    libraries = [CachedLibrary(name, f"/usr/local/lib/{name}", Arch.X86_64) for name in sonames]
    return serialise(Cache().merge(libraries))


@pytest.fixture
def root(root: str) -> str:
    """An image with a cache of its own."""
    put(root, CACHE, a_cache("libown.so.1"))
    return root


def test_mount_points_links_and_cache_are_there(root: str) -> None:
    placed = put_in(root, driver_plan())
    assert os.lstat(f"{root}{HOME}/libcuda.so.535.1").st_size == 0
    assert os.readlink(f"{root}{HOME}/libcuda.so.1") == "libcuda.so.535.1"
    assert os.readlink(f"{root}{HOME}/libcuda.so") == "libcuda.so.1"
    assert cached(root) == {
        "libcuda.so.1": f"{HOME}/libcuda.so.1",
        "libown.so.1": "/usr/local/lib/libown.so.1",
    }
    assert placed == Placed(
        written=(
            f"{HOME}/libcuda.so.535.1",
            f"{HOME}/libcuda.so.1",
            f"{HOME}/libcuda.so",
            CACHE,
        )
    )


def test_a_second_time_nothing_is_written(root: str) -> None:
    plan = driver_plan(library_directories=(f"{HOME}/vdpau",))
    os.remove(f"{root}/etc/ld.so.conf")
    put_in(root, plan)
    before = {path: os.lstat(root + path).st_ctime_ns for path in tree(root)}
    placed = put_in(root, plan)
    assert placed.written == ()
    assert {path: os.lstat(root + path).st_ctime_ns for path in tree(root)} == before


def test_an_empty_plan_writes_nothing(root: str) -> None:
    before = tree(root)
    assert put_in(root, Plan()) == Placed()
    assert tree(root) == before


def test_a_cache_is_made_if_there_is_none(root: str) -> None:
    os.remove(root + CACHE)
    put_in(root, driver_plan())
    assert cached(root) == {"libcuda.so.1": f"{HOME}/libcuda.so.1"}
    assert stat.S_IMODE(os.lstat(root + CACHE).st_mode) == 0o644


def test_etc_is_made_if_there_is_none(tmp_path: Path) -> None:
    root = debian(str(tmp_path / "image"))
    os.rename(f"{root}/etc", f"{tmp_path}/etc")
    put_in(root, driver_plan())
    assert cached(root) == {"libcuda.so.1": f"{HOME}/libcuda.so.1"}


@pytest.mark.parametrize(
    "make",
    [
        lambda path: put(path, "", b"garbage" * 100),
        os.mkfifo,
        lambda path: os.mknod(path, 0o20666, os.makedev(1, 5)),
        lambda path: os.symlink("/nowhere", path),
        lambda path: os.symlink(path, path),
        lambda path: os.symlink("/proc/self/exe", path),
    ],
    ids=["garbage", "FIFO", "device", "dangling", "cycle", "magic"],
)
def test_a_cache_that_no_loader_can_use_is_made_anew(
    root: str, make: Callable[[str], object]
) -> None:
    os.remove(root + CACHE)
    make(root + CACHE)
    put_in(root, driver_plan())
    assert stat.S_ISREG(os.lstat(root + CACHE).st_mode)
    assert cached(root) == {"libcuda.so.1": f"{HOME}/libcuda.so.1"}
    assert sorted(os.listdir(f"{root}/etc")) == ["ld.so.cache", "ld.so.conf", "ld.so.conf.d"]


def test_a_cache_that_is_a_link_is_read_inside_and_replaced(root: str) -> None:
    os.rename(root + CACHE, f"{root}/usr/cache")
    os.symlink("/usr/cache", root + CACHE)
    before = tree(f"{root}/usr")["/cache"]
    put_in(root, driver_plan())
    assert set(cached(root)) == {"libcuda.so.1", "libown.so.1"}
    assert stat.S_ISREG(os.lstat(root + CACHE).st_mode)
    assert tree(f"{root}/usr")["/cache"] == before


@pytest.mark.parametrize("size", [(8 << 20) + 1, 5 << 30])
def test_a_cache_of_absurd_size_is_an_error_and_stays(root: str, size: int) -> None:
    os.truncate(root + CACHE, size)
    before = tree(root)
    with pytest.raises(FileTooLarge):
        put_in(root, driver_plan())
    assert tree(root) == before
    assert os.stat(root + CACHE).st_blocks < 1000


def test_the_cache_keeps_its_mode_and_owner(root: str) -> None:
    os.chmod(root + CACHE, 0o640)
    os.chown(root + CACHE, 5, 6)
    put_in(root, driver_plan())
    status = os.lstat(root + CACHE)
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o640, 5, 6)


def test_a_link_in_the_place_of_a_mount_point_becomes_a_file(root: str) -> None:
    """A runtime would mount over what the link leads to, which may be anything."""
    put(root, "/etc/shadow", b"secret")
    link(root, f"{HOME}/libcuda.so.535.1", "/etc/shadow")
    put_in(root, driver_plan())
    assert stat.S_ISREG(os.lstat(f"{root}{HOME}/libcuda.so.535.1").st_mode)
    with open(f"{root}/etc/shadow", "rb") as file:
        assert file.read() == b"secret"


def test_a_file_in_the_place_of_a_mount_point_stays(root: str) -> None:
    put(root, f"{HOME}/libcuda.so.535.1", b"the image's own")
    put_in(root, driver_plan())
    with open(f"{root}{HOME}/libcuda.so.535.1", "rb") as file:
        assert file.read() == b"the image's own"


def test_an_empty_directory_in_the_place_of_a_mount_point_becomes_a_file(root: str) -> None:
    os.mkdir(f"{root}{HOME}/libcuda.so.535.1")
    put_in(root, driver_plan())
    assert stat.S_ISREG(os.lstat(f"{root}{HOME}/libcuda.so.535.1").st_mode)


def test_a_directory_is_mounted_on_a_directory(root: str) -> None:
    put_in(root, Plan(mounts=(Mount("/etc", "/usr/share/nvidia"),)))
    assert os.path.isdir(f"{root}/usr/share/nvidia")


@pytest.mark.parametrize("name", ["libcuda.so.535.1", "libcuda.so.1", "libcuda.so"])
def test_a_directory_with_files_is_not_replaced(root: str, name: str) -> None:
    put(root, f"{HOME}/{name}/file", b"x")
    before = tree(root)
    with pytest.raises(DirectoryInTheWay, match=name):
        put_in(root, driver_plan())
    assert tree(root) == before


def test_what_is_mounted_over_is_left_alone(root: str) -> None:
    """A tmpfs on /run hides what the image has there, and the runtime makes what it needs."""
    link(root, "/var/run", "/run")  # dangling, until the runtime makes /run
    os.mkdir(f"{root}/dev")
    link(root, "/var/dev", "../dev")
    plan = Plan(
        mounts=(
            Mount("/etc/hostname", "/run/nvidia-persistenced/socket"),
            Mount("/etc/hostname", "/var/run/nvidia-fabricmanager/socket"),
            Mount("/etc/hostname", "/dev/nvidia"),
            Mount("/etc/hostname", "/var/dev/nvidia"),
        ),
        links=(Link("/dev/dri/by-path/pci-0-card", "card0"),),
    )
    before = tree(root)
    placed = put_in(root, plan, [{"destination": "/run", "type": "tmpfs"}])
    assert placed == Placed(omitted=("/dev/dri/by-path/pci-0-card",))
    assert tree(root) == before


def test_directories_that_are_searched_anyway_need_no_drop_in(root: str) -> None:
    put_in(root, driver_plan(library_directories=(HOME, "/usr/lib64", "/usr/lib")))
    assert not os.path.exists(root + DROP_IN)


def test_other_directories_get_a_drop_in(root: str) -> None:
    put_in(root, driver_plan(library_directories=(HOME, f"{HOME}/vdpau", "/opt/nvidia")))
    with open(root + DROP_IN, encoding="utf-8") as file:
        assert file.read() == f"{HOME}/vdpau\n/opt/nvidia\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, f"include {DROP_IN}\n"),
        ("", f"include {DROP_IN}\n"),
        ("/opt/lib\n", f"include {DROP_IN}\n/opt/lib\n"),
        (f"# include {DROP_IN}\n", f"include {DROP_IN}\n# include {DROP_IN}\n"),
        ("include /etc/ld.so.conf.d/*.conf\n", "include /etc/ld.so.conf.d/*.conf\n"),
        ("  include ld.so.conf.d/*.conf # all\n", "  include ld.so.conf.d/*.conf # all\n"),
    ],
)
def test_the_drop_in_is_included(root: str, before: str | None, after: str) -> None:
    os.remove(f"{root}/etc/ld.so.conf")
    if before is not None:
        put(root, "/etc/ld.so.conf", before.encode())
    put_in(root, driver_plan(library_directories=("/opt/nvidia",)))
    with open(f"{root}/etc/ld.so.conf", encoding="utf-8") as file:
        assert file.read() == after


def test_32_bit_libraries_are_cached_for_32_bit_programs(tmp_path: Path) -> None:
    root = fedora(str(tmp_path / "image"))
    plan = Plan(
        libraries=(
            CachedLibrary("libcuda.so.1", "/usr/lib64/libcuda.so.1", Arch.X86_64),
            CachedLibrary("libcuda.so.1", "/usr/lib/libcuda.so.1", Arch.I386),
        )
    )
    put_in(root, plan, arches=(Arch.X86_64, Arch.I386))
    with open(root + CACHE, "rb") as file:
        entries = [(entry.path, entry.flags) for entry in parse(file.read()).entries]
    assert entries == [(b"/usr/lib64/libcuda.so.1", 0x303), (b"/usr/lib/libcuda.so.1", 3)]


def test_an_image_without_glibc_gets_no_cache(tmp_path: Path) -> None:
    for make in (alpine, scratch):
        root = make(f"{tmp_path}/{make.__name__}")
        put_in(root, driver_plan("/usr/lib"))
        assert os.readlink(f"{root}/usr/lib/libcuda.so.1") == "libcuda.so.535.1"
        assert not os.path.exists(root + CACHE)
        assert not os.path.exists(root + DROP_IN)


MUSL = "/etc/ld-musl-x86_64.path"


@pytest.mark.parametrize(
    ("before", "directories", "after"),
    [
        (None, (), None),
        (None, ("/opt/nvidia",), "/lib\n/usr/local/lib\n/usr/lib\n/opt/nvidia\n"),
        ("/lib:/usr/lib", (), "/lib:/usr/lib"),
        ("/lib:/usr/lib\n", ("/opt/nvidia",), "/lib\n/usr/lib\n/opt/nvidia\n"),
        ("/lib\n/opt/own\n", (), "/lib\n/opt/own\n/usr/lib\n"),
    ],
)
def test_musl_finds_what_it_would_not_search(
    tmp_path: Path, before: str | None, directories: tuple[str, ...], after: str | None
) -> None:
    root = alpine(str(tmp_path / "image"))
    if before is not None:
        put(root, MUSL, before.encode())
    plan = driver_plan("/usr/lib", library_directories=directories)
    for _ in range(2):  # the second time finds the first one's file
        put_in(root, plan)
        found = None
        if os.path.exists(root + MUSL):
            with open(root + MUSL, encoding="utf-8") as file:
                found = file.read()
        assert found == after


def big_file(path: str) -> None:
    with open(path, "wb") as file:
        file.write(b"x" * (2 << 20))


def _device_plan() -> Plan:
    return driver_plan(devices=(Device("/dev/nvidia0", 195, 0),))


@pytest.mark.parametrize("target", ["/etc", "../../outside", "nowhere", "/proc/self/root"])
def test_dev_that_is_a_link_becomes_a_directory_if_it_gets_devices(root: str, target: str) -> None:
    if os.path.lexists(f"{root}/dev"):
        os.rmdir(f"{root}/dev")
    os.symlink(target, f"{root}/dev")
    put_in(root, driver_plan())
    assert os.readlink(f"{root}/dev") == target, "nothing is made there without devices"
    assert "/dev" in put_in(root, _device_plan()).written
    assert stat.S_ISDIR(os.lstat(f"{root}/dev").st_mode)
    assert put_in(root, _device_plan()).written == ()


def test_dev_is_a_link_again_if_placing_fails(root: str) -> None:
    if os.path.lexists(f"{root}/dev"):
        os.rmdir(f"{root}/dev")
    os.symlink("/etc", f"{root}/dev")
    put(root, f"{HOME}/libcuda.so.1/file", b"a directory in the way")
    with pytest.raises(DirectoryInTheWay):
        put_in(root, _device_plan())
    assert os.readlink(f"{root}/dev") == "/etc"


@pytest.mark.parametrize(
    "make",
    [
        lambda path: put(path, "", b"the image's own"),
        big_file,
        lambda path: os.symlink("libcuda.so.1-own", path),
        os.mkfifo,
        None,
    ],
    ids=["file", "big file", "link", "FIFO", "nothing"],
)
def test_a_failure_takes_everything_back(root: str, make: Callable[[str], object] | None) -> None:
    """The last step fails: a directory is where the cache belongs."""
    if make is not None:
        for name in ("libcuda.so.1", "libcuda.so"):
            make(f"{root}{HOME}/{name}")
    link(root, f"{HOME}/libcuda.so.535.1", "/etc/ld.so.conf")
    os.mkdir(f"{root}{HOME}/libnvidia-ml.so.535.1")
    os.remove(root + CACHE)
    put(root, f"{CACHE}/file")
    os.remove(f"{root}/etc/ld.so.conf")
    plan = driver_plan(library_directories=("/opt/nvidia",))
    more = (
        Mount("/etc/hostname", f"{HOME}/libnvidia-ml.so.535.1"),
        Mount("/etc/hostname", "/usr/new/directories/file"),
    )
    plan = Plan(
        mounts=plan.mounts + more,
        links=plan.links,
        libraries=plan.libraries,
        library_directories=plan.library_directories,
    )
    before = tree(root)
    with pytest.raises(DirectoryInTheWay, match=r"ld\.so\.cache"):
        put_in(root, plan)
    assert tree(root) == before


def test_success_leaves_no_spare_names(root: str) -> None:
    big_file(f"{root}{HOME}/libcuda.so.1")
    os.mkfifo(f"{root}{HOME}/libcuda.so")
    put_in(root, driver_plan())
    assert [name for name in os.listdir(root + HOME) if "nvshim" in name] == []
    assert os.readlink(f"{root}{HOME}/libcuda.so.1") == "libcuda.so.535.1"


def test_no_descriptor_is_left_open(root: str) -> None:
    before = os.listdir("/proc/self/fd")
    put_in(root, driver_plan())
    put(root, f"{HOME}/libother.so/file")
    with pytest.raises(DirectoryInTheWay):
        put_in(root, Plan(links=(Link(f"{HOME}/libother.so", "x"),)))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/usr/lib/a", "../../../../etc/shadow"),
        ("/usr/lib/a", "b/c"),
        ("/usr/lib/a", ".."),
        ("/usr/lib/a", ""),
        ("/usr/lib/a", "/usr/../etc"),
        ("/usr/lib/a", "a\0b"),
        ("/usr/lib/a", "\ud800"),
        ("/usr/../etc/a", "b"),
        ("usr/lib/a", "b"),
    ],
)
def test_links_that_are_no_plain_names_are_refused(root: str, path: str, target: str) -> None:
    before = tree(root)
    with pytest.raises(PathRefused):
        put_in(root, Plan(links=(Link(path, target),)))
    assert tree(root) == before


@pytest.mark.parametrize("directory", ["relative", "/a b", "/a:b", "/a\nb", "/a/../b", "/", "/a=b"])
def test_directories_that_a_loader_would_read_otherwise_are_refused(
    root: str, directory: str
) -> None:
    with pytest.raises(PathRefused):
        put_in(root, driver_plan(library_directories=(directory,)))


def test_a_mount_point_with_a_way_out_is_refused(root: str) -> None:
    with pytest.raises(PathRefused):
        put_in(root, Plan(mounts=(Mount("/etc/hostname", "/usr/../../etc/canary"),)))


@contextmanager
def overlay(root: str) -> Iterator[tuple[str, str]]:
    """The image as containerd mounts it: (merged directory, the container's own layer)."""
    above = os.path.dirname(root)
    merged, upper, work = f"{above}/merged", f"{above}/upper", f"{above}/work"
    for directory in (merged, upper, work):
        os.mkdir(directory)
    options = f"lowerdir={root},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], check=True)
    try:
        yield merged, upper
    finally:
        subprocess.run(["umount", merged], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_on_an_overlay_the_container_s_layer_gets_only_what_is_written(root: str) -> None:
    put(root, f"{HOME}/libcuda.so.1", b"x" * 4096)
    image = tree(root)
    with overlay(root) as (merged, upper):
        placed = put_in(merged, driver_plan())
        files = {path for path in tree(upper) if not os.path.isdir(upper + path)}
        assert files == set(placed.written)
        assert set(cached(merged)) == {"libcuda.so.1", "libown.so.1"}
    assert tree(root) == image


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_on_an_overlay_a_failure_takes_everything_back(root: str) -> None:
    big_file(f"{root}{HOME}/libcuda.so.1")
    os.mkfifo(f"{root}{HOME}/libcuda.so")
    os.remove(root + CACHE)
    put(root, f"{CACHE}/file")
    with overlay(root) as (merged, _):
        before = tree(merged)
        with pytest.raises(DirectoryInTheWay):
            put_in(merged, driver_plan())
        assert tree(merged) == before
