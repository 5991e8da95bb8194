"""Before publishing a container's exit, find out whether a fault of its GPUs ended it.

A container without GPUs skips this; after an exit with 0, only a file must be removed. If a node
agent runs and knows of no fault, checking for its file is enough. Otherwise a worker searches and
reports (:mod:`shim.work.exit_cause`). Its time is limited; if it does not finish, only its result
is lost, not the exit.

The agent may learn of a fault after the exit. So once the exit is published, an end without a known
cause is also recorded, for the agent to complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from api.values import replace
from hooks.config import load_config
from shim import bundle, files, loop
from shim.causes.agent import agent_runs
from shim.children import Exit
from shim.context import ShimContext
from shim.errors import NvshimError
from shim.pod.process import Process
from shim.work.worker import Answer, Link, Worker

LOOKING: Final = 1.0
"""Seconds that an exit may wait for its cause."""

_TOLD_BY: Final = "nvshim"


class Ending:
    """The exit of a container with GPUs.

    Attributes:
        exit: the exit to publish. Its status differs if a GPU has failed and this is configured.
        unexplained: the container's config.json and its record, if it failed without a known cause;
            otherwise None.
    """

    __slots__ = ("exit", "unexplained")

    def __init__(self, exit_: Exit, unexplained: tuple[bytes, bytes] | None = None) -> None:
        self.exit = exit_
        self.unexplained = unexplained


async def exit_with_cause(
    shim: ShimContext, init: Process, path: str, exit_: Exit, *, out_of_memory: bool
) -> Ending:
    """Find out why a container with GPUs ended.

    Args:
        shim: the shim of the container.
        init: the container's init process, which has ended.
        path: the container's bundle.
        exit_: how it ended.
        out_of_memory: whether the container ran out of memory.
    """
    if not exit_.status:
        return Ending(exit_)
    found = None
    try:
        if _may_be_known(shim.namespace, init.container_id):
            found = await _look(shim, init, path, exit_, out_of_memory=out_of_memory)
    except (NvshimError, OSError) as error:
        shim.log.warning("the cause of an exit is not known", id=init.id, why=str(error))
    if found is None or not found["cause"]:
        return Ending(exit_, _read(path))
    if init.stdio is not None:
        init.stdio.tell(f"{_TOLD_BY}: {found['cause']}")
    shim.log.warning(
        "a container has ended after a fault of a GPU",
        id=init.id,
        cause=found["cause"],
        status=exit_.status,
        told=found["status"],
        **found["first"],
    )
    return Ending(replace(exit_, status=found["status"]))


def remember_end(shim: ShimContext, container_id: str, ending: Ending) -> None:
    """Record how a container ended if no cause is known.

    Args:
        shim: the shim of the container.
        container_id: its id.
        ending: the container's exit, which has been published.
    """
    if ending.unexplained is None:
        return
    # Imported here: few containers with GPUs fail.
    from shim.causes.exit_store import identity_of, write_ended  # noqa: PLC0415

    spec, record = ending.unexplained
    try:
        status, at = ending.exit.status, ending.exit.at / 1e9
        container = {
            **identity_of(shim.namespace, container_id, files.parse_object(spec, bundle.CONFIG)),
            "gpus": _uuids(files.parse_object(record, bundle.RECORD)) if record else [],
            "ended": at,
            "exit_status": status,
            "told_status": status,
        }
        write_ended(load_config().state, container, [], "")
    except NvshimError as error:
        shim.log.warning("an end is not remembered", id=container_id, why=str(error))


def _read(path: str) -> tuple[bytes, bytes] | None:
    """Read a bundle's record and spec; once the exit is published, the bundle may be gone."""
    record = os.path.join(path, bundle.RECORD)
    try:
        spec = files.read(os.path.join(path, bundle.CONFIG), bundle.LONGEST_SPEC)
        there = os.path.lexists(record)
        return spec, files.read(record, bundle.LONGEST_SPEC) if there else b""
    except NvshimError:
        return None


def _uuids(record: Mapping[str, Any]) -> list[str]:
    grant = record.get("grant") or {}
    rows = [*(grant.get("gpus") or ()), *(grant.get("mig_devices") or ())]
    return [str(row["uuid"]) for row in rows if row.get("uuid")]


def forget_cause(shim: ShimContext, container_id: str) -> None:
    """Remove the agent's file of a deleted container."""
    try:
        os.unlink(_file_of(load_config().state, shim.namespace, container_id))
    except FileNotFoundError:
        pass
    except (NvshimError, OSError) as error:  # the agent removes the files of deleted containers
        shim.log.warning("a file of causes is left", id=container_id, why=str(error))


def _may_be_known(namespace: str, container_id: str) -> bool:
    state = load_config().state
    return os.path.lexists(_file_of(state, namespace, container_id)) or not agent_runs(state)


def _file_of(state: str, namespace: str, container_id: str) -> str:
    """Return the result of :func:`shim.causes.record.path_of` without loading that module."""
    return os.path.join(state, "causes", namespace, f"{container_id}.json")


async def _look(
    shim: ShimContext, init: Process, path: str, exit_: Exit, *, out_of_memory: bool
) -> dict[str, Any] | None:
    def work(link: Link) -> Answer | None:
        # Imported here: few shims need it.
        from shim.work.exit_cause import End, tell_cause  # noqa: PLC0415

        asked = link.receive()
        return None if asked is None else (tell_cause(End(**asked), shim.log), -1)

    worker = Worker(shim.reaper, work, shim.log.descriptors())
    end = {
        "namespace": shim.namespace,
        "container_id": init.container_id,
        "bundle": path,
        "pid": init.pid,
        "status": exit_.status,
        "at": exit_.at / 1e9,
        "out_of_memory": out_of_memory,
    }
    with loop.move_on_after(LOOKING):
        found, _ = await worker.ask(end)
        return found
    shim.log.warning("the cause of an exit was not found in time", id=init.id)
    return None
