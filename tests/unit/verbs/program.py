"""The program as containerd runs it, with a server that reports its initial state.

The verbs are the real ones, executed by a real launcher. Instead of the server, a module writes
down facts about its own process, and waits until it is killed.
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
        directory: for its installation, and for the files of shims outside of bundles.
        broken: whether importing its server fails.
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
        """Run it until it exits, as containerd does: with pipes, in its own process group.

        Args:
            words: its arguments.
            cwd: its working directory.
            stdin: its input.
            environment: variables in addition to PATH.
            merged: whether stdout and stderr are one pipe.
        """
        return subprocess.run(
            [str(self.path), *words],
            cwd=cwd or self.directory,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            # Nothing would stop a fork server that a single test left behind.
            env={"PATH": os.environ["PATH"], "NVSHIM_FORK_SERVER": "0", **(environment or {})},
            process_group=0,
            timeout=60,
            check=False,
        )

    def argv(self, bundle: Path) -> list[str]:
        """Return containerd's command line of ``start`` in a bundle, which names the container."""
        words = ["-namespace", "test", "-address", self.address, "-id", bundle.name]
        return [str(self.path), *words, "start"]

    def start(
        self,
        bundle: Path,
        *flags: str,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run ``start`` in a bundle, which names the container."""
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
        """Return an address without a containerd; it makes the names of sockets unique."""
        return str(self.directory / "containerd.sock")

    def facts(self, bundle: Path) -> dict[str, Any]:
        """Return the facts that the shim in a bundle wrote about itself."""
        deadline = time.monotonic() + 10
        while not (bundle / FACTS).exists():
            assert time.monotonic() < deadline, "no shim came up"
            time.sleep(0.005)
        facts: dict[str, Any] = json.loads((bundle / FACTS).read_text())
        return facts

    def kill(self, bundle: Path) -> None:
        """Kill the shim that was started in a bundle."""
        _kill(self.facts(bundle)["pid"])

    def close(self) -> None:
        """Kill all started processes, and remove their sockets."""
        for pid in self._processes():
            _kill(pid)
        for bundle in self._bundles:
            if (bundle / "address").is_file():
                path = (bundle / "address").read_text().removeprefix("unix://")
                # The stand-in server does not remove its sockets.
                for trace in (path, f"{path}.{bundle.name}"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(trace)

    def _processes(self) -> Iterator[int]:
        """Yield all processes that run in a bundle, also those that wrote no facts yet."""
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
        # The process that adopts orphans is its parent, so the test can only wait for its end.
        poll = select.poll()
        poll.register(held, select.POLLIN)
        assert poll.poll(5000), "a killed process did not end"
    finally:
        os.close(held)
