"""The device plugin's settings, as an operator checks them: ``nvshim node --check-config``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from integration.timeouts import PATIENCE
from tests.harness.launcher import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
version: v1
flags:
  migStrategy: single
  plugin:
    deviceListStrategy: envvar
    deviceIDStrategy: index
  gfd:
    oneshot: true
sharing:
  timeSlicing:
    resources:
    - name: gpu
      replicas: 4
"""


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name in {"PATH", "HOME", "LANG", "PYTHONPATH"}
    }
    return subprocess.run(
        [sys.executable, "-m", "integration.cli", "node", "--check-config", *arguments],
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
        check=False,
        cwd=REPOSITORY,
        env={**clean, **variables},
    )


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_a_flag_comes_before_its_variable_and_that_before_the_file(
    file: str, tmp_path: Path
) -> None:
    done = check(
        "--device-id-strategy=uuid",
        "--pass-device-specs",
        "--fail-on-init-error=false",
        CONFIG_FILE=file,
        DEVICE_ID_STRATEGY="index",
        DEVICE_LIST_STRATEGY="volume-mounts,cdi-cri",
        MPS_ROOT="",
        NVIDIA_CTK_PATH="/usr/bin/nvidia-ctk",
    )
    assert done.returncode == 0, done.stderr
    assert "NVIDIA_CTK_PATH has no effect" in done.stderr
    assert f"flags.gfd in {file} has no effect" in done.stderr
    holds = yaml.safe_load(done.stdout)
    flags, plugin = holds["flags"], holds["flags"]["plugin"]
    assert (flags["migStrategy"], flags["failOnInitError"]) == ("single", False)
    assert flags["mpsRoot"] == "/run/nvidia/mps"
    assert plugin["deviceIDStrategy"] == "uuid"
    assert plugin["deviceListStrategy"] == ["volume-mounts", "cdi-cri"]
    assert plugin["passDeviceSpecs"] is True
    (shared,) = holds["sharing"]["timeSlicing"]["resources"]
    assert shared == {"name": "nvidia.com/gpu", "devices": "all", "replicas": 4}

    # The output is a valid configuration.
    again = tmp_path / "again.yaml"
    again.write_text(done.stdout)
    assert check("--config-file", str(again)).stdout == done.stdout


def test_what_means_nothing_without_another_option_is_refused() -> None:
    for words, needed in (
        (("--dra-mig",), "--dra"),
        (("--dra-shares", "4"), "--dra"),
        (("--dra-metadata",), "--dra"),
        (("--nvsentinel-acts",), "--nvsentinel"),
    ):
        done = check(*words)
        assert (done.returncode, f"{words[0]} needs {needed}." in done.stderr) == (2, True)


def test_what_cannot_be_without_the_api_server_is_refused() -> None:
    for word in ("--node-labels=node", "--node-labels=node-feature", "--mig-config-file=/layouts"):
        done = check(word)
        wanted = f"{word.partition('=')[0]} needs an --api-server or a --kubeconfig."
        assert (done.returncode, wanted in done.stderr) == (2, True), word
    assert check("--node-labels=file").returncode == 0


def test_what_is_wrong_is_one_line_with_the_key(file: str, tmp_path: Path) -> None:
    with open(file, "a", encoding="utf-8") as config:
        config.write("imex: {channelIds: [1]}\n")
    done = check("--config-file", file)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("NVSHIM-E2723")
    assert "imex.channelIDs" in done.stderr
    assert done.stderr.count("\n") == 1
    done = check(MIG_STRATEGY="both")
    assert (done.returncode, "MIG_STRATEGY: 'both'" in done.stderr) == (1, True)
    done = check("--config-file", file, "--config-dir", str(tmp_path))
    assert done.returncode == 2


def test_one_of_several_is_chosen_by_a_name_that_somebody_writes(file: str, tmp_path: Path) -> None:
    name = tmp_path / "elsewhere" / "labels"
    name.parent.mkdir()
    name.write_text('app="x"\nnvidia.com/device-plugin.config="config.yaml"\n')
    done = check(CONFIG_FILE_SRCDIR=str(tmp_path), DEFAULT_CONFIG="other")
    assert (done.returncode, "NVSHIM-E2725" in done.stderr) == (1, True)
    done = check("--config-dir", os.path.dirname(file), "--config-name-file", str(name))
    assert yaml.safe_load(done.stdout)["flags"]["migStrategy"] == "single"
