"""A real container whose rootfs takes no writes finds the driver's library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from hooks.plan import CachedLibrary, Link, Mount, Plan
from tests.unit.hooks.image.images import put_in
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


def plan_for(home: str, source: str) -> Plan:
    return Plan(
        mounts=(Mount(source, f"{home}/libcuda.so.535"),),
        links=(Link(f"{home}/libcuda.so.1", "libcuda.so.535"),),
        libraries=(CachedLibrary("libcuda.so.1", f"{home}/libcuda.so.1", ARCH),),
    )


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
    usual_umask: None,
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
    placed = put_in(root, plan, mounts, arches=(ARCH,))
    more = [as_oci(mount) for mount in (*placed.mounts, *plan.mounts)]
    found = run_in_container(f"{tmp_path}/bundle", root, [*mounts, *more], placed.environment)
    assert found == {"libcuda.so.1": 41}
    assert bool(placed.environment) is not has_cache
