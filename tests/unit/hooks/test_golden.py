"""Golden tables: all edits for a request and an image.

``golden.json`` has for each case what the container gets: the entries that are added to its spec,
and the changes of the image's files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.errors import NvshimError
from hooks import engine
from hooks.image.ldcache import parse
from hooks.image.rootfs import Rootfs
from tests.unit.hooks.fake_node import MULTIARCH, VERSION, Node, nvml_gpu, nvml_mig
from tests.unit.hooks.golden import Golden
from tests.unit.hooks.image import images

GOLDEN = Golden("golden.json")
ONE = "NVIDIA_VISIBLE_DEVICES=0"
ALL = "NVIDIA_DRIVER_CAPABILITIES=all"
MANAGEMENT = "NVIDIA_VISIBLE_DEVICES=management.nvidia.com/gpu=all"
IMAGES: dict[str, Callable[[str], str]] = {
    "debian": images.debian,
    "fedora": images.fedora,
    "alpine": images.alpine,
    "scratch": images.scratch,
}
# Name: image, and the environment of the container.
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "usual": ("debian", (ONE,)),
    "every GPU": ("debian", ("NVIDIA_VISIBLE_DEVICES=all",)),
    "every capability": ("debian", (ONE, ALL)),
    "graphics": ("debian", ("NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_DRIVER_CAPABILITIES=graphics")),
    "graphics without DRM nodes": (
        "debian",
        ("NVIDIA_VISIBLE_DEVICES=2:0", "NVIDIA_DRIVER_CAPABILITIES=graphics"),
    ),
    "utility": ("debian", (ONE, "NVIDIA_DRIVER_CAPABILITIES=utility")),
    "driver without GPU": ("debian", ("NVIDIA_VISIBLE_DEVICES=none",)),
    "MIG device": ("debian", ("NVIDIA_VISIBLE_DEVICES=2:0", ALL)),
    "libraries in lib64": ("fedora", (ONE, ALL)),
    "musl": ("alpine", (ONE,)),
    "no loader": ("scratch", (ONE,)),
    "management": ("debian", (MANAGEMENT,)),
    "management beside a GPU": ("debian", (f"{MANAGEMENT},nvidia.com/gpu=0",)),
    **{
        f"capabilities {names}": ("debian", (ONE, f"NVIDIA_DRIVER_CAPABILITIES={names}"))
        for names in (
            "compute", "utility,compute", "video", "display", "ngx", "compat32", "compute,compat32",
        )
    },
    **{
        f"{name} alone": ("debian", (f"NVIDIA_VISIBLE_DEVICES=nvidia.com/{name}=all",))
        for name in ("gds", "mofed", "gdrcopy", "nvswitch")
    },
    **{
        f"GPU and {asked}": ("debian", (ONE, f"NVIDIA_{asked}"))
        for asked in (
            "GDS=enabled", "MIG_CONFIG_DEVICES=all", "MIG_MONITOR_DEVICES=all", "IMEX_CHANNELS=7",
            "IMEX_CHANNELS=all", "IMEX_CHANNELS=1", "IMEX_CHANNELS=8",
        )
    },
}  # fmt: skip
MOUNTS = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    {"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
]


@pytest.fixture
def full(bare_node: Node) -> Node:
    """Make a node with three GPUs, one with MIG devices, and a driver with all kinds of files."""
    node = bare_node
    node.add_kernel()
    node.add_driver()
    for stem, soname in (
        ("libnvidia-eglcore", None),
        ("libGLX_nvidia", "libGLX_nvidia.so.0"),
        ("libnvidia-allocator", "libnvidia-allocator.so.1"),
        ("libnvidia-encode", "libnvidia-encode.so.1"),
        ("libnvidia-ngx", "libnvidia-ngx.so.1"),
        ("libnvcuvid", "libnvcuvid.so.1"),
    ):
        node.add_library(f"{stem}.so.{VERSION}", soname)
    node.add_library(f"libvdpau_nvidia.so.{VERSION}", "libvdpau_nvidia.so.1", f"{MULTIARCH}/vdpau")
    node.add_library(f"libcuda.so.{VERSION}", "libcuda.so.1", "usr/lib/i386-linux-gnu", bits=32)
    module = f"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{VERSION}"
    for path in (
        "usr/bin/nvidia-smi", "usr/bin/nvidia-cuda-mps-control", "etc/cufile.json", module,
        "etc/vulkan/icd.d/nvidia_icd.json", "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    ):  # fmt: skip
        node.write(node.driver / path, "x")
    for path in ("tmp/nvidia-mps", "run/udev"):
        (node.driver / path).mkdir(parents=True)
    node.write(node.driver / f"lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin", "x")
    node.write(node.proc / "driver/nvidia/params", "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n")
    node.add_features()
    node.add_gpu(0, drm=True)
    node.add_gpu(1, drm=True)
    node.add_gpu(2)
    node.add_mig(2, 1, 0, (30, 31))
    mig = nvml_gpu(2, mig=True, mig_devices=[nvml_mig(0, 1, 0)])
    node.take_inventory(nvml_gpu(0), nvml_gpu(1), mig)
    return node


def spec_of(environment: tuple[str, ...]) -> dict[str, Any]:
    return {
        "process": {"env": ["PATH=/bin", *environment], "user": {"uid": 0, "gid": 0}},
        "mounts": list(MOUNTS),
        "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}},
    }


def inject(
    node: Node, spec: dict[str, Any], root: Path, prepared: engine.Prepared | None = None
) -> engine.Injection:
    inventory = engine.load_inventory(node.config)
    request = engine.read_request(spec)
    config, staging = replace(node.config, char_links=False), f"{node.base}/staging"
    target = (
        engine.RootfsTarget(str(root), staging)
        if prepared is None
        else engine.LayerTarget(prepared, str(root), staging)
    )
    return engine.inject(spec, request, inventory, target, config=config)


def shown(
    node: Node, before: dict[str, Any], done: engine.Injection, changed: dict[str, str]
) -> dict[str, Any]:
    """Return a readable form of what a container gets. Node paths appear by name."""
    after = done.spec
    linux, process = after["linux"], after["process"]
    got = {
        "devices": [
            f"{d['path']} {d['type']} {d['major']}:{d['minor']} {d['fileMode']:o} {d['gid']}"
            for d in linux["devices"]
        ],
        "rules": [
            f"{r['major']}:{r['minor']} {r['access']}" for r in linux["resources"]["devices"][1:]
        ],
        "mounts": [
            f"{m['destination']} from {m['source']} {','.join(m['options'])}"
            for m in after["mounts"][len(MOUNTS) :]
        ],
        "environment": process["env"][len(before["process"]["env"]) :],
        "groups": process["user"].get("additionalGids", []),
        "image": changed,
        "staging": changes(images.Tree(), node.base / "staging"),
        "left out": done.record["left_out"],
        "proc files": [file["path"] for file in done.record["proc_files"]],
    }
    text = json.dumps(got)
    for path, name in ((node.driver, "DRIVER"), (node.base, "NODE")):
        text = text.replace(str(path), name)
    named: dict[str, Any] = json.loads(text)
    return named


def changes(before: images.Tree, root: Path) -> dict[str, str]:
    """Return the changes in an image: links' targets, the sonames of a cache, other content."""
    after = images.tree(str(root))
    assert set(before) <= set(after)
    found = {}
    for path, seen in after.items():
        at = Path(f"{root}{path}")
        if seen == before.get(path):
            continue
        if at.is_symlink():
            found[path] = f"link to {at.readlink()}"
        elif path == "/etc/ld.so.cache":
            entries = parse(at.read_bytes()).entries
            found[path] = ", ".join(
                f"{os.fsdecode(e.soname)}: {os.fsdecode(e.path)}" for e in entries
            )
        else:
            found[path] = "directory" if at.is_dir() else at.read_text()
    return found


