from __future__ import annotations

import os
from typing import Any

import pytest

from hooks.edits.grant import decide
from hooks.edits.planning import arches_of, make_plan
from hooks.image.layout import Layout, Libc, Loader
from hooks.node.capabilities import FILES, NODES, Library, every_row, rows_of
from hooks.node.inventory import take_inventory
from hooks.plan import Bounds, Plan
from hooks.requests.request import read_request
from hooks.words import CAPABILITIES, Arch
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node, nvml_gpu, nvml_mig

HOME = "/usr/lib/x86_64-linux-gnu"
HOME32 = "/usr/lib/i386-linux-gnu"


def layout(home: str = HOME) -> Layout:
    return Layout(
        (
            Loader(Arch.X86_64, Libc.GLIBC, home),
            Loader(Arch.I386, Libc.GLIBC, HOME32),
        )
    )


def planned(
    node: Node, capabilities: str, devices: str = "0", home: str = HOME, **told: Any
) -> Plan:
    environment = [
        f"NVIDIA_VISIBLE_DEVICES={devices}",
        f"NVIDIA_DRIVER_CAPABILITIES={capabilities}",
    ]
    request: Any = read_request({"process": {"env": environment}})
    # As NVML counts: in bus order.
    there = sorted(os.listdir(f"{node.config.proc}/driver/nvidia/gpus"))
    gpus = [nvml_gpu(minor_of(node, bus), bus, index=n) for n, bus in enumerate(there)]
    inventory = node.take_inventory(*(gpu | (told if not gpu["minor"] else {}) for gpu in gpus))
    return make_plan(decide(request, inventory), inventory, layout(home))


def minor_of(node: Node, bus: str) -> int:
    with open(f"{node.config.proc}/driver/nvidia/gpus/{bus}/information") as file:
        return next(int(line.split()[-1]) for line in file if line.startswith("Device Minor"))


def destinations(plan: Plan) -> set[str]:
    return {mount.destination for mount in plan.mounts}


def paths(plan: Plan) -> set[str]:
    return {device.path for device in plan.devices}


@pytest.fixture
def full(node: Node) -> Node:
    """A node with something for every capability."""
    for name, soname in {
        f"libnvidia-eglcore.so.{VERSION}": None,
        f"libGLX_nvidia.so.{VERSION}": "libGLX_nvidia.so.0",
        f"libnvidia-allocator.so.{VERSION}": "libnvidia-allocator.so.1",
        f"libnvidia-encode.so.{VERSION}": "libnvidia-encode.so.1",
        f"libvdpau_nvidia.so.{VERSION}": "libvdpau_nvidia.so.1",
        f"libnvidia-ngx.so.{VERSION}": "libnvidia-ngx.so.1",
    }.items():
        node.add_library(name, soname)
    node.add_library(f"libcuda.so.{VERSION}", "libcuda.so.1", "usr/lib32", bits=32)
    for path in (
        "usr/bin/nvidia-smi",
        "usr/bin/nvidia-cuda-mps-control",
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "usr/share/vulkan/icd.d/nvidia_icd.json",
        "usr/share/X11/xorg.conf.d/10-nvidia.conf",
        f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
        f"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}",
    ):
        node.write(node.driver / path, "x")
    node.add_gpu(2, "0000:00:01.0", drm=True)  # the first in bus order
    return node


CUDA = f"{HOME}/libcuda.so.{VERSION}"
NVML = f"{HOME}/libnvidia-ml.so.{VERSION}"
EGL = f"{HOME}/libnvidia-eglcore.so.{VERSION}"
ENCODE = f"{HOME}/libnvidia-encode.so.{VERSION}"
VDPAU = f"{HOME}/vdpau/libvdpau_nvidia.so.{VERSION}"
NGX = f"{HOME}/libnvidia-ngx.so.{VERSION}"
XORG = f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}"
FIRMWARE = f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
SMI, MPS = "/usr/bin/nvidia-smi", "/usr/bin/nvidia-cuda-mps-control"
CUDA32 = f"{HOME32}/libcuda.so.{VERSION}"
VULKAN = "/etc/vulkan/icd.d/nvidia_icd.json"
EGL_JSON = "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"
OF_INTEREST = {
    CUDA,
    NVML,
    EGL,
    ENCODE,
    VDPAU,
    NGX,
    XORG,
    FIRMWARE,
    SMI,
    MPS,
    CUDA32,
    VULKAN,
    EGL_JSON,
}

