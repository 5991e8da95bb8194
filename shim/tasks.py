"""Tasks of containers, none of which ends the others when it fails.

A task group ends with the first exception in it. One shim serves a whole pod: what nobody foresaw
in one container's output must not end its neighbours.
"""

from __future__ import annotations

from api.errors import describe_bug

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any, Protocol

    from api.aio.groups import TaskGroup
    from shim.log import Log
else:
    Protocol = object


class Tasks(Protocol):
    """Where tasks are started."""

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, Any]], /, *arguments: Any
    ) -> object:
        """Start one, without waiting for its first step."""


class GuardedTasks:
    """Starts tasks in a group that outlives their failures.

    Args:
        group: the group.
        log: where a failure is told, with where it happened.
    """

    __slots__ = ("_group", "_log")

    def __init__(self, group: TaskGroup, log: Log) -> None:
        self._group = group
        self._log = log

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, Any]], /, *arguments: Any
    ) -> None:
        """Start one, without waiting for its first step."""
        self._group.start_soon(self._run, function, arguments)

    async def _run(
        self, function: Callable[..., Coroutine[Any, Any, Any]], arguments: tuple[Any, ...]
    ) -> None:
        try:
            await function(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the pod goes on
            self._log.error("a task of a container failed", traceback=describe_bug(error))
