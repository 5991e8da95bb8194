"""What is dear to make, and lent to one test after another while each leaves it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Generic, TypeVar

from tests.harness.own_process import outliving

__all__ = ["Kept"]

T = TypeVar("T")


class Kept(Generic[T]):
    """Something that several tests use.

    Args:
        make: makes it, and removes it at the end.
        tidy: takes back what a test has done to it; if that fails, the next one gets another.
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
        """Lend it to a test; it is made for the first one."""
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
