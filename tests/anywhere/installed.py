"""``python -m tests.anywhere.installed -- COMMAND…``: run a command while the product is installed.

In its mount namespace, this program covers the directories that an installation changes. It
installs the product below /opt, configures the shim and a handler in containerd, and starts
containerd at its usual address and a container with GPUs. When the command exits, it stops them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from typing import Final

from integration.containers.traces import forget
from integration.simulated import Scenario, SimulatedNode
from shim import syscalls
from tests.harness.dist import built
from tools.images import BUSYBOX, busybox, write_archive

# The directories that the installation changes, which are covered by overlays.
_CHANGED: Final = ("/etc", "/opt", "/usr/local", "/var/lib")
# These start empty: a container's root cannot be on an overlay.
_EMPTY: Final = ("/run/containerd", "/var/lib/containerd")
_SETTINGS: Final = "/etc/containerd-shim-nvidia/config.toml"
_RUNTIME: Final = "io.containerd.nvidia.v1"
_NAMESPACE: Final = "in-use"
_NAME: Final = "trained"
_START_TIMEOUT: Final = 60.0


def main() -> int:
    """Install the product, start containerd and a container, run the command, and stop both.

    Returns:
        The command's exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.anywhere.installed", description=__doc__)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="in-use-"))
        stack.callback(_unmount, _cover(directory))
        node = SimulatedNode.create(f"{directory}/node", Scenario.load("two"))
        stack.enter_context(node)
        os.makedirs(os.path.dirname(_SETTINGS), exist_ok=True)
        shutil.copyfile(node.config_path, _SETTINGS)
        subprocess.run([f"{built().path}/bin/nvshim", "install"], check=True)
        subprocess.run(["nvshim", "configure", "containerd"], check=True)
        log = stack.enter_context(open(f"{directory}/containerd.log", "wb"))
        containerd = subprocess.Popen(["containerd"], stdout=log, stderr=log)
        stack.callback(forget, _NAMESPACE)
        stack.callback(_end, containerd)
        _use(directory)
        stack.callback(_ctr, "tasks", "delete", "--force", _NAME)
        code = subprocess.run(options.command, check=False).returncode
        if "RUNNING" not in _ctr("tasks", "ls"):
            sys.stderr.write("the container exited while the command ran\n")
            return 1
    return code


def _cover(directory: str) -> list[str]:
    """Cover the directories that are changed; return the new mount points."""
    upper = f"{directory}/changed"
    os.mkdir(upper)
    syscalls.mount("tmpfs", upper, "tmpfs", 0, "mode=755")
    for path in _CHANGED:
        layers = {name: f"{upper}/{name}{path}" for name in ("upper", "work")}
        for each in layers.values():
            os.makedirs(each)
        options = f"lowerdir={path},upperdir={layers['upper']},workdir={layers['work']}"
        syscalls.mount("overlay", path, "overlay", 0, options)
    for path in _EMPTY:
        os.makedirs(path, exist_ok=True)
        syscalls.mount("tmpfs", path, "tmpfs", 0, "mode=711")
    return [*_EMPTY, *_CHANGED, upper]


def _unmount(paths: list[str]) -> None:
    for path in paths:
        syscalls.umount(path, syscalls.MNT_DETACH)


def _use(directory: str) -> None:
    """Wait for containerd, and start a container with GPUs."""
    deadline = time.monotonic() + _START_TIMEOUT
    while subprocess.run(["ctr", "version"], capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"containerd does not answer; see {directory}/containerd.log")
        time.sleep(0.1)
    _ctr("images", "import", write_archive(f"{directory}/images.tar", [busybox()]))
    _ctr(
        "run", "--detach", "--runtime", _RUNTIME, "--env", "NVIDIA_VISIBLE_DEVICES=all",
        BUSYBOX, _NAME, "sleep", "1000000",
    )  # fmt: skip


def _ctr(*words: str) -> str:
    argv = ["ctr", "--namespace", _NAMESPACE, *words]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
