"""A real dockerd that uses a private containerd.

dockerd is the unmodified one of a Debian release. It has no bridge and no packet filter rules, so
its containers have no network. All its files are below containerd's directory, and its containers
are in containerd's own namespace and cgroup, so that leftovers are found and removed as those of
any other container (:mod:`integration.containers.traces`)::

    with PrivateDocker(containerd, DockerParts.of_release("sid")) as docker:
        docker.import_image("glibc", glibc())
        docker("run", "--rm", "--network=none", "--gpus=all", "glibc", "nvidia-smi", "-L")

``python -m tests.harness.docker RELEASE…`` downloads the programs.

Source: dockerd(8); daemon/nvidia_linux.go of Docker: ``--gpus`` is known to a daemon that finds
nvidia-container-runtime-hook on its PATH when it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

from integration.timeouts import PATIENCE
from tests.harness.processes import end
from tests.harness.waiting import eventually
from tools.containerd import Completed, PrivateContainerd
from tools.images import Image, write_layer
from tools.parts import programs_of_release

HOOK: Final = "nvidia-container-runtime-hook"

# In sid the client is in its own package.
_PACKAGES: Final = {"bookworm": ["docker.io"]}
_PACKAGES_SINCE: Final = ["docker.io", "docker-cli"]
# Before 23, the daemon creates a key, by default in /etc/docker.
_KEYED: Final = frozenset({"bookworm"})
# Every daemon creates this, wherever its other files are.
_FIXED: Final = ("/run/docker/plugins", "/run/docker")
_START_TIMEOUT: Final = 30
_STOP_TIMEOUT: Final = 15


@dataclass(frozen=True, slots=True)
class DockerParts:
    """The programs of a Docker version, as absolute paths."""

    release: str  # the Debian release that they come from
    dockerd: str  # the daemon
    docker: str  # its client

    @classmethod
    def of_release(cls, release: str, *, say: Callable[[str], None] | None = None) -> Self:
        """Return the programs of a Debian release."""
        packages = _PACKAGES.get(release, _PACKAGES_SINCE)
        programs = {"dockerd": ("dockerd",), "docker": ("docker",)}
        where = programs_of_release(programs, packages, release, say=say)
        return cls(release, f"{where}/dockerd/dockerd", f"{where}/docker/docker")


class PrivateDocker:
    """A private dockerd. It runs while the context is open.

    Args:
        containerd: a running containerd for Docker's containers. Its owner removes leftovers.
        amend: called before the start, to change daemon.json at :attr:`settings_path` and to
            install the hook for ``--gpus`` in :attr:`bin_directory`. By default that is a hook that
            records that it ran.

    Attributes:
        hook_log: the file that exists if NVIDIA's hook has run.
        address: the path of the socket.
        bin_directory: the first directory of the daemon's PATH.
        settings_path: daemon.json.
    """

    def __init__(
        self,
        containerd: PrivateContainerd,
        parts: DockerParts,
        settings: dict[str, Any] | None = None,
        amend: Callable[[PrivateDocker], None] | None = None,
    ) -> None:
        self._containerd = containerd
        self._parts = parts
        self._directory = os.path.join(containerd.directory, "docker")
        self._address = f"unix://{self._directory}/d.sock"
        self._amend = amend
        self.address = f"{self._directory}/d.sock"
        self.bin_directory = f"{self._directory}/bin"
        self.settings_path = f"{self._directory}/daemon.json"
        key = {"deprecated-key-path": f"{self._directory}/key.json"}
        self._settings = {**(key if parts.release in _KEYED else {}), **(settings or {})}
        self._not_there = [path for path in _FIXED if not os.path.exists(path)]
        self._process: subprocess.Popen[bytes] | None = None
        self._ids: list[str] = []
        self.hook_log = os.path.join(self._directory, "hook.log")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_containers()
        self._stop()

    def __call__(self, *arguments: str, check: bool = False, stdin: str = "") -> Completed:
        """Run the client until it exits.

        Args:
            arguments: the arguments of ``docker``.
            check: whether a non-zero exit code fails the test.
        """
        argv = [self._parts.docker, "--host", self._address, *arguments]
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=40 * PATIENCE,
            check=False,
            env={**self._environment, "DOCKER_CONFIG": f"{self._directory}/client"},
        )
        assert not check or done.returncode == 0, done.stderr
        return Completed(tuple(argv), done.returncode, done.stdout, done.stderr)

    def run(self, *words: str, image: str = "glibc") -> Completed:
        """Run ``docker run --rm`` with a command; the flags are the words before ``--``."""
        at = words.index("--")
        flags = ["--rm", "--network=none", f"--cidfile={self._cidfile()}", *words[:at]]
        return self("run", *flags, image, *words[at + 1 :])

    def start_idle(self, *flags: str, name: str, image: str = "glibc") -> None:
        """Start a container that does nothing until it is stopped."""
        self("run", "--detach", "--network=none", f"--cidfile={self._cidfile()}",
             f"--name={name}", *flags, image, "sleep", "1000", check=True)  # fmt: skip

    def import_image(self, name: str, image: Image) -> None:
        """Import an image of tools.images."""
        layer = write_layer(os.path.join(self._directory, "layer.tar"), image)
        changes = [f"--change=ENV {key}={value}" for key, value in image.environment.items()]
        self("import", *changes, layer, name, check=True)
        os.unlink(layer)

    def remove_containers(self) -> None:
        """Remove every container, and record the names of its traces."""
        self._learn_ids()
        ids = self("ps", "--all", "--quiet", "--no-trunc").lines
        if ids:
            self("rm", "--force", *ids)

    def log(self) -> str:
        """Return the daemon's log."""
        with open(os.path.join(self._directory, "dockerd.log"), errors="replace") as file:
            return file.read()

    @property
    def _environment(self) -> dict[str, str]:
        path = f"{self._directory}/bin:{self._containerd.path}"
        return {"PATH": path, "HOME": self._directory, "TMPDIR": self._directory}

    def _cidfile(self) -> str:
        descriptor, path = tempfile.mkstemp(dir=f"{self._directory}/ids")
        os.close(descriptor)
        os.unlink(path)
        self._ids.append(path)
        return path

    def _learn_ids(self) -> None:
        for path in self._ids:
            if os.path.exists(path):
                with open(path) as file:
                    self._containerd.know(file.read().strip())

    def _start(self) -> None:
        for name in ("bin", "client", "ids", "cdi"):
            os.makedirs(os.path.join(self._directory, name), exist_ok=True)
        with open(self.settings_path, "w") as file:
            json.dump(self._settings, file)
        if self._amend is None:
            hook = os.path.join(self.bin_directory, HOOK)
            with open(hook, "w") as file:
                file.write(f'#!/bin/sh\necho "$@" >>{self.hook_log}\nexit 1\n')
            os.chmod(hook, 0o755)
        else:
            self._amend(self)
        with open(os.path.join(self._directory, "dockerd.log"), "ab") as log:
            self._process = subprocess.Popen(
                [
                    self._parts.dockerd,
                    f"--config-file={self.settings_path}",
                    f"--containerd={self._containerd.address}",
                    f"--containerd-namespace={self._containerd.namespace}",
                    f"--containerd-plugins-namespace={self._containerd.namespace}-plugins",
                    f"--cgroup-parent=/{self._containerd.namespace}",
                    f"--data-root={self._directory}/data",
                    f"--exec-root={self._directory}/exec",
                    f"--host={self._address}",
                    f"--pidfile={self._directory}/pid",
                    "--bridge=none",
                    "--iptables=false",
                    "--ip6tables=false",
                    "--ip-forward=false",
                    "--ip-masq=false",
                    "--userland-proxy=false",
                    "--storage-driver=overlay2",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        eventually(self._answers, "dockerd answers", timeout=_START_TIMEOUT)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"dockerd ended: {self.log()[-2000:]}"
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(self._address.removeprefix("unix://")):
                return False
        return self("version").code == 0

    def _stop(self) -> None:
        if self._process is None:
            return
        end(self._process, timeout=_STOP_TIMEOUT)
        self._process = None
        for path in self._not_there:
            with contextlib.suppress(OSError):
                os.rmdir(path)


if __name__ == "__main__":
    for _release in sys.argv[1:]:
        DockerParts.of_release(_release, say=print)
