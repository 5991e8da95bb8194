"""Checkpoints as containerd stores them: created and restored by its client."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from integration.simulated import SimulatedNode
from tests.conftest import RUNTIME
from tests.harness.events import Recorder
from tests.harness.leaks import Census, describe
from tests.harness.runtime import Container, Runtime, is_alive, one_line, remove_fifos
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd
from tools.images import busybox, write_archive
from tools.parts import SYSTEM_PATH, Parts

# The program knows something that a second start could not know, and prints it when asked.
SECRET: Final = """
trap 'exit 7' TERM
trap 'echo $secret >/dev/shm/told' USR1
read secret </proc/sys/kernel/random/uuid
: >/dev/shm/ready
while :; do sleep 0.02; done
"""


@pytest.fixture(scope="module")
def with_criu(
    shim_directory: str, shim_config: str, parts: Parts, criu: str
) -> Iterator[PrivateContainerd]:
    """Return a containerd whose shims find a CRIU that works with this kernel."""
    first = [os.path.dirname(criu)]
    if first[0] in SYSTEM_PATH.split(":"):
        first = []
    environment = {"PATH": ":".join([*first, shim_directory, parts.path])}
    with PrivateContainerd(
        shim_directory=shim_directory,
        shim_config=shim_config,
        parts=parts,
        environment=environment,
    ) as containerd:
        archive = write_archive(f"{containerd.directory}/images.tar", [busybox()])
        containerd.ctr("images", "import", archive)
        os.unlink(archive)
        yield containerd


@pytest.fixture
def runtime(with_criu: PrivateContainerd) -> Iterator[Runtime]:
    census = Census(with_criu)
    # runc: Debian 12's crun is built without CRIU.
    runtime = Runtime(with_criu, RUNTIME, None)
    yield runtime
    runtime.close()
    # With any shim, restores leave the client's fifos and what containerd unpacks.
    remove_fifos(with_criu)
    for path in glob.glob(f"{with_criu.directory}/tmp/ctrd-checkpoint*"):
        shutil.rmtree(path)
    left = census.leftovers()
    if left:
        message = describe(left, with_criu.log())
        census.remove(left)
        pytest.fail(message, pytrace=False)


def _tell(container: Container) -> str:
    """Make the program print its secret."""
    eventually(lambda: container.exec("test", "-e", "/dev/shm/ready").code == 0, "the trap is set")
    container.exec("rm", "-f", "/dev/shm/told")
    assert container.kill("USR1").code == 0

    def told() -> str:
        return container.exec("cat", "/dev/shm/told").stdout.strip()

    return eventually(told, "the program writes its secret")


def test_container_is_restored_from_its_image_as_it_was(runtime: Runtime) -> None:
    containerd, reference = runtime.containerd, "nvshim.local/saved:latest"
    container = runtime.start("sh", "-c", SECRET)
    secret = _tell(container)
    before = container.pid
    with Recorder(containerd) as recorder:
        containerd.ctr("containers", "checkpoint", "--task", container.name, reference)
        assert (container.pid, container.status) == (before, "RUNNING"), "it continues"
        told = recorder.wait_for(container.name, lambda names: "resumed" in names)
        # containerd's own shim sends no event, although containerd's documentation requires it.
        between = ["checkpointed"] if runtime.is_ours else []
        assert told == ["paused", *between, "resumed"]
        assert _tell(container) == secret
        container.remove()
        assert not is_alive(before)

        # The same name, because the spec names the cgroup after it.
        containerd.ctr("containers", "restore", "--live", container.name, reference)
        assert container.status == "RUNNING"
        assert container.pid not in (0, before)
        assert _tell(container) == secret
        assert container.kill("TERM").code == 0
        assert container.exit_code() == 7
    containerd.ctr("images", "rm", "--sync", reference)


@pytest.mark.parametrize("layered", [True, False])
def test_restored_container_has_the_drivers_files_as_it_had_them(
    runtime: Runtime,
    two_gpus: SimulatedNode,
    configure: Callable[[str], None],
    tmp_path: Path,
    layered: bool,
) -> None:
    """In a layer, or mounted: CRIU restores an open file only at the same place."""

    def set_driver_layer(*, on: bool) -> None:
        with open(two_gpus.config_path, encoding="utf-8") as file:
            lines = [line for line in file if not line.startswith("layers =")]
        own = f'[node]\nlayers = "{tmp_path}/layers"\ndriver-layer = {str(on).lower()}\n'
        configure("".join(lines).replace("[node]\n", own))

    def smi_is_mounted(container: Container) -> bool:
        with open(f"/proc/{container.pid}/mountinfo", encoding="utf-8") as file:
            return "/usr/bin/nvidia-smi" in file.read()

    containerd, reference = runtime.containerd, "nvshim.local/saved-gpu:latest"
    set_driver_layer(on=layered)
    flags = ("--env", "NVIDIA_VISIBLE_DEVICES=all", "--env", "NVIDIA_DRIVER_CAPABILITIES=utility")
    script = f"exec 3</usr/bin/nvidia-smi; echo x >/mine; {SECRET}"
    container = runtime.start("sh", "-c", script, flags=flags)
    secret = _tell(container)
    assert smi_is_mounted(container) != layered
    containerd.ctr("containers", "checkpoint", "--rw", "--task", container.name, reference)
    container.remove()
    set_driver_layer(on=not layered)
    containerd.ctr("containers", "restore", "--rw", "--live", container.name, reference)
    assert _tell(container) == secret
    assert smi_is_mounted(container) != layered
    assert container.exec("cat", "/mine").stdout == "x\n"
    container.remove()
    containerd.ctr("images", "rm", "--sync", reference)


def test_what_cannot_be_saved_goes_on_and_leaves_no_image(runtime: Runtime) -> None:
    # CRIU saves at most 1 MiB of a removed file.
    container = runtime.start(
        "sh", "-c", f"exec 9>/big; head -c 3000000 /dev/zero >&9; rm /big; {SECRET}"
    )
    secret = _tell(container)
    images = runtime.containerd.ctr("images", "ls", "-q").lines
    done = runtime.containerd.ctr("tasks", "checkpoint", container.name, check=False)
    assert done.code != 0
    assert one_line(done)
    if runtime.is_ours:
        assert "NVSHIM-E1527 checkpoint-failed" in done.stderr
        assert "ghost file" in done.stderr
    assert container.status == "RUNNING"
    assert _tell(container) == secret
    assert runtime.containerd.ctr("images", "ls", "-q").lines == images


def test_checkpoint_of_a_task_is_an_image(runtime: Runtime) -> None:
    container = runtime.start("sh", "-c", SECRET)
    done = runtime.containerd.ctr("tasks", "checkpoint", container.name)
    (image,) = done.lines
    assert image in runtime.containerd.ctr("images", "ls", "-q").lines
    runtime.containerd.ctr("images", "rm", "--sync", image)
    assert container.status == "RUNNING"
