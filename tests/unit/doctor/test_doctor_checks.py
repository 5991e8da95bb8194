"""Each check against a node that is broken for it, and against one that is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import click
import pytest

from integration.cli.app import nvshim
from integration.doctor.checks import CHECKS
from integration.doctor.examination import Examination, choose, examine, judge
from integration.doctor.facts import Node, Unseen
from integration.doctor.findings import Severity
from integration.doctor.observing import GROUPS
from tests.harness.waiting import eventually
from tests.unit.doctor.trees import (
    BUNDLE,
    CDI,
    CHECKPOINT,
    CONTAINERD,
    CONTAINERD_PID,
    DAEMON,
    DEVICE_ALLOW,
    DROP_IN,
    HANDLER,
    KUBELET,
    MOUNTS,
    OURS,
    PREFIX,
    SERVER_PID,
    SHIM_PID,
    TREE,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from integration.doctor.findings import Finding
    from tests.unit.doctor.trees import Healthy, Tree

    Break = Callable[[Tree], object]

OPTIONS: Final = 'BinaryName = "/usr/bin/runc"\nSystemdCgroup = true\n'
MODULES: Final = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
# A program of this machine that no node of these tests has.
ELSEWHERE_ONLY: Final = os.path.realpath(sys.executable)
EVIDENCE: Final = "/was-run"
PCI: Final = "/sys/bus/pci/devices"
NVIDIAS: Final = "/usr/bin/nvidia-container-runtime"
PROGRAM: Final = "/usr/local/bin/containerd-shim-nvidia-v1"
RUNTIMES: Final = '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes'


def without(*paths: str) -> Break:
    return lambda tree: tree.remove(*paths)


def text(path: str, content: str, mode: int = 0o644) -> Break:
    return lambda tree: tree.write(path, content, mode)


def changed(path: str, old: str, new: str) -> Break:
    return lambda tree: tree.change(path, old, new)


def added(path: str, more: str) -> Break:
    return lambda tree: tree.write(path, tree.read(path) + more)


def all_of(*breaks: Break) -> Break:
    return lambda tree: [each(tree) for each in breaks]


def gpu_driver(name: str) -> Break:
    """The first GPU, bound to another driver of the kernel."""

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


def other_driver_container(tree: Tree) -> None:
    tree.write("/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.14", "")


def real(program: str, path: str) -> Break:
    return lambda tree: tree.real(program, path)


def unpackaged(program: str, said: str) -> Break:
    return lambda tree: tree.script(f"/usr/bin/{program}", f"echo {said}")


def said_by(program: str) -> Break:
    """What a program of this machine says, of one that does not run without procfs."""

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
    """Only the files are left to go by: Debian 12's containerd does not know CDI."""
    tree.remove("/usr/bin/containerd")


def enable_cdi(tree: Tree) -> None:
    without_containerd(tree)
    line = 'enable_cdi = true\ncdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]\n'
    tree.write(CONTAINERD, tree.read(CONTAINERD) + f'[plugins."io.containerd.grpc.v1.cri"]\n{line}')


def in_k3s(tree: Tree) -> None:
    path = "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"
    tree.write(path, tree.read(CONTAINERD))
    tree.process(CONTAINERD_PID, "containerd", "-c", path)


def no_handler(tree: Tree) -> None:
    tree.change(CONTAINERD, HANDLER, "")


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
    """The container in a cgroup of version 1, without systemd."""

    def change(tree: Tree) -> None:
        tree.remove("/run/systemd/system")
        tree.write("/proc/970/cgroup", "5:devices:/kube/web\n0::/\n")
        tree.write("/sys/fs/cgroup/devices/kube/web/devices.list", rules)

    return change


ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

