from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hooks.edits.grant import decide
from hooks.edits.planning import make_plan
from hooks.image.layout import Layout, Libc, Loader
from hooks.node.capabilities import FILES, NODES, Library, every_row, rows_of
from hooks.plan import Bounds, CachedLibrary, Plan
from hooks.requests.request import read_request
from hooks.words import CAPABILITIES, Arch
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node, nvml_gpu, nvml_mig

LAYOUT = Layout(
    (
        Loader(Arch.X86_64, Libc.GLIBC, f"/{MULTIARCH}"),
        Loader(Arch.I386, Libc.GLIBC, "/usr/lib/i386-linux-gnu"),
    )
)


def planned(
    node: Node, capabilities: str, devices: str, *gpus: dict[str, Any], layout: Layout = LAYOUT
) -> Plan:
    environment = [
        f"NVIDIA_VISIBLE_DEVICES={devices}",
        f"NVIDIA_DRIVER_CAPABILITIES={capabilities}",
    ]
    request: Any = read_request({"process": {"env": environment}})
    inventory = node.take_inventory(*gpus)
    return make_plan(decide(request, inventory), inventory, layout)


CTL, MODESET = "/dev/nvidiactl", "/dev/nvidia-modeset"


@pytest.mark.parametrize(("profile", "with_drm"), [("1g.10gb", False), ("1g.12gb+gfx", True)])
def test_mig_device_brings_its_capabilities_and_drm_if_it_has_graphics(
    bare_node: Node, profile: str, *, with_drm: bool
) -> None:
    bare_node.add_kernel()
    bare_node.add_driver()
    bare_node.add_gpu(0, drm=True)
    bare_node.add_mig(0, 1, 0, (12, 13))
    devices = [nvml_mig(0, 1, 0, profile)]
    plan = planned(bare_node, "graphics", "0:0", nvml_gpu(0, mig=True, mig_devices=devices))
    caps = {"/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"}
    drm = {"/dev/dri/card0", "/dev/dri/renderD128"} if with_drm else set()
    assert {device.path for device in plan.devices} == {CTL, MODESET, "/dev/nvidia0", *caps, *drm}


def test_what_the_driver_does_not_have_is_listed_with_the_places_searched(node: Node) -> None:
    (node.dev / "nvidia-uvm").unlink()
    plan = planned(node, "compute,utility", "0", nvml_gpu(0), nvml_gpu(1))
    missing = {m.what: m.sought for m in plan.missing}
    assert f"{node.driver}/{MULTIARCH}" in missing[f"libcudadebugger.so.{VERSION} (x86_64)"]
    assert "/usr/bin/nvidia-smi" in missing["nvidia-smi"]
    assert "/run/nvidia-persistenced/socket" in missing
    assert "No such file" in missing["/dev/nvidia-uvm"][0]


ICD = "vulkan/icd.d/nvidia_icd"


def icd(library: str) -> str:
    return json.dumps({"file_format_version": "1.0.0", "ICD": {"library_path": library}})


@pytest.fixture
def vulkan(node: Node) -> Node:
    """Make a node with 64-bit and 32-bit libraries, and manifests with the host's paths of them."""
    for directory, bits, arch in (("usr/lib64", 64, "x86_64"), ("usr/lib", 32, "i686")):
        node.add_library(f"libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0", directory, bits)
        manifest = node.driver / f"usr/share/{ICD}.{arch}.json"
        node.write(manifest, icd(f"/{directory}/libGLX_nvidia.so.0"))
    node.write(node.driver / "usr/share/glvnd/egl_vendor.d/10_nvidia.json", icd("/x/libother.so.0"))
    node.write(node.driver / "usr/share/vulkan/implicit_layer.d/nvidia_layers.json", "{")
    node.write(node.driver / "etc/OpenCL/vendors/nvidia.icd", "/x/libGLX_nvidia.so.0\n")
    return node


def manifests(plan: Plan) -> dict[str, str]:
    """Return the library that each manifest names instead of the host's."""
    found = {}
    for file in plan.files:
        if file.source:
            text = file.content.decode()
            is_json = file.path.endswith(".json")
            found[file.path] = json.loads(text)["ICD"]["library_path"] if is_json else text.strip()
    return found


def test_manifest_has_the_name_of_a_library_that_the_container_gets(vulkan: Node) -> None:
    plan = planned(vulkan, "graphics", "0", nvml_gpu(0), nvml_gpu(1))
    assert manifests(plan) == {f"/etc/{ICD}.x86_64.json": "libGLX_nvidia.so.0"}
    (file,) = [file for file in plan.files if file.source]
    assert file.source == f"{vulkan.driver}/usr/share/{ICD}.x86_64.json"
    assert file.reason == "names libGLX_nvidia.so.0 in place of /usr/lib64/libGLX_nvidia.so.0"
    # Files that name another library, or that a loader cannot parse, stay unchanged.
    mounted = {mount.destination for mount in plan.mounts}
    assert "/usr/share/glvnd/egl_vendor.d/10_nvidia.json" in mounted
    assert "/etc/vulkan/implicit_layer.d/nvidia_layers.json" in mounted
    assert file.path not in mounted
    # Without graphics the library is missing, so its name would not help.
    plan = planned(vulkan, "compute", "0", nvml_gpu(0), nvml_gpu(1))
    assert manifests(plan) == {}
    assert "/etc/OpenCL/vendors/nvidia.icd" in {mount.destination for mount in plan.mounts}


