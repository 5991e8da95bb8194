"""A real container with a read-only rootfs finds the driver's library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from hooks.image.layout import read_layout
from hooks.image.placement import Placed
from hooks.image.rootfs import Rootfs
from hooks.plan import CachedLibrary, File, Link, Mount, Plan
from tests.unit.hooks.image.images import debian, link, put, put_in
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
    """Return a function that makes an image on its own file system, then read-only."""
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
    """Return /probe's answer from libcuda.so.1 in a container of runc."""
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


HOME: Final = "/run/containerd-shim-nvidia"
OPENCL: Final = "/etc/OpenCL/vendors/nvidia.icd"
ICD: Final = "/etc/vulkan/icd.d/nvidia_icd.x86_64.json"
EGL: Final = "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"
LAYER: Final = "/etc/vulkan/implicit_layer.d/nvidia_layers.json"
PLATFORM: Final = "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json"
SAFETY: Final = "/etc/vulkansc/icd.d/nvidia_icd.json"  # no variable adds to its drivers
ALL: Final = {OPENCL, ICD, EGL, LAYER, PLATFORM, SAFETY}


def put_manifests(image: Any, tmp_path: Path, **variables: str) -> tuple[Placed, dict[str, str]]:
    """Place manifests that the image cannot hold; return the result and the staged files."""

    def build(root: str) -> None:
        debian(root)
        put(root, "/etc/OpenCL/vendors/pocl.icd", b"libpocl.so\n")
        put(root, "/etc/OpenCL/vendors/README", b"")
        link(root, OPENCL, "nowhere")

    root = image(build)
    (tmp_path / "file").write_text("")
    plan = Plan(
        mounts=tuple(Mount(f"{tmp_path}/file", path) for path in (OPENCL, EGL, LAYER, SAFETY)),
        files=tuple(File(path, b"{}", source=f"{tmp_path}/file") for path in (ICD, PLATFORM)),
    )
    placed = put_in(root, plan, [RUN], variables=variables)
    staging = Path(f"{root}-staging")
    return placed, {
        str(path.relative_to(staging)): str(path.readlink()) if path.is_symlink()
        else path.read_text()
        for path in staging.rglob("*")
        if not path.is_dir()
    }  # fmt: skip


def test_manifests_without_room_are_where_variables_say(image: Any, tmp_path: Path) -> None:
    placed, staged = put_manifests(image, tmp_path)
    assert dict(placed.environment) == {
        "OCL_ICD_VENDORS": f"{HOME}/opencl",
        "VK_ADD_DRIVER_FILES": f"{HOME}/vulkan/nvidia_icd.x86_64.json",
        "VK_ADD_IMPLICIT_LAYER_PATH": f"{HOME}/vulkan-layers/nvidia_layers.json",
        "__EGL_EXTERNAL_PLATFORM_CONFIG_DIRS": (
            f"{HOME}/egl-platforms:/etc/egl/egl_external_platform.d"
            ":/usr/share/egl/egl_external_platform.d"
        ),
        "__EGL_VENDOR_LIBRARY_DIRS": (
            f"{HOME}/egl:/etc/glvnd/egl_vendor.d:/usr/share/glvnd/egl_vendor.d"
        ),
    }
    assert dict(placed.substitutes) == {
        OPENCL: f"{HOME}/opencl/nvidia.icd",
        ICD: f"{HOME}/vulkan/nvidia_icd.x86_64.json",
        LAYER: f"{HOME}/vulkan-layers/nvidia_layers.json",
        EGL: f"{HOME}/egl/10_nvidia.json",
        PLATFORM: f"{HOME}/egl-platforms/15_nvidia_gbm.json",
    }
    assert set(placed.omitted) == ALL
    # Once a loader has explicit paths, it does not search the image.
    assert staged == {
        "opencl/nvidia.icd": "",
        "opencl/pocl.icd": "/etc/OpenCL/vendors/pocl.icd",
        "vulkan/nvidia_icd.x86_64.json": "{}",
        "vulkan-layers/nvidia_layers.json": "",
        "egl/10_nvidia.json": "",
        "egl-platforms/15_nvidia_gbm.json": "{}",
    }
    assert {mount.destination for mount in placed.mounts} == {
        f"{HOME}/opencl", f"{HOME}/opencl/nvidia.icd", f"{HOME}/vulkan",
        f"{HOME}/vulkan-layers", f"{HOME}/vulkan-layers/nvidia_layers.json",
        f"{HOME}/egl", f"{HOME}/egl/10_nvidia.json", f"{HOME}/egl-platforms",
    }  # fmt: skip


