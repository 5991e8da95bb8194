"""Ask NVML one question, in a child that lives only for this question.

The answer is written to a file in memory, because a pipe would have to be read in the meantime.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final

from hooks.config import Config
from hooks.node.driver import Driver, find_driver
from hooks.node.fingerprint import Fingerprint
from hooks.node.nvml import library_path, probe_command
from integration.nvml.child import QUERY
from integration.nvml.process import TO_DIE, NvmlClosed, Stop, child_command, start

__all__ = ["STOP", "Stopped", "ask", "ask_nvml", "probe"]

# Seconds for a child to start and end, besides the time that NVML may take.
_MORE: Final = 1.0


class Stopped(Exception):
    """The caller no longer wants the answer."""


STOP: Final[ContextVar[Stop | None]] = ContextVar("STOP", default=None)
"""A flag for the questions of this thread; once it is set, they are given up."""


def ask_nvml(config: Config, question: str, *arguments: str) -> bytes | None:
    """Ask NVML one of the questions of :mod:`integration.nvml.child_query`.

    Args:
        config: locates the driver, and sets the time limit of NVML.
        question: "fabric", "links", "mode", "parts" or "persistence".
        arguments: the arguments of the question.

    Returns:
        What the child printed; None if it did not exit in time, or if NVML has to stay closed.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: the driver's files do not match the loaded kernel module's version.
    """
    library = library_path(_driver_of(config))
    seconds = config.nvml_timeout
    command = child_command(QUERY, library, question, *arguments, seconds=seconds)
    return ask(command, seconds + _MORE, state=config.state)


def probe(config: Config, *, more: float = 0.0) -> bytes | None:
    """Ask NVML for the inventory.

    Args:
        config: locates the driver, and sets the time limit of NVML.
        more: seconds that the caller waits in addition.

    Returns:
        What :mod:`hooks.node.nvml_probe` printed; None as for :func:`ask_nvml`.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: the driver's files do not match the loaded kernel module's version.
    """
    command = probe_command(config, _driver_of(config))
    return ask(command, config.nvml_timeout + more, state=config.state)


def _driver_of(config: Config) -> Driver:
    return find_driver(Fingerprint(config.host_root), config)


def ask(command: Sequence[str], seconds: float, *, state: str) -> bytes | None:
    """Run a program that opens NVML, and that may hang in the kernel.

    Args:
        command: the argument list. The program gets no environment and no stdin.
        seconds: the time limit. The program is then killed, and abandoned if it does not die.
        state: the directory ``state`` of the configuration.

    Returns:
        The program's stdout; None if it could not be started or did not exit in time, or if NVML
        had to stay closed for that long.

    Raises:
        Stopped: the caller no longer wants the answer (:data:`STOP`).
    """
    stop = STOP.get()
    with open(os.memfd_create("answer"), "w+b") as answer:
        try:
            process = start(
                command, stdin=subprocess.DEVNULL, stdout=answer.fileno(), state=state,
                patience=seconds,
            )  # fmt: skip
        except (NvmlClosed, OSError):
            return None
        try:
            has_ended = process.wait(seconds, stop)
        except BaseException:  # such as Ctrl-C, which does not reach the child
            process.kill()
            raise
        if not has_ended:
            process.kill()
            process.wait(TO_DIE)
            if stop is not None and stop.is_set:
                raise Stopped
            return None
        answer.seek(0)
        return answer.read()
