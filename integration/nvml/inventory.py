"""The node's inventory for programs that are no shim: the same, kept for the next container too."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from hooks import engine
from hooks.config import Config
from hooks.node.inventory import Inventory, survey
from integration.nvml.children import Process, start
from integration.nvml.lock import is_alone, opening

if TYPE_CHECKING:
    from threading import Event


__all__ = ["STOP", "Stopped", "ask", "inventory_of", "look_at_node"]

_POLL: Final = 0.01
_TO_DIE: Final = 1.0


def inventory_of(config: Config, *, confirmed: bool = False, anew: bool = False) -> Inventory:
    """What the node has: as it was kept if that is still true, otherwise with NVML's answer.

    Args:
        config: where to look.
        confirmed: a kept one counts only if NVML has confirmed it, however short ago that failed;
            nor if a GPU was lost then, which may be back. While somebody needs NVML closed, as for
            a reset, it counts all the same.
        anew: a kept one does not count: a GPU may be lost since, which only NVML knows.

    Returns:
        The inventory. It is kept, so that the next container does not have to ask.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    kept = None if anew else engine.load_inventory(config)
    if kept is not None and not (confirmed and _is_doubtful(kept) and not is_alone(config.state)):
        return kept
    return engine.take_inventory(config, _answer(config))


def _answer(config: Config) -> bytes | None:
    return ask(engine.probe_command(config), config.nvml_timeout, state=config.state)


def _is_doubtful(kept: Inventory) -> bool:
    return bool(kept.nvml_failure) or any(gpu.lost for gpu in kept.gpus)


def look_at_node(config: Config, *, nvml: bool = True) -> Inventory:
    """What the node has, for a person who only looks: nothing is kept.

    Args:
        config: where to look.
        nvml: whether NVML is asked if nothing is kept that is still true; otherwise procfs tells,
            which knows of no MIG devices.

    Returns:
        The inventory.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    if not nvml:
        return survey(config)
    return survey(config, lambda: _answer(config))


class Stopped(Exception):
    """An answer is not wanted any more."""


STOP: Final[ContextVar[Event | None]] = ContextVar("STOP", default=None)
"""For a thread whose questions may become needless: once it is set, they are given up."""


def ask(command: Sequence[str], seconds: float, *, state: str) -> bytes | None:
    """Run a program that opens NVML, and may hang in the kernel, where no signal reaches it.

    Args:
        command: the argument list. It gets no environment and no stdin.
        seconds: that it may take; a second after that it is left alone.
        state: the directory ``state`` of the configuration.

    Returns:
        What it wrote to stdout; None if it could not be started or did not end in time, or if
        somebody needed NVML closed for as long.

    Raises:
        Stopped: the answer is not wanted any more (:data:`STOP`).
    """
    with opening(state, seconds) as lock:
        return None if lock is None else _ask(command, seconds, lock)


def _ask(command: Sequence[str], seconds: float, lock: int) -> bytes | None:
    stop = STOP.get()
    # A pipe would have to be emptied meanwhile.
    with open(os.memfd_create("answer"), "w+b") as answer:
        try:
            process = start(command, stdin=subprocess.DEVNULL, stdout=answer.fileno(), lock=lock)
        except OSError:
            return None
        try:
            ended = _ends(process, seconds, stop)
        except BaseException:  # as by a signal that a terminal's other processes get
            process.kill()
            raise
        if not ended:
            process.kill()
            _ends(process, _TO_DIE)
            if stop is not None and stop.is_set():
                raise Stopped
            return None
        answer.seek(0)
        return answer.read()


def _ends(process: Process, seconds: float, stop: Event | None = None) -> bool:
    """Whether it ends in time."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline or (stop is not None and stop.is_set()):
            return False
        time.sleep(_POLL)
    return True
