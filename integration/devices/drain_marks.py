"""Write and remove the marks of devices that are out of service.

Rules
- A mark is replaced as a whole. Commands that write marks take a lock in turn, so that neither
  loses the other's changes. Reading needs no lock.
- Draining a device that is already drained keeps its time, and its reason unless a new one is
  given. A GPU that had no UUID when it was marked gets its UUID as its name.
- A reset or a change of MIG devices holds a separate lock until it ends, even by a crash. While
  another process holds that lock, that process's mark stays.
- The request that the node agent close NVML is valid only while the reset holds that lock. If a
  command is killed, its request stays in the mark, and the next command with the lock withdraws it.
- The locks are in the state directory. The directory of the marks is removed with the last mark.

Source: flock(2).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Final

from hooks.config import Config
from hooks.node.drained import Drain, path_of, read_drains
from integration.devices.drain_errors import DrainError, MarkUnwritten, NotDrained, ResetRunning
from integration.files import flock_within, remove_file, replace_file
from shim.causes.agent import is_locked

OF_MIG: Final = "MIG layout: "
"""How the steps of a change of MIG devices start; those of a reset do not."""

_LOCK: Final = "drained.lock"
_RESET: Final = "reset.lock"
_GLANCE: Final = 0.5  # seconds: a check whether the lock is held takes it for a moment


def put(config: Config, drain: Drain) -> Drain:
    """Take something out of service.

    Args:
        drain: the mark. An existing mark keeps its time, and its reason if this one has none; the
            agent closes NVML if either mark requests it.

    Returns:
        The new mark.

    Raises:
        MarkUnwritten: it cannot be written; an existing mark is unchanged.
    """
    with _writing(config, drain.device):
        before = find(config, drain.device)
        if before is None and drain.device.startswith("GPU-"):
            before = find(config, drain.bus_id)
        now = drain if before is None else _united(before, drain, config)
        now = replace(now, since=now.since or time.time())
        if now != before:
            _write(config, now)
        if before is not None and before.device != now.device:
            _remove(config, before.device)
        return now


def _united(before: Drain, drain: Drain, config: Config) -> Drain:
    # MIG devices may be changed on a GPU whose reset failed: that does not make it usable.
    is_apart = drain.reset.startswith(OF_MIG) and not before.reset.startswith(OF_MIG)
    of_person = before.stays or not before.reset or is_apart
    # The next `nvshim mig apply` undoes one that was killed only on GPUs that have its mark.
    is_begun = before.reset.startswith(OF_MIG) or is_resetting(config)
    under_way = before.reset if not drain.reset and is_begun else ""
    for_reset = before.for_reset and bool(under_way)
    lets_go = before.lets_go and (for_reset or not before.for_reset)
    return replace(
        drain,
        bus_id=drain.bus_id or before.bus_id,
        # A reset does not replace a person's reason.
        reason=(before.reason if drain.reset and of_person else "")
        or drain.reason
        or before.reason,
        since=before.since,
        lets_go=drain.lets_go or lets_go,
        for_reset=for_reset and not drain.lets_go,
        reset=drain.reset or under_way,
        # A device that a person has drained stays drained after the reset.
        stays=bool(drain.reset and of_person) or bool(under_way),
    )


def step(config: Config, device: str, how_far: str, *, closed: bool = False) -> None:
    """Record the progress of a GPU's reset, or of a change of its MIG devices.

    Args:
        device: the device, named as in :class:`~hooks.node.drained.Drain`.
        how_far: the step, for messages.
        closed: whether the node agent has to keep NVML closed at this step.

    Raises:
        MarkUnwritten: it cannot be written.
    """
    with _writing(config, device):
        mark = find(config, device)
        if mark is not None:
            by_person = mark.lets_go and not mark.for_reset
            _write(
                config,
                replace(
                    mark,
                    reset=how_far,
                    lets_go=by_person or closed,
                    for_reset=closed and not by_person,
                ),
            )


def finish(config: Config, device: str) -> bool:
    """Return a GPU to service after its reset, unless a person drained it before.

    Returns:
        Whether it is in service now.

    Raises:
        MarkUnwritten: the mark cannot be removed.
    """
    with _writing(config, device):
        mark = find(config, device)
        if mark is not None and mark.stays:
            lets_go = mark.lets_go and not mark.for_reset
            _write(config, replace(mark, reset="", stays=False, lets_go=lets_go, for_reset=False))
            return False
        _remove(config, device)
        return True


def find(config: Config, device: str) -> Drain | None:
    """Return the mark of a device; None if it is in service.

    Args:
        device: the device, named as in :class:`~hooks.node.drained.Drain`.
    """
    return next((each for each in read_drains(config) if each.device == device), None)


def take(config: Config, device: str) -> Drain:
    """Return something to service.

    Returns:
        The removed mark.

    Raises:
        NotDrained: there is no mark.
        ResetRunning: it is being reset.
        MarkUnwritten: it cannot be removed.
    """
    with _writing(config, device):
        mark = find(config, device)
        if mark is None:
            raise NotDrained(
                f"to return {device} to service",
                found="it is in service",
                do="see `nvshim list` for what is not",
            )
        if mark.reset and is_resetting(config):
            raise ResetRunning(
                f"to return {device} to service",
                found=f"a command is at work on it ({mark.reset})",
                do="wait until that `nvshim reset` or `nvshim mig apply` ends, or interrupt it",
            )
        _remove(config, device)
        return mark


def _remove(config: Config, device: str) -> None:
    path = path_of(config, device)
    with suppress(FileNotFoundError):
        remove_file(path)
    with suppress(OSError):  # something else is out of service
        os.rmdir(config.drained)


@contextmanager
def resetting(config: Config) -> Iterator[None]:
    """Hold the lock of resets: a node does one reset, or one change of MIG devices, at a time.

    Raises:
        ResetRunning: another process holds it.
        MarkUnwritten: the lock file cannot be created.
    """
    asked = "to reset or partition a GPU"
    with _open(config, _RESET, asked) as fd:
        if not flock_within(fd, fcntl.LOCK_EX, _GLANCE):
            raise ResetRunning(
                asked,
                found="another `nvshim reset` or `nvshim mig apply` is running on this node",
                do="wait until it ends; `nvshim list` shows its progress",
            )
        for mark in read_drains(config):
            if mark.for_reset:
                step(config, mark.device, mark.reset)
        yield


def is_resetting(config: Config) -> bool:
    """Return whether a process of this node is resetting a GPU."""
    return is_locked(os.path.join(config.state, _RESET))


def _write(config: Config, drain: Drain) -> None:
    content = {name: value for name, value in asdict(drain).items() if value and name != "device"}
    path = path_of(config, drain.device)
    replace_file(path, json.dumps(content, indent=1).encode() + b"\n")


@contextmanager
def _writing(config: Config, device: str) -> Iterator[None]:
    asked = f"to write down what is out of service ({device})"
    with _open(config, _LOCK, asked) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        except OSError as error:
            raise unwritten(config, asked, error) from error


@contextmanager
def _open(config: Config, name: str, asked: str) -> Iterator[int]:
    path = os.path.join(config.state, name)
    try:
        os.makedirs(config.state, mode=0o711, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unwritten(config, asked, error) from error
    try:
        yield fd
    finally:
        os.close(fd)


def unwritten(config: Config, asked: str, error: OSError) -> DrainError:
    """Return the error for a mark or lock that cannot be written."""
    return MarkUnwritten(
        asked,
        found=f"{error.filename or config.drained}: {error.strerror}",
        do="run it as root on the node; the directories are `state` and `drained` in [node] of "
        "config.toml",
    )