# How to break a node, and what of it is to be found: code, severity, and a word of what is said.
SICK: Final[dict[str, tuple[Break, str, Severity, str]]] = {
    "no driver": (without("/driver/usr"), "D001", ERROR, "no libcuda"),
    "module of another version": (
        module_of_another_version,
        "D002", ERROR, "550.54.14",
    ),
    "a driver container beside": (other_driver_container, "D003", NOTE, "550.54.14"),
    "no GPU in procfs": (without("/proc/driver/nvidia/gpus"), "D004", ERROR, "2 on the PCI bus"),
    "a GPU off the bus": (gpu_off_the_bus, "D004", ERROR, "fell off the bus"),
    "uvm not loaded": (without("/sys/module/nvidia_uvm"), "D007", NOTE, "nvidia-uvm"),
    "uvm not loaded, and not to be": (
        all_of(
            without("/sys/module/nvidia_uvm"),
            added(OURS, "[devices]\nload-kernel-modules = false\n"),
        ),
        "D007", ERROR, "not loaded by anybody",
    ),
    "control node missing": (without("/dev/nvidiactl"), "D008", WARNING, "/dev/nvidiactl"),
    "control node missing, and not to be made": (
        all_of(without("/dev/nvidia-uvm"), added(OURS, "[devices]\nmake-nodes = false\n")),
        "D008", ERROR, "made by nobody",
    ),
    "GPU's node missing": (without("/dev/nvidia1"), "D008", WARNING, "/dev/nvidia1"),
    "uvm with other numbers": (uvm_elsewhere, "D009", ERROR, "/dev/nvidia-uvm"),
    "no file but a node": (
        all_of(without("/dev/nvidia0"), text("/dev/nvidia0", "")), "D009", ERROR, "no character",
    ),
    "link missing": (without("/dev/char/195:0"), "D010", NOTE, "195:0"),
    "link of another device": (
        all_of(
            lambda tree: tree.link("/dev/char/195:0", "../nvidia1"),
            lambda tree: tree.write(OURS, tree.read(OURS).replace(
                "[policy]", "char-links = false\n[policy]")),
        ),
        "D010", WARNING, "195:0",
    ),
    "nouveau has a GPU": (gpu_driver("nouveau"), "D011", ERROR, "0000:"),
    "nouveau is loaded": (text("/sys/module/nouveau/initstate", "live"), "D011", WARNING, "loaded"),
    "vfio has a GPU": (gpu_driver("vfio-pci"), "D012", NOTE, "0000:"),
    "MPS without a daemon": (text("/tmp/nvidia-mps/control", ""), "D013", WARNING, "nvidia-mps"),
    "IMEX without a channel": (
        lambda tree: tree.write("/proc/devices", tree.read("/proc/devices").replace(
            "Character devices:\n", "Character devices:\n242 nvidia-caps-imex-channels\n")),
        "D014", NOTE, "IMEX",
    ),
    "WSL without its libraries": (
        all_of(
            lambda tree: tree.write(OURS, tree.read(OURS).replace(
                "[policy]", 'platform = "wsl"\n[policy]')),
        ),
        "D015", ERROR, "dxg",
    ),
    "Tegra without its lists": (
        lambda tree: tree.write(OURS, tree.read(OURS).replace(
            "[policy]", 'platform = "tegra"\n[policy]')),
        "D015", ERROR, "csv",
    ),
    "runc of Debian 12": (real("/usr/sbin/runc", "/usr/bin/runc"), "D020", ERROR, "CVE-2025-31133"),
    "crun of Debian 12": (
        said_by("/usr/bin/crun"), "D021", WARNING, "CVE-2026-47766",
    ),
    "containerd of Debian 12": (
        real("/usr/bin/containerd", "/usr/bin/containerd"), "D022", ERROR, "CVE-2026-53488",
    ),
    "NVIDIA's toolkit": (
        unpackaged("nvidia-ctk", "NVIDIA Container Toolkit CLI version 1.17.3"),
        "D023", ERROR, "CVE-2025-23266",
    ),
    "a runc that is none": (unpackaged("runc", "hello"), "D024", WARNING, "no version"),
    "a runc that fails": (
        lambda tree: tree.script("/usr/bin/runc", "echo wrong libc >&2; exit 3"),
        "D024", WARNING, "wrong libc",
    ),
    "a runc of long ago": (unpackaged("runc", "runc version 1.0.3"), "D025", ERROR, "1.1.0"),
    "no TOML": (text(CONTAINERD, "version = = 2"), "D030", ERROR, "TOML"),
    "what containerd refuses": (added(CONTAINERD, "[grpc]\naddress = 5\n"), "D030", ERROR, "ended"),
    "no handler, and no program": (
        all_of(no_handler, without(DAEMON), without(PROGRAM)),
        "D031", ERROR, "io.containerd.nvidia.v1",
    ),
    "no handler, and a kubelet": (
        all_of(no_handler, without(DAEMON)), "D031", WARNING, f"finds {PROGRAM} by its name",
    ),
    "no handler, and no kubelet": (
        all_of(no_handler, without(DAEMON), without(KUBELET, "/proc/820")),
        "D031", NOTE, f"finds {PROGRAM} by its name",
    ),
    "nobody imports it": (
        handler_in(DROP_IN, "# imports"), "D032", ERROR, "does not import",
    ),
    "in the wrong directory": (
        handler_in("/etc/containerd/config.d/99-nvidia.toml"),
        "D032", ERROR, "config.d",
    ),
    "drop-in of another version": (
        changed(DROP_IN, "version = 2", "version = 3"), "D033", WARNING, "version 3",
    ),
    "default that is not there": (
        added(CONTAINERD, '[plugins."io.containerd.grpc.v1.cri".containerd]\n'
              'default_runtime_name = "gone"\n'),
        "D034", ERROR, "gone",
    ),
    "a handler without a type": (added(CONTAINERD, f"{RUNTIMES}.kata]\n"), "D035", ERROR, "kata"),
    "a handler that is NVIDIA's": (
        added(CONTAINERD, f'{RUNTIMES}.legacy]\nruntime_type = "io.containerd.runc.v2"\n'
              f'{RUNTIMES}.legacy.options]\nBinaryName = "{NVIDIAS}"\n'),
        "D036", WARNING, "legacy",
    ),
    "a shim that is not there": (
        without(PROGRAM), "D037", ERROR, "nvidia",
    ),
    "a shim beside containerd's path": (
        text(f"/proc/{CONTAINERD_PID}/environ", "PATH=/sbin:/bin\0"), "D037", ERROR, "/sbin:/bin",
    ),
    "a runtime that is not there": (
        changed(CONTAINERD, "/usr/bin/runc", "/usr/bin/youki"), "D037", ERROR, "youki",
    ),
    "configured after the start": (
        lambda tree: tree.began(CONTAINERD_PID, -3600), "D038", WARNING, CONTAINERD,
    ),
    "k3s writes it anew": (in_k3s, "D039", WARNING, "k3s"),
    "a drop-in that takes a section away": (
        text(DROP_IN, f'version = 2\n{RUNTIMES}.kata]\nruntime_type = "io.containerd.kata.v2"\n'),
        "D045", ERROR, "runc",
    ),
    "no CRI for the kubelet": (
        changed(CONTAINERD, "imports", 'disabled_plugins = ["cri"]\nimports'),
        "D046", ERROR, "kubelet",
    ),
    "no CRI for the handler": (
        all_of(
            without(KUBELET),
            changed(CONTAINERD, "imports", 'disabled_plugins = ["cri"]\nimports'),
        ),
        "D046", WARNING, "for nothing",
    ),
    "a misspelt option": (
        changed(CONTAINERD, "SystemdCgroup", "SystemdCgroups"), "D040", ERROR, "SystemdCgroups",
    ),
    "kubelet has cgroupfs": (
        changed(KUBELET, "systemd", "cgroupfs"), "D041", ERROR, "SystemdCgroup = true",
    ),
    "our handler has cgroupfs": (
        changed(CONTAINERD, OPTIONS, ""), "D041", WARNING, "nvidia",
    ),
    "no systemd": (without("/run/systemd/system"), "D041", ERROR, "does not run"),
    "handlers differ": (
        all_of(without(KUBELET), changed(CONTAINERD, OPTIONS, "")),
        "D042", WARNING, "runc",
    ),
    "a class without a handler": (
        changed("/classes.yaml", "handler: nvidia", "handler: nvidia-cdi"),
        "D043", ERROR, "nvidia-cdi",
    ),
    "a handler without a class": (
        changed("/classes.yaml", "handler: nvidia", "handler: runc"), "D044", WARNING, "nvidia",
    ),
    "daemon.json is none": (text(DAEMON, "{"), "D050", ERROR, "no JSON"),
    "crio.conf is none": (text("/etc/crio/crio.conf.d/10.conf", "[[["), "D050", ERROR, "10.conf"),
    "Docker's runtime is NVIDIA's": (
        text(DAEMON, json.dumps({"runtimes": {"nvidia": {"path": NVIDIAS}}})),
        "D051", WARNING, NVIDIAS,
    ),
    "Docker's default is not there": (
        text(DAEMON, json.dumps({"default-runtime": "nvidia"})), "D051", ERROR, "default-runtime",
    ),
    "no hook for --gpus": (
        without("/usr/bin/nvidia-container-runtime-hook"), "D052", WARNING, "hook",
    ),
    "ours calls NVIDIA's": (
        changed(CONTAINERD, "/usr/bin/runc", NVIDIAS), "D053", ERROR, "is ours",
    ),
    "the default is NVIDIA's": (
        changed(
            CONTAINERD,
            ".options]\nSystemdCgroup",
            f'.options]\nBinaryName = "{NVIDIAS}"\nSystemdCgroup',
        ),
        "D053", WARNING, "default",
    ),
    "an OCI hook": (
        text("/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", '{"hook": "NVIDIA"}'),
        "D054", WARNING, "hooks.d",
    ),
    "an NRI plugin": (
        lambda tree: tree.process(77, "/work/nvidia-toolkit", "--enable-nri-plugin"),
        "D054", WARNING, "NRI",
    ),
    "CDI of other directories": (
        all_of(enable_cdi, added(OURS, '[cdi]\nspec-dirs = ["/var/run/cdi"]\n')),
        "D055", NOTE, "/etc/cdi",
    ),
    "CRI-O calls NVIDIA's": (
        text("/etc/crio/crio.conf.d/99.conf",
             f'[crio.runtime.runtimes.nvidia]\nruntime_path = "{NVIDIAS}"\n'),
        "D056", NOTE, "nvidia",
    ),
    "a spec that is none": (text(CDI, '{"cdiVersion": "0.5.0"}'), "D060", ERROR, "kind"),
    "a spec for all to write": (
        lambda tree: tree.write(CDI, tree.read(CDI), 0o666), "D060", ERROR, "everybody",
    ),
    "a spec's files are gone": (
        lambda tree: shutil.rmtree(tree.at("/driver/usr/bin")), "D061", ERROR, "/driver/usr/bin",
    ),
    "a spec's nodes are others": (spec_with(other_numbers), "D062", ERROR, "not 195:200"),
    "a spec of another driver": (spec_with(another_version), "D063", ERROR, "550.54.14"),
    "two specs in one directory": (
        spec_with(lambda spec: None, "/run/cdi/other.json"), "D064", ERROR, "nobody gets them",
    ),
    "two specs in two directories": (
        spec_with(lambda spec: None, "/etc/cdi/other.json"), "D064", WARNING, "the last decides",
    ),
    "no spec after a boot": (all_of(enable_cdi, without(CDI)), "D065", WARNING, "containerd"),
    "a spec with a GPU that is gone": (spec_with(another_gpu), "D066", WARNING, "GPU-00000000"),
    "a misspelt key": (changed(OURS, "mode", "mood"), "D070", ERROR, "mood"),
    "every image is believed": (changed(OURS, '"default"', '"nvidia"'), "D071", WARNING, "nvidia"),
    "NVIDIA's configuration": (
        all_of(without(OURS), text("/etc/nvidia-container-runtime/config.toml", "")),
        "D071", WARNING, "nvidia-container-runtime",
    ),
    "what NVIDIA's configuration says": (
        all_of(
            without(OURS),
            text("/etc/nvidia-container-runtime/config.toml",
                 '[nvidia-container-cli]\nldcache = "/x"\n'),
        ),
        "D072", NOTE, "ldcache",
    ),
    "a hook for all to write": (
        all_of(
            text("/usr/bin/hook", "", 0o777),
            added(OURS, '[cdi]\nallow-hooks = ["/usr/bin/hook"]\n'),
        ),
        "D073", ERROR, "others than root",
    ),
    "SELinux enforces": (text("/sys/fs/selinux/enforce", "1"), "D080", WARNING, "not there"),
    "SELinux's boolean is off": (
        all_of(
            text("/sys/fs/selinux/enforce", "1"),
            text("/sys/fs/selinux/booleans/container_use_devices", "0 0"),
        ),
        "D080", WARNING, "off",
    ),
    "AppArmor without a parser": (
        all_of(
            text("/sys/module/apparmor/parameters/enabled", "Y\n"),
            without("/usr/bin/apparmor_parser"),
        ),
        "D081", WARNING, "apparmor_parser",
    ),
    "hybrid": (
        added(MOUNTS, "40 30 0:30 / /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices\n"),
        "D082", NOTE, "version 1",
    ),
    "no cgroups": (changed(MOUNTS, "cgroup2", "tmpfs"), "D082", ERROR, "no cgroups"),
    "nodev on /dev": (changed(MOUNTS, "/dev rw", "/dev rw,nodev"), "D084", ERROR, "nodev"),
    "noexec on the driver": (
        added(MOUNTS, "50 22 8:2 / /driver rw,noexec - ext4 /dev/sdb rw\n"),
        "D084", ERROR, "driver",
    ),
    "noexec on images": (
        added(MOUNTS, "50 22 8:2 / /var/lib/containerd rw,noexec - ext4 /dev/sdb rw\n"),
        "D084", WARNING, "snapshotter",
    ),
    "few inotify instances": (
        text("/proc/sys/fs/inotify/max_user_instances", "8\n"), "D085", WARNING, "8",
    ),
    "few descriptors": (
        changed(f"/proc/{CONTAINERD_PID}/limits", "1048576", "1024"), "D087", WARNING, "1024",
    ),
    "current leads nowhere": (
        lambda tree: tree.link(f"{PREFIX}/current", "gone"), "D090", ERROR, "current",
    ),
    "a link of ours leads to what only another machine has": (
        lambda tree: tree.link("/usr/local/bin/nvshim", ELSEWHERE_ONLY), "D090", ERROR, "nvshim",
    ),
    "a link of ours leads to itself": (
        lambda tree: tree.link("/usr/local/bin/nvshim", "/usr/local/bin/nvshim"),
        "D090", ERROR, "nvshim",
    ),
    "no interpreter": (without("/usr/bin/python3"), "D091", ERROR, "python3"),
    "two programs": (
        lambda tree: tree.script("/usr/bin/containerd-shim-nvidia-v1"), "D092", WARNING, "/usr/bin",
    ),
    "shims of an older version": (older_version, "D093", NOTE, "0.0.9"),
    "a version that nobody uses": (
        lambda tree: shutil.copytree(tree.at(TREE), tree.at(f"{PREFIX}/0.0.1-cc")),
        "D093", NOTE, "0.0.1-cc",
    ),
    "shims of a version that is gone": (removed_version, "D094", ERROR, "0.0.9"),
    "a fat shim": (
        changed(f"/proc/{SHIM_PID}/smaps_rollup", "3000", "99000"), "D095", WARNING, "96 MiB",
    ),
    "a fork server that is deaf": (
        without(f"/proc/{SERVER_PID}/fd/4"), "D096", WARNING, "accepts nobody",
    ),
    "a fork server that is stopped": (
        lambda tree: tree.began(SERVER_PID, -3600, "T"),
        "D096", WARNING, "accepts nobody",
    ),
    "a fork server of another version": (
        lambda tree: tree.change(f"/proc/{SERVER_PID}/maps", "0.1.0-aaaaaaaa", "0.0.9-bbbbbbbb"),
        "D096", WARNING, "0.0.9",
    ),
    "systemd does not know the GPU": (
        changed(DEVICE_ALLOW, "DeviceAllow=/dev/char/195:0 rwm\n", ""),
        "D100", ERROR, "/dev/nvidia0",
    ),
    "systemd lets it be made, not used": (
        changed(DEVICE_ALLOW, "195:0 rwm", "195:0 m"), "D100", ERROR, "/dev/nvidia0",
    ),
    "the cgroup does not allow it": (
        in_version_1("c 1:3 rwm\nc 195:255 rw\n"), "D100", ERROR, "its cgroup",
    ),
    "made with another driver": (
        module_of_another_version, "D101", ERROR, "550.54.14",
    ),
    "its device is another": (
        lambda tree: tree.node("/dev/nvidia0", 195, 7), "D101", ERROR, "/dev/nvidia0",
    ),
    "its GPU is gone": (
        changed(f"{BUNDLE}/nvidia.json", "GPU-", "GPU-0"), "D102", ERROR, "k8s.io/web",
    ),
    "its record is damaged": (text(f"{BUNDLE}/nvidia.json", "[]"), "D103", NOTE, "could not look"),
    "systemd does not answer": (
        lambda tree: tree.script("/usr/bin/systemctl", "echo no bus >&2; exit 1"),
        "D103", NOTE, "no bus",
    ),
    "the agent's unit is enabled, and nothing runs": (
        lambda tree: tree.link(
            "/etc/systemd/system/multi-user.target.wants/nvshim-node.service", "/x"
        ),
        "D104", ERROR, "the unit nvshim-node is enabled",
    ),
    "the agent has a pod, and nothing runs": (
        text("/var/log/pods/x_node-agent-ab1_77/node-agent/0.log", ""),
        "D104", ERROR, "/var/log/pods/x_node-agent-ab1_77/node-agent",
    ),
    "no device plugin ever": (without(CHECKPOINT), "D106", ERROR, "no node agent runs"),
    "no device plugin since the kubelet's restart": (
        changed(CHECKPOINT, '["GPU-a", "GPU-b"]', "null"), "D106", ERROR, "nobody serves it",
    ),
}  # fmt: skip

