"""Letting go of NVML when somebody needs the GPUs for himself.

A process that has NVML keeps the kernel module in use: no GPU can be reset, MIG mode cannot be
switched, and the module cannot be removed. The agent lets go by itself when it is told to end, and
when the driver's files go. For the rest there is a file, ``let-go`` in the agent's state directory:
as long as it is there no child of the monitor's runs, and its first line is the reason that people
are told. Only root can make it. The mark of something that is out of service can say the same
(:mod:`hooks.node.drained`): `nvshim drain --let-go`, `nvshim drain --driver`, `nvshim reset`.

A person's request lasts until that person takes it back. A reset's request lasts as long as the
command holds its lock, or its nvidia-smi the lock of NVML: both end with the process, also by
SIGKILL. After :data:`LONGEST` the agent opens NVML in spite of the reset, because it does not hear
the errors of the other GPUs until then.

Source: nvidia-smi(1), "--gpu-reset" and "--multi-instance-gpu".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NoReturn

import anyio

from api.errors import one_line
from hooks.node.drained import Drain, read_drains
from integration.devices.drain_marks import is_resetting
from integration.files import read_some
from integration.node.values.service_name import ServiceName
from integration.nvml.lock import give_up, is_alone
from integration.timeouts import PATIENCE
from integration.watcher import ANY, Interest, Watcher

if TYPE_CHECKING:
    from integration.node.service import Context

FILE: Final = "let-go"
"""The file's name in the state directory."""

FAULT: Final = "monitor.let-go"
"""What the fault is called that the file is only looked for every now and then."""

LONGEST: Final = 300.0 * PATIENCE
"""Seconds that a reset may have NVML closed."""

_LOOK: Final = 1.0  # seconds between two looks whether a reset has ended, which nothing tells
_LONGEST_LINE: Final = 200
_FILE: Final = Interest(frozenset({FILE}))


async def follow(context: Context) -> NoReturn:
    """Let go of NVML while the file is there, or a mark says so, until cancelled."""
    state, config = context.state, context.config
    directory = config.state
    resets = _Resets(context)
    with Watcher(quiet=0) as watcher:
        while True:
            drains = read_drains(config)
            by_reset = resets.reason(drains)
            why = _reason(os.path.join(directory, FILE)) or _reason_of_people(drains) or by_reset
            if why != state.nvml_pause.value:
                state.nvml_pause.publisher(ServiceName.MONITOR).publish(why)
                if why:
                    context.say("info", "NVML is let go", reason=why)
                else:
                    context.say("info", "NVML is asked again")
                    state.look_requested.send()
            with anyio.move_on_after(_LOOK if resets.is_running else float("inf")):
                await watcher.change({directory: _FILE, config.drained: ANY})
            line = f"{directory} is not watched: {watcher.deaf}" if watcher.deaf else ""
            context.fault(FAULT, line, level="warning")


class _Resets:
    """For how long resets have NVML closed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since: float | None = None
        self._is_over = False

    @property
    def is_running(self) -> bool:
        """Whether one has NVML closed, or should have ended."""
        return self._since is not None

    def reason(self, drains: Iterable[Drain]) -> str:
        """Why NVML is closed for a reset; "" if none is under way, or one takes too long."""
        config, now = self._context.config, time.monotonic()
        mark = next((each for each in drains if each.lets_go and each.for_reset), None)
        if mark is None or not (is_resetting(config) or is_alone(config.state)):
            self._since, self._is_over = None, False
            return ""
        self._since = now if self._since is None else self._since
        if now - self._since < LONGEST:
            return _reason_of(mark)
        if not self._is_over:
            self._is_over = True
            self._context.say(
                "error", "a reset does not end, NVML is opened in spite of it",
                device=mark.device, reset=mark.reset,
            )  # fmt: skip
            give_up(config.state)
        return ""


def _reason_of_people(drains: Iterable[Drain]) -> str:
    """Why, if a person took something out of service and said that NVML is to be let go."""
    return next((_reason_of(mark) for mark in drains if mark.lets_go and not mark.for_reset), "")


def _reason_of(mark: Drain) -> str:
    return one_line(f"{mark.name} is out of service {mark.why}")


def _reason(path: str) -> str:
    """Why, if the file is there."""
    try:
        first = read_some(path, _LONGEST_LINE).decode(errors="replace").partition("\n")[0]
    except FileNotFoundError:
        return ""
    except OSError:
        first = ""
    return one_line(first) or f"{path} is there"
