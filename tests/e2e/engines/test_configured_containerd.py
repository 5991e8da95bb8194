"""Run pods on a containerd that ``nvshim configure containerd`` has configured."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from typing import Any, Final

import pytest

from api.proto.deviceplugin_pb2 import ContainerAllocateResponse
from integration.cri.client import Cri
from integration.cri.errors import CriRefused
from integration.simulated import SimulatedNode
from tests.harness.containerds import nothing_left
from tests.harness.nvshim import nvshim
from tests.harness.own_process import restored
from tests.harness.pods import IDLE, Pods, import_image
from tests.harness.releases import UNSTABLE, of_releases
from tests.harness.runtime import STOCK, is_alive
from tests.harness.waiting import eventually
from tools.cri.plugin import CriContainerd, CriPlugin
from tools.images import GLIBC, PAUSE, glibc, pause, write_archive
from tools.parts import Parts

DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"


class Configured:
    """A containerd whose configuration the test changes before it starts."""

    def __init__(self) -> None:
        self.options = ["--set-default"]
        self.before = b""
        self.containerd: CriContainerd

    def amend(self, path: str) -> None:
        """Configure as an operator does: the node has a file, and nvshim adds to it."""
        with open(path, "rb") as file:
            self.before = file.read()
        self.nvshim(path, *self.options)

    def nvshim(self, path: str, *options: str) -> Any:
        return nvshim(
            "configure", "containerd", "--config", path, "-o", "json",
            "--containerd", self.containerd.parts.containerd,
            "--handler-options", f"{self.containerd.directory}/handlers",
            "--records", f"{self.containerd.directory}/records", *options,
        ).document  # fmt: skip

    @property
    def path(self) -> str:
        return f"{self.containerd.directory}/config.toml"

    def restart(self, *options: str) -> None:
        self.options = list(options)
        self.containerd.restart()


@pytest.fixture(scope="module", autouse=True)
def _signals_as_from_a_terminal() -> Iterator[None]:
    """Reset signals that nohup has ignored: containerd would ignore them as well."""
    with restored():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        yield


@pytest.fixture(scope="module", params=of_releases("installed", "trixie", UNSTABLE))
def configured(
    request: pytest.FixtureRequest,
    shim_directory: str,
    two_gpus: SimulatedNode,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Configured]:
    configured = Configured()
    # A separate configuration, because it names the kubelet's record.
    config = shutil.copy(two_gpus.config_path, tmp_path_factory.mktemp("shim") / "config.toml")
    configured.containerd = CriContainerd(
        shim_directory=shim_directory,
        shim_config=str(config),
        parts=Parts.named(request.param),
        cri=CriPlugin({"runc": {"runtime_type": STOCK}}, PAUSE),
        amend=configured.amend,
    )
    with configured.containerd as containerd, Cri(containerd.address) as cri:
        archive = write_archive(f"{containerd.directory}/pods.tar", [glibc(), pause()])
        import_image(cri, containerd, archive, GLIBC, PAUSE)
        os.unlink(archive)
        yield configured


def start_gpu_container(pods: Pods, uuid: str) -> str:
    """Return the GPUs in a container that a device plugin has given one."""
    given = ContainerAllocateResponse(envs={DEVICES: uuid})
    container = pods.run().start(*IDLE, image=GLIBC, granted=given)
    shim = f"{container.bundle}/nvidia.json"
    assert os.path.exists(shim), "that was not our shim"
    done = container.exec("nvidia-smi", "-L")
    assert done.code == 0, done.stdout + done.stderr
    return done.stdout


def test_pod_of_the_handler_gets_its_gpu_as_the_default_does_and_others_are_as_before(
    configured: Configured, two_gpus: SimulatedNode
) -> None:
    first, second = (gpu.uuid for gpu in two_gpus.scenario.gpus)
    with nothing_left(configured.containerd):
        pods = Pods(configured.containerd, "nvidia")
        seen = start_gpu_container(pods, second)
        assert second in seen
        assert first not in seen
        default = Pods(configured.containerd, "")
        assert first in start_gpu_container(default, first)
        default.close()
        others = Pods(configured.containerd, "runc")
        plain = others.run().start(*IDLE, image=GLIBC, env={DEVICES: "all"})
        assert plain.exec("sh", "-c", "ls /dev | grep nvidia").stdout == ""
        others.close()
        pods.close()


@pytest.mark.parametrize("configured", of_releases("trixie", UNSTABLE), indirect=True)
def test_the_containerd_that_runs_is_asked_and_named(configured: Configured) -> None:
    """The running containerd, not a different release that is first in the PATH."""
    containerd = configured.containerd
    assert containerd.parts.containerd != Parts.installed().containerd
    words = (
        "configure", "containerd", "--config", configured.path, "--socket", containerd.address,
        "--handler-options", f"{containerd.directory}/handlers",
        "--records", f"{containerd.directory}/records", "--dry-run",
    )  # fmt: skip
    if containerd.parts.version < (2, 0):
        # The installed containerd does not know the option.
        assert "+enable_cdi = true" in nvshim(*words, "--enable-cdi", check=False).stdout
        return
    with open(configured.path, "rb") as file:
        written = file.read()
    try:
        with open(configured.path, "w", encoding="utf-8") as file:
            file.write("version = 1\n")
        refused = nvshim(*words, check=False)
    finally:
        with open(configured.path, "wb") as file:
            file.write(written)
    assert refused.code == 1
    named = f"NVSHIM-E2556 .*containerd 2\\.\\S+ \\({re.escape(containerd.parts.containerd)}\\)"
    assert re.search(named, refused.stderr), refused.stderr


def test_options_reach_the_shim_and_removal_leaves_the_file_as_it_was(
    configured: Configured,
) -> None:
    containerd = configured.containerd
    # Replace the existing handler: the file was rewritten, our drop-in was not.
    configured.restart("--set-default", "--systemd-cgroup", "yes")
    with nothing_left(containerd):
        pods = Pods(containerd, "")
        # Our shim reports that systemd does not run here: the option has reached it.
        with pytest.raises(CriRefused, match="NVSHIM-E1206"):
            pods.run()
        pods.close()
    again = configured.nvshim(configured.path, *configured.options)
    assert again["changed"] is False
    assert again["restart"]["needed"] == "nothing"
    removed = configured.nvshim(configured.path, "--remove")
    assert removed["restart"]["needed"] == "restart"
    with open(configured.path, "rb") as file:
        assert file.read() == configured.before
    assert not os.path.exists(f"{containerd.directory}/conf.d")
    assert not os.path.exists(f"{containerd.directory}/handlers")
    assert configured.nvshim(configured.path, "--remove")["changed"] is False


@pytest.mark.parametrize("configured", of_releases(UNSTABLE), indirect=True)
def test_restart_by_a_signal_is_refused_where_nobody_starts_what_it_ends(
    configured: Configured,
) -> None:
    containerd = configured.containerd
    pid = containerd.pid
    done = nvshim(
        "configure", "containerd", "--config", configured.path, "--set-default",
        "--containerd", containerd.parts.containerd, "--socket", containerd.address,
        "--handler-options", f"{containerd.directory}/handlers",
        "--records", f"{containerd.directory}/records", "--restart", "signal", check=False,
    )  # fmt: skip
    assert done.code == 1
    assert "NVSHIM-E2568" in done.stderr
    assert re.search(r"(changed|created) /", done.stdout), "it lists the files that it wrote"
    assert is_alive(pid)
    assert containerd.ctr("version").code == 0
    # A restart does what SIGHUP would have done.
    os.kill(pid, signal.SIGHUP)
    eventually(lambda: not is_alive(pid), "containerd has exited")
