"""A private containerd that can be stopped, killed, upgraded and inspected::

    with PrivateContainerd("/tmp/somewhere", shim_directory=".cache/bin") as containerd:
        done = containerd.ctr("run", "--rm", "--runtime", RUNTIME, IMAGE, "first", "true")
        containerd.restart()

It extends the product's own (:mod:`integration.simulated.containerd`) with what tests need. CRI
pods of all containerds are in the same namespace, so their ids distinguish them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Self

from integration.containers import traces
from integration.containers.procfs import Procfs
from integration.simulated import containerd as simulated
from integration.simulated.containerd import CLEANUP_TIMEOUT, DISABLED_PLUGINS, Completed
from integration.timeouts import PATIENCE

__all__ = ["DISABLED_PLUGINS", "Completed", "PrivateContainerd"]

_STOP_TIMEOUT: Final = 10.0 * PATIENCE


class PrivateContainerd(simulated.PrivateContainerd):
    """A containerd with separate directories. As a context it runs, and is removed at the end.

    Args:
        environment: more variables for containerd, and so for its shims.
        debug: whether containerd and its shims log debug messages.
        amend: called before each start with the path of the configuration, to change it.

    Attributes:
        parts: the programs of the next start. Assign others while containerd is stopped to
            upgrade it.
    """

    def __init__(
        self,
        directory: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        debug: bool = True,
        amend: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(directory, **options)
        self.fifo_directory = os.path.join(self.directory, "fifo")
        self._more_environment.update(environment or {})
        self._debug = debug
        self._amend = amend

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def ttrpc_address(self) -> str:
        """Return the socket where shims publish their events."""
        return self.address + ".ttrpc"

    @property
    def marks(self) -> traces.Marks:
        """Return the marks that distinguish this containerd's traces from those of others."""
        return replace(super().marks, pods=frozenset(self.pod_ids()))

    def configure_plugins(self, version: int) -> str:
        """Return the configuration of plugins, in TOML; called before each start.

        Args:
            version: of the configuration's format: 2, or 3 for containerd 2.x.
        """
        del version
        return ""

    def pod_ids(self) -> Iterable[str]:
        """Return the ids of the CRI's pods and containers so far; this containerd has no CRI."""
        return ()

    def know(self, *containers: str) -> None:
        """Register ids of containers that another client has created."""
        self._words.update(containers)

    def bundle(self, container: str, *, namespace: str | None = None) -> str:
        """Return the directory of a task's bundle, which may not exist."""
        return os.path.join(
            self.directory,
            "state",
            "io.containerd.runtime.v2.task",
            namespace or self.namespace,
            container,
        )

    def stop(self, *, timeout: float = _STOP_TIMEOUT) -> None:
        """Stop containerd as a service manager does; containers keep running.

        Args:
            timeout: seconds after which it is killed.
        """
        process = self._process
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def restart(self) -> None:
        """Stop containerd, and start it in the same directories."""
        self.stop()
        self.start()

    def shim_pids(self) -> list[int]:
        """Return the processes that listen on a socket where a shim of ours would."""
        return self.pids_listening_on(*(trace.name for trace in traces.sockets(self.marks)))

    def pids_listening_on(self, *paths: str) -> list[int]:
        """Return our processes that listen on one of these unix sockets."""
        return sorted(
            int(trace.name)
            for trace in traces.processes(self.marks)
            if not Procfs().listening(int(trace.name)).isdisjoint(paths)
        )

    def log(self) -> str:
        """Return the log of containerd and its shims so far."""
        try:
            with open(self.log_path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def sweep(self) -> set[traces.Trace]:
        """Remove what containers left: processes, mounts, cgroups, sockets, files.

        containerd may run meanwhile; its own files are not touched.

        Returns:
            What could not be removed in time.
        """
        return traces.clean(self.marks, CLEANUP_TIMEOUT)

    def _write_config(self) -> None:
        super()._write_config()
        os.makedirs(self.fifo_directory, exist_ok=True)
        with open(self._config_path, "a", encoding="utf-8") as file:
            file.write(self.configure_plugins(2 if self.parts.version < (2, 0) else 3))
        if self._amend is not None:
            self._amend(self._config_path)
