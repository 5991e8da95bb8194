"""A directory with everything on a node that the doctor examines. Tests break it.

It is a simulated GPU node with a driver, containerd's real configuration and program (with its
libraries, so that it runs in a chroot), the procfs files of processes, an installation of ours and
a container.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable
from typing import Any, Final

from hooks.cdi import schema
from hooks.cdi.generating import SpecOptions, generate
from hooks.node.inventory import survey
from integration.doctor.places import Places
from integration.simulated import Scenario, SimulatedNode

OURS: Final = "/etc/containerd-shim-nvidia/config.toml"
CONTAINERD: Final = "/etc/containerd/config.toml"
DROP_IN: Final = "/etc/containerd/conf.d/99-nvidia.toml"
KUBELET: Final = "/var/lib/kubelet/config.yaml"
CHECKPOINT: Final = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
DAEMON: Final = "/etc/docker/daemon.json"
CDI: Final = "/run/cdi/nvidia.json"
MOUNTS: Final = "/proc/self/mountinfo"
PREFIX: Final = "/opt/containerd-shim-nvidia"
TREE: Final = f"{PREFIX}/0.1.0-aaaaaaaa"
BUNDLE: Final = "/run/containerd/io.containerd.runtime.v2.task/k8s.io/web"
DEVICE_ALLOW: Final = "/etc/device-allow"
SHIM_PID, SERVER_PID, CONTAINERD_PID = 950, 960, 812

_OUR_CONFIG: Final = """\
[node]
driver-root = "/driver"
dev = "/dev"
proc = "/proc"
sys = "/sys"
[policy]
mode = "default"
"""
_ROOT_FILE: Final = """\
version = 2
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins."io.containerd.grpc.v1.cri".registry.configs."registry.example".auth]
password = "hunter2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = true
"""
# In the main file, since containerd 1 takes a plugin's section from one file.
HANDLER: Final = """\
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
runtime_type = "io.containerd.nvidia.v1"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/runc"
SystemdCgroup = true
"""
_OTHERS_DROP_IN: Final = """\
version = 2
[plugins."io.containerd.gc.v1.scheduler"]
pause_threshold = 0.02
"""
_DAEMON_JSON: Final = {
    "runtimes": {"nvidia": {"runtimeType": "io.containerd.nvidia.v1"}},
    "proxies": {"http-proxy": "http://user:hunter2@proxy.example"},
}
_MOUNTINFO: Final = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
25 22 0:5 / /dev rw,nosuid shared:2 - devtmpfs udev rw
30 22 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec shared:9 - cgroup2 cgroup2 rw
31 22 0:27 / /run rw,nosuid,nodev shared:9 - tmpfs tmpfs rw,size=1k
"""
_MEMORY: Final = """\
00-7f [rollup]
Pss: 3000 kB
Private_Clean: 0 kB
Private_Dirty: 2000 kB
"""
_MANIFEST: Final = """\
apiVersion: v1
kind: ConfigMap
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: nvidia}
handler: nvidia
"""


