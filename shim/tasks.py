"""Where background tasks of containers run: :class:`shim.pod.server.GuardedTasks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Tasks(Protocol):
    """Where tasks are started."""

    def start_soon(
        self, function: Callable[..., Coroutine[Any, Any, Any]], /, *arguments: Any
    ) -> object:
        """Start one, without waiting for its first step."""
