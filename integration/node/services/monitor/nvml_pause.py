"""Close NVML while another process needs exclusive access to the GPUs.

A process that uses NVML keeps the kernel module in use: no GPU can be reset, MIG mode cannot be
switched, and the module cannot be removed. The agent closes NVML when it exits and when the
driver's files disappear. In other cases a file can request this: ``let-go`` in the agent's state
directory. While it exists, no child of the monitor runs. Its first line is the reason, for people.
Only root can create it. A mark that takes something out of service can request the same
(:mod:`hooks.node.drained`): `nvshim drain --let-go`, `nvshim drain --driver`, `nvshim reset`.

A person's request lasts until that person removes it. A reset's request lasts while the command
holds its lock, or its nvidia-smi holds NVML's lock. Both locks end with the process, even if it
is killed.

After :data:`LONGEST` the agent opens NVML even if the reset has not ended, because it receives no
errors of the other GPUs until then. For a MIG layout, this limit applies to each GPU that changes.

Source: nvidia-smi(1), "--gpu-reset" and "--multi-instance-gpu".
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Final, NoReturn

import anyio

from api.errors import one_line
from hooks.node.drained import Drain, read_drains
from integration.devices.drain_marks import is_resetting
from integration.files import read_some
from integration.node.service import Context
from integration.node.values.service_name import ServiceName
from integration.nvml.lock import break_lock, is_exclusive
from integration.timeouts import PATIENCE
from integration.watcher import ANY, Interest, Watcher

FILE: Final = "let-go"
"""The file's name in the state directory."""

FAULT: Final = "monitor.let-go"
"""The subject of the fault that the directory cannot be watched."""

LONGEST: Final = 300.0 * PATIENCE
"""Seconds for which a reset may keep NVML closed."""

_LOOK: Final = 1.0  # seconds between two checks whether a reset has ended; nothing reports it
_LONGEST_LINE: Final = 200
_FILE: Final = Interest(frozenset({FILE}))


async def follow(context: Context) -> NoReturn:
    """Pause NVML while the file or a mark asks for it, until cancelled."""
    state, config = context.state, context.config
    pause = state.nvml_pause.publisher(ServiceName.MONITOR)
    gpus = state.resetting_gpus.publisher(ServiceName.MONITOR)
    directory = config.state
    resets = _Resets(context)
    with Watcher(quiet=0) as watcher:
        while True:
            drains = read_drains(config)
            by_reset = resets.reason(drains)
            why = _reason(os.path.join(directory, FILE)) or _reason_of_people(drains) or by_reset
            gpus.publish(resets.gpus if why and why == by_reset else frozenset())
            if why != state.nvml_pause.value:
                pause.publish(why)
                if why:
                    context.say("info", "NVML is closed", reason=why)
                else:
                    context.say("info", "NVML is open again")
                    state.look_requested.send()
            with anyio.move_on_after(_LOOK if resets.is_running else float("inf")):
                await watcher.change({directory: _FILE, config.drained: ANY})
            line = f"{directory} is not watched: {watcher.deaf}" if watcher.deaf else ""
            context.fault(FAULT, line, level="warning")


class _Resets:
    """Measures for how long resets have kept NVML closed."""

    def __init__(self, context: Context) -> None:
        self.gpus: frozenset[str] = frozenset()
        """The GPUs that keep NVML closed, by UUID."""
        self._context = context
        self._since: float | None = None
        self._is_over = False

    @property
    def is_running(self) -> bool:
        """Whether a reset keeps NVML closed, or should have ended."""
        return self._since is not None

    def reason(self, drains: Iterable[Drain]) -> str:
        """Return why NVML is closed for a reset; "" without a reset, or if it takes too long."""
        config, now = self._context.config, time.monotonic()
        closed = [each for each in drains if each.lets_go and each.for_reset]
        if not closed or not (is_resetting(config) or is_exclusive(config.state)):
            self.gpus, self._since, self._is_over = frozenset(), None, False
            return ""
        mark, before, self.gpus = closed[0], self.gpus, frozenset(each.device for each in closed)
        if self._since is None or self.gpus != before:
            self._since, self._is_over = now, False
        if now - self._since < LONGEST:
            return _reason_of(mark)
        if not self._is_over:
            self._is_over = True
            self._context.say(
                "error", "a reset takes too long; NVML is opened anyway",
                device=mark.device, reset=mark.reset,
            )  # fmt: skip
            break_lock(config.state)
        return ""


def _reason_of_people(drains: Iterable[Drain]) -> str:
    """Return the reason of a person's mark that asks to close NVML; "" if there is none."""
    return next((_reason_of(mark) for mark in drains if mark.lets_go and not mark.for_reset), "")


def _reason_of(mark: Drain) -> str:
    return one_line(f"{mark.name} is out of service {mark.why}")


def _reason(path: str) -> str:
    """Return the reason in the file; "" if there is no file."""
    try:
        first = read_some(path, _LONGEST_LINE).decode(errors="replace").partition("\n")[0]
    except FileNotFoundError:
        return ""
    except OSError:
        first = ""
    return one_line(first) or f"{path} is there"