# Broken where no file can do it: by a fault of NVML's, or of the kernel that runs the tests; or of
# an agent that runs (test_doctor_agent.py).
ELSEWHERE: Final = {"D005", "D006", "D016", "D083", "D105", "D107", "D108", "D109", "D110", "D111"}


def found(tree: Tree, code: str) -> list[Finding]:
    return list(examine(tree.places(), choose([code])).findings)


@pytest.mark.parametrize("name", SICK)
def test_what_is_wrong_is_found(tree: Tree, name: str) -> None:
    make_sick, code, severity, words = SICK[name]
    make_sick(tree)
    findings = found(tree, code)
    assert {f.code for f in findings} == {f"NVSHIM-{code}"}
    assert findings[0].severity is severity, findings
    assert any(words in f.found for f in findings), findings
    assert all(f.remedy and f.title for f in findings)


def test_on_a_healthy_node_no_check_says_anything(healthy: Healthy) -> None:
    def look() -> list[Examination]:
        seen = examine(healthy.tree.places())
        # While the machine is busy, programs are slow, NVML's among them.
        return [] if {found.code for found in seen.findings} == {"NVSHIM-D005"} else [seen]

    (examination,) = eventually(look, "NVML answers at once", timeout=30)
    assert examination.findings == ()
    assert not any(isinstance(getattr(examination.node, group), Unseen) for group in GROUPS)


