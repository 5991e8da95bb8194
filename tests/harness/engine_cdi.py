"""A CDI spec as ``nvidia-ctk cdi generate`` writes it, and the way an engine applies it.

containerd, CRI-O and Docker apply CDI specs with the CDI project's library before a shim sees the
OCI spec. This module does the same, so that tests can use any containerd.

Source: NVIDIA Container Toolkit 1.17 to 1.20, pkg/nvcdi and internal/discover; CDI,
pkg/cdi/container-edits.go.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from integration.simulated import SimulatedNode

HOME: Final = "/usr/lib/x86_64-linux-gnu"
FOLDERS: Final = (HOME, f"{HOME}/vdpau")
_READ_ONLY: Final = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
_PLACES: Final = (
    "usr/lib", "usr/share/glvnd", "usr/share/egl", "usr/share/nvidia", "usr/bin", "lib/firmware",
)  # fmt: skip
_COMMON: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")


def trap(directory: Path, name: str = "nvidia-cdi-hook") -> tuple[str, Path]:
    """Install a program that logs its arguments; return its path and the log's path."""
    program, log = directory / name, directory / f"{name}.log"
    program.write_text(f'#!/bin/sh\necho "$@" >>{log}\n')
    program.chmod(0o755)
    return str(program), log


def links(node: SimulatedNode) -> dict[str, list[str]]:
    """Return the values of ``--link`` by the hook that has them."""
    version = node.driver_version
    return {
        "by-path": [
            f"../{name}::/dev/dri/by-path/pci-{gpu.pci.lower()}-{kind}"
            for number, gpu in enumerate(node.scenario.gpus)
            for kind, name in (("card", f"card{number}"), ("render", f"renderD{128 + number}"))
        ],
        "gbm": [f"../libnvidia-allocator.so.1::{HOME}/gbm/nvidia-drm_gbm.so"],
        "libraries": [
            f"libcuda.so.1::{HOME}/libcuda.so",
            f"libnvidia-opticalflow.so.1::{HOME}/libnvidia-opticalflow.so",
            f"libGLX_nvidia.so.{version}::{HOME}/libGLX_indirect.so.0",
        ],
    }


def mounts(node: SimulatedNode) -> Iterator[tuple[str, str]]:
    """Return the driver's files that a spec mounts: their host paths and container paths."""
    for place in _PLACES:
        for top, _, names in os.walk(f"{node.driver_root}/{place}"):
            for name in sorted(names):
                source = f"{top}/{name}"
                is_library = ".so" in name or name.endswith(".dll")
                if is_library and not name.endswith(f".so.{node.driver_version}"):
                    continue
                if not os.path.islink(source):
                    yield source, source.removeprefix(node.driver_root)


def hooks(node: SimulatedNode, program: str) -> list[dict[str, Any]]:
    """Return the hooks of a spec, which call the program at a path."""
    linked = links(node)
    folders = [word for folder in FOLDERS for word in ("--folder", folder)]
    ldconfig = ("--ldconfig-path", "/sbin/ldconfig")
    calls = [
        *(["create-symlinks", *(w for text in texts for w in ("--link", text))]
          for texts in linked.values()),
        ["enable-cuda-compat", f"--host-driver-version={node.driver_version}"],
        ["create-soname-symlinks", *ldconfig, *folders],
        ["update-ldcache", *ldconfig, *folders],
        ["disable-device-node-modification"],
        ["update-application-profile"],
    ]  # fmt: skip
    first = ["nvidia-ctk", "hook"] if program.endswith("nvidia-ctk") else ["nvidia-cdi-hook"]
    return [
        {"path": program, "args": [*first, *call], "env": ["NVIDIA_CTK_DEBUG=false"]}
        for call in calls
    ]


def apply(
    spec: dict[str, Any], node: SimulatedNode, program: str, *, stage: str = "createContainer"
) -> None:
    """Add the node's GPUs to a container's OCI spec, as an engine does with a CDI spec."""
    nodes = [*(f"nvidia{gpu.minor}" for gpu in node.scenario.gpus), *_COMMON]
    for number in range(len(node.scenario.gpus)):
        nodes += [f"dri/card{number}", f"dri/renderD{128 + number}"]
    linux = spec["linux"]
    rules = linux.setdefault("resources", {}).setdefault("devices", [])
    for name in nodes:
        number = os.stat(f"{node.dev}/{name}").st_rdev
        major, minor = os.major(number), os.minor(number)
        entry = {"path": f"/dev/{name}", "type": "c", "major": major, "minor": minor}
        linux.setdefault("devices", []).append({**entry, "fileMode": 0o666, "uid": 0, "gid": 0})
        rule = {"type": "c", "major": major, "minor": minor, "access": "rwm"}
        rules.append({"allow": True, **rule})
    spec["process"]["env"] = [
        entry for entry in spec["process"]["env"] if not entry.startswith("NVIDIA_VISIBLE_DEVICES=")
    ] + ["NVIDIA_VISIBLE_DEVICES=void", f"NVIDIA_CTK_LIBCUDA_DIR={HOME}"]
    spec["mounts"] += [
        {"source": source, "destination": where, "type": "bind", "options": _READ_ONLY}
        for source, where in mounts(node)
    ]
    spec.setdefault("hooks", {}).setdefault(stage, []).extend(hooks(node, program))
