"""Expensive fixtures that tests share as long as each test restores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, TypeVar

from tests.harness.own_process import outliving

__all__ = ["Kept"]

T = TypeVar("T")


class Kept(Generic[T]):
    """A value that several tests share.

    Args:
        make: creates it, and removes it at the end.
        tidy: undoes a test's changes; if that fails, the next test gets a new value.
    """

    def __init__(
        self, make: Callable[[], AbstractContextManager[T]], tidy: Callable[[T], None]
    ) -> None:
        self._make = make
        self._tidy = tidy
        self._stack = ExitStack()
        self._made: list[T] = []

    @contextmanager
    def lent(self) -> Iterator[T]:
        """Lend it to a test, and create it for the first one."""
        if not self._made:
            with outliving(serves=True):
                self._made.append(self._stack.enter_context(self._make()))
        (it,) = self._made
        try:
            yield it
            self._tidy(it)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove it."""
        self._made.clear()
        with outliving():
            self._stack.close()
