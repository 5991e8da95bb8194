"""Libraries for a container whose rootfs takes no writes, up to a real container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from hooks.image.ldcache import parse
from hooks.image.placement import Placed
from hooks.image.rootfs_errors import RootfsReadOnly
from hooks.plan import CachedLibrary, Link, Mount, Plan
from hooks.words import Arch
from tests.unit.hooks.image.images import alpine, debian, put, put_in, tree
from tests.unit.hooks.image.loader_programs import (
    ARCH,
    answers,
    can_compile,
    compile_library,
    ldconfig,
    make_root,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")

RUN: Final[dict[str, Any]] = {"destination": "/run", "type": "tmpfs", "source": "tmpfs"}
DEV: Final[dict[str, Any]] = {
    "destination": "/dev",
    "type": "tmpfs",
    "source": "tmpfs",
    "options": ["mode=755"],
}
HOME = f"/run/containerd-shim-nvidia/{ARCH.value}"

stage = partial(put_in, arches=(ARCH,))


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Callable[[Callable[[str], object]], str]]:
    """Makes an image on a file system of its own, which then takes no writes."""
    root = f"{tmp_path}/image"
    os.mkdir(root)

    def make(build: Callable[[str], object]) -> str:
        build(root)
        for directory in ("run", "dev", "proc"):
            os.makedirs(f"{root}/{directory}", exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        return root

    subprocess.run(["mount", "-t", "tmpfs", "image", root], check=True)
    try:
        yield make
    finally:
        subprocess.run(["umount", root], check=True)


def plan_for(home: str, source: str = "/etc/hostname", **more: Any) -> Plan:
    return Plan(
        mounts=(Mount(source, f"{home}/libcuda.so.535"), *more.pop("mounts", ())),
        links=(Link(f"{home}/libcuda.so.1", "libcuda.so.535"), *more.pop("links", ())),
        libraries=(CachedLibrary("libcuda.so.1", f"{home}/libcuda.so.1", ARCH),),
        **more,
    )


def with_cache(root: str) -> None:
    debian(root)
    put(root, "/etc/ld.so.cache", b"anything")


def test_the_image_is_untouched_and_staging_has_it_all(image: Any, tmp_path: Path) -> None:
    root = image(with_cache)
    before = tree(root)
    placed = stage(root, plan_for(HOME), [DEV, RUN])
    assert tree(root) == before
    staging = f"{root}-staging"
    assert os.stat(staging).st_mode & 0o777 == 0o700
    assert placed == Placed(
        mounts=(
            Mount(f"{staging}/libraries/{ARCH.value}", HOME, reason="driver libraries"),
            Mount(
                f"{staging}/etc/ld.so.cache", "/etc/ld.so.cache", reason="finds driver libraries"
            ),
        )
    )
    library = f"{staging}/libraries/{ARCH.value}"
    assert sorted(os.listdir(library)) == ["libcuda.so.1", "libcuda.so.535"]
    assert os.readlink(f"{library}/libcuda.so.1") == "libcuda.so.535"
    assert os.stat(library).st_mode & 0o777 == 0o755
    with open(f"{staging}/etc/ld.so.cache", "rb") as file:
        assert [entry.soname for entry in parse(file.read()).entries] == [b"libcuda.so.1"]


@pytest.mark.parametrize(
    ("before", "after"),
    [("", HOME), ("/opt/lib", f"/opt/lib:{HOME}"), (f"::{HOME}:/a", None)],
)
def test_without_a_cache_to_cover_the_last_resort_is_the_environment(
    image: Any, before: str, after: str | None
) -> None:
    placed = stage(image(debian), plan_for(HOME), [DEV, RUN], library_path=before)
    assert placed.environment == ((("LD_LIBRARY_PATH", after),) if after else ())
    assert [mount.destination for mount in placed.mounts] == [HOME]


def test_directories_below_are_searched_too(image: Any) -> None:
    plan = plan_for(HOME, library_directories=(f"{HOME}/vdpau", "/usr/lib"))
    placed = stage(image(debian), plan, [DEV, RUN])
    assert placed.environment == (("LD_LIBRARY_PATH", f"{HOME}:{HOME}/vdpau"),)


@pytest.mark.skipif(ARCH is not Arch.X86_64, reason="the image is of x86-64")
@pytest.mark.parametrize("has_path", [True, False])
def test_musl_is_told_by_its_path_file_if_there_is_one(image: Any, has_path: bool) -> None:
    def build(root: str) -> None:
        alpine(root)
        if has_path:
            put(root, "/etc/ld-musl-x86_64.path", b"/lib")

    placed = stage(image(build), plan_for(HOME), [DEV, RUN])
    destinations = [mount.destination for mount in placed.mounts]
    if has_path:
        assert destinations == [HOME, "/etc/ld-musl-x86_64.path"]
        assert placed.environment == ()
        with open(placed.mounts[1].source, encoding="ascii") as file:
            assert file.read() == f"/lib\n{HOME}\n"
    else:
        assert destinations == [HOME]
        assert placed.environment == (("LD_LIBRARY_PATH", HOME),)


def test_mount_that_is_required_has_room_or_is_an_error(image: Any, tmp_path: Path) -> None:
    root = image(lambda root: os.makedirs(f"{root}/opt/vendor"))

    def of_a_file(source: str, destination: str, kind: str = "bind") -> Mount:
        return Mount(source, destination, reason="v.com/d=0", kind=kind, required=True)

    file, below = "/etc/hostname", of_a_file("/etc/hostname", "/opt/vendor/hostname")
    for mounts in (
        (of_a_file("/etc", "/opt/vendor"), below),
        (of_a_file("tmpfs", "/opt/vendor", "tmpfs"), below),
        (of_a_file(file, "/run/vendor/x"),),
    ):
        placed = stage(root, Plan(mounts=mounts), [DEV, RUN])
        assert placed.omitted == ()
    for mounts in (
        (below,),
        (of_a_file("/usr", "/opt/vendor"), below),
        (of_a_file(file, "/opt/vendor"),),
    ):
        shutil.rmtree(f"{root}-staging")
        with pytest.raises(RootfsReadOnly, match=r"v\.com/d=0"):
            stage(root, Plan(mounts=mounts, links=(Link("/run/a", "b"),)), [DEV, RUN])
        assert tree(f"{root}-staging") == {}


def test_what_has_no_mount_point_is_omitted(image: Any) -> None:
    def build(root: str) -> None:
        debian(root)
        put(root, "/usr/bin/nvidia-smi")
        put(root, "/usr/share/nvidia/file")
        os.symlink("b", f"{root}/usr/a")

    plan = plan_for(
        HOME,
        mounts=(
            Mount("/etc/hostname", "/usr/bin/nvidia-smi"),
            Mount("/etc/hostname", "/usr/bin/nvidia-debugdump"),
            Mount("/etc", "/usr/share/nvidia"),
            Mount("/etc/hostname", "/usr/share"),
            Mount("/etc/hostname", "/run/nvidia-persistenced/socket"),
        ),
        links=(Link("/usr/a", "b"), Link("/usr/c", "d")),
    )
    placed = stage(image(build), plan, [DEV, RUN])
    assert placed.omitted == ("/usr/bin/nvidia-debugdump", "/usr/share", "/usr/c")


def test_without_a_tmpfs_there_is_no_room(image: Any) -> None:
    root = image(debian)
    with pytest.raises(RootfsReadOnly, match="tmpfs"):
        stage(root, plan_for("/usr/lib/x86_64-linux-gnu"), [])
    assert stage(root, Plan(), []) == Placed()


needs_runc = pytest.mark.skipif(
    not can_compile() or not shutil.which("runc"), reason="needs gcc, ldconfig and runc"
)


def run_in_container(
    bundle: str, root: str, mounts: list[dict[str, Any]], environment: tuple[tuple[str, str], ...]
) -> dict[str, int]:
    """What /probe gets from libcuda.so.1 in a container that runc makes."""
    spec = {
        "ociVersion": "1.0.2",
        "root": {"path": root, "readonly": True},
        "process": {
            "user": {"uid": 65534, "gid": 65534},
            "args": ["/probe", "libcuda.so.1"],
            "env": [f"{name}={value}" for name, value in environment],
            "cwd": "/",
        },
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("mount", "pid", "ipc", "network")]},
    }
    os.mkdir(bundle)
    with open(f"{bundle}/config.json", "w", encoding="utf-8") as file:
        json.dump(spec, file)
    identity = f"nvshim-test-{os.getpid()}"
    argv = ["runc", "--root", f"{bundle}/state", "run", "--bundle", bundle, identity]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return answers(done.stdout)


def as_oci(mount: Mount) -> dict[str, Any]:
    return {
        "destination": mount.destination,
        "source": mount.source,
        "type": "bind",
        "options": list(mount.options),
    }


@needs_runc
@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("tmpfs", ["/run", "/dev"])
def test_a_real_container_finds_the_library(
    image: Any,
    tmp_path: Path,
    has_cache: bool,
    tmpfs: str,
) -> None:
    def build(root: str) -> None:
        make_root(root)
        if has_cache:
            ldconfig(root)

    root = image(build)
    compile_library(f"{tmp_path}/driver/libcuda.so.535", "libcuda.so.1", 41)
    proc = {"destination": "/proc", "type": "proc", "source": "proc"}
    mounts = [proc, DEV, RUN] if tmpfs == "/run" else [proc, DEV]
    plan = plan_for(
        f"{tmpfs}/containerd-shim-nvidia/{ARCH.value}", f"{tmp_path}/driver/libcuda.so.535"
    )
    placed = stage(root, plan, mounts)
    more = [as_oci(mount) for mount in (*placed.mounts, *plan.mounts)]
    found = run_in_container(f"{tmp_path}/bundle", root, [*mounts, *more], placed.environment)
    assert found == {"libcuda.so.1": 41}
    assert bool(placed.environment) is not has_cache
