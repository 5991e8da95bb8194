"""Run a private containerd next to the machine's own.

It is the installed program, unmodified, with root, state, sockets and configuration in one
directory::

    containerd = PrivateContainerd(shim_directory=".cache/bin")
    try:
        containerd.start()
        containerd.ctr("images", "import", "busybox.tar")
        done = containerd.ctr("run", "--rm", "--runtime", RUNTIME, IMAGE, "first", "true")
    finally:
        containerd.remove()

Rules
- It shares nothing with another containerd, except what every containerd keeps at fixed places: the
  shims' sockets (named by a hash of our address) and the low-level runtime's state (in a directory
  named after our namespace).
- The namespace has a unique name, so that traces of our containers can be identified
  (:mod:`integration.containers.traces`).
- ``remove`` removes everything, whatever state it is in: processes, mounts, cgroups, sockets,
  files. If something is left, that is reported as an error.

Source: containerd-config.toml(5), containerd docs/ops.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from integration.containers import traces
from integration.simulated.errors import (
    CleanupIncomplete,
    ContainerdExited,
    ContainerdNotReady,
    CtrFailed,
    CtrTimeout,
)
from integration.simulated.programs import Programs
from integration.timeouts import PATIENCE
from shim.syscalls import file_system_type

# Not needed here; each costs start time or uses a fixed path of the system.
DISABLED_PLUGINS: Final = (
    "io.containerd.nri.v1.nri",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
)

# The plugins that serve a kubelet.
CRI_PLUGINS: Final = (
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.images",
    "io.containerd.cri.v1.runtime",
    "io.containerd.podsandbox.controller.v1.podsandbox",
)

_CONFIG: Final = """\
version = {version}
root = {root}
state = {state}
disabled_plugins = {disabled}

[grpc]
address = {address}

[debug]
level = {level}

[plugins."io.containerd.internal.v1.opt"]
path = {opt}

