"""The installer: lock the node, install the tree, configure the engine, then watch the node.

Each step detects by itself whether it has work to do, so an installer that was killed is simply
started again. ``nvshim install``, ``nvshim configure`` and ``nvshim config`` do the actual work;
they run on the node, from the tree that the installer copied there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from api.errors import NvshimError
from integration import exits
from integration.engines.restart import SOCKETS
from integration.errors import TreeError, fields_of
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE
from integration.install_layout import STAGING
from integration.json_documents import parse_json
from integration.kubernetes.backoff import Backoff
from integration.kubernetes.engine_query import query_engine
from integration.kubernetes.errors import DriverNotReady, HostCommandFailed, ImageTreeMissing
from integration.kubernetes.gpu_detection import has_gpu
from integration.kubernetes.host import Host
from integration.kubernetes.settings import Settings
from integration.kubernetes.status import Log, Reporter, State
from integration.kubernetes.stop_signals import Stopped
from integration.kubernetes.validations import (
    DRIVER_READY,
    TOOLKIT_READY,
    DriverReady,
    read_driver_ready,
)
from integration.tree import MANIFEST, own_tree, read_tree, verify
from shim import VERSION

_Identities = dict[str, tuple[int, ...] | None]

SHIM: Final = "containerd-shim-nvidia-v1"
# In the state directory.
_TEMPORARY: Final = "node-installer.tmp"

# An installation copies and verifies thousands of files, perhaps on a slow disk.
_INSTALL_TIMEOUT: Final = 300.0
_COMMAND_TIMEOUT: Final = 120.0
# Each query starts a process, and a restart need not be noticed sooner.
_QUERY_INTERVAL: Final = 15.0
_POLL: Final = 1.0
# A starting engine answers within seconds.
_RETRY_DELAY: Final = 2.0

_ALL: Final = "1000"
_LOGGED: Final = (
    "changed", "complete", "tested", "current", "previous", "collected", "unseen_shims", "left",
    "restart", "notes", "mentioned_in",
)  # fmt: skip


_CONFIGS: Final = {
    "containerd": "/etc/containerd/config.toml",
    "crio": "/etc/crio/crio.conf",
    "docker": "/etc/docker/daemon.json",
}
# Next to the configuration; every file in these directories is watched.
_DROP_INS: Final = {"containerd": "{}/conf.d", "crio": "{}/crio.conf.d"}
_ALWAYS_CDI: Final = frozenset({"crio"})
_SOCKETS: Final = {engine: SOCKETS[engine] for engine in ("containerd", "crio")}
"""The CRI sockets of engines that have one; dockerd has none."""


class Installer:
    """Installs on one node and keeps it installed."""

    def __init__(self, settings: Settings, host: Host, log: Log) -> None:
        self._settings = settings
        self._host = host
        self._log = log
        self._tree = settings.tree or own_tree()
        self._report = Reporter(host, settings.state, settings.local, VERSION)
        self._backoff = Backoff()
        self._next_query = 0.0
        self._must_query = False
        self._has_seen_socket = False
        # The settings that the engine must run with; the handler alone until its files are written.
        kind = settings.runtime_type or RUNTIME_TYPE
        self._wanted: dict[str, Any] = {
            "containerd": {"runtimes": {settings.runtime_name: {"runtime_type": kind}}}
        }

    def run(self) -> None:
        """Install and configure, then watch the node until a stop signal arrives.

        Raises:
            InstallerRunning: another installer works on this node; nothing was changed.
            KubernetesError: a step failed; the previous installation stays in effect.
        """
        lock = self._host.lock(self._settings.pid_file)
        try:
            self._work()
        except Stopped as stopped:
            self._log.info("stopping", signal=str(stopped))
            if self._settings.remove_on_exit and self._report.status.state != State.NO_GPU:
                self._remove()
            self._report.update(state=State.ENDED, message=f"stopped by {stopped}")
        except NvshimError as error:
            self._report.update(state=State.FAILED, message=str(error))
            raise
        finally:
            with suppress(NvshimError):
                self._host.remove_tree(self._temporary)
            # Keep the file: an installer that has already opened it must lock the same one.
            os.ftruncate(lock, 0)
            os.close(lock)

    def _work(self) -> None:
        self._report.update(state=State.STARTING)
        self._host.remove_tree(self._temporary)  # left by an installer that was killed
        self._host.make_directory(self._temporary)
        if not self._await_gpu():
            return
        root = self._driver_root()
        # Taken before our own changes, so that another tool's change in the meantime is not missed.
        seen = self._identities(self._watched)
        self._install()
        self._configure(root)
        self._check_engine(time.monotonic())
        if not self._settings.once:
            self._watch(seen)
        # The engine may still be starting because we have just restarted it.
        deadline = time.monotonic() + _COMMAND_TIMEOUT
        while self._report.status.state == State.ENGINE and time.monotonic() < deadline:
            self._pause(_POLL)
            self._check_engine(time.monotonic())

    # -- the steps ------------------------------------------------------------------------

    def _await_gpu(self) -> bool:
        """Wait for a GPU, unless the node is already set up.

        Returns:
            Whether to set up the node; False if it has no GPU and the installer runs only once.
        """
        settings = self._settings
        while not (
            settings.every_node
            or self._host.identity(self._current) is not None
            or has_gpu(self._host)
        ):
            if self._report.status.state != State.NO_GPU:
                self._log.info("no NVIDIA GPU on this node; nothing to do")
            self._report.update(state=State.NO_GPU, message="no NVIDIA GPU on this node")
            if settings.once:
                return False
            self._report.heartbeat(time.monotonic())
            self._pause(settings.interval)
        return True

    def _driver_root(self) -> str:
        """Wait for the driver if configured; return its root, or "" if it is not configured."""
        settings = self._settings
        if not settings.wait_for_driver:
            return settings.driver_root
        path = os.path.join(settings.validations, DRIVER_READY)
        deadline = time.monotonic() + settings.driver_timeout
        while (content := self._host.read(path)) is None:
            self._report.update(state=State.WAITING, message=f"waiting for {path}")
            now = time.monotonic()
            self._report.heartbeat(now)
            if settings.driver_timeout and now > deadline:
                raise DriverNotReady(
                    "to wait for the node's driver",
                    found=f"{path} did not appear within {settings.driver_timeout:g} s",
                    do="see the logs of the operator's validator and driver pods",
                )
            self._pause(_POLL)
        ready: DriverReady = read_driver_ready(content, path)
        root = settings.driver_root or ready.driver_root
        self._log.info("the driver is ready", root=root, of_host=ready.is_host_driver)
        return root

    def _install(self) -> dict[str, Any]:
        """Run ``nvshim install`` from the image's tree and return its answer."""
        self._report.update(state=State.INSTALLING, message="")
        settings = self._settings
        staging = self._staging
        self._host.remove_tree(staging)  # left by an installer that was killed
        if not self._tree:
            raise ImageTreeMissing(
                "to find the tree to install",
                found="this program does not run from a tree",
                do="run it from the tree that `make dist` builds, or set NVSHIM_TREE",
            )
        tree = read_tree(self._tree)
        source = self._current if self._is_intact(tree.digest) else self._copy()
        words = ["install", "--prefix", settings.prefix, "--bindir", settings.bindir]
        try:
            self._smoke_test(source)
            if not settings.self_test:
                # Without the privileges for a self-test the installer cannot see which trees the
                # node's shims use, so it keeps all of them.
                words += ["--no-self-test", "--keep", _ALL]
                self._check_configuration(source, tree.name)
            answer = self._nvshim(source, *words, timeout=_INSTALL_TIMEOUT)
        finally:
            self._host.remove_tree(staging)
        self._log.info("installed", tree=tree.name, **_log_fields(answer))
        return answer

    def _is_intact(self, digest: str = "") -> bool:
        """Return whether the installed tree is intact, and the one with this digest if given."""
        try:
            with self._host.directory(self._current) as directory:
                path = f"/proc/self/fd/{directory}"
                if digest in {"", read_tree(path).digest}:
                    verify(path)
                    return True
        except FileNotFoundError:
            pass
        except (OSError, TreeError) as error:
            found = error.found if isinstance(error, TreeError) else error.strerror
            self._log.warning("the installed tree is damaged", tree=self._current, found=found)
        return False

    def _copy(self) -> str:
        """Copy the image's tree to the staging directory on the node and return its path."""
        self._log.info("copying", tree=self._tree, to=self._staging)
        self._host.copy_tree(self._tree, self._staging)
        return self._staging

    def _smoke_test(self, tree: str) -> None:
        """Check that the shim can run on this node before it is activated."""
        argv = [os.path.join(tree, "bin", SHIM), "-v"]
        result = self._host.run(argv, timeout=_COMMAND_TIMEOUT)
        if result.code != 0:
            raise HostCommandFailed(
                f"to run {SHIM} on this node", found=f"status {result.code}: {result.last_line}"
            )

    def _check_configuration(self, source: str, name: str) -> None:
        """Check that a tree can read the node's configuration, as a self-test does.

        An older version does not know each key. If the current version cannot read it either, the
        switch does no harm.
        """
        if source == self._current or self._host.identity(self._current) is None:
            return
        fault = self._configuration_fault(source)
        if fault and not self._configuration_fault(self._current):
            raise HostCommandFailed(
                f"to switch to {name}",
                found=fault,
                do="the current version stays; change the configuration so that both can read it",
            )

    def _configuration_fault(self, tree: str) -> str:
        """Return what a tree's version finds wrong in the node's configuration; "" for nothing."""
        try:
            error = self._nvshim(tree, "config", "validate").get("error") or {}
        except NvshimError:
            return ""  # it is damaged, or one of the first versions, which have no such command
        return str(error.get("message", ""))

    def _configure(self, driver_root: str) -> None:
        """Configure the shim and the engine with the installed program."""
        self._report.update(state=State.CONFIGURING, driver_root=driver_root)
        if driver_root:
            self._nvshim(self._current, "config", "set", "node.driver-root", driver_root)
            self._log.info("the driver root is set", root=driver_root)
        if self._settings.engine:
            answer = self._configure_engine(self._settings.restart)
            self._log.info("configured", engine=self._settings.engine, **_log_fields(answer))

    def _configure_engine(self, restart: str) -> dict[str, Any]:
        settings = self._settings
        options = _switch("set-default", settings.set_default)
        options += ["--replace"] if settings.replace else []
        has_path = settings.engine == "crio"  # whether a handler names the shim by its path
        if settings.runtime_type and settings.engine == "containerd":
            options += ["--runtime-type", settings.runtime_type]
            has_path = settings.runtime_type == RUNC_TYPE
        if has_path:
            options += ["--shim", os.path.join(settings.bindir, SHIM)]
        if settings.engine not in _ALWAYS_CDI:
            options += _switch("enable-cdi", settings.enable_cdi)
        answer = self._nvshim(self._current, *self._engine_words(restart), *options)
        self._wanted = answer.get("in_force") or self._wanted
        return answer

    def _engine_words(self, restart: str) -> list[str]:
        settings = self._settings
        words = ["configure", settings.engine, "--runtime-name", settings.runtime_name]
        words += ["--config", settings.config] if settings.config else []
        if settings.drop_in and settings.engine in _DROP_INS:
            words += ["--drop-in", settings.drop_in]
        words += ["--socket", settings.socket] if settings.socket else []
        return [*words, "--restart", restart]

    def _check_engine(self, now: float) -> None:
        """Ask the engine whether it runs with the handler, and update the status."""
        try:
            missing = self._missing_settings()
        except ConnectionError:
            self._next_query, self._must_query = now + _RETRY_DELAY, True
            if self._report.status.state not in {State.READY, State.RESTART}:
                what = f"{self._settings.engine} does not answer on {self._socket}"
                self._report.update(state=State.ENGINE, message=what)
            return
        self._next_query, self._must_query = now + _QUERY_INTERVAL, bool(missing)
        if missing:
            what = f"restart {self._settings.engine}: it runs without {missing[0]}"
            if self._report.status.message != what:
                self._log.warning(what, handler=self._settings.runtime_name, lacks=missing)
            self._report.update(state=State.RESTART, restart_outstanding=True, message=what)
            return
        if self._settings.toolkit_ready:
            path = os.path.join(self._settings.validations, TOOLKIT_READY)
            if self._host.read(path) is None:
                self._host.write(path, _mark())
                self._log.info("toolkit-ready is written", path=path)
        if self._report.status.state != State.READY:
            self._log.info("ready", handler=self._settings.runtime_name, asked=missing is not None)
        known = None if missing is None else False
        self._report.update(state=State.READY, restart_outstanding=known, message="")

    def _missing_settings(self) -> list[str] | None:
        """Return the configured settings that the engine does not run with; None if unknown.

        Raises:
            ConnectionError: the engine does not answer.
        """
        socket = self._socket
        if not socket:
            return None
        self._has_seen_socket |= self._host.identity(socket) is not None
        if not self._has_seen_socket:
            return None  # the engine may use another socket
        try:
            with self._host.directory(os.path.dirname(socket)) as directory:
                engine = query_engine(f"/proc/self/fd/{directory}/{os.path.basename(socket)}")
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(socket) from error
        return None if engine is None else engine.lacks(self._wanted)

    def _remove(self) -> None:
        """Uninstall everything; if a step fails, continue with the next one."""
        self._report.update(state=State.REMOVING, message="")
        settings = self._settings
        self._host.remove_tree(self._staging)
        ready = os.path.join(settings.validations, TOOLKIT_READY)
        if settings.toolkit_ready and self._host.read(ready) == _mark():
            self._host.remove(ready)
        commands = [[*self._engine_words(settings.restart), "--remove"]] if settings.engine else []
        commands += [["uninstall", "--prefix", settings.prefix, "--bindir", settings.bindir]]
        source = self._remover()
        for words in commands:
            try:
                answer = self._nvshim(source, *words)
            except NvshimError as error:
                self._log.error("not removed", **fields_of(error))
            else:
                self._log.info("removed", step=words[0], **_log_fields(answer))
        if source == self._staging:
            self._host.remove_tree(source)
            self._host.remove_if_empty(settings.prefix)

    def _remover(self) -> str:
        """Return the tree whose nvshim uninstalls: the installed one, or a copy if damaged."""
        if self._tree and not self._is_intact():
            try:
                return self._copy()
            except NvshimError as error:
                self._log.error("not copied", **fields_of(error))
        return self._current

    # -- watching -------------------------------------------------------------------------

    def _watch(self, seen: _Identities) -> None:
        """Check the node periodically and restore what another tool changed."""
        socket = self._identities((self._socket,))
        waiting = False
        while True:
            self._pause(self._settings.interval)
            now = time.monotonic()
            self._report.heartbeat(now)
            current = self._identities(self._watched)
            due = self._backoff.due(now)
            if current != seen and now >= due:
                self._reassert(now)
                seen, waiting = current, False
            elif current != seen and not waiting:
                self._log.info(
                    "the node changed; the next check is delayed", seconds=round(due - now)
                )
                waiting = True
            restarted = self._identities((self._socket,))
            if restarted != socket or (self._must_query and now >= self._next_query):
                socket = restarted
                self._check_engine(now)

    def _reassert(self, now: float) -> None:
        """Install and configure again; this changes nothing on an intact node."""
        # Restart the engine only after a calm time, or two tools could restart it forever.
        restart = self._settings.restart if self._backoff.is_calm(now) else "none"
        answers = [self._install()]
        if self._settings.engine:
            answers.append(self._configure_engine(restart))
        if any(answer.get("changed") for answer in answers):
            self._backoff.done(now)
            self._report.update(reasserted=self._report.status.reasserted + 1)
            self._log.warning(
                "restored what another tool had changed", times=self._report.status.reasserted
            )
        self._check_engine(time.monotonic())

    def _identities(self, paths: Iterable[str]) -> _Identities:
        return {path: self._host.identity(path) for path in paths if path}

    @property
    def _watched(self) -> tuple[str, ...]:
        settings = self._settings
        paths = [os.path.join(self._current, MANIFEST), os.path.join(settings.bindir, SHIM)]
        if settings.engine:
            paths.append(settings.config or _CONFIGS[settings.engine])
            if settings.engine in _DROP_INS:
                directory = _DROP_INS[settings.engine].format(os.path.dirname(paths[-1]))
                directory = os.path.dirname(settings.drop_in) or directory
                paths += self._host.files(directory)
        return tuple(paths)

    # -- the node -------------------------------------------------------------------------

    @property
    def _current(self) -> str:
        return os.path.join(self._settings.prefix, "current")

    @property
    def _staging(self) -> str:
        return os.path.join(self._settings.prefix, STAGING)

    @property
    def _temporary(self) -> str:
        return os.path.join(self._settings.state, _TEMPORARY)

    @property
    def _socket(self) -> str:
        return self._settings.socket or _SOCKETS.get(self._settings.engine, "")

    def _nvshim(self, tree: str, *words: str, timeout: float = _COMMAND_TIMEOUT) -> dict[str, Any]:
        """Run a command of the tree's nvshim in the node's root and return its answer."""
        argv = [os.path.join(tree, "bin", "nvshim"), *words, "--output", "json"]
        environment = {"TMPDIR": self._temporary}  # a command that is killed leaves its files there
        result = self._host.run(argv, timeout=timeout, environment=environment)
        self._report.heartbeat(time.monotonic())
        _reap()
        if result.code not in {exits.OK, exits.FOUND}:
            raise HostCommandFailed(
                "nvshim " + " ".join(words), found=_error_line(result.stderr) or result.last_line
            )
        try:
            answer = parse_json(result.stdout)
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def _pause(self, seconds: float) -> None:
        _reap()
        time.sleep(seconds)


def _switch(option: str, wanted: bool | None) -> list[str]:  # noqa: FBT001 - a setting
    """Return an on/off option; none for None, which keeps the node's setting."""
    return [] if wanted is None else [f"--{option}" if wanted else f"--no-{option}"]


def _mark() -> bytes:
    """Return the content of toolkit-ready; other components only check that the file exists."""
    return f"containerd-shim-nvidia {VERSION}\n".encode()


def _log_fields(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a command's answer for the log, without diffs and lists of steps."""
    fields = {key: answer[key] for key in _LOGGED if answer.get(key) not in (None, [], {})}
    files = answer.get("files")
    if isinstance(files, list) and files:
        fields["files"] = [file.get("path") for file in files if isinstance(file, dict)]
    return fields


def _error_line(stderr: str) -> str:
    """Return the error line of a command's JSON error document; "" if it has none."""
    try:
        error = parse_json(stderr)["error"]
        return f"{error['code']} {error['name']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return ""


def _reap() -> None:
    """Reap orphans: in a container this process is process 1."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