CTL, MODESET, GPU = "/dev/nvidiactl", "/dev/nvidia-modeset", "/dev/nvidia2"
UVM = {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
DRI = {"/dev/dri/card2", "/dev/dri/renderD130"}


@pytest.mark.parametrize(
    ("capabilities", "files", "nodes"),
    [
        ("utility", {NVML, SMI}, set()),
        ("compute", {CUDA, MPS}, UVM),
        ("utility,compute", {NVML, SMI, CUDA, MPS}, UVM),
        ("video", {CUDA, ENCODE, VDPAU}, UVM),
        ("graphics", {EGL, VULKAN, EGL_JSON}, {MODESET, *DRI}),
        ("display", {EGL, VULKAN, EGL_JSON, XORG}, {MODESET, *DRI}),
        ("ngx", {NGX}, set()),
        ("compat32", set(), set()),
        ("compute,compat32", {CUDA, MPS, CUDA32}, UVM),
        ("all", OF_INTEREST - {FIRMWARE}, {MODESET, *DRI, *UVM}),
    ],
)
def test_capability_brings(full: Node, capabilities: str, files: set[str], nodes: set[str]) -> None:
    plan = planned(full, capabilities)
    assert destinations(plan) & OF_INTEREST == files | {FIRMWARE}
    assert paths(plan) == nodes | {CTL, GPU}


def test_mounts_are_read_only_files_of_the_driver(full: Node) -> None:
    for mount in planned(full, "all").mounts:
        assert mount.source.startswith(f"{full.driver}/")
        assert {"ro", "nosuid", "nodev"} <= set(mount.options)


def test_library_without_soname_needs_no_link(full: Node) -> None:
    plan = planned(full, "graphics")
    name = f"libnvidia-eglcore.so.{VERSION}"
    assert (name, EGL) in {(c.soname, c.path) for c in plan.libraries}
    assert not any(link.target == name for link in plan.links)


def test_gbm_backend_leads_to_the_allocator_from_its_own_directory(full: Node) -> None:
    links = {link.path: link.target for link in planned(full, "graphics").links}
    assert links[f"{HOME}/gbm/nvidia-drm_gbm.so"] == f"{HOME}/libnvidia-allocator.so.{VERSION}"
    assert f"{HOME}/gbm/nvidia-drm_gbm.so" not in {
        link.path for link in planned(full, "compute").links
    }


def test_no_path_is_planned_twice(full: Node) -> None:
    plan = planned(full, "all")
    for keys in (
        [m.destination for m in plan.mounts],
        [link.path for link in plan.links],
        [d.path for d in plan.devices],
        [(c.soname, c.arch) for c in plan.libraries],
    ):
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("profile", "with_drm"), [("1g.10gb", False), ("1g.12gb+gfx", True)])
def test_mig_device_brings_its_capabilities_and_drm_if_it_has_graphics(
    bare_node: Node, profile: str, *, with_drm: bool
) -> None:
    bare_node.add_kernel()
    bare_node.add_driver()
    bare_node.add_gpu(0, drm=True)
    bare_node.add_mig(0, 1, 0, (12, 13))
    devices = [nvml_mig(0, 1, 0, profile)]
    plan = planned(bare_node, "graphics", "0:0", mig=True, mig_devices=devices)
    caps = {"/dev/nvidia-caps/nvidia-cap12", "/dev/nvidia-caps/nvidia-cap13"}
    drm = {"/dev/dri/card0", "/dev/dri/renderD128"} if with_drm else set()
    assert paths(plan) == {CTL, MODESET, "/dev/nvidia0", *caps, *drm}


def test_what_the_driver_does_not_have_is_listed_with_the_places_searched(node: Node) -> None:
    (node.dev / "nvidia-uvm").unlink()
    missing = {m.what: m.sought for m in planned(node, "compute,utility").missing}
    assert f"{node.driver}/{MULTIARCH}" in missing[f"libcudadebugger.so.{VERSION} (x86_64)"]
    assert "/usr/bin/nvidia-smi" in missing["nvidia-smi"]
    assert "/run/nvidia-persistenced/socket" in missing
    assert "No such file" in missing["/dev/nvidia-uvm"][0]


def test_socket_of_a_service_is_mounted_writable_and_not_executable(node: Node) -> None:
    (node.driver / "tmp/nvidia-mps").mkdir(parents=True)
    mount = next(m for m in planned(node, "compute").mounts if m.destination == "/tmp/nvidia-mps")
    assert "ro" not in mount.options
    assert "noexec" in mount.options
    assert "/tmp/nvidia-mps" not in destinations(planned(node, "utility"))


def test_32_bit_libraries_are_asked_for_with_compat32_only(node: Node) -> None:
    inventory = take_inventory(node.config, None)
    for capabilities, arches in (("all", 2), ("compute", 1)):
        environment = ["NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}"]
        request: Any = read_request({"process": {"env": environment}})
        assert len(arches_of(decide(request, inventory), inventory)) == arches


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


def test_gpus_that_are_not_granted_are_in_no_link_and_no_mask(full: Node) -> None:
    plan = planned(full, "graphics", devices="1")  # without DRM nodes
    assert plan.link_directories == ()
    assert b"0x1]" in plan.files[0].content
    assert planned(full, "graphics", devices="none").files == ()


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
