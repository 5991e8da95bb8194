"""Save a running container: the steps around the runtime's call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from api.proto import events_pb2
from shim import loop
from shim.checkpoint import criu
from shim.loop import Tasks
from shim.pod.creation import Resources
from shim.pod.operations import LATE, Exits
from shim.pod.process import Process


async def save(
    path: str,
    *,
    tasks: Tasks,
    resources: Resources,
    exits: Exits,
    init: Process,
    pids: Iterable[int],
    request: criu.CheckpointOptions,
    report: Callable[..., None],
) -> None:
    """Save a container in a directory.

    If init ends in the meantime, but not because of the checkpoint, kill the runtime and CRIU.

    Args:
        path: the directory.
        tasks: the group that watches init in the meantime.
        resources: the container's resources.
        exits: waits for a checkpoint that should end init.
        init: the container's init process.
        pids: all of the container's processes.
        request: containerd's request.
        report: publishes an event of the container.

    Raises:
        NvshimError: saving failed. The container continues, and nothing is left of the checkpoint.
    """
    uris = init.uris
    paths = [
        uri if uri.startswith("/") and not uris.terminal else None
        for uri in (uris.stdin, uris.stdout, uris.stderr)
    ]
    external = criu.external_files(init.pid, pids, paths)
    injection = resources.injection
    saved = loop.CancelScope()
    tasks.start_soon(_end_with_init, os.pidfd_open(init.pid), resources, exits, saved)
    exits.by_checkpoint = request.exit
    try:
        try:
            if injection is not None:
                await injection.uncover(init.pid)
            driver_layer = injection is not None and injection.has_driver_layer
            await resources.criu().save(path, request, external, driver_layer=driver_layer)
        finally:
            if injection is not None and init.child is not None and init.child.exit is None:
                await injection.cover(init.pid)
        report(events_pb2.TaskCheckpointed, checkpoint=path)
    finally:
        saved.cancel()
        exits.by_checkpoint = False


async def _end_with_init(
    init: int, resources: Resources, exits: Exits, saved: loop.CancelScope
) -> None:
    """Abort the running checkpoint when init ends.

    While CRIU traces init, the kernel reports its end only to CRIU, but a pidfd shows it to all.

    Args:
        init: a pidfd of init; closed here.
        resources: the resources whose runtime was called.
        exits: knows whether the checkpoint itself ends init.
        saved: cancelled once the checkpoint has ended.
    """
    try:
        with saved:
            await loop.wait_readable(init)
            if exits.by_checkpoint:
                await loop.sleep(LATE)
            resources.runtime.end_calls("checkpoint")
    finally:
        os.close(init)