class Tree:
    """A node's root."""

    def __init__(self, root: str) -> None:
        self.root = root

    def at(self, path: str) -> str:
        return self.root + path

    def read(self, path: str) -> str:
        with open(self.at(path), encoding="utf-8") as file:
            return file.read()

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Replace a file, which another tree may share."""
        here = self.at(path)
        os.makedirs(os.path.dirname(here), exist_ok=True)
        if os.path.lexists(here):
            os.unlink(here)
        with open(here, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(here, mode)

    def change(self, path: str, old: str, new: str) -> None:
        text = self.read(path)
        assert old in text
        mode = stat.S_IMODE(os.stat(self.at(path)).st_mode)
        self.write(path, text.replace(old, new), mode)

    def script(self, path: str, *lines: str) -> None:
        self.write(path, "\n".join(["#!/bin/sh", *lines, ""]), 0o755)

    def remove(self, *paths: str) -> None:
        for path in paths:
            here = self.at(path)
            if os.path.isdir(here) and not os.path.islink(here):
                shutil.rmtree(here)
            else:
                os.unlink(here)

    def link(self, path: str, target: str) -> None:
        here = self.at(path)
        os.makedirs(os.path.dirname(here), exist_ok=True)
        if os.path.lexists(here):
            os.unlink(here)
        os.symlink(target, here)

    def node(self, path: str, major: int, minor: int) -> None:
        here = self.at(path)
        if os.path.lexists(here):
            os.unlink(here)
        os.mknod(here, stat.S_IFCHR | 0o666, os.makedev(major, minor))

    def process(
        self, pid: int, *words: str, name: str = "", uid: int = 0, mounts: int = 1, **files: str
    ) -> None:
        """Add a process that is younger than every file of the node."""
        self.began(pid, 86400)
        self.write(f"/proc/{pid}/comm", f"{name or os.path.basename(words[0])[:15]}\n")
        self.write(f"/proc/{pid}/cmdline", "".join(f"{word}\0" for word in words))
        self.write(f"/proc/{pid}/status", f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        self.link(f"/proc/{pid}/ns/mnt", f"mnt:[{mounts}]")
        for file, text in files.items():
            self.write(f"/proc/{pid}/{file}", text)

    def began(self, pid: int, seconds: int, state: str = "S") -> None:
        """Set a process's start time relative to now."""
        ticks = (time.clock_gettime(time.CLOCK_BOOTTIME) + seconds) * os.sysconf("SC_CLK_TCK")
        fields = [state, *["0"] * 18, str(int(ticks)), *["0"] * 20]
        self.write(f"/proc/{pid}/stat", f"{pid} (a) b) {' '.join(fields)}\n")

    def real(self, program: str, path: str) -> None:
        """Add a program of this machine with the libraries that it needs."""
        shutil.copyfile(program, _room(self.at(path)))
        os.chmod(self.at(path), 0o755)
        # For a static program it prints nothing, and fails.
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
        for word in said.stdout.split():
            if word.startswith("/") and not os.path.exists(self.at(word)):
                shutil.copyfile(word, _room(self.at(word)))
                os.chmod(self.at(word), 0o755)

    def package(self, name: str, version: str, path: str, changelog: str = "") -> None:
        """Register a program as installed by dpkg."""
        self.write(f"/var/lib/dpkg/info/{name}.list", f"/.\n{path}\n")
        status = f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n"
        self.write("/var/lib/dpkg/status", f"Package: other\nVersion: 1\n\n{status}\n")
        here = _room(self.at(f"/usr/share/doc/{name}/changelog.Debian.gz"))
        with open(here, "wb") as file:
            subprocess.run(["gzip"], input=changelog.encode(), stdout=file, check=True)

    def container(self, uuids: Iterable[str], driver: str) -> None:
        """Add a container that has two devices of the first GPU."""
        record = {
            "format": 1,
            "node": {"driver": driver},
            "grant": {"gpus": [{"uuid": uuid} for uuid in uuids]},
            "edits": {
                "devices": [
                    {"path": "/dev/nvidia0", "major": 195, "minor": 0},
                    {"path": "/dev/nvidiactl", "major": 195, "minor": 255},
                ]
            },
            "identity": {
                "driver": driver,
                "proc": "/proc",
                "sys": "/sys",
                "modules": [],
                "observations": [["number", "/dev/nvidia0", [195, 0]]],
            },
        }
        self.write(f"{BUNDLE}/nvidia.json", json.dumps(record))
        self.write(f"{BUNDLE}/init.pid", "970")
        self.process(970, "sleep", cgroup="0::/kubepods.slice/cri-containerd-web.scope\n")
        allowed = ("/dev/char/195:0 rwm", "/dev/char/195:255 rwm", "char-pts rwm")
        lines = [*(f"DeviceAllow={line}" for line in allowed), "DevicePolicy=strict"]
        self.write(DEVICE_ALLOW, "\n".join([*lines, ""]))

    def cdi(self) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(self.read(CDI))
        return tree

    def write_cdi(self, tree: Any, path: str = CDI) -> None:
        self.write(path, json.dumps(tree))

    def places(self, **more: Any) -> Places:
        return Places(root=self.root, manifest=self.at("/classes.yaml"), **more)


def _room(path: str) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    return path


def _link(source: str, target: str) -> None:
    """Copy a tree as ``cp -al`` does, which takes three times as long."""
    for above, directories, names in os.walk(source):
        copy = target + above.removeprefix(source)
        os.mkdir(copy, stat.S_IMODE(os.stat(above).st_mode))
        links = [name for name in directories if os.path.islink(os.path.join(above, name))]
        for name in (*names, *links):
            os.link(os.path.join(above, name), os.path.join(copy, name), follow_symlinks=False)


