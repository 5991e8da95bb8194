"""The installer: the node's lock, the tree, the engine's configuration; then it watches.

Each step finds out by itself whether there is something to do, so an installer that was killed
anywhere is simply started again. What decides how a thing is done is not here: ``nvshim install``,
``nvshim configure`` and ``nvshim config`` are run on the node, from the tree that is put there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from api.errors import NvshimError
from integration import exits
from integration.engines.restart import SOCKETS
from integration.errors import TreeError, fields_of
from integration.handlers import RUNC_TYPE, RUNTIME_TYPE
from integration.json_documents import parse_json
from integration.kubernetes.backoff import Backoff
from integration.kubernetes.errors import DriverNotReady, HostCommandFailed, ImageTreeMissing
from integration.kubernetes.gpus import has_gpu
from integration.kubernetes.handlers import ask_engine
from integration.kubernetes.settings import Settings
from integration.kubernetes.status import Log, Reporter, State
from integration.kubernetes.stopping import Stopped
from integration.kubernetes.validations import (
    DRIVER_READY,
    TOOLKIT_READY,
    DriverReady,
    read_driver_ready,
)
from integration.tree import MANIFEST, own_tree, read_tree, verify
from shim import VERSION

if TYPE_CHECKING:
    from integration.kubernetes.host import Host

    _Seen = dict[str, tuple[int, ...] | None]

SHIM: Final = "containerd-shim-nvidia-v1"
STAGING: Final = ".node-installer"
"""Below the prefix: where the image's tree is until it is installed."""

# An installation copies and verifies thousands of files, on whatever disk a node has.
_INSTALL_TIMEOUT: Final = 300.0
_COMMAND_TIMEOUT: Final = 120.0
# Nobody needs to know of a restart sooner, and each question is a process.
_ASK_EVERY: Final = 15.0
_WAIT: Final = 1.0
# An engine that has been started answers within seconds.
_ASK_AGAIN: Final = 2.0

_ALL: Final = "1000"
_TOLD: Final = (
    "changed", "complete", "tested", "current", "previous", "collected", "unseen_shims", "left",
    "restart", "notes", "mentioned_in",
)  # fmt: skip


_CONFIGS: Final = {
    "containerd": "/etc/containerd/config.toml",
    "crio": "/etc/crio/crio.conf",
    "docker": "/etc/docker/daemon.json",
}
# Beside the configuration; whatever is put there is looked at.
_DROP_INS: Final = {"containerd": "{}/conf.d", "crio": "{}/crio.conf.d"}
_ALWAYS_CDI: Final = frozenset({"crio"})
_SOCKETS: Final = {engine: SOCKETS[engine] for engine in ("containerd", "crio")}
"""Where those that serve the CRI do; dockerd does not."""