[timeouts]
"io.containerd.timeout.shim.cleanup" = {cleanup}
"io.containerd.timeout.shim.load" = {load}
"io.containerd.timeout.shim.shutdown" = {shutdown}
"io.containerd.timeout.task.state" = {answer}
"""

# containerd's own limits, in seconds.
_LIMITS: Final = {"cleanup": 5, "load": 5, "shutdown": 3, "answer": 2}

# The longest TMPDIR: sockets are four levels below it, and an address has at most 107 bytes.
_LONGEST_TEMPORARY: Final = 48
# statfs(2): an overlay's upper directory cannot be on another overlay.
_OVERLAYFS: Final = 0x794C7630
# systemd's umask for containerd: users of containers need access to what it creates.
_UMASK: Final = 0o022

_START_TIMEOUT: Final = 20.0 * PATIENCE
_CTR_TIMEOUT: Final = 30.0
CLEANUP_TIMEOUT: Final = 10.0 * PATIENCE
_POLL: Final = 0.01


@dataclass(frozen=True, slots=True)
class Completed:
    """The result of a program."""

    argv: tuple[str, ...]
    code: int  # its exit code; negative for a signal
    stdout: str  # decoded as UTF-8
    stderr: str  # decoded as UTF-8

    @property
    def lines(self) -> list[str]:
        """The lines of stdout."""
        return self.stdout.splitlines()


class PrivateContainerd:
    """A containerd with its own directories, sockets and namespace.

    Args:
        directory: contains everything; created if missing, removed at the end. None for a temporary
            one. Keep it short: a unix socket's path has at most 107 bytes.
        shim_directory: contains ``containerd-shim-nvidia-v1``; None to use installed shims only.
        shim_config: path of the shim's config.toml (NVSHIM_CONFIG).
        parts: the programs; the installed ones by default.

    Raises:
        ContainerdNotInstalled: no parts were given, and a program is not installed.
    """

    disabled_plugins: ClassVar[tuple[str, ...]] = (*DISABLED_PLUGINS, *CRI_PLUGINS)

    def __init__(
        self,
        directory: str | None = None,
        *,
        shim_directory: str | None = None,
        shim_config: str | None = None,
        parts: Programs | None = None,
    ) -> None:
        self.parts = parts or Programs.installed()
        if directory is None:
            directory = tempfile.mkdtemp(prefix="nvshim-", dir=_temporary())
            os.chmod(directory, 0o711)  # noqa: S103 - containers' users need access to their roots
        elif not os.path.isdir(directory):
            os.makedirs(directory)
            os.chmod(directory, 0o711)  # noqa: S103 - the same, whatever our umask is
        self.directory = os.path.realpath(directory)
        digest = hashlib.sha256(self.directory.encode()).hexdigest()[:8]
        self.namespace = f"nvshim-{digest}"
        self.address = os.path.join(self.directory, "containerd.sock")
        self.log_path = os.path.join(self.directory, "containerd.log")
        self._config_path = os.path.join(self.directory, "config.toml")
        self._shim_directory = shim_directory
        self._debug = True
        self._more_environment = {
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TMPDIR": os.path.join(self.directory, "tmp"),
            **({"NVSHIM_CONFIG": os.path.abspath(shim_config)} if shim_config else {}),
            **({"CONTAINERD_SNAPSHOTTER": "native"} if is_on_overlay(self.directory) else {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._words: set[str] = set()

    @property
    def pid(self) -> int:
        """The pid of containerd; 0 if it is not running."""
        return self._process.pid if self._process else 0

    @property
    def marks(self) -> traces.Marks:
        """What identifies this containerd's traces."""
        return traces.Marks(
            self.directory,
            self.address,
            self.namespace,
            frozenset(self._words),
            self.pid,
        )

    @property
    def path(self) -> str:
        """The search path of containerd, its shims, and programs that use it."""
        own = [os.path.abspath(self._shim_directory)] if self._shim_directory else []
        return ":".join([*own, self.parts.path])

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": self.path, **self._more_environment}

    def start(self, *, timeout: float = _START_TIMEOUT) -> None:
        """Start containerd, and wait until it answers.

        Args:
            timeout: the time limit in seconds.

        Raises:
            ContainerdExited: it exited at once; the message has its last log line.
            ContainerdNotReady: it did not answer in time and was killed.
        """
        program = self.parts.containerd
        self._write_config()
        with open(self.log_path, "ab") as log:
            # Its own session: a Ctrl-C in the terminal must not reach containerd.
            self._process = subprocess.Popen(
                [program, "--config", self._config_path],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                umask=_UMASK,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout
        while not self._answers():
            code = self._process.poll()
            if code is not None:
                self._process = None
                raise ContainerdExited(
                    f"to start containerd in {self.directory}",
                    found=f"it exited with {code}: {self._last_words()}",
                )
            if time.monotonic() > deadline:
                self.kill()
                raise ContainerdNotReady(
                    f"to start containerd in {self.directory} within {timeout:g} s",
                    found=f"its socket does not answer; its last log line: {self._last_words()}",
                )
            time.sleep(_POLL)

    def kill(self) -> None:
        """Kill containerd, as in a crash; containers keep running."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def ctr_argv(self, *arguments: str, namespace: str | None = None) -> list[str]:
        """Return the command line of ``ctr`` for this containerd and a namespace."""
        # Any word may be the id of a container or a pod. Remembering all of them is simpler and
        # safer than parsing ctr's flags.
        self._words.update(arguments)
        self._words.update(word.rpartition("=")[2] for word in arguments if "=" in word)
        return [
            self.parts.ctr, "--address", self.address,
            "--namespace", namespace or self.namespace, *arguments,
        ]  # fmt: skip

    def ctr(
        self,
        *arguments: str,
        stdin: str = "",
        timeout: float = _CTR_TIMEOUT,
        check: bool = True,
        namespace: str | None = None,
    ) -> Completed:
        """Run ``ctr`` until it exits.

        Args:
            arguments: what follows ``ctr --address … --namespace …``.
            timeout: the time limit in seconds, on a machine of normal speed.
            check: whether a non-zero exit code is an error.
            namespace: the namespace; this containerd's own by default.

        Raises:
            CtrTimeout: it took too long and was killed; a container it started was not.
            CtrFailed: it failed, and ``check`` is on.
        """
        argv = self.ctr_argv(*arguments, namespace=namespace)
        timeout *= PATIENCE
        asked = "ctr " + " ".join(arguments)
        try:
            done = subprocess.run(
                argv,
                input=stdin.encode(),
                capture_output=True,
                timeout=timeout,
                check=False,
                env=self._environment,
            )
        except subprocess.TimeoutExpired as error:
            output = ((error.stderr or b"") + (error.stdout or b"")).decode(errors="replace")
            raise CtrTimeout(
                asked,
                found=f"no end within {timeout:g} s; its output: {output or 'none'}",
                do=f"see {self.log_path}",
            ) from error
        completed = Completed(
            tuple(argv),
            done.returncode,
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
        )
        if check and completed.code != 0:
            output = completed.stderr or completed.stdout
            raise CtrFailed(asked, found=f"exit code {completed.code}: {output or 'no output'}")
        return completed

    def spawn_ctr(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start ``ctr`` and leave it running.

        Args:
            options: passed to :class:`subprocess.Popen` (``stdin``, ``stdout`` …).
        """
        return subprocess.Popen(self.ctr_argv(*arguments), env=self._environment, **options)

    def end_fork_servers(self) -> None:
        """Stop the fork servers of our shims; each removes its own socket."""
        deadline = time.monotonic() + CLEANUP_TIMEOUT
        while servers := traces.fork_servers(self.marks):
            late = time.monotonic() > deadline
            for pid in servers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(_POLL)

    def remove(self) -> None:
        """Stop containerd and remove everything that it and its containers created.

        Raises:
            CleanupIncomplete: something is left, and so is the directory.
        """
        self.kill()
        self.end_fork_servers()
        left = traces.clean(self.marks, CLEANUP_TIMEOUT)
        if left:
            raise CleanupIncomplete(
                f"to remove the containerd in {self.directory}",
                found="what remains: " + ", ".join(str(trace) for trace in sorted(left)),
            )
        traces.forget(self.namespace)
        shutil.rmtree(self.directory, ignore_errors=True)
        if os.path.lexists(self.directory):
            raise CleanupIncomplete(f"to remove {self.directory}", found="it still exists")

    def _write_config(self) -> None:
        os.makedirs(os.path.join(self.directory, "tmp"), exist_ok=True)
        version = 2 if self.parts.version < (2, 0) else 3
        # The level that logs each event.
        level = "debug" if self.parts.version < (1, 7) else "trace"
        # A TOML basic string is written like a JSON string.
        values = {
            "root": os.path.join(self.directory, "root"),
            "state": os.path.join(self.directory, "state"),
            "opt": os.path.join(self.directory, "opt"),
            "address": self.address,
            "level": level if self._debug else "info",
            "disabled": self.disabled_plugins,
            "version": version,
        }
        limits = {key: f"{seconds * PATIENCE:g}s" for key, seconds in _LIMITS.items()}
        text = _CONFIG.format(**{key: json.dumps(v) for key, v in {**values, **limits}.items()})
        with open(self._config_path, "w", encoding="utf-8") as file:
            file.write(text)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.address)
            except OSError:  # cheaper than running ctr for each poll
                return False
        try:
            return self.ctr("version", timeout=5, check=False).code == 0
        except CtrTimeout:
            return False

    def _last_words(self) -> str:
        with open(self.log_path, encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if line.strip()]
        return lines[-1].rstrip("\n") if lines else "none"


def _temporary() -> str | None:
    """Return a directory for temporary directories with short paths; None for TMPDIR."""
    return None if len(os.path.realpath(tempfile.gettempdir())) <= _LONGEST_TEMPORARY else "/tmp"  # noqa: S108 - made by mkdtemp(3)


def is_on_overlay(directory: str) -> bool:
    """Whether a directory is on an overlay, so that it cannot hold an upper directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return file_system_type(fd) == _OVERLAYFS
    finally:
        os.close(fd)