def test_variable_of_another_edit_stays(image: Any, tmp_path: Path) -> None:
    """For example, that of a CDI spec with another vendor's OpenCL."""
    (tmp_path / "file").write_text("")
    plan = Plan(
        mounts=(Mount(f"{tmp_path}/file", OPENCL), Mount(f"{tmp_path}/file", "/usr/bin/smi")),
        environment=(("OCL_ICD_VENDORS", "/theirs"), ("PATH", "/theirs")),
    )
    placed = put_in(image(debian), plan, [RUN], variables={"PATH": "/own"})
    assert placed.environment == (("PATH", f"/theirs:{HOME}/bin"),)
    assert dict(placed.substitutes) == {"/usr/bin/smi": f"{HOME}/bin/smi"}


def test_no_link_leads_a_volume_onto_the_tmpfs_of_the_libraries(image: Any) -> None:
    root = image(lambda root: link(debian(root), "/volume", "/run"))
    volume = {"destination": "/volume", "type": "bind", "source": "/x", "options": ["rbind"]}
    with Rootfs.open(root) as rootfs:
        assert read_layout(rootfs, (ARCH,), [DEV, RUN, volume]).scratch == "/dev"
        below = volume | {"destination": "/volume/below"}
        assert read_layout(rootfs, (ARCH,), [DEV, RUN, below]).scratch == "/run"


@pytest.mark.parametrize(
    ("linked", "target"),
    [
        ("/usr/bin", "/data"),
        ("/usr/bin/smi", "/data/smi"),
        ("/usr/bin/smi", os.fsdecode(b"/data/\xff")),
    ],
)
def test_no_link_leads_a_mount_into_a_volume_that_the_host_shares(
    image: Any, tmp_path: Path, linked: str, target: str
) -> None:
    def build(root: str) -> None:
        put(root, target if linked == "/usr/bin/smi" else "/data/smi", b"")
        link(root, linked, target)

    root = image(build)
    (tmp_path / "file").write_text("")
    plan = Plan(mounts=(Mount(f"{tmp_path}/file", "/usr/bin/smi"),))
    volume = {"destination": "/data", "type": "bind", "source": "/x", "options": ["rbind"]}
    assert put_in(root, plan, [RUN, volume]).omitted == ()
    shared = volume | {"options": ["rbind", "rshared"]}
    assert put_in(root, plan, [RUN, shared]).omitted == ("/usr/bin/smi",)


@pytest.mark.parametrize(
    "variables",
    [
        {
            "OCL_ICD_VENDORS": "", "VK_ADD_DRIVER_FILES": "/x", "VK_ADD_IMPLICIT_LAYER_PATH": "",
            "__EGL_VENDOR_LIBRARY_DIRS": "/", "__EGL_EXTERNAL_PLATFORM_CONFIG_DIRS": "/x",
        },
        # With these a loader ignores those, even if they are empty.
        {
            "OCL_ICD_VENDORS": "/x", "VK_DRIVER_FILES": "", "VK_IMPLICIT_LAYER_PATH": "/x",
            "__EGL_VENDOR_LIBRARY_FILENAMES": "",
            "__EGL_EXTERNAL_PLATFORM_CONFIG_FILENAMES": "/x",
        },
    ],
)  # fmt: skip
def test_manifests_are_lost_where_the_container_says_itself_where_to_look(
    image: Any, tmp_path: Path, variables: dict[str, str]
) -> None:
    placed, staged = put_manifests(image, tmp_path, **variables)
    assert [*placed.environment, *placed.substitutes, *placed.mounts] == []
    assert staged == {}
    assert set(placed.omitted) == ALL


def test_manifest_of_vulkan_is_lost_with_the_variable_s_former_name(
    image: Any, tmp_path: Path
) -> None:
    placed, _ = put_manifests(image, tmp_path, VK_ICD_FILENAMES="")
    assert ICD not in dict(placed.substitutes)
    assert dict(placed.substitutes).keys() == ALL - {ICD, SAFETY}