def test_a_program_of_another_machine_is_none_of_the_node_s(tree: Tree) -> None:
    assert os.access(ELSEWHERE_ONLY, os.X_OK)
    tree.link("/usr/bin/containerd-shim-nvidia-v1", ELSEWHERE_ONLY)
    assert not found(tree, "D092")
    tree.link("/usr/bin/crun", ELSEWHERE_ONLY)
    node = examine(tree.places(), choose(["D020"])).node
    assert not isinstance(node.programs, Unseen)
    assert "crun" not in {program.name for program in node.programs}


def test_a_container_that_has_ended_is_nobody_s_trouble(tree: Tree) -> None:
    module_of_another_version(tree)
    in_version_1("")(tree)
    codes = ["D100", "D101", "D102", "D103"]
    assert {f.code[-4:] for f in examine(tree.places(), choose(codes)).findings} == {"D100", "D101"}
    # Its number is that of another process; and nobody's.
    tree.write("/proc/970/cgroup", "5:devices:/user\n0::/user.slice\n")
    assert examine(tree.places(), choose(codes)).findings == ()
    tree.remove("/proc/970")
    assert examine(tree.places(), choose(codes)).findings == ()


def test_a_fork_server_that_prepares_itself_or_has_just_ended_is_nobody_s_trouble(
    tree: Tree,
) -> None:
    tree.remove(f"/proc/{SERVER_PID}/fd/4")

    def look(state: str, begun: int) -> list[str]:
        tree.began(SERVER_PID, begun, state)
        return [f.found for f in examine(tree.places(), choose(["D096"])).findings]

    assert look("S", 3600) == []
    assert len(look("S", -3600)) == len(look("T", 3600)) == 1
    assert look("Z", -3600) == []


