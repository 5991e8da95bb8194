"""Ways to break a node: each takes a tree and introduces one fault."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

from tests.unit.doctor.trees import (
    BUNDLE,
    CDI,
    CONTAINERD,
    CONTAINERD_PID,
    HANDLER,
    PREFIX,
    SHIM_PID,
    TREE,
    Tree,
)

Break = Callable[[Tree], object]

OPTIONS: Final = 'BinaryName = "/usr/bin/runc"\nSystemdCgroup = true\n'
MODULES: Final = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
# A program of this machine that the nodes of these tests lack.
ELSEWHERE_ONLY: Final = os.path.realpath(sys.executable)
EVIDENCE: Final = "/was-run"
PCI: Final = "/sys/bus/pci/devices"
NVIDIAS: Final = "/usr/bin/nvidia-container-runtime"
PROGRAM: Final = "/usr/local/bin/containerd-shim-nvidia-v1"
RUNCS_TYPE: Final = f'io.containerd.runc.v2"\nruntime_path = "{PROGRAM}"'
RUNTIMES: Final = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes'


def without(*paths: str) -> Break:
    return lambda tree: tree.remove(*paths)


def text(path: str, content: str, mode: int = 0o644) -> Break:
    return lambda tree: tree.write(path, content, mode)


def large(path: str) -> Break:
    """Make a large file."""

    def make(tree: Tree) -> None:
        tree.write(path, "")
        with open(tree.at(path), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, 65 << 20)

    return make


def changed(path: str, old: str, new: str) -> Break:
    return lambda tree: tree.change(path, old, new)


def added(path: str, more: str) -> Break:
    return lambda tree: tree.write(path, tree.read(path) + more)


def all_of(*breaks: Break) -> Break:
    return lambda tree: [each(tree) for each in breaks]


def gpu_driver(name: str) -> Break:
    """Bind the first GPU to another kernel driver."""

    def bind(tree: Tree) -> None:
        device = min(os.listdir(tree.at(PCI)))
        here = os.path.join(os.path.realpath(tree.at(f"{PCI}/{device}")), "driver")
        os.unlink(here)
        os.symlink(f"../../../bus/pci/drivers/{name}", here)

    return bind


def gpu_off_the_bus(tree: Tree) -> None:
    os.unlink(tree.at(f"{PCI}/{min(os.listdir(tree.at(PCI)))}"))


def uvm_elsewhere(tree: Tree) -> None:
    seen = os.lstat(tree.at("/dev/nvidia-uvm"))
    tree.node("/dev/nvidia-uvm", os.major(seen.st_rdev) - 1, 0)


def module_of_another_version(tree: Tree) -> None:
    tree.write("/sys/module/nvidia/version", "550.54.14\n")
    banner = "/proc/driver/nvidia/version"
    tree.write(banner, re.sub(r"\d+\.\d+\.\d+", "550.54.14", tree.read(banner)))


def future_library(tree: Tree) -> None:
    directory = tree.at(f"/driver/usr/lib/{os.uname().machine}-linux-gnu")
    (libcuda,) = (name for name in os.listdir(directory) if name.startswith("libcuda.so.5"))
    os.link(f"{directory}/{libcuda}", f"{directory}/{libcuda.replace('cuda', 'nvfuture')}")


def other_driver_container(tree: Tree) -> None:
    tree.write("/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.14", "")


def real(program: str, path: str) -> Break:
    return lambda tree: tree.real(program, path)


def unpackaged(program: str, said: str) -> Break:
    return lambda tree: tree.script(f"/usr/bin/{program}", f"echo {said}")


def said_by(program: str) -> Break:
    """Install a script that prints this machine's version of a program, which needs procfs."""

    def write(tree: Tree) -> None:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        unpackaged(os.path.basename(program), done.stdout.splitlines()[0])(tree)

    return write


def spec_with(change: Callable[[Any], object], path: str = CDI) -> Break:
    def write(tree: Tree) -> None:
        spec = tree.cdi()
        change(spec)
        tree.write_cdi(spec, path)

    return write


def other_numbers(spec: Any) -> None:
    for device in spec["devices"]:
        for node in device["containerEdits"].get("deviceNodes", ()):
            if node["path"].startswith("/dev/nvidia"):
                node["major"], node["minor"] = 195, 200


def another_version(spec: Any) -> None:
    mounts = spec["containerEdits"]["mounts"]
    library = next(m for m in mounts if "/libcuda.so." in m["hostPath"])
    library["hostPath"] = "/driver/usr/lib/libcuda.so.550.54.14"


