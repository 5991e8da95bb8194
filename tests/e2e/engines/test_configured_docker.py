"""``docker run --gpus`` on a dockerd that ``nvshim configure docker`` has configured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import pytest

from integration.simulated import SimulatedNode
from tests.harness.containerds import nothing_left
from tests.harness.docker import HOOK, DockerParts, PrivateDocker
from tests.harness.nvshim import Answer, nvshim
from tools.containerd import PrivateContainerd
from tools.images import glibc
from tools.parts import Parts

SETTINGS: Final[dict[str, Any]] = {"log-level": "debug", "features": {"buildkit": False}}
RELEASE: Final = "trixie"


def configure(docker: PrivateDocker, *words: str, check: bool = True) -> Answer:
    return nvshim(
        "configure", "docker", "--config", docker.settings_path, "-o", "json",
        "--hook-directory", docker.bin_directory, "--records", f"{docker.bin_directory}/records",
        "--dockerd", DockerParts.of_release(RELEASE).dockerd, "--socket", docker.address,
        *words, check=check,
    )  # fmt: skip


@pytest.fixture(scope="module")
def docker(shim_directory: str, two_gpus: SimulatedNode) -> Iterator[PrivateDocker]:
    parts = Parts.of_release(RELEASE)
    with (
        PrivateContainerd(
            shim_directory=shim_directory, shim_config=two_gpus.config_path, parts=parts
        ) as containerd,
        nothing_left(containerd),
        PrivateDocker(
            containerd,
            DockerParts.of_release(RELEASE),
            SETTINGS,
            amend=lambda docker: check_first(configure(docker, "--set-default").document),
        ) as docker,
    ):
        docker.import_image("glibc", glibc())
        yield docker


def check_first(document: Any) -> None:
    assert document["restart"]["needed"] == "restart", "dockerd finds the hook at its start"
    assert {os.path.basename(file["path"]) for file in document["files"]} >= {HOOK, "daemon.json"}


def test_gpus_flag_works_and_the_stand_in_says_what_it_is(
    docker: PrivateDocker, two_gpus: SimulatedNode
) -> None:
    done = docker.run("--gpus=device=1", "--", "nvidia-smi", "-L")
    assert done.code == 0, done.stderr
    assert two_gpus.scenario.gpus[1].uuid in done.stdout
    assert two_gpus.scenario.gpus[0].uuid not in done.stdout
    said = subprocess.run(
        [f"{docker.bin_directory}/{HOOK}", "prestart"], capture_output=True, text=True, check=False
    )
    assert said.returncode == 1
    assert "stand-in" in said.stderr
    # With another runtime, the container fails instead of starting without its GPUs.
    other = docker.run("--gpus=all", "--runtime=runc", "--", "true")
    assert other.code != 0
    assert "stand-in" in other.stderr


def test_signal_tells_dockerd_of_another_runtime_without_a_restart(docker: PrivateDocker) -> None:
    words = ("--set-default", "--runtime-name", "gpu")
    document = configure(docker, *words, "--restart", "signal").document
    assert document["restart"]["done"] == "signal"

    # dockerd has read its configuration when the command returns.
    done = docker.run("--gpus=all", "--", "sh", "-c", "ls /dev")
    assert "nvidia1" in done.stdout, done.stderr
    named = docker.run("--runtime=gpu", "--", "true")
    assert named.code == 0, named.stderr
    assert configure(docker, *words).document["changed"] is False
    # It keeps a runtime that is gone from the file; if it was the default, reload fails.
    refused = configure(
        docker, "--runtime-name", "gpu", "--no-set-default", "--restart", "signal", check=False
    )
    assert refused.code == 1
    assert json.loads(refused.stderr)["error"]["code"] == "NVSHIM-E2568"
    assert refused.document["changed"] is True


def test_removal_is_the_exact_inverse_and_takes_only_ours_from_what_others_changed(
    docker: PrivateDocker,
) -> None:
    original = json.dumps(SETTINGS)
    assert configure(docker, "--remove", "--dry-run", check=False).code == 3
    configure(docker, "--remove")
    with open(docker.settings_path) as file:
        assert file.read() == original
    assert os.listdir(docker.bin_directory) == []
    configure(docker, "--set-default")
    with open(docker.settings_path) as file:
        ours = file.read()
    with open(docker.settings_path, "w") as file:
        file.write(ours.replace('"debug"', '"info"'))
    configure(docker, "--remove")
    with open(docker.settings_path) as file:
        assert file.read() == original.replace('"debug"', '"info"')
    assert os.listdir(docker.bin_directory) == []
    assert configure(docker, "--remove").document["changed"] is False
