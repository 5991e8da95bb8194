"""The shim's own loop as a backend of anyio, so that tests written for anyio run on it, too.

``anyio_backend`` is then ``OURS``. It implements only the part of anyio that tests use; the rest
fails. A test and its fixtures run in one task, as on asyncio: a fixture may hold a task group open
around the test.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from io import IOBase
from typing import Any, Final

import anyio
import anyio.abc
from anyio._core import _eventloop

from shim import loop
from shim.loop import core
from shim.loop.scopes import CancelScope
from tests.harness.signals import open_signal_receiver

OURS: Final = "ours"


class Stream(anyio.abc.UNIXSocketStream):
    """A stream over a unix socket on the loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    @property
    def _raw_socket(self) -> socket.socket:
        return self._socket

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await loop.checkpoint()
        while True:
            try:
                read = self._socket.recv(max_bytes)
            except BlockingIOError:
                await loop.wait_readable(self._socket)
            except OSError as error:
                raise self._error() from error
            else:
                if not read:
                    raise anyio.EndOfStream
                return read

    async def send(self, item: bytes) -> None:
        await loop.checkpoint()
        view = memoryview(item)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                await loop.wait_writable(self._socket)
            except OSError as error:
                raise self._error() from error

    def _error(self) -> Exception:
        closed = self._socket.fileno() < 0
        return anyio.ClosedResourceError() if closed else anyio.BrokenResourceError()

    async def send_eof(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        self._socket.close()

    async def send_fds(self, message: bytes, fds: Collection[int | IOBase]) -> None:
        raise NotImplementedError

    async def receive_fds(self, msglen: int, maxfds: int) -> tuple[bytes, list[int]]:
        raise NotImplementedError


class Runner(anyio.abc.TestRunner):
    """Runs a test and its fixtures in one task of one loop."""

    def __init__(self) -> None:
        self._loop = core.Loop()
        self._task: core.Task | None = None
        self._given: list[tuple[Coroutine[Any, Any, Any], list[Any], list[BaseException]]] = []
        self._wake: Callable[[], object] = lambda: None

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            assert self._loop.tasks == {self._task}, "tasks are left"
            self._task.coro.close()
        self._loop.close()

    def is_running(self) -> bool:
        return core.running()

    async def _serve(self) -> None:
        while True:
            while self._given:
                coro, results, errors = self._given.pop()
                try:
                    results.append(await coro)
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    errors.append(error)
                del coro, results, errors
                self._wake()
            self._more = loop.Event()
            await self._more.wait()

    async def _ask(
        self, coro: Coroutine[Any, Any, Any], results: list[Any], errors: list[BaseException]
    ) -> None:
        done = loop.Event()
        self._wake = done.set
        self._given.append((coro, results, errors))
        if self._task is None:
            self._task = core.Task(self._serve(), "tests", CancelScope(), lambda _: None)
            self._loop.start(self._task)
        else:
            self._more.set()
        await done.wait()

    def call(self, coro: Coroutine[Any, Any, Any]) -> Any:
        assert not core.running()
        results: list[Any] = []
        errors: list[BaseException] = []
        core.set_current(self._loop)
        try:
            asked = self._ask(coro, results, errors)
            call = core.Task(asked, "a call", CancelScope(), lambda _: None)
            self._loop.start(call)
            self._loop.run(call)
        finally:
            core.set_current(None)
        if errors:
            raise errors.pop()
        return results.pop()

    def run_asyncgen_fixture(
        self, fixture_func: Callable[..., Any], kwargs: dict[str, Any]
    ) -> Iterable[Any]:
        generator = fixture_func(**kwargs)

        async def step() -> Any:
            return await anext(generator, None)

        yield self.call(step())
        assert self.call(step()) is None, "a fixture goes on"

    def run_fixture(
        self, fixture_func: Callable[..., Coroutine[Any, Any, Any]], kwargs: dict[str, Any]
    ) -> Any:
        return self.call(fixture_func(**kwargs))

    def run_test(
        self, test_func: Callable[..., Coroutine[Any, Any, Any]], kwargs: dict[str, Any]
    ) -> None:
        self.call(test_func(**kwargs))


class _Status:
    """Lets a task report that it has started."""

    def __init__(self) -> None:
        self.event = loop.Event()
        self.value: Any = None

    def started(self, value: Any = None) -> None:
        self.value = value
        self.event.set()


class TaskGroup(loop.TaskGroup):
    """A task group with anyio's ``start``, for fixtures.

    The failure of a task that has not started yet is the failure of its group.
    """

    async def start(self, function: Any, *arguments: Any, name: str | None = None) -> Any:
        status = _Status()
        self.start_soon(partial(function, task_status=status), *arguments, name=name)
        await status.event.wait()
        return status.value


class Backend(anyio.abc.AsyncBackend):
    """The functions that anyio calls. anyio does not instantiate backends."""

    @classmethod
    def run(cls, func: Any, args: Any, kwargs: Any, options: Any) -> Any:
        return loop.run(partial(func, *args, **kwargs))

    @classmethod
    def current_token(cls) -> object:
        return core.current()

    @classmethod
    def current_time(cls) -> float:
        return loop.current_time()

    @classmethod
    def cancelled_exception_class(cls) -> type[BaseException]:
        return core.Cancelled

    @classmethod
    async def checkpoint(cls) -> None:
        await loop.checkpoint()

    @classmethod
    async def sleep(cls, delay: float) -> None:
        await loop.sleep(delay)

    @classmethod
    def create_cancel_scope(cls, *, deadline: float = math.inf, shield: bool = False) -> Any:
        return CancelScope(deadline=deadline, shield=shield)

    @classmethod
    def create_task_group(cls) -> Any:
        return TaskGroup()

    @classmethod
    def create_event(cls) -> Any:
        return loop.Event()

    @classmethod
    def create_lock(cls, *, fast_acquire: bool) -> Any:
        return loop.Lock()

    @classmethod
    async def run_sync_in_worker_thread(
        cls,
        func: Any,
        args: Any,
        abandon_on_cancel: bool = False,  # noqa: FBT002 - anyio's signature
        limiter: Any = None,
    ) -> Any:
        with CancelScope(shield=not abandon_on_cancel):
            return await loop.run_in_thread(partial(func, *args))

    @classmethod
    async def connect_unix(cls, path: Any, kind: Any = socket.SOCK_STREAM) -> Any:
        await loop.checkpoint()
        sock = socket.socket(socket.AF_UNIX, kind)
        try:
            sock.setblocking(False)
            while True:
                try:
                    sock.connect(path)
                except BlockingIOError:  # the listen queue is full
                    await loop.sleep(0.001)
                else:
                    return Stream(sock)
        except BaseException:
            sock.close()
            raise

    @classmethod
    async def wrap_unix_stream_socket(cls, sock: socket.socket) -> Any:
        return Stream(sock)

    @classmethod
    async def wait_readable(cls, obj: Any) -> None:
        await loop.wait_readable(obj)

    @classmethod
    async def wait_writable(cls, obj: Any) -> None:
        await loop.wait_writable(obj)

    @classmethod
    def open_signal_receiver(cls, *signals: Any) -> Any:
        return open_signal_receiver(*signals)

    @classmethod
    def get_running_tasks(cls) -> Sequence[Any]:
        return loop.get_running_tasks()

    @classmethod
    async def wait_all_tasks_blocked(cls) -> None:
        await loop.checkpoint()  # one turn, which has polled the descriptors
        while core.current()._ready:
            await loop.checkpoint()

    @classmethod
    @contextlib.contextmanager
    def create_test_runner(cls, options: dict[str, Any]) -> Iterator[Runner]:  # type: ignore[override]
        with Runner() as runner:
            yield runner


def _library(others: Callable[[], str | None]) -> Callable[[], str | None]:
    return lambda: OURS if core.running() else others()


def register() -> None:
    """Register the backend, so that ``anyio_backend`` can be ``OURS``."""
    if OURS not in _eventloop.loaded_backends:
        _eventloop.loaded_backends[OURS] = Backend  # type: ignore[type-abstract] # not all of it
        _eventloop.current_async_library = _library(_eventloop.current_async_library)