def test_every_check_has_a_node_that_is_sick_of_it() -> None:
    tried = {code for _, code, _, _ in SICK.values()} | ELSEWHERE
    assert {check.code for check in CHECKS} == {f"NVSHIM-{code}" for code in tried}


def test_the_table_is_in_order_and_says_all_that_the_reference_needs() -> None:
    codes = [check.code for check in CHECKS]
    assert codes == sorted(set(codes))
    for check in CHECKS:
        assert re.fullmatch(r"NVSHIM-D\d{3}", check.code)
        assert check.title
        assert check.title[-1] not in ".!"
        assert check.why.endswith((".", "]]."))
        assert check.remedy
        assert check.reference == "" or check.reference.startswith("https://")
        assert set(check.needs) <= set(GROUPS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.code)
def test_a_check_that_is_blind_says_so(check: Any) -> None:
    (finding,) = judge(Node(), [check])
    assert finding.unseen
    assert finding.severity is Severity.NOTE
    assert finding.found == "could not look: nobody asked for it"


def test_nvml_that_fails_and_one_that_is_slow(healthy: Healthy) -> None:
    faults = os.path.join(healthy.simulated.state, "nvml-faults")
    cases = {
        "nvmlInit=error:999": (ERROR, "NVMLError"),
        "nvmlInit=sleep:2200": (WARNING, "it answered after "),
        "gpu1=error:15": (ERROR, "GPU is lost"),
        "gpu1.nvmlDeviceGetBrand=error:999": (WARNING, "nvmlDeviceGetBrand: Unknown Error"),
    }
    for fault, (severity, words) in cases.items():
        with open(faults, "w") as file:
            file.write(fault)
        try:
            (finding,) = found(healthy.tree, "D005")
        finally:
            os.unlink(faults)
        assert finding.severity is severity
        assert words in finding.found
    eventually(lambda: not found(healthy.tree, "D005"), "NVML answers at once", timeout=30)


