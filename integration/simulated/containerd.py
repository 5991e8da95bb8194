"""A containerd of our own, beside whatever the machine runs.

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
- Nothing is shared with another containerd but what every containerd has at fixed places: the
  sockets of shims (named by a hash of our address) and the low-level runtime's state (in a
  directory named by our namespace).
- One namespace with a name of its own, so that the traces of our containers can be told apart
  (:mod:`integration.containers.traces`).
- Everything is removed at the end, whatever state it is in: processes, mounts, cgroups, sockets,
  files. What cannot be removed is an error, not a silence.

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

# Of no use here, and each costs time at start or touches a fixed place of the system.
DISABLED_PLUGINS: Final = (
    "io.containerd.nri.v1.nri",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
)

# Those that serve a kubelet.
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

# Of the directory that TMPDIR names: sockets lie four names below it, and an address has 107 bytes.
_LONGEST_TEMPORARY: Final = 48
# statfs(2): no overlay's upper directory can lie on another overlay.
_OVERLAYFS: Final = 0x794C7630
# As systemd starts containerd: users of containers have to get into what it makes.
_UMASK: Final = 0o022

_START_TIMEOUT: Final = 20.0 * PATIENCE
_CTR_TIMEOUT: Final = 30.0
CLEANUP_TIMEOUT: Final = 10.0 * PATIENCE
_POLL: Final = 0.01


@dataclass(frozen=True, slots=True)
class Completed:
    """How a program ended."""

    argv: tuple[str, ...]  # what was run
    code: int  # its exit code; negative for a signal
    stdout: str  # what it wrote there, decoded as UTF-8
    stderr: str  # likewise

    @property
    def lines(self) -> list[str]:
        """The lines of stdout."""
        return self.stdout.splitlines()


class PrivateContainerd:
    """A containerd with everything of its own.

    Args:
        directory: where all of it is; made if missing, removed at the end. None for a
            temporary one. Keep it short: a unix socket's path ends at 107 bytes.
        shim_directory: where ``containerd-shim-nvidia-v1`` is; None to use installed shims only.
        shim_config: path of the config.toml that the shim is to read (NVSHIM_CONFIG).
        parts: which containerd; the installed one if not given.

    Raises:
        ContainerdNotInstalled: no parts were given, and something is not installed.
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
            os.chmod(directory, 0o711)  # noqa: S103 - roots of containers with other users are in it
        elif not os.path.isdir(directory):
            os.makedirs(directory)
            os.chmod(directory, 0o711)  # noqa: S103 - likewise, whatever our umask is
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
        """The process of containerd; 0 if it does not run."""
        return self._process.pid if self._process else 0

    @property
    def marks(self) -> traces.Marks:
        """By what this containerd's traces are told from those of others."""
        return traces.Marks(
            self.directory,
            self.address,
            self.namespace,
            frozenset(self._words),
            self.pid,
        )

    @property
    def path(self) -> str:
        """The search path of containerd, its shims, and others that work with it."""
        own = [os.path.abspath(self._shim_directory)] if self._shim_directory else []
        return ":".join([*own, self.parts.path])

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": self.path, **self._more_environment}

    def start(self, *, timeout: float = _START_TIMEOUT) -> None:
        """Start containerd, and wait until it answers.

        Args:
            timeout: seconds it may take.

        Raises:
            ContainerdExited: it ended at once; the message has its last word.
            ContainerdNotReady: it does not answer in time. It is killed.
        """
        program = self.parts.containerd
        self._write_config()
        with open(self.log_path, "ab") as log:
            # Its own session: a Ctrl-C at a test run's terminal is not for containerd.
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
                    f"containerd in {self.directory}",
                    found=f"it ended with {code}: {self._last_words()}",
                )
            if time.monotonic() > deadline:
                self.kill()
                raise ContainerdNotReady(
                    f"containerd in {self.directory} within {timeout:g} s",
                    found=f"no answer on its socket; its last word: {self._last_words()}",
                )
            time.sleep(_POLL)

    def kill(self) -> None:
        """End containerd as a crash does; containers go on. Nothing if it is stopped."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def ctr_argv(self, *arguments: str, namespace: str | None = None) -> list[str]:
        """The command line of ``ctr`` for this containerd and its namespace, or another."""
        # Any word may be the id of a container or a pod. To remember all of them is simpler,
        # and surer, than to know the flags of ctr.
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
        """Run ``ctr`` to its end.

        Args:
            arguments: what follows ``ctr --address … --namespace …``.
            timeout: seconds it may take, on a machine that is not slow.
            check: whether another exit code than 0 is an error.
            namespace: another than this containerd's own.

        Raises:
            CtrTimeout: it took too long. It is killed; a container it started is not.
            CtrFailed: it ended with another code, and ``check`` is on.
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
                found=f"no end within {timeout:g} s; it said: {output or 'nothing'}",
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
            raise CtrFailed(asked, found=f"exit code {completed.code}: {output or 'no word'}")
        return completed

    def spawn_ctr(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start ``ctr`` and leave it running.

        Args:
            options: how :class:`subprocess.Popen` is to connect it (``stdin``, ``stdout`` …).
        """
        return subprocess.Popen(self.ctr_argv(*arguments), env=self._environment, **options)

    def end_fork_servers(self) -> None:
        """End the processes that fork our shims; each removes its own socket."""
        deadline = time.monotonic() + CLEANUP_TIMEOUT
        while servers := traces.fork_servers(self.marks):
            late = time.monotonic() > deadline
            for pid in servers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(_POLL)

    def remove(self) -> None:
        """End containerd and remove everything it and its containers made.

        Raises:
            CleanupIncomplete: something is still there, and the directory with it.
        """
        self.kill()
        self.end_fork_servers()
        left = traces.clean(self.marks, CLEANUP_TIMEOUT)
        if left:
            raise CleanupIncomplete(
                f"to remove the containerd in {self.directory}",
                found="still there: " + ", ".join(str(trace) for trace in sorted(left)),
            )
        traces.forget(self.namespace)
        shutil.rmtree(self.directory, ignore_errors=True)
        if os.path.lexists(self.directory):
            raise CleanupIncomplete(f"to remove {self.directory}", found="it is still there")

    def _write_config(self) -> None:
        os.makedirs(os.path.join(self.directory, "tmp"), exist_ok=True)
        version = 2 if self.parts.version < (2, 0) else 3
        # The level at which each event that passes through containerd is logged.
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
            except OSError:  # cheaper than a ctr for each poll
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
    """Where a temporary directory leaves room for addresses of sockets; None for TMPDIR."""
    return None if len(os.path.realpath(tempfile.gettempdir())) <= _LONGEST_TEMPORARY else "/tmp"  # noqa: S108 - made by mkdtemp(3)


def is_on_overlay(directory: str) -> bool:
    """Whether a directory can have no overlay's upper directory in it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return file_system_type(fd) == _OVERLAYFS
    finally:
        os.close(fd)
