"""NVIDIA's devices as a CDI spec without hooks.

``generated.json`` has the spec for each set of options, or the error.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.errors import NvshimError
from hooks.cdi import generating
from hooks.cdi.generating import SpecOptions, generate
from hooks.cdi.spec import DeviceNode, SpecFile
from hooks.node.inventory import Inventory
from hooks.words import CAPABILITIES, Arch, Capability
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Elves, Node, nvml_gpu, nvml_mig, uuid_of
from tests.unit.hooks.golden import Golden

GOLDEN = Golden("generated.json")


def taken(node: Node) -> Inventory:
    """Return an inventory: GPU 0 with DRM nodes, GPU 2 in MIG mode with one device."""
    return node.take_inventory(
        nvml_gpu(2, "0000:00:01.0", index=0),
        nvml_gpu(0, index=1),
        nvml_gpu(1, index=2, mig=True, mig_devices=[nvml_mig(0, 1, 0)]),
    )


@pytest.fixture
def node(node: Node) -> Node:
    node.add_mig(1, 1, 0, (12, 13))
    node.add_gpu(2, "0000:00:01.0", drm=True)
    return node


def made(node: Node, inventory: Inventory, **wish: Any) -> Any:
    """Return a readable form of the spec, or the error. Node directories appear by name."""
    try:
        found: Any = shown(generate(SpecOptions(**wish), inventory, node.config))
    except NvshimError as error:
        found = {"error": str(error)}
    return json.loads(json.dumps(found).replace(str(node.base), "NODE"))


def shown(spec: SpecFile) -> dict[str, Any]:
    edits = {"": spec.edits, **{device.name: device.edits for device in spec.devices}}
    mounts: dict[str, list[str]] = {}
    for each in edits.values():
        assert (each.hooks, each.intel_rdt, each.net_devices) == ((), None, ())
        for mount in each.mounts:
            assert "ro" in mount.options
            mounts.setdefault(mount.host_path, []).append(mount.container_path)
    return {
        "spec": [spec.version, spec.kind, *map("=".join, spec.annotations)],
        "devices": {
            name: " ".join(map(str, (*map(numbered, each.device_nodes), *each.additional_gids)))
            for name, each in edits.items()
        },
        "environment": [variable for each in edits.values() for variable in each.env],
        "mounts": {source: " ".join(places) for source, places in mounts.items()},
    }


def numbered(node: DeviceNode) -> str:
    values = (getattr(node, name) for name in node.__match_args__)
    return ":".join(str(value) for value in values if value not in {"", None})


PLAIN: dict[str, Any] = {"capabilities": frozenset({Capability.COMPUTE})}
WISHES: dict[str, dict[str, Any]] = {
    "usual": {},
    "by index": {"strategies": ("index",)},
    "by type and index": {"strategies": ("type-index",)},
    "by both": {"strategies": ("type-index", "index")},
    "compute": PLAIN,
    "compute, in a directory": {**PLAIN, "directories": ("/opt/nvidia/lib",)},
    "compute, by words": {**PLAIN, "strategies": ("type-index",)},
    "compute, annotated": {**PLAIN, "annotations": (("nvidia.com/driver", VERSION),)},
    "devices by name": {"devices": ("1", "2:0")},
    "device by the beginning of its UUID": {
        "devices": (uuid_of(0)[:12].upper(),), "all_device": False,
    },
    "all devices by name": {"devices": ("all",)},
    "without groups": {"groups": False},
    **{
        f"device {device}": {"devices": (device,)}
        for device in ("7", "what is this", "none", "nvidia.com/gds=all", "vendor.example/x=0")
    },
    "no vendor": {"vendor": "a/b"},
    "no class": {"class_": "-"},
    "no annotation": {"annotations": (("a b", ""),)},
    **{f"kind {kind}": {"kind": kind} for kind in generating.KINDS if kind != "gpu"},
}  # fmt: skip


@pytest.mark.parametrize("name", WISHES)
def test_wish_makes_a_spec(node: Node, name: str) -> None:
    GOLDEN.compare(name, made(node, taken(node), **WISHES[name]))


@pytest.mark.parametrize("kind", [kind for kind in generating.KINDS if kind != "gpu"])
def test_kind_is_of_what_the_node_has(node: Node, kind: str) -> None:
    node.add_features()
    GOLDEN.compare(f"kind {kind} of a node with features", made(node, taken(node), kind=kind))


def test_node_without_gpus_has_no_spec(bare_node: Node) -> None:
    bare_node.add_kernel()
    bare_node.add_driver()
    GOLDEN.compare("no GPUs", made(bare_node, bare_node.take_inventory()))


def test_library_is_mounted_by_the_names_that_programs_ask_for(node: Node, elves: Elves) -> None:
    """Every mount delays the start, and programs do not open the names that linkers use."""
    sonames = {
        "libcuda": "libcuda.so.1",
        "libnvidia-ml": "libnvidia-ml.so.1",
        "libnvidia-encode": "libnvidia-encode.so.1",
        "libnvidia-allocator": "libnvidia-allocator.so.1",
        "libnvidia-opticalflow": "libnvidia-opticalflow.so.1",
        "libGLX_nvidia": "libGLX_nvidia.so.0",
        "libnvidia-glcore": f"libnvidia-glcore.so.{VERSION}",
        "libnvidia-vulkan-producer": f"libnvidia-vulkan-producer.so.{VERSION}",
    }
    for stem, soname in sonames.items():
        elves.write(node.driver / MULTIARCH / f"{stem}.so.{VERSION}", soname)
    spec = generate(SpecOptions(), taken(node), node.config)
    homes = tuple(f"{home}/" for home in generating.DIRECTORIES[Arch.X86_64])
    names: dict[str, set[str]] = {}
    for mount in spec.edits.mounts:
        stem = mount.host_path.rpartition("/")[2].partition(".so")[0]
        for home in homes:
            if mount.container_path.startswith(home):
                names.setdefault(stem, set()).add(mount.container_path.removeprefix(home))
    assert {stem: names[stem] for stem in sonames} == {
        "libcuda": {"libcuda.so.1", "libcuda.so", f"libcuda.so.{VERSION}"},
        "libnvidia-ml": {"libnvidia-ml.so.1", "libnvidia-ml.so", f"libnvidia-ml.so.{VERSION}"},
        "libnvidia-encode": {"libnvidia-encode.so.1"},
        "libnvidia-allocator": {"libnvidia-allocator.so.1", "gbm/nvidia-drm_gbm.so"},
        "libnvidia-opticalflow": {"libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"},
        "libGLX_nvidia": {"libGLX_nvidia.so.0", "libGLX_indirect.so.0"},
        "libnvidia-glcore": {f"libnvidia-glcore.so.{VERSION}"},
        "libnvidia-vulkan-producer": {
            f"libnvidia-vulkan-producer.so.{VERSION}", "libnvidia-vulkan-producer.so",
        },
    }  # fmt: skip


def test_library_is_mounted_where_the_host_s_manifest_names_it(node: Node, elves: Elves) -> None:
    """A CDI spec cannot change the content of the manifest."""
    elves.write(node.driver / MULTIARCH / f"libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0")
    named = "/nix/store/x/lib/libGLX_nvidia.so.0"
    manifest = node.write(
        node.driver / "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json",
        json.dumps({"ICD": {"library_path": named}}),
    )
    spec = generate(SpecOptions(), taken(node), node.config)
    mounts = {mount.container_path: mount.host_path for mount in spec.edits.mounts}
    assert mounts["/etc/vulkan/icd.d/nvidia_icd.x86_64.json"] == str(manifest)
    assert mounts[named] == mounts[f"/{MULTIARCH}/libGLX_nvidia.so.0"]
    # A spec without graphics has no library to mount there.
    spec = generate(SpecOptions(**PLAIN), taken(node), node.config)
    assert named not in {mount.container_path for mount in spec.edits.mounts}


def test_manifest_of_two_names_is_mounted_by_both(node: Node, elves: Elves) -> None:
    elves.write(node.driver / MULTIARCH / f"libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0")
    directory = node.driver / "usr/share/vulkan/icd.d"
    manifest = node.write(
        directory / "nvidia_icd.x86_64.json",
        json.dumps({"ICD": {"library_path": "/x/libGLX_nvidia.so.0"}}),
    )
    (directory / "nvidia_icd.json").symlink_to(manifest.name)
    spec = generate(SpecOptions(), taken(node), node.config)
    mounts = {mount.container_path: mount.host_path for mount in spec.edits.mounts}
    for name in ("nvidia_icd.json", "nvidia_icd.x86_64.json"):
        assert mounts[f"/etc/vulkan/icd.d/{name}"] == str(manifest), name


def test_manifest_s_library_is_that_of_its_architecture(node: Node, elves: Elves) -> None:
    name = f"libGLX_nvidia.so.{VERSION}"
    sources = {}
    for directory, bits in ((MULTIARCH, 64), ("usr/lib/i386-linux-gnu", 32)):
        sources[bits] = node.driver / directory / name
        sources[bits].parent.mkdir(parents=True, exist_ok=True)
        elves.write(sources[bits], "libGLX_nvidia.so.0", bits)
    for machine, bits in (("x86_64", 64), ("i686", 32)):
        node.write(
            node.driver / f"usr/share/vulkan/icd.d/nvidia_icd.{machine}.json",
            json.dumps({"ICD": {"library_path": f"/store/{bits}/libGLX_nvidia.so.0"}}),
        )
    spec = generate(SpecOptions(capabilities=CAPABILITIES), taken(node), node.config)
    mounts = {mount.container_path: mount.host_path for mount in spec.edits.mounts}
    for bits, source in sources.items():
        assert mounts[f"/store/{bits}/libGLX_nvidia.so.0"] == str(source), bits