@pytest.mark.parametrize("case", CASES)
def test_container_gets(full: Node, tmp_path: Path, case: str) -> None:
    image, environment = CASES[case]
    root = tmp_path / "rootfs"
    root.mkdir()
    before = images.tree(IMAGES[image](str(root)))
    spec = spec_of(environment)
    try:
        done = inject(full, spec, root)
    except NvshimError as error:
        assert images.tree(str(root)) == before
        GOLDEN.compare(case, {"error": str(error).replace(str(full.base), "NODE")})
        return
    found = shown(full, spec, done, changes(before, root))
    given = [each.split()[0] for each in (*found["devices"], *found["mounts"])]
    assert len(given) == len(set(given)), "no device or mount appears twice"
    GOLDEN.compare(case, found)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
@pytest.mark.parametrize("case", ["usual", "every capability", "musl"])
def test_image_that_takes_no_writes_gets(full: Node, tmp_path: Path, case: str) -> None:
    image, environment = CASES[case]
    root = tmp_path / "rootfs"
    root.mkdir()
    before = images.tree(IMAGES[image](str(root)))
    spec = spec_of(environment)
    with ExitStack() as stack:
        subprocess.run(["mount", "--bind", "-o", "ro", root, root], check=True)
        stack.callback(lambda: subprocess.run(["umount", root], check=True))
        done = inject(full, spec, root)
        assert images.tree(str(root)) == before
    GOLDEN.compare(f"{case}, read-only", shown(full, spec, done, {}))
    elsewhere = done.record["elsewhere"]
    assert elsewhere["/usr/bin/nvidia-smi"] == "/run/containerd-shim-nvidia/bin/nvidia-smi"
    assert elsewhere.keys().isdisjoint(done.record["left_out"])
    assert set(elsewhere.values()) <= {mount["destination"] for mount in done.spec["mounts"]}


# Requests beyond NVIDIA's GPUs are not prepared.
NOT_PREPARED = ("management", " alone", "GDS=", "IMEX_CHANNELS=")


@pytest.mark.parametrize("case", [c for c in CASES if not any(word in c for word in NOT_PREPARED)])
def test_what_was_prepared_is_what_would_have_been_done(
    full: Node, tmp_path: Path, case: str
) -> None:
    image, environment = CASES[case]
    spec = spec_of(environment)
    alone, layer = tmp_path / "alone", tmp_path / "layer"
    alone.mkdir()
    IMAGES[image](str(alone))
    shutil.copytree(alone, layer, symlinks=True)
    request, inventory = engine.read_request(spec), engine.load_inventory(full.config)
    assert inventory is not None
    # As it is cached, for all containers with the same request.
    with Rootfs.open(str(layer)) as tree:
        kept, _ = engine.prepare(
            spec, request, inventory, tree, rootfs=str(alone), config=full.config
        )
    prepared = engine.Prepared.decode(kept.encode())
    assert prepared is not None
    shared = inject(full, spec, layer, prepared=prepared)
    done = inject(full, spec, alone)
    assert shared.spec == done.spec
    assert changes(images.tree(str(alone)), layer) == {}
    told = {"layered", "milliseconds"}
    assert {k: v for k, v in shared.record.items() if k not in told} == {
        k: v for k, v in done.record.items() if k not in told
    }
