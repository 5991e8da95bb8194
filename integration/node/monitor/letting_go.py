"""Letting go of NVML when somebody needs the GPUs for himself.

A process that has NVML keeps the kernel module in use: no GPU can be reset, MIG mode cannot be
switched, and the module cannot be removed. The agent lets go by itself when it is told to end, and
when the driver's files go. For the rest there is a file, ``let-go`` in the agent's state directory:
as long as it is there no child of the monitor's runs, and its first line is the reason that people
are told. Only root can make it. The mark of something that is out of service can say the same
(:mod:`hooks.node.drained`): `nvshim drain --let-go`, `nvshim drain --driver`, `nvshim reset`.

Source: nvidia-smi(1), "--gpu-reset" and "--multi-instance-gpu".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NoReturn

from api.errors import one_line
from hooks.config import Config
from hooks.node.drained import read_drains
from integration.files import read_some
from integration.node.watcher import ANY, Interest, Watcher

if TYPE_CHECKING:
    from integration.node.components import Context

FILE: Final = "let-go"
"""The file's name in the state directory."""

FAULT: Final = "monitor.let-go"
"""What the fault is called that the file is only looked for every now and then."""

_LONGEST: Final = 200
_FILE: Final = Interest(frozenset({FILE}))


async def follow(context: Context) -> NoReturn:
    """Let go of NVML while the file is there, until cancelled."""
    board, config = context.board, context.config
    directory = config.state
    with Watcher(quiet=0) as watcher:
        while True:
            why = _reason(os.path.join(directory, FILE)) or _reason_of_marks(config)
            if why != board.let_go:
                board.post(let_go=why)
                if why:
                    context.say("info", "NVML is let go", reason=why)
                else:
                    context.say("info", "NVML is asked again")
                    board.want_look()
            await watcher.change({directory: _FILE, config.drained: ANY})
            line = f"{directory} is not watched: {watcher.deaf}" if watcher.deaf else ""
            context.fault(FAULT, line, level="warning")


def _reason_of_marks(config: Config) -> str:
    """Why, if something is out of service for which NVML is to be let go."""
    marks = (each for each in read_drains(config) if each.lets_go)
    return next((one_line(f"{mark.name} is out of service {mark.why}") for mark in marks), "")


def _reason(path: str) -> str:
    """Why, if the file is there."""
    try:
        first = read_some(path, _LONGEST).decode(errors="replace").partition("\n")[0]
    except FileNotFoundError:
        return ""
    except OSError:
        first = ""
    return one_line(first) or f"{path} is there"
