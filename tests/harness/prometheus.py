"""Debian's real Prometheus server and promtool, unmodified and not installed.

``python -m tests.harness.prometheus`` downloads the programs.

Source: prometheus(1), promtool(1); Prometheus' HTTP API.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from integration.simulated.packages import default_cache, unpack
from integration.timeouts import PATIENCE
from tests.harness.processes import end, sockets_of
from tests.harness.waiting import eventually
from tools.packages import fetch

__all__ = ["Programs", "Prometheus", "Promtool"]

# Its programs need only libc, of this or any later release.
_RELEASE: Final = "bookworm"
_PACKAGE: Final = "prometheus"
_NAMES: Final = ("prometheus", "promtool")


@dataclass(frozen=True, slots=True)
class Programs:
    """The paths of the programs."""

    prometheus: str  # the server
    promtool: str  # checks metrics and rules

    @classmethod
    def of_debian(cls, *, say: Callable[[str], None] | None = None) -> Self:
        """Return the programs of Debian's package."""
        into = os.path.join(default_cache(), f"{_RELEASE}-{_PACKAGE}")
        directory = os.path.join(into, "unpacked")
        debs = fetch([_PACKAGE], into, release=_RELEASE, say=say)
        unpack(debs, directory, finish=_keep_programs)
        return cls(*(os.path.join(directory, name) for name in _NAMES))


def _keep_programs(new: str) -> None:
    """Delete the many web pages and images of the package."""
    for name in _NAMES:
        os.rename(os.path.join(new, "usr", "bin", name), os.path.join(new, name))
    for name in os.listdir(new):
        if name not in _NAMES:
            shutil.rmtree(os.path.join(new, name))


class Promtool:
    """Runs promtool."""

    def __init__(self, programs: Programs) -> None:
        self._program = programs.promtool

    def __call__(self, *words: str, stdin: str = "") -> tuple[bool, str]:
        """Run it; return whether it found no error, and its output."""
        done = subprocess.run(
            [self._program, *words],
            input=stdin, capture_output=True, text=True, timeout=50 * PATIENCE, check=False,
            env={"PATH": "/usr/bin:/bin", "TZ": "UTC"},
        )  # fmt: skip
        return done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A private Prometheus server. It runs while the context is open."""

    def __init__(self, programs: Programs, directory: str, config: dict[str, Any]) -> None:
        self._programs = programs
        self._directory = directory
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def __enter__(self) -> Self:
        os.makedirs(self._directory, exist_ok=True)
        path = os.path.join(self._directory, "prometheus.yml")
        with open(path, "w", encoding="utf-8") as file:
            yaml.safe_dump(self._config, file)
        with open(os.path.join(self._directory, "log"), "wb") as log:
            self._process = subprocess.Popen(
                [
                    self._programs.prometheus, f"--config.file={path}", "--log.level=warn",
                    f"--storage.tsdb.path={self._directory}/data",
                    "--web.listen-address=127.0.0.1:0",
                ],
                cwd=self._directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={"PATH": "/usr/bin:/bin", "GOMAXPROCS": "2", "TZ": "UTC"},
            )  # fmt: skip
        try:
            port = eventually(self._port, "a port of Prometheus")
            self._url = f"http://127.0.0.1:{port}"
            eventually(self._is_ready, "Prometheus is ready")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def get(self, path: str, **parameters: str) -> Any:
        """Return the API's answer."""
        with urlopen(
            f"{self._url}/api/v1/{path}?{urlencode(parameters)}", timeout=60 * PATIENCE
        ) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Evaluate an expression; return its series and their values."""
        data = self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in data["result"]]

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self._url}/-/ready", timeout=60 * PATIENCE) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _port(self) -> int:
        """Return the port that the server chose."""
        assert self._process is not None
        assert self._process.poll() is None, self._said()
        pid = self._process.pid
        sockets = sockets_of(pid)
        with open(f"/proc/{pid}/net/tcp", encoding="ascii") as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:
                    return int(fields[1].rpartition(":")[2], 16)
        return 0

    def _said(self) -> str:
        with open(os.path.join(self._directory, "log"), encoding="utf-8") as file:
            return file.read()

    def _stop(self) -> None:
        if self._process is None:
            return
        end(self._process)
        self._process = None


if __name__ == "__main__":
    Programs.of_debian(say=print)