def another_gpu(spec: Any) -> None:
    spec["devices"][0]["name"] = "GPU-00000000-1111-2222-3333-444444444444"


def without_containerd(tree: Tree) -> None:
    """Remove the program, so that only the files count: Debian 12's containerd lacks CDI."""
    tree.remove("/usr/bin/containerd")


def enable_cdi(tree: Tree) -> None:
    without_containerd(tree)
    line = 'enable_cdi = true\ncdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]\n'
    tree.write(CONTAINERD, tree.read(CONTAINERD) + f'[plugins."io.containerd.grpc.v1.cri"]\n{line}')


def in_k3s(tree: Tree) -> None:
    path = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
    tree.write(path, tree.read(CONTAINERD))
    tree.process(CONTAINERD_PID, "containerd", "-c", path)


def in_k0s(tree: Tree, mark: str = "# k0s_managed=true\n") -> None:
    path = "/etc/k0s/containerd.toml"
    tree.write(path, mark + tree.read(CONTAINERD))
    tree.process(CONTAINERD_PID, "containerd", "--config", path)


def container_of(image: str = "", **variables: str) -> Break:
    """Change the running container's spec, with the default driver capabilities."""

    def write(tree: Tree) -> None:
        record = json.loads(tree.read(f"{BUNDLE}/nvidia.json"))
        record["grant"]["capabilities"] = ["compute", "utility"]
        tree.write(f"{BUNDLE}/nvidia.json", json.dumps(record))
        spec = {
            "process": {"env": [f"{name}={value}" for name, value in variables.items()]},
            "annotations": {"io.kubernetes.cri.image-name": image} if image else {},
        }
        tree.write(f"{BUNDLE}/config.json", json.dumps(spec))

    return write


def pod_of_verify(tree: Tree) -> None:
    """Leave a pod of a killed ``nvshim verify``."""
    named = {"sandbox-namespace": "gpu", "sandbox-name": "nvshim-verify-0123abcd"}
    annotations = {f"io.kubernetes.cri.{key}": name for key, name in named.items()}
    path = f"{os.path.dirname(BUNDLE)}/left/config.json"
    tree.write(path, json.dumps({"annotations": annotations}))


def no_handler(tree: Tree) -> None:
    tree.change(CONTAINERD, HANDLER, "")


def of_runcs_type(more: str = "", options: str = OPTIONS) -> Break:
    """Configure our handler with runc's runtime type, which some versions of containerd need."""

    def change(tree: Tree) -> None:
        tree.change(CONTAINERD, 'io.containerd.nvidia.v1"', RUNCS_TYPE + more)
        tree.change(CONTAINERD, OPTIONS, options)

    return change


def sandboxer_of(version: str) -> Break:
    """Let our shim create the sandboxes of a containerd that reports this version."""

    def change(tree: Tree) -> None:
        ours = 'io.containerd.nvidia.v1"'
        tree.change(CONTAINERD, ours, f'{ours}\nsandboxer = "shim"')
        tree.script(
            "/usr/bin/containerd",
            f'[ "$1" = --version ] && exec echo containerd github.com/containerd/v2 {version}',
            f'while read -r line; do echo "$line"; done <{CONTAINERD}',
        )

    return change


def handler_in(path: str, imports: str = "imports") -> Break:
    def move(tree: Tree) -> None:
        no_handler(tree)
        tree.change(CONTAINERD, "imports", imports)
        tree.write(path, f"version = 2\n{HANDLER}")

    return move


def removed_version(tree: Tree) -> None:
    maps = tree.read(f"/proc/{SHIM_PID}/maps").replace("0.1.0-aaaaaaaa", "0.0.9-bbbbbbbb")
    tree.write(f"/proc/{SHIM_PID}/maps", maps)


def older_version(tree: Tree) -> None:
    removed_version(tree)
    shutil.copytree(tree.at(TREE), tree.at(f"{PREFIX}/0.0.9-bbbbbbbb"))


def in_version_1(rules: str) -> Break:
    """Put the container in a cgroup v1, without systemd."""

    def change(tree: Tree) -> None:
        tree.remove("/run/systemd/system")
        tree.write("/proc/970/cgroup", "5:devices:/kube/web\n0::/\n")
        tree.write("/sys/fs/cgroup/devices/kube/web/devices.list", rules)

    return change
