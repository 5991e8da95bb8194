"""Running nvidia-smi, where it hangs in the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hooks.config import Config
from hooks.node.driver import Driver, DriverFile
from hooks.words import Arch
from integration.node.nvidia_smi import SmiFailed, run_nvidia_smi

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that is started here ends by a signal, as one that the driver holds does not."""
    left: list[int] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: left.append(self.pid))
    yield
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.usefixtures("unkillable")
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_one_that_cannot_be_killed_is_left_alone(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 1000\n", encoding="ascii")
    program.chmod(0o755)
    file = DriverFile("nvidia-smi", "/usr/bin/nvidia-smi", str(program))
    driver = Driver("1", Arch.X86_64, (), (file,), ())
    with pytest.raises(SmiFailed, match="nor been killed: the driver holds process"):
        run_nvidia_smi(driver, Config(state=str(tmp_path)), (), 0.2)