def test_a_driver_that_is_shut_down_when_nobody_uses_it(tree: Tree) -> None:
    tree.remove("/run/nvidia-persistenced")
    (finding,) = found(tree, "D006")
    assert finding.severity is WARNING
    assert "persistence mode is off" in finding.found


def test_a_kernel_without_openat2(healthy: Healthy) -> None:
    from dataclasses import replace  # noqa: PLC0415 - of this test alone

    checks = choose(["D083"])
    node = examine(healthy.tree.places(), checks).node
    assert judge(node, checks) == ()
    assert not isinstance(node.machine, Unseen)
    old = replace(node, machine=replace(node.machine, kernel="5.4.0", openat2=False))
    (finding,) = judge(old, checks)
    assert "5.4.0" in finding.found


def test_what_a_package_s_changelog_names_is_fixed(tree: Tree) -> None:
    tree.script("/usr/bin/runc", "echo runc version 1.1.5+ds1")
    (bare,) = found(tree, "D020")
    assert bare.severity is ERROR
    changelog = "runc (1.1.5+ds1-1+deb12u9)\n  * Fix CVE-2024-21626, CVE-2025-31133\n"
    tree.package("runc", "1.1.5+ds1-1+deb12u9", "/bin/runc", changelog)
    (packaged,) = found(tree, "D020")
    assert packaged.severity is WARNING
    assert "CVE-2024-21626" not in packaged.found
    assert "CVE-2025-52881" in packaged.found
    assert "1.1.5+ds1-1+deb12u9" in packaged.found
    assert "may have fixed them" in packaged.found
    tree.package("runc", "2", "/bin/runc", f"{changelog}{bare.found}")
    assert found(tree, "D020") == []


