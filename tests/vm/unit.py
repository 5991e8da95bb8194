"""containerd as a systemd unit."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Final

from integration.timeouts import PATIENCE
from tests.harness.waiting import eventually
from tools.containerd import PrivateContainerd

UNIT: Final = "containerd.service"

_DROP_IN: Final = f"/run/systemd/system/{UNIT}.d/nvshim.conf"

# Keep Debian's unit, but replace its command and drop its wait of five seconds.
_TEXT: Final = """\
[Service]
ExecStart=
ExecStart={program} --config {config}
Environment={environment}
StandardOutput=append:{log}
StandardError=append:{log}
RestartSec=100ms
"""


def systemctl(*arguments: str) -> str:
    """Run systemctl, and return its output."""
    done = subprocess.run(
        ["systemctl", *arguments], capture_output=True, text=True, check=True,
        timeout=60 * PATIENCE,
    )  # fmt: skip
    return done.stdout.strip()


def systemd_version() -> int:
    """Return systemd's major version."""
    return int(systemctl("--version").split()[1])


class ContainerdUnit(PrivateContainerd):
    """A private containerd that systemd starts, stops, and restarts when it fails."""

    @property
    def pid(self) -> int:
        return int(systemctl("show", "--property=MainPID", "--value", UNIT))

    def start(self, *, timeout: float = 20.0) -> None:
        self._write_config()
        variables = " ".join(f'"{name}={value}"' for name, value in self._environment.items())
        os.makedirs(os.path.dirname(_DROP_IN), exist_ok=True)
        with open(_DROP_IN, "w", encoding="utf-8") as file:
            file.write(
                _TEXT.format(
                    program=self.parts.containerd,
                    config=self._config_path,
                    environment=variables,
                    log=self.log_path,
                )
            )
        systemctl("daemon-reload")
        systemctl("start", UNIT)
        self.wait_until_it_answers()

    def wait_until_it_answers(self) -> None:
        """Wait until it answers after systemd has started or restarted it."""
        eventually(self._answers, "containerd answers")

    def stop(self, *, timeout: float = 0.0) -> None:
        """Let systemd stop it, with the timeout of the unit."""
        systemctl("stop", UNIT)

    def kill(self) -> None:
        """Kill it; systemd restarts it."""
        self.stop()

    def remove(self) -> None:
        super().remove()
        shutil.rmtree(os.path.dirname(_DROP_IN), ignore_errors=True)
        systemctl("daemon-reload")
        systemctl("reset-failed")