class Healthy:
    """A node without faults, which tests copy."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._made = 0
        root = os.path.join(directory, "n")
        self.simulated = SimulatedNode.create(root, Scenario.load("two"))
        self.driver = self.simulated.driver_version
        self.uuids = [gpu.uuid for gpu in self.simulated.scenario.gpus]
        self.tree = Tree(root)
        try:
            self._fill(self.tree)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def copy(self) -> Tree:
        """Copy the node; the copy shares its files until they are replaced."""
        self._made += 1
        root = os.path.join(self.directory, f"c{self._made}")
        _link(self.tree.root, root)
        tree = Tree(root)
        tree.container(self.uuids[:1], self.driver)
        return tree

    def _fill(self, tree: Tree) -> None:
        tree.write(OURS, _OUR_CONFIG)
        tree.real("/bin/busybox", "/bin/sh")
        for directory in ("/run/systemd/system", "/run/containerd/s", "/var/lib/containerd"):
            os.makedirs(tree.at(directory))
        os.makedirs(tree.at("/var"), exist_ok=True)
        os.symlink("/run", tree.at("/var/run"))
        tree.write("/run/nvidia-persistenced/socket", "")
        self._fill_kernel(tree)
        self._fill_programs(tree)
        tree.write(CONTAINERD, _ROOT_FILE + HANDLER)
        tree.write(DROP_IN, _OTHERS_DROP_IN)
        known = {"nvidia.com/gpu": ["GPU-a", "GPU-b"], "example.com/nic": []}
        checkpoint = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": known}, "Checksum": 1}
        tree.write(CHECKPOINT, json.dumps(checkpoint))
        tree.write(KUBELET, "kind: KubeletConfiguration\ncgroupDriver: systemd\n")
        tree.write(DAEMON, json.dumps(_DAEMON_JSON))
        tree.write("/classes.yaml", _MANIFEST)
        self._fill_installation(tree)
        tree.container(self.uuids[:1], self.driver)
        config = tree.places().config()
        spec = schema.to_tree(generate(SpecOptions(), survey(config), config))
        text = json.dumps(spec).replace(tree.root, "")
        tree.write(CDI, text)

    def _fill_kernel(self, tree: Tree) -> None:
        tree.write("/proc/sys/kernel/osrelease", "6.1.0\n")
        tree.write("/proc/sys/fs/inotify/max_user_instances", "128\n")
        tree.write(MOUNTS, _MOUNTINFO)
        os.makedirs(tree.at("/dev/char"))
        for directory, _, names in os.walk(tree.at("/dev")):
            for name in names:
                here = os.path.join(directory, name)
                seen = os.lstat(here)
                if stat.S_ISCHR(seen.st_mode):
                    number = f"{os.major(seen.st_rdev)}:{os.minor(seen.st_rdev)}"
                    os.symlink(
                        os.path.relpath(here, tree.at("/dev/char")), tree.at(f"/dev/char/{number}")
                    )

    def _fill_programs(self, tree: Tree) -> None:
        tree.script("/usr/bin/runc", "echo runc version 1.4.3")
        tree.script("/usr/bin/crun", "echo crun version 1.28")
        tree.real("/usr/bin/containerd", "/usr/lib/real/containerd")
        tree.script(
            "/usr/bin/containerd",
            '[ "$1" = --version ] && exec echo containerd github.com/containerd/containerd v2.3.5',
            'exec /usr/lib/real/containerd "$@"',
        )
        tree.script("/usr/bin/containerd-shim-runc-v2")
        tree.script("/usr/bin/nvidia-container-runtime-hook", "exit 1")
        tree.script("/usr/bin/apparmor_parser")
        tree.script("/usr/bin/python3")
        tree.script(
            "/usr/bin/systemctl", f'while read -r line; do echo "$line"; done <{DEVICE_ALLOW}'
        )
        limits = (
            "Limit  Soft Limit  Hard Limit\nMax open files            1048576   1048576 files\n"
        )
        tree.process(
            CONTAINERD_PID,
            "/usr/bin/containerd",
            environ="TOKEN=hunter2\0PATH=/usr/local/bin:/usr/bin:/bin\0",
            limits=limits,
        )
        tree.process(1, "/sbin/init", name="systemd")
        tree.process(820, "/usr/bin/kubelet", f"--config={KUBELET}")

    def _fill_installation(self, tree: Tree) -> None:
        program = "containerd-shim-nvidia-v1"
        tree.script(f"{TREE}/bin/{program}")
        tree.write(f"{TREE}/bin/{program}.py", "#!/usr/bin/python3 -IS\n", 0o755)
        tree.script(f"{TREE}/bin/nvshim")
        tree.link(f"{PREFIX}/current", "0.1.0-aaaaaaaa")
        for name in (program, "nvshim"):
            tree.link(f"/usr/local/bin/{name}", f"{PREFIX}/current/bin/{name}")
        address = "/run/containerd/containerd.sock"
        maps = f"7f00-7f01 r-xp 00000000 08:01 42   {TREE}/lib/google/_upb/_message.abi3.so\n"
        tree.process(
            SHIM_PID, program, "-namespace", "k8s.io", "-id", "pod", "-address", address,
            name="containerd-shim", maps=maps, smaps_rollup=_MEMORY,
        )  # fmt: skip
        tree.process(
            SERVER_PID, program, "-address", address, "fork-server",
            name="containerd-shim", maps=maps,
        )  # fmt: skip
        tree.began(SERVER_PID, -3600)
        tree.link(f"/proc/{SERVER_PID}/fd/4", "socket:[777]")
        line = "0000000000000000: 00000002 00000000 00010000 0001 01   777 /run/containerd/s/f\n"
        tree.write(
            f"/proc/{SERVER_PID}/net/unix",
            f"Num RefCount Protocol Flags Type St Inode Path\n{line}",
        )
