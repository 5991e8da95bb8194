"""The program as containerd runs it, with a server that tells what it was born with.

The verbs are the real ones, executed through a real launcher. In the place of the server there
is a module that writes down what a process can know of itself, and waits to be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import shim
from tests.harness.launcher import SITE
from tools.launcher import write_launcher

NAME = "containerd-shim-nvidia-v1"
INTERPRETER = os.path.realpath(sys.executable)
SOURCES = os.path.dirname(os.path.dirname(os.path.abspath(shim.__file__)))

FACTS = "facts.json"
_PROBE = """
import json, os, signal

def main(**arguments):
    own = "/proc/self/"
    text = lambda name: open(own + name, encoding="utf-8").read()
    facts = {
        "arguments": arguments,
        "pid": os.getpid(), "pgid": os.getpgid(0), "sid": os.getsid(0),
        "cwd": os.getcwd(), "environment": dict(os.environ),
        "umask": os.umask(0),
        "fds": {fd: os.readlink(own + "fd/" + fd) for fd in os.listdir(own + "fd")
                if os.path.lexists(own + "fd/" + fd)},
        "listener_inheritable": os.get_inheritable(arguments["listener_fd"]),
        "status": dict(line.split(":\\t") for line in text("status").splitlines()),
        "oom_score_adj": int(text("oom_score_adj")),
        "cgroup": text("cgroup"),
        "comm": text("comm").strip(),
        "cmdline": text("cmdline").rstrip("\\0").split("\\0"),
    }
    with open("facts.part", "w") as file:
        json.dump(facts, file)
    os.rename("facts.part", "facts.json")
    while True:
        signal.pause()
"""
_BROKEN = r"raise ImportError('a module is \"missing\"\nin this tree')"


class Program:
    """One installed program, and the shims that were started with it.

    Args:
        directory: where to install it, and what the shims keep outside their bundles.
        broken: whether its server can't even be imported.
    """

    def __init__(self, directory: Path, *, broken: bool = False) -> None:
        self.directory = directory
        self.path = directory / NAME
        self.sockets = directory / "r" / "containerd" / "s"
        library = directory / "lib"
        library.mkdir(parents=True)
        without_bytecode = shutil.ignore_patterns("__pycache__")
        shutil.copytree(f"{SOURCES}/shim", library / "shim", ignore=without_bytecode)
        (library / "api").symlink_to(os.path.join(SOURCES, "api"))
        (library / "hooks").symlink_to(os.path.join(SOURCES, "hooks"))
        (library / "shim/pod/main.py").write_text(_BROKEN if broken else _PROBE)
        write_launcher(str(self.path), interpreter=INTERPRETER, library_paths=[str(library), SITE])
        self._bundles: list[Path] = []

    def bundle(self, name: str, annotations: Mapping[str, str] | None = None) -> Path:
        """Make a bundle, as containerd does before it calls ``start``."""
        bundle = self.directory / "bundles" / name
        bundle.mkdir(parents=True, mode=0o700)
        (bundle / "config.json").write_text(json.dumps({"annotations": dict(annotations or {})}))
        self._bundles.append(bundle)
        return bundle

    def run(
        self,
        *words: str,
        cwd: Path | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        merged: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end, as containerd does: with pipes, and in a process group of its own.

        Args:
            words: its arguments.
            cwd: where.
            stdin: what it can read.
            environment: added to PATH and a runtime directory of the test's own.
            merged: whether stdout and stderr are one pipe.
        """
        return subprocess.run(
            [str(self.path), *words],
            cwd=cwd or self.directory,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            # Nobody would end a fork server that is left behind for a single test.
            env={"PATH": os.environ["PATH"], "NVSHIM_FORK_SERVER": "0", **(environment or {})},
            process_group=0,
            timeout=20,
            check=False,
        )

    def argv(self, bundle: Path) -> list[str]:
        """How containerd calls ``start`` in a bundle; the container is named like it."""
        words = ["-namespace", "test", "-address", self.address, "-id", bundle.name]
        return [str(self.path), *words, "start"]

    def start(
        self,
        bundle: Path,
        *flags: str,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run ``start`` in a bundle; the container is named like it."""
        words = ["-namespace", "test", "-address", self.address, "-publish-binary", "/bin/true"]
        return self.run(
            *words,
            *("-id", bundle.name),
            *flags,
            "start",
            cwd=bundle,
            stdin=stdin,
            environment=environment,
            merged=True,
        )

    @property
    def address(self) -> str:
        """Of the containerd that there isn't: with it, the sockets' names are this test's own."""
        return str(self.directory / "containerd.sock")

    def facts(self, bundle: Path) -> dict[str, Any]:
        """What the shim that was started in a bundle says of itself."""
        deadline = time.monotonic() + 10
        while not (bundle / FACTS).exists():
            assert time.monotonic() < deadline, "no shim came up"
            time.sleep(0.005)
        facts: dict[str, Any] = json.loads((bundle / FACTS).read_text())
        return facts

    def kill(self, bundle: Path) -> None:
        """End the shim that was started in a bundle the hard way."""
        _kill(self.facts(bundle)["pid"])

    def close(self) -> None:
        """End all that was started, and remove its sockets."""
        for pid in self._processes():
            _kill(pid)
        for bundle in self._bundles:
            if (bundle / "address").is_file():
                path = (bundle / "address").read_text().removeprefix("unix://")
                # The server of these tests takes no announcement away.
                for trace in (path, f"{path}.{bundle.name}"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(trace)

    def _processes(self) -> Iterator[int]:
        """Everything that runs in a bundle, also if it has not come to tell of itself."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/cwd").startswith(f"{self.directory}/"):
                    yield int(pid)


def _kill(pid: int) -> None:
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(held, signal.SIGKILL)
        # It is a child of whoever adopts orphans, so only its end can be waited for.
        poll = select.poll()
        poll.register(held, select.POLLIN)
        assert poll.poll(5000), "a killed process did not end"
    finally:
        os.close(held)
