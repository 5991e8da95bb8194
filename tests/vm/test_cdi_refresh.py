"""The units that refresh the CDI spec, with a real systemd."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from integration.simulated import SimulatedNode
from tests.harness.launcher import REPOSITORY
from tests.harness.waiting import eventually
from tests.vm.unit import systemctl

UNIT: Final = "nvshim-cdi-refresh"
_UNITS: Final = "/run/systemd/system"
_PREFIX: Final = "/opt/containerd-shim-nvidia"


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Path]:
    """Install the units of this checkout for the simulated node; yield the spec's path."""
    node = SimulatedNode.open(os.environ["NVSHIM_TEST_NODE"])
    program = tmp_path / "nvshim"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = {[REPOSITORY, *sys.path]!r}\n"
        "from integration.cli.app import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    for kind in ("service", "path"):
        with open(f"{REPOSITORY}/integration/systemd/{UNIT}.{kind}", encoding="utf-8") as file:
            text = file.read().replace("/usr/local/bin/nvshim", str(program))
        with open(f"{_UNITS}/{UNIT}.{kind}", "w", encoding="utf-8") as file:
            file.write(text)
    made = tmp_path / "nvidia.yaml"
    # What an administrator would write: other places, and more patience on a slow machine.
    drop_in = f"{_UNITS}/{UNIT}.service.d"
    os.makedirs(drop_in)
    config = tmp_path / "config.toml"
    with open(node.config_path, encoding="utf-8") as file:
        text = file.read().replace(node.state, f"{tmp_path}/state")
    config.write_text(f"{text}nvml-timeout = 60\n")
    with open(f"{drop_in}/test.conf", "w", encoding="utf-8") as file:
        file.write(
            f"[Service]\nPrivateTmp=no\nEnvironment=NVSHIM_CONFIG={config}\n"
            f"Environment=NVIDIA_CTK_CDI_OUTPUT_FILE_PATH={made}\n"
        )
    os.makedirs(_PREFIX, exist_ok=True)
    systemctl("daemon-reload")
    yield made
    systemctl("stop", f"{UNIT}.path", f"{UNIT}.service")
    for path in (f"{UNIT}.service", f"{UNIT}.path"):
        os.unlink(f"{_UNITS}/{path}")
    shutil.rmtree(drop_in)
    shutil.rmtree(_PREFIX)
    systemctl("daemon-reload")


def _say(key: str) -> str:
    return systemctl("show", f"--property={key}", "--value", f"{UNIT}.service")


def test_spec_is_made_anew_when_another_version_is_current(spec: Path) -> None:
    # The machine itself has no NVIDIA module, loaded or loadable.
    systemctl("start", f"{UNIT}.service")
    assert _say("ActiveState") == "inactive"
    assert not spec.exists()
    with open(f"{_UNITS}/{UNIT}.service.d/driver.conf", "w", encoding="utf-8") as file:
        file.write("[Service]\nExecCondition=\n")
    systemctl("daemon-reload")
    systemctl("start", f"{UNIT}.service")
    assert _say("Result") == "success"
    names = [device["name"] for device in yaml.safe_load(spec.read_text())["devices"]]
    assert "all" in names
    systemctl("start", f"{UNIT}.path")
    spec.unlink()
    os.symlink("2", f"{_PREFIX}/current.new")
    os.rename(f"{_PREFIX}/current.new", f"{_PREFIX}/current")
    eventually(spec.exists, "the spec is written again", timeout=60)
