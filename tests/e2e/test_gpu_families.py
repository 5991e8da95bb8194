"""What a GPU container is given beside its GPU: seen from inside, a container per family."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import pytest

from integration.images import GLIBC
from integration.simulated import Scenario, SimulatedNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from integration.containerd import Completed
    from tests.harness.runtime import Container, Runtime

PROFILE: Final = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"


@pytest.fixture(scope="module")
def node(workshop: str) -> Iterator[SimulatedNode]:
    """A node with two GPUs and one of everything else."""
    with SimulatedNode.create(f"{workshop}/families", Scenario.load("two")) as node:
        yield node


@pytest.fixture
def configure(shim_config: str) -> Iterator[Callable[[str], None]]:
    """Give the shim another configuration; it reads it for each container."""
    with open(shim_config) as file:
        before = file.read()

    def write(text: str) -> None:
        with open(shim_config, "w") as file:
            file.write(text)

    yield write
    write(before)


@pytest.fixture
def gpus(runtime: Runtime, node: SimulatedNode, configure: Callable[[str], None]) -> Runtime:
    """The runtime on that node."""
    if not runtime.is_ours:
        pytest.skip("containerd's own shim knows nothing of GPUs")
    with open(node.config_path) as file:
        configure(file.read())
    return runtime


def run(gpus: Runtime, script: str, *flags: str, **environment: str) -> Completed:
    done = gpus.run("sh", "-c", script, image=GLIBC, flags=[*_env(environment), *flags])
    assert done.code == 0, done.stdout + done.stderr
    return done


def _env(variables: dict[str, str]) -> list[str]:
    named = {f"NVIDIA_{name}": value for name, value in variables.items()}
    return [word for name, value in named.items() for word in ("--env", f"{name}={value}")]


def record_of(gpus: Runtime, container: Container) -> Any:
    with open(os.path.join(gpus.containerd.bundle(container.name), "nvidia.json")) as file:
        return json.load(file)


@pytest.mark.parametrize("flags", [[], ["--read-only"]])
def test_drm_nodes_come_with_their_links_and_egl_with_its_mask(
    gpus: Runtime, node: SimulatedNode, flags: list[str]
) -> None:
    script = (
        f"cd /dev/dri/by-path && for l in *; do echo $l $(readlink $l); test -c $l; done; "
        f"touch new 2>/dev/null && echo writable; cat {PROFILE} 2>/dev/null; ls -l /dev/dri/card*"
    )
    done = run(gpus, script, *flags, VISIBLE_DEVICES="1", DRIVER_CAPABILITIES="graphics")
    pci = node.scenario.gpus[1].pci
    assert done.lines[:2] == [f"pci-{pci}-card ../card1", f"pci-{pci}-render ../renderD129"]
    assert "writable" not in done.lines
    assert "/dev/dri/card1" in done.lines[-1]
    if not flags:  # a read-only image has no such directory, and no room for one
        assert '["EGLVisibleDGPUDevices", 0x2]' in done.stdout


def test_parameters_of_the_module_are_covered_if_procfs_has_them(gpus: Runtime) -> None:
    container = gpus.start_idle(image=GLIBC, flags=_env({"VISIBLE_DEVICES": "0"}))
    (file,) = record_of(gpus, container)["proc_files"]
    assert file["path"] == "/proc/driver/nvidia/params"
    with open(file["source"]) as staged:
        assert "ModifyDeviceFiles: 0\n" in staged.read()
    # The node is simulated; the procfs is this machine's, which has a driver or has not.
    shown = container.exec("cat", file["path"])
    if os.path.exists(file["path"]):
        assert file["state"] == "covered"
        assert "ModifyDeviceFiles: 0\n" in shown.stdout
    else:
        assert file["state"] == "its procfs does not have the file"
        assert shown.code != 0
