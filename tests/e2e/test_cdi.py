"""CDI devices of any vendor in containers of the shim."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.simulated import SimulatedNode
from tests.harness.runtime import Runtime, one_line
from tools.containerd import Completed
from tools.images import GLIBC


@pytest.fixture
def specs(
    runtime: Runtime, mig_gpus: SimulatedNode, configure: Callable[[str], None], tmp_path: Path
) -> Specs:
    """Yield a directory of CDI specs that the shim reads."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of CDI")
    return Specs(runtime, mig_gpus, configure, tmp_path)


class Specs:
    """A directory of CDI specs, and the shim's configuration that names it."""

    def __init__(
        self,
        runtime: Runtime,
        mig_gpus: SimulatedNode,
        write: Callable[[str], None],
        directory: Path,
    ) -> None:
        self._runtime = runtime
        self._node = mig_gpus
        self._write_config = write
        self.directory = directory
        self.configure("")

    def configure(self, more: str) -> None:
        """Write the configuration, with further keys in [cdi]."""
        with open(self._node.config_path) as file:
            of_node = file.read()
        self._write_config(f'{of_node}\n[cdi]\nspec-dirs = ["{self.directory}/specs"]\n{more}\n')

    def write(self, name: str, text: str) -> None:
        """Write a spec file."""
        (self.directory / "specs").mkdir(exist_ok=True)
        (self.directory / "specs" / name).write_text(text)

    def run(self, *command: str, devices: str, flags: tuple[str, ...] = ()) -> Completed:
        """Run a container that names devices, as a kubelet does."""
        words = ("--annotation", f"cdi.k8s.io/test={devices}", *flags)
        return self._runtime.run(*command, image=GLIBC, flags=words)


def vendor_spec(specs: Specs, **more: Any) -> None:
    """Write a vendor's spec in JSON: a character device, a mount, a variable and a group."""
    host = specs.directory / "host"
    host.mkdir(exist_ok=True)
    (host / "libvendor.conf").write_text("of the vendor\n")
    if not (host / "accel0").exists():
        os.mknod(host / "accel0", stat.S_IFCHR | 0o600, os.makedev(1, 7))  # /dev/full
    edits = {
        "deviceNodes": [{"path": "/dev/accel/accel0", "hostPath": str(host / "accel0")}],
        "env": ["ACCEL=0"],
        "additionalGids": [4321],
    }
    mount = {"hostPath": f"{host}/libvendor.conf", "containerPath": "/etc/vendor/libvendor.conf"}
    common = {
        "env": ["VENDOR=here"],
        "mounts": [{**mount, "options": ["ro", "nosuid", "nodev"]}],
        **more,
    }
    file = {
        "cdiVersion": "0.7.0",
        "kind": "vendor.example/accel",
        "devices": [{"name": "0", "containerEdits": edits}],
        "containerEdits": common,
    }
    specs.write("vendor.json", json.dumps(file))


def test_device_of_a_foreign_vendor_is_there_in_all_its_parts(specs: Specs) -> None:
    vendor_spec(specs)
    script = (
        "stat -c '%F %t:%T' /dev/accel/accel0; echo x 2>/dev/null >/dev/accel/accel0 || echo full;"
        "cat /etc/vendor/libvendor.conf; echo $VENDOR $ACCEL; id -G;"
        "touch /etc/vendor/libvendor.conf 2>/dev/null || echo read-only"
    )
    done = specs.run("sh", "-c", script, devices="vendor.example/accel=0")
    assert done.lines[0] == "character special file 1:7", done.stderr
    assert done.lines[1:4] == ["full", "of the vendor", "here 0"]
    assert "4321" in done.lines[4].split()
    assert done.lines[5] == "read-only"


@pytest.mark.parametrize(
    ("devices", "code", "named"),
    [
        ("vendor.example/accel=7", "NVSHIM-E0604", "vendor.example/accel has 0"),
        ("broken.example/x=0", "NVSHIM-E0604", "broken.yaml cannot be used"),
        ("vendor.example/proc=0", "NVSHIM-E0609", "/proc/sys"),
        # runc 1.4 is the first version that can.
        ("vendor.example/net=0", "NVSHIM-E0610", "cannot move the network interface eth9"),
    ],
)
def test_device_that_cannot_be_given_is_a_typed_error(
    specs: Specs, devices: str, code: str, named: str
) -> None:
    vendor_spec(specs)
    specs.write("broken.yaml", "cdiVersion: 0.5.0\nkind: broken.example/x\ndevices: nonsense\n")
    for name, edits in {
        "proc": {"mounts": [{"hostPath": "/etc", "containerPath": "/proc/sys"}]},
        "net": {"netDevices": [{"hostInterfaceName": "eth9", "name": "eth9"}]},
    }.items():
        file = {
            "cdiVersion": "1.1.0",
            "kind": f"vendor.example/{name}",
            "devices": [{"name": "0", "containerEdits": edits}],
        }
        specs.write(f"{name}.json", json.dumps(file))
    done = specs.run("true", devices=devices)
    assert done.code == 1
    assert code in done.stderr
    assert named in done.stderr
    assert one_line(done)


