"""A container keeps its GPU when systemd rewrites the device rules of cgroups."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from integration.doctor.examination import choose, examine
from integration.doctor.places import Places
from integration.simulated import SimulatedNode
from tests.harness.runtime import Container, Runtime, new_name
from tests.vm.unit import systemctl, systemd_version
from tools.images import GLIBC

NVIDIA_MAJOR: Final = 195

# The last version whose systemd forgets a device without a link in /dev/char, of the two that
# tests run with: Debian 12's and Debian 13's.
LAST_THAT_FORGETS: Final = 252


@pytest.fixture
def node(shim_config: str, tmp_path: Path) -> Iterator[SimulatedNode]:
    """Make a simulated node whose device nodes are in /dev itself, without links."""
    node = SimulatedNode.open(os.environ["NVSHIM_TEST_NODE"])
    with open(shim_config) as file:
        before = file.read()
    made = []
    for name in os.listdir(node.dev):
        seen = os.lstat(os.path.join(node.dev, name))
        if stat.S_ISCHR(seen.st_mode):
            path = f"/dev/{name}"
            os.mknod(path, seen.st_mode, seen.st_rdev)
            os.chmod(path, seen.st_mode & 0o777)
            made.append(path)
    assert _links() == []
    yield node
    for path in [*made, *_links()]:
        os.unlink(path)
    with open(shim_config, "w") as file:
        file.write(before)


def _links() -> list[str]:
    names = os.listdir("/dev/char")
    return sorted(f"/dev/char/{name}" for name in names if name.startswith(f"{NVIDIA_MAJOR}:"))


def _configure(path: str, node: SimulatedNode, state: Path, *, links: bool) -> None:
    with open(path, "w") as file:
        file.write(
            f'[node]\ndriver-root = "{node.driver_root}"\nproc = "{node.proc}"\n'
            f'sys = "{node.sys}"\ndev = "/dev"\nstate = "{state}"\nnvml-timeout = 60\n'
            f"char-links = {str(links).lower()}\n"
        )


def _opened(container: Container) -> list[str]:
    """Return the results of opening the GPU and the control node. No driver serves either."""
    done = container.exec("probe", "open", "/dev/nvidia1", "/dev/nvidiactl", "/dev/null")
    return [line.split()[1] for line in done.lines]


ALLOWED: Final = ["ENXIO", "ENXIO", "OK"]
LOST: Final = ["EPERM", "EPERM", "OK"]


@pytest.mark.parametrize("links", [True, False], ids=["links made", "no links"])
@pytest.mark.parametrize("low_level_runtime", ["runc", "crun"])
def test_gpu_stays_through_a_reload_of_systemd(
    runtime: Runtime,
    node: SimulatedNode,
    shim_config: str,
    tmp_path: Path,
    links: bool,
    low_level_runtime: str,
) -> None:
    _configure(shim_config, node, tmp_path / "state", links=links)
    name = new_name()
    container = runtime.start(
        "sleep", "1000", image=GLIBC, name=name,
        flags=[
            *runtime.low_level_flags(str(tmp_path), binary=shutil.which(low_level_runtime)),
            "--cgroup", f"system.slice:nvshim:{name}",
            "--env", "NVIDIA_VISIBLE_DEVICES=1", "--env", "NVIDIA_DRIVER_CAPABILITIES=utility",
        ],
    )  # fmt: skip
    expected = [f"/dev/char/{NVIDIA_MAJOR}:1", f"/dev/char/{NVIDIA_MAJOR}:255"]
    assert _links() == (expected if links else [])
    assert _opened(container) == ALLOWED
    stays = links or low_level_runtime == "crun" or systemd_version() > LAST_THAT_FORGETS
    # The doctor reports the container before the reload takes its GPU away.
    assert _diagnosed(runtime, shim_config) == ([] if stays else [name])
    systemctl("daemon-reload")
    assert _opened(container) == (ALLOWED if stays else LOST)
    # The other GPU is still denied.
    other = f"/proc/{container.pid}/root/tmp/other"
    os.mknod(other, stat.S_IFCHR | 0o666, os.makedev(NVIDIA_MAJOR, 0))
    assert container.exec("probe", "open", "/tmp/other").stdout == "/tmp/other EPERM\n"


def _diagnosed(runtime: Runtime, shim_config: str) -> list[str]:
    """Return the containers whose GPUs systemd will deny, according to the doctor."""
    containerd = f"{runtime.containerd.directory}/config.toml"
    places = Places(config_path=shim_config, containerd_config=containerd)
    findings = examine(places, choose(["D100", "D103"])).findings
    assert {finding.code for finding in findings} <= {"NVSHIM-D100"}, findings
    assert all("systemd's nvshim-" in finding.found for finding in findings), findings
    return [finding.found.partition(":")[0].rpartition("/")[2] for finding in findings]