def test_manifest_of_one_of_two_architectures_has_the_path_in_the_container(vulkan: Node) -> None:
    plan = planned(vulkan, "graphics,compat32", "0", nvml_gpu(0), nvml_gpu(1))
    name = f"libGLX_nvidia.so.{VERSION}"
    assert manifests(plan) == {
        f"/etc/{ICD}.x86_64.json": f"/{MULTIARCH}/{name}",
        f"/etc/{ICD}.i686.json": f"/usr/lib/i386-linux-gnu/{name}",
    }


def test_library_of_no_known_capability_comes_with_all_of_them(node: Node) -> None:
    node.add_library(f"libnvfuture.so.{VERSION}", "libnvfuture.so.1")
    plan = planned(node, "all", "0", nvml_gpu(0), nvml_gpu(1))
    place = f"/{MULTIARCH}/libnvfuture.so.{VERSION}"
    (mount,) = [mount for mount in plan.mounts if mount.destination == place]
    assert mount.reason == "x86_64 library of no known capability"
    assert CachedLibrary("libnvfuture.so.1", place, Arch.X86_64) in plan.libraries
    plan = planned(node, "compute,utility,graphics,video,display", "0", nvml_gpu(0), nvml_gpu(1))
    assert place not in {mount.destination for mount in plan.mounts}


@pytest.mark.parametrize(
    ("capabilities", "has_ldconfig", "is_set"),
    [("compute", False, True), ("compute", True, False), ("utility", False, False)],
)
def test_triton_is_told_where_libcuda_is_in_an_image_without_ldconfig(
    node: Node, capabilities: str, *, has_ldconfig: bool, is_set: bool
) -> None:
    layout = replace(LAYOUT, has_ldconfig=has_ldconfig)
    plan = planned(node, capabilities, "0", nvml_gpu(0), nvml_gpu(1), layout=layout)
    found = dict(plan.environment).get("TRITON_LIBCUDA_PATH")
    assert found == (f"/{MULTIARCH}" if is_set else None)


def test_profiles_that_cuda_opens_come_with_compute(node: Node) -> None:
    path = f"/usr/share/nvidia/nvidia-application-profiles-{VERSION}-rc"
    node.write(node.driver / path[1:], "{}")
    for capability, has_it in (("compute", True), ("utility", False)):
        plan = planned(node, capability, "0", nvml_gpu(0), nvml_gpu(1))
        assert (path in {mount.destination for mount in plan.mounts}) is has_it


def test_node_without_32_bit_libraries_lacks_them_in_one_line(node: Node) -> None:
    plan = planned(node, "all", "0", nvml_gpu(0), nvml_gpu(1))
    assert [m.what for m in plan.missing if "i386" in m.what] == ["all libraries for i386"]
    node.add_library(f"libcuda.so.{VERSION}", "libcuda.so.1", "usr/lib/i386-linux-gnu", bits=32)
    plan = planned(node, "compute,compat32", "0", nvml_gpu(0), nvml_gpu(1))
    missing = {m.what for m in plan.missing}
    assert f"libnvidia-opencl.so.{VERSION} (i386)" in missing
    assert "all libraries for i386" not in missing


def test_table_has_every_capability_and_names_that_stay_names() -> None:
    assert set(FILES) == set(NODES) == CAPABILITIES
    for row in every_row():
        if isinstance(row, Library):
            assert "/" not in row.name
            assert ".so." in row.name
            assert row.name.count("*") <= 1


def test_video_has_all_libraries_of_compute_and_display_of_graphics() -> None:
    def libraries(capability: str) -> set[str]:
        return {row.name for row in rows_of({capability}) if isinstance(row, Library)}

    assert libraries("compute") < libraries("video")
    assert libraries("graphics") == libraries("display")


def test_bounds_of_two_vendors_are_what_either_may() -> None:
    none = Bounds(mount_kinds=frozenset())
    majors, programs = frozenset({195}), frozenset({"/bin/hook"})
    one = Bounds(majors, ("/a",), frozenset({8}), frozenset({"bind"}), programs, host_settings=True)
    other = Bounds(frozenset({235}), ("/b",), frozenset({9}), frozenset({"tmpfs"}), programs)
    assert one | none == none | one == one
    assert one | other == Bounds(
        frozenset({195, 235}), ("/a", "/b"), frozenset({8, 9}), frozenset({"bind", "tmpfs"}),
        programs, host_settings=True,
    )  # fmt: skip