def test_hook_of_a_foreign_spec_runs_only_if_it_is_allowed_and_without_the_images_environment(
    specs: Specs,
) -> None:
    program, seen = specs.directory / "hook", specs.directory / "seen"
    program.write_text(f'#!/bin/sh\nenv >{seen}\necho "$@" >>{seen}\n')
    program.chmod(0o755)
    hook = {"hookName": "createRuntime", "path": str(program), "args": ["hook", "one"]}
    vendor_spec(specs, hooks=[hook])
    image = ("--env", "LD_PRELOAD=/evil.so", "--env", "SECRET=1")

    def run() -> Completed:
        return specs.run("sh", "-c", "echo runs", devices="vendor.example/accel=0", flags=image)

    refused = run()
    assert "NVSHIM-E0607" in refused.stderr
    assert str(program) in refused.stderr
    assert "allow-hooks" in refused.stderr
    assert one_line(refused)

    specs.configure('other-hooks = "leave-out"')
    done = run()
    assert done.lines == ["runs"], done.stderr
    assert not seen.exists()

    specs.configure(f'allow-hooks = ["{program}"]')
    done = run()
    assert done.lines == ["runs"], done.stderr
    environment = seen.read_text()
    assert "PATH=" in environment
    assert "\none\n" in environment
    assert "LD_PRELOAD" not in environment
    assert "SECRET" not in environment


def test_spec_as_amds_program_writes_it(specs: Specs) -> None:
    host = specs.directory / "host"
    host.mkdir()
    nodes = {"kfd": (1, 3), "card1": (1, 5), "renderD128": (1, 7)}
    for name, number in nodes.items():
        os.mknod(host / name, stat.S_IFCHR | 0o660, os.makedev(*number))
    paths = {"kfd": "/dev/kfd", "card1": "/dev/dri/card1", "renderD128": "/dev/dri/renderD128"}
    listed = "".join(
        f"    - path: {paths[name]}\n      hostPath: {host}/{name}\n      permissions: rw\n"
        for name in nodes
    )
    device = "  containerEdits:\n    deviceNodes:\n" + listed
    specs.write(
        "amd.yaml",
        f'---\ncdiVersion: "0.6.0"\nkind: amd.com/gpu\ndevices:\n- name: "0"\n{device}'
        f"- name: all\n{device}",
    )
    script = "stat -c '%n %t:%T' /dev/kfd /dev/dri/*"
    done = specs.run("sh", "-c", script, devices="amd.com/gpu=0")
    assert done.lines == ["/dev/kfd 1:3", "/dev/dri/card1 1:5", "/dev/dri/renderD128 1:7"]


def nvidia_ctk_spec(mig_gpus: SimulatedNode) -> dict[str, Any]:
    """Return a spec as ``nvidia-ctk cdi generate`` writes it: everything by hooks."""
    home = "/usr/lib/x86_64-linux-gnu"
    version = mig_gpus.driver_version
    names = [f"lib{stem}.so.{version}" for stem in ("cuda", "nvidia-ml", "nvidia-ptxjitcompiler")]
    source = next(
        top
        for top, _, found in os.walk(mig_gpus.driver_root, followlinks=True)
        if names[0] in found
    )
    hook = "/usr/bin/nvidia-cdi-hook"

    def call(*words: str) -> dict[str, Any]:
        return {
            "hookName": "createContainer",
            "path": hook,
            "args": ["nvidia-cdi-hook", *words],
            "env": ["NVIDIA_CTK_DEBUG=false"],
        }

    by_path = "../card3::/dev/dri/by-path/pci-0000:5d:00.0-card"
    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/special",
        "devices": [
            {
                "name": "third",
                "containerEdits": {
                    "deviceNodes": [
                        {"path": f"/dev/{name}", "hostPath": f"{mig_gpus.dev}/{name}"}
                        for name in ("nvidia3", "dri/card3")
                    ],
                    "hooks": [call("create-symlinks", "--link", by_path)],
                },
            }
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{"path": "/dev/nvidiactl", "hostPath": f"{mig_gpus.dev}/nvidiactl"}],
            "mounts": [
                {
                    "hostPath": f"{source}/{name}",
                    "containerPath": f"{home}/odd/{name}",
                    "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                }
                for name in names
            ],
            "hooks": [
                call("create-symlinks", "--link", f"libcuda.so.1::{home}/odd/libcuda.so"),
                call("enable-cuda-compat", f"--host-driver-version={version}"),
                call("update-ldcache", "--folder", f"{home}/odd"),
                call("disable-device-node-modification"),
                call("update-application-profile"),
                call("chmod", "--mode", "755", "--path", "/dev/dri"),
            ],
        },
    }


def test_spec_as_nvidia_ctk_writes_it_needs_none_of_its_hooks(
    specs: Specs, mig_gpus: SimulatedNode
) -> None:
    specs.write("nvidia.json", json.dumps(nvidia_ctk_spec(mig_gpus)))
    script = (
        "probe dlopen libcuda.so.1 libcuda.so libnvidia-ml.so.1;"
        "ls /dev/nvidia* /dev/dri; readlink /dev/dri/by-path/*;"
        "cat /etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf;"
        "ldconfig && probe dlopen libnvidia-ml.so.1"
    )
    done = specs.run("sh", "-c", script, devices="nvidia.com/special=third")
    text = done.stdout
    assert done.code == 0, text + done.stderr
    odd = "/usr/lib/x86_64-linux-gnu/odd"
    assert [line.split()[1].startswith(odd) for line in done.lines[:3]] == [True] * 3
    assert "/dev/nvidia3\n" in text
    assert "../card3\n" in text
    assert "EGLVisibleDGPUDevices" in text
    assert "0x8" in text
    assert "/dev/nvidia0" not in text
    assert done.lines[-1].startswith(f"libnvidia-ml.so.1 {odd}")