class Installer:
    """What the DaemonSet runs."""

    def __init__(self, settings: Settings, host: Host, log: Log) -> None:
        self._settings = settings
        self._host = host
        self._log = log
        self._tree = settings.tree or own_tree()
        self._report = Reporter(host, settings.state, settings.local, VERSION)
        self._backoff = Backoff()
        self._ask_at = 0.0
        self._has_to_ask = False
        self._has_seen_socket = False
        # What the engine has to run with, by its files; until those are written, the handler.
        kind = settings.runtime_type or RUNTIME_TYPE
        self._wanted: dict[str, Any] = {
            "containerd": {"runtimes": {settings.runtime_name: {"runtime_type": kind}}}
        }

    def run(self) -> None:
        """Do everything; then watch, until it is told to end.

        Raises:
            InstallerRunning: another one works on this node. Nothing was touched.
            KubernetesError: a step failed. What was in effect before still is.
        """
        lock = self._host.lock(self._settings.pid_file)
        try:
            self._work()
        except Stopped as stopped:
            self._log.info("told to end", signal=str(stopped))
            if self._settings.remove_on_exit and self._report.status.state != State.NO_GPU:
                self._remove()
            self._report.say(state=State.ENDED, message=f"told to end by {stopped}")
        except NvshimError as error:
            self._report.say(state=State.FAILED, message=str(error))
            raise
        finally:
            # The file stays: who has opened it already would hold a lock on nothing.
            os.ftruncate(lock, 0)
            os.close(lock)

    def _work(self) -> None:
        self._report.say(state=State.STARTING)
        if not self._await_gpu():
            return
        root = self._driver_root()
        # What changes from here on is looked at again: it may not all have been our doing.
        seen = self._look(self._watched)
        self._install()
        self._configure(root)
        self._ask(time.monotonic())
        if not self._settings.once:
            self._watch(seen)
        # Perhaps it was we who have just restarted it.
        deadline = time.monotonic() + _COMMAND_TIMEOUT
        while self._report.status.state == State.ENGINE and time.monotonic() < deadline:
            self._pause(_WAIT)
            self._ask(time.monotonic())

    # -- the steps ------------------------------------------------------------------------

    def _await_gpu(self) -> bool:
        """Wait for a GPU, unless the node has been set up already.

        Returns:
            Whether the node is to be set up; False if it has none and nobody is to wait.
        """
        settings = self._settings
        while not (
            settings.every_node
            or self._host.identity(self._current) is not None
            or has_gpu(self._host)
        ):
            if self._report.status.state != State.NO_GPU:
                self._log.info("no NVIDIA GPU on this node; nothing is done")
            self._report.say(state=State.NO_GPU, message="no NVIDIA GPU on this node")
            if settings.once:
                return False
            self._report.alive(time.monotonic())
            self._pause(settings.interval)
        return True

    def _driver_root(self) -> str:
        """Wait for the driver if that is asked, and say where it is; empty if nobody said."""
        settings = self._settings
        if not settings.wait_for_driver:
            return settings.driver_root
        path = os.path.join(settings.validations, DRIVER_READY)
        deadline = time.monotonic() + settings.driver_timeout
        while (content := self._host.read(path)) is None:
            self._report.say(state=State.WAITING, message=f"{path} is not there yet")
            now = time.monotonic()
            self._report.alive(now)
            if settings.driver_timeout and now > deadline:
                raise DriverNotReady(
                    "the node's driver",
                    found=f"no {path} within {settings.driver_timeout:g} s",
                    do="see what the operator's validator and driver say",
                )
            self._pause(_WAIT)
        ready: DriverReady = read_driver_ready(content, path)
        root = settings.driver_root or ready.driver_root
        self._log.info("the driver is ready", root=root, of_host=ready.is_host_driver)
        return root

    def _install(self) -> dict[str, Any]:
        """Have the image's tree installed, by its own program; returns its answer."""
        self._report.say(state=State.INSTALLING, message="")
        settings = self._settings
        staging = self._staging
        self._host.remove_tree(staging)  # of one that was killed
        if not self._tree:
            raise ImageTreeMissing(
                "what is to be installed",
                found="this program is not of a tree",
                do="run it from the tree that `make dist` makes, or name one in NVSHIM_TREE",
            )
        tree = read_tree(self._tree)
        source = self._current if self._has_whole(tree.digest) else self._copy()
        words = ["install", "--prefix", settings.prefix, "--bindir", settings.bindir]
        try:
            self._try_out(source)
            if not settings.self_test:
                # Who may start no container may not look into the node's shims either; so which
                # trees they use is not known, and none is collected.
                words += ["--no-self-test", "--keep", _ALL]
            answer = self._nvshim(source, *words, timeout=_INSTALL_TIMEOUT)
        finally:
            self._host.remove_tree(staging)
        self._log.info("installed", tree=tree.name, **_told(answer))
        return answer

    def _has_whole(self, digest: str = "") -> bool:
        """Whether the tree in effect can be used: the wanted one, to the last file."""
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
        """Copy the image's tree to the node, beside what is installed; returns its place."""
        self._log.info("copying", tree=self._tree, to=self._staging)
        self._host.copy_tree(self._tree, self._staging)
        return self._staging

    def _try_out(self, tree: str) -> None:
        """See that the shim runs on this node at all, before anything leads to it."""
        argv = [os.path.join(tree, "bin", SHIM), "-v"]
        ended = self._host.run(argv, timeout=_COMMAND_TIMEOUT)
        if ended.code != 0:
            raise HostCommandFailed(
                f"to run {SHIM} on this node", found=f"status {ended.code}: {ended.last_words}"
            )

    def _configure(self, driver_root: str) -> None:
        """Have the shim and the engine configured, by the installed program."""
        self._report.say(state=State.CONFIGURING, driver_root=driver_root)
        if driver_root:
            self._nvshim(self._current, "config", "set", "node.driver-root", driver_root)
            self._log.info("the driver's root is set", root=driver_root)
        if self._settings.engine:
            answer = self._configure_engine(self._settings.restart)
            self._log.info("configured", engine=self._settings.engine, **_told(answer))

    def _configure_engine(self, restart: str) -> dict[str, Any]:
        settings = self._settings
        options = _wish("set-default", settings.set_default)
        options += ["--replace"] if settings.replace else []
        if settings.runtime_type and settings.engine == "containerd":
            options += ["--runtime-type", settings.runtime_type]
            if settings.runtime_type == RUNC_TYPE:
                options += ["--shim", os.path.join(settings.bindir, SHIM)]
        if settings.engine not in _ALWAYS_CDI:
            options += _wish("enable-cdi", settings.enable_cdi)
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

    def _ask(self, now: float) -> None:
        """Find out whether a pod of the handler gets its GPUs, and say so."""
        try:
            lacking = self._lacking()
        except ConnectionError:
            self._ask_at, self._has_to_ask = now + _ASK_AGAIN, True
            if self._report.status.state not in {State.READY, State.RESTART}:
                what = f"{self._settings.engine} does not answer at {self._socket}"
                self._report.say(state=State.ENGINE, message=what)
            return
        self._ask_at, self._has_to_ask = now + _ASK_EVERY, bool(lacking)
        if lacking:
            what = f"{self._settings.engine} has to be restarted: it runs without {lacking[0]}"
            if self._report.status.message != what:
                self._log.warning(what, handler=self._settings.runtime_name, lacks=lacking)
            self._report.say(state=State.RESTART, restart_outstanding=True, message=what)
            return
        if self._settings.toolkit_ready:
            path = os.path.join(self._settings.validations, TOOLKIT_READY)
            if self._host.read(path) is None:
                self._host.write(path, _mark())
                self._log.info("toolkit-ready is written", path=path)
        if self._report.status.state != State.READY:
            self._log.info("ready", handler=self._settings.runtime_name, asked=lacking is not None)
        known = None if lacking is None else False
        self._report.say(state=State.READY, restart_outstanding=known, message="")

    def _lacking(self) -> list[str] | None:
        """What the engine's files have and it does not run with; None if that is not known.

        Raises:
            ConnectionError: it does not answer.
        """
        socket = self._socket
        if not socket:
            return None
        self._has_seen_socket |= self._host.identity(socket) is not None
        if not self._has_seen_socket:
            return None  # it may be anywhere
        try:
            with self._host.directory(os.path.dirname(socket)) as directory:
                engine = ask_engine(f"/proc/self/fd/{directory}/{os.path.basename(socket)}")
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(socket) from error
        return None if engine is None else engine.lacks(self._wanted)

    def _remove(self) -> None:
        """Take everything back. A step that fails does not keep the next one from being done."""
        self._report.say(state=State.REMOVING, message="")
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
                self._log.info("removed", step=words[0], **_told(answer))
        if source == self._staging:
            self._host.remove_tree(source)
            self._host.remove_if_empty(settings.prefix)

    def _remover(self) -> str:
        """The tree whose nvshim removes everything. A damaged one cannot do that."""
        if self._tree and not self._has_whole():
            try:
                return self._copy()
            except NvshimError as error:
                self._log.error("not copied", **fields_of(error))
        return self._current

    # -- watching -------------------------------------------------------------------------

    def _watch(self, seen: _Seen) -> None:
        """Look at the node now and then; put back what another tool took away."""
        socket = self._look((self._socket,))
        waiting = False
        while True:
            self._pause(self._settings.interval)
            now = time.monotonic()
            self._report.alive(now)
            current = self._look(self._watched)
            due = self._backoff.due(now)
            if current != seen and now >= due:
                self._assert_again(now)
                seen, waiting = current, False
            elif current != seen and not waiting:
                self._log.info("changed; looked at again", seconds=round(due - now))
                waiting = True
            restarted = self._look((self._socket,))
            if restarted != socket or (self._has_to_ask and now >= self._ask_at):
                socket = restarted
                self._ask(now)

    def _assert_again(self, now: float) -> None:
        """Install and configure again, which changes nothing if nothing is amiss."""
        # Two tools that both restart the engine would never end.
        restart = self._settings.restart if self._backoff.is_calm(now) else "none"
        answers = [self._install()]
        if self._settings.engine:
            answers.append(self._configure_engine(restart))
        if any(answer.get("changed") for answer in answers):
            self._backoff.done(now)
            self._report.say(reasserted=self._report.status.reasserted + 1)
            self._log.warning(
                "put back what another tool had changed", times=self._report.status.reasserted
            )
        self._ask(time.monotonic())

    def _look(self, paths: Iterable[str]) -> _Seen:
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
    def _socket(self) -> str:
        return self._settings.socket or _SOCKETS.get(self._settings.engine, "")

    def _nvshim(self, tree: str, *words: str, timeout: float = _COMMAND_TIMEOUT) -> dict[str, Any]:
        """Run a command of the node's own copy, and return its answer."""
        argv = [os.path.join(tree, "bin", "nvshim"), *words, "--output", "json"]
        ended = self._host.run(argv, timeout=timeout)
        self._report.alive(time.monotonic())
        _reap()
        if ended.code not in {exits.OK, exits.FOUND}:
            raise HostCommandFailed(
                "nvshim " + " ".join(words), found=_why(ended.stderr) or ended.last_words
            )
        try:
            answer = parse_json(ended.stdout)
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def _pause(self, seconds: float) -> None:
        _reap()
        time.sleep(seconds)


def _wish(option: str, wanted: bool | None) -> list[str]:  # noqa: FBT001 - a setting
    """An option that is given, or denied; None leaves it as somebody has set it on the node."""
    return [] if wanted is None else [f"--{option}" if wanted else f"--no-{option}"]


def _mark() -> bytes:
    """What toolkit-ready holds; others look only whether it is there."""
    return f"containerd-shim-nvidia {VERSION}\n".encode()


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    """What of a command's answer is told in the log: no differences, no lists of steps."""
    told = {key: answer[key] for key in _TOLD if answer.get(key) not in (None, [], {})}
    files = answer.get("files")
    if isinstance(files, list) and files:
        told["files"] = [file.get("path") for file in files if isinstance(file, dict)]
    return told


def _why(stderr: str) -> str:
    """The one line of a failure, out of its document."""
    try:
        error = parse_json(stderr)["error"]
        return f"{error['code']} {error['name']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return ""


def _reap() -> None:
    """Take the exit of what others have left to us: in a container this is process 1."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