def test_a_node_that_has_just_booted_has_lost_nothing(tree: Tree) -> None:
    # No module is loaded before somebody needs one, and then a container's shim loads it.
    tree.remove("/proc/driver/nvidia", *(f"/sys/module/{m}" for m in MODULES))
    tree.change("/proc/devices", "nvidia", "nobody")
    codes = ("D001", "D002", "D004", "D007", "D008", "D009")
    (finding,) = examine(tree.places(), choose(codes)).findings
    assert finding.code == "NVSHIM-D007"
    assert finding.severity is NOTE


def test_every_command_that_is_advised_is_one() -> None:
    for check in CHECKS:
        for line in filter(None, check.command.split(" && ")):
            program, *words = line.split()
            if program != "nvshim":
                continue
            command: Any = nvshim
            while isinstance(command, click.Group):
                name = words.pop(0)
                found = command.get_command(click.Context(command), name)
                assert found is not None, line
                command = found
            # Without running it: the words are read, or it is an error of usage.
            command.make_context(program, words)


@pytest.mark.parametrize("whose", [{"uid": 1000}, {"mounts": 7}], ids=["user", "container"])
def test_a_process_that_only_calls_itself_containerd_is_not_believed(
    tree: Tree, whose: dict[str, Any]
) -> None:
    # Its program would be run by root, and its configuration read in the place of the node's.
    tree.script("/home/evil/containerd", f"echo >{EVIDENCE}", "exit 1")
    tree.write("/home/evil/config.toml", "version = 2\n")
    tree.remove(f"/proc/{CONTAINERD_PID}")
    words = ("containerd", "--config", "/home/evil/config.toml")
    tree.process(CONTAINERD_PID, *words, **whose)
    tree.link(f"/proc/{CONTAINERD_PID}/exe", "/home/evil/containerd")
    containerd = examine(tree.places(), choose(["D030", "D031"])).node.containerd
    assert containerd is not None
    assert not isinstance(containerd, Unseen)
    assert (containerd.pid, containerd.path, containerd.dump_fault) == (0, CONTAINERD, "")
    assert not os.path.exists(tree.at(EVIDENCE))
    # Of root's own, in the node's namespace, it is.
    tree.process(CONTAINERD_PID, *words)
    assert {f.code for f in examine(tree.places(), choose(["D030"])).findings} == {"NVSHIM-D030"}
    assert os.path.exists(tree.at(EVIDENCE))


