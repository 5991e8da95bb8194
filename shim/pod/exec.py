"""An exec: another process of a container, which the runtime starts in it."""

from __future__ import annotations

import json
import os
from typing import Any

from shim import files, loop
from shim.children import Reaper
from shim.errors import KilledWhileStarting, NvshimError
from shim.pod.creation import Resources
from shim.pod.process import Process
from shim.stdio.uris import StdioUris


class Exec(Process):
    """One exec.

    Args:
        container_id: its container.
        exec_id: its id.
        uris: its stdio.
        spec: the OCI process.
        bundle: the container's bundle.
    """

    def __init__(
        self, container_id: str, exec_id: str, uris: StdioUris, spec: dict[str, Any], bundle: str
    ) -> None:
        super().__init__(container_id, exec_id, uris)
        self._spec = spec
        # The prefix keeps an exec id from naming another file: "init" is a valid id.
        self._path = os.path.join(bundle, f"exec.{exec_id}")
        self._starting: loop.CancelScope | None = None

    async def start(self, resources: Resources, reaper: Reaper) -> None:
        """Let the runtime start it; after a failure, this may be repeated.

        Raises:
            KilledWhileStarting: :meth:`cancel_start` was called.
            NvshimError, OSError: the cause of the failure.
        """
        try:
            await self._start(resources, reaper)
        except BaseException:
            self.close_stdio()
            if self.child is not None:
                self.child.kill()
            self.child = None
            raise

    def cancel_start(self) -> None:
        """Cancel a running or queued :meth:`start`, whatever it waits for."""
        self.kills += 1
        if self._starting is not None:
            self._starting.cancel()

    async def _start(self, resources: Resources, reaper: Reaper) -> None:
        process_file, pid_file = f"{self._path}.json", f"{self._path}.pid"
        try:
            with loop.CancelScope() as self._starting:
                files.write(process_file, json.dumps(self._spec).encode())
                stdio = await resources.open_stdio(self)
                with reaper.window():
                    try:
                        await resources.runtime.execute(
                            stdio.child(), process_file=process_file, pid_file=pid_file
                        )
                    except BaseException:
                        try:
                            # The runtime may have created the process before it was killed.
                            self.child = resources.adopt(pid_file)
                        except NvshimError:
                            pass  # it had not
                        raise
                    self.child = resources.adopt(pid_file)
                await resources.start_stdio(stdio)
                if not self._starting.cancel_called:  # the runtime has just returned
                    return
        finally:
            for file in (process_file, pid_file):
                files.remove(file)
        raise KilledWhileStarting(
            f"to start {self.exec_id} in {self.container_id}",
            found="it was killed before it was made",
            do="if it hung, look for what holds its runtime up",
        )
