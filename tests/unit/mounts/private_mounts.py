"""A private mount namespace for one test. Its mounts are invisible outside and leave nothing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec

from shim import syscalls

P = ParamSpec("P")


def in_private_mount_namespace(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test in a thread whose mount namespace ends with it and its children.

    Args:
        test: the test. It has to use ``/proc/thread-self`` instead of ``/proc/self``.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        errors: list[BaseException] = []

        def body() -> None:
            try:
                syscalls.unshare(syscalls.CLONE_NEWNS)
                syscalls.mount("", "/", "", syscalls.MS_PRIVATE | syscalls.MS_REC)
                test(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - raised again, where pytest sees it
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    return run