def test_names_of_others_stay_on_their_line(tree: Tree) -> None:
    name = "evil\\u001b[31m\\n"
    tree.write(CONTAINERD, tree.read(CONTAINERD) + f'{RUNTIMES}."{name}"]\n')
    without_containerd(tree)
    (finding,) = found(tree, "D035")
    assert finding.found.isprintable()
    assert "evil?[31m" in finding.found


def test_containerd_s_own_word_counts_and_not_what_the_files_seem_to_say(tree: Tree) -> None:
    # containerd 1 takes all of the plugin's section from the drop-in, and nothing from the root.
    assert found(tree, "D032") == found(tree, "D045") == []
    other = f'version = 2\n{RUNTIMES}.kata]\nruntime_type = "io.containerd.kata.v2"\n'
    tree.write("/etc/containerd/conf.d/zz-other.toml", other)
    (finding,) = found(tree, "D032")
    assert "makes something else of it" in finding.found


def test_own_handler_of_containerd_that_a_drop_in_takes_away_is_named(tree: Tree) -> None:
    """What is left of a node that has gone back from containerd 2 to 1."""
    tree.write(CONTAINERD, 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    assert found(tree, "D045") == []
    tree.write(DROP_IN, f"version = 2\n{HANDLER}")
    (finding,) = found(tree, "D045")
    assert f"own handler runc is lost to {DROP_IN}" in finding.found
