"""Asking NVML one question in a child of its own, since it may hang (:mod:`.query_child`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from hooks import engine
from integration.nvml.inventory import ask

if TYPE_CHECKING:
    from hooks.config import Config

_PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "query_child.py")
_PLACE: Final = 3  # of the program in the command that asks for the inventory
_TO_END: Final = 1.0


def ask_nvml(config: Config, question: str, *arguments: str) -> bytes | None:
    """What NVML answers to one question.

    Args:
        config: where the driver is, and how long it may take.
        question: "links", "mode", "parts" or "persistence".

    Returns:
        What the child printed; None if it did not end in time, or NVML was not to be opened.

    Raises:
        DriverNotFound: there is no driver below the driver root.
        DriverMismatch: its files are not of the loaded kernel module's version.
    """
    command = list(engine.probe_command(config))
    command[_PLACE] = _PROGRAM
    seconds = config.nvml_timeout + _TO_END
    return ask([*command, question, *arguments], seconds, state=config.state)
