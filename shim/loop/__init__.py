"""The shim's event loop: tasks, cancel scopes, descriptors, timers and threads.

The shim runs once per pod. asyncio and anyio would add a hundred modules and two megabytes to each
of these processes, so the shim has its own small loop. Its functions have anyio's names and, except
for the points below, their meaning.

- :func:`run` runs a coroutine function; :func:`create_task_group` starts more tasks.
- :class:`CancelScope`, :func:`move_on_after` and :func:`fail_after` cancel what runs inside them.
- :class:`Event` and :class:`Lock` are for tasks; :func:`sleep` and :func:`checkpoint` wait.
- :func:`wait_readable` and :func:`wait_writable` wait for a descriptor. :func:`watch` calls a
  function whenever a descriptor is ready, without a task; :class:`Channel` reads a socket this way.
- :func:`handle_signals` calls a function whenever a signal arrives.
- :func:`run_in_thread` calls a function in a thread.

Differences from anyio on asyncio:

- Waiting for an event that is set, a free lock or an empty group does not yield to other tasks.
  All but the last are cancellation points.
- Only a scope can cancel a task. There is one loop per process.
- A task started in a group whose scope is cancelled is cancelled at its first wait.
- A group raises a task's KeyboardInterrupt or SystemExit, like any exception. If a signal
  handler raises while all tasks wait, everything is cancelled and :func:`run` raises.
- Two tasks cannot wait for the same side of a descriptor (RuntimeError). Closing a descriptor does
  not wake the tasks that wait for it: cancel them first.
- A scope can be entered only once, and its shield cannot change.
- All tasks share the thread's contextvars context.
- An abandoned asynchronous generator is closed at once, without waiting. Use
  ``contextlib.aclosing``.

Source: anyio's documentation, "Cancellation and timeouts" and "Creating and managing tasks".
"""

from __future__ import annotations

from shim.loop.core import Cancelled, current_time
from shim.loop.core import running_tasks as get_running_tasks
from shim.loop.scopes import (
    CancelScope,
    GuardedTasks,
    TaskGroup,
    Tasks,
    fail_after,
    move_on_after,
    run,
)
from shim.loop.waiting import (
    Channel,
    Event,
    Lock,
    checkpoint,
    handle_signals,
    run_in_thread,
    sleep,
    unwatch,
    wait_readable,
    wait_writable,
    watch,
)

__all__ = [
    "CancelScope",
    "Cancelled",
    "Channel",
    "Event",
    "GuardedTasks",
    "Lock",
    "TaskGroup",
    "Tasks",
    "checkpoint",
    "create_task_group",
    "current_time",
    "fail_after",
    "get_running_tasks",
    "handle_signals",
    "move_on_after",
    "run",
    "run_in_thread",
    "sleep",
    "unwatch",
    "wait_readable",
    "wait_writable",
    "watch",
]

create_task_group = TaskGroup
