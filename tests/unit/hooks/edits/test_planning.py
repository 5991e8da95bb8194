from __future__ import annotations

from typing import Any

import pytest

from hooks.edits.grant import decide
from hooks.edits.planning import make_plan
from hooks.image.layout import Layout, Libc, Loader
from hooks.node.capabilities import FILES, NODES, Library, every_row, rows_of
from hooks.plan import Bounds, Plan
from hooks.requests.request import read_request
from hooks.words import CAPABILITIES, Arch
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node, nvml_gpu, nvml_mig

LAYOUT = Layout(
    (
        Loader(Arch.X86_64, Libc.GLIBC, f"/{MULTIARCH}"),
        Loader(Arch.I386, Libc.GLIBC, "/usr/lib/i386-linux-gnu"),
    )
)


def planned(node: Node, capabilities: str, devices: str, *gpus: dict[str, Any]) -> Plan:
    environment = [
        f"NVIDIA_VISIBLE_DEVICES={devices}",
        f"NVIDIA_DRIVER_CAPABILITIES={capabilities}",
    ]
    request: Any = read_request({"process": {"env": environment}})
    inventory = node.take_inventory(*gpus)
    return make_plan(decide(request, inventory), inventory, LAYOUT)


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
