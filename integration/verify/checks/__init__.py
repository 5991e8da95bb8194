"""The checks, in the order in which they are made.

A check is made if those that it needs have not failed: a handler that is missing is one failure,
and not one of every container. What is not there at all (no kubelet, no agent) a check finds by
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from integration.verify.checks import agent, containers, devices
from integration.verify.node import Node


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table."""

    name: str  # by which it is asked for
    title: str  # what it checks, in some words
    # makes it, and returns what was seen. It raises NotAsExpected, NotMade or CriError.
    make: Callable[[Node], str]
    needs: tuple[str, ...] = ()  # the names of those without which it says nothing


CHECKS: Final = (
    Check("handler", "the engine runs pods with our handler", containers.handler_answers),
    Check("exit", "exit codes arrive", containers.exit_code_arrives, ("handler",)),
    Check("exec", "exec works", containers.exec_arrives, ("exit",)),
    Check("no-gpu", "no request, no GPU", containers.none_is_given, ("exit",)),
    Check("gpu", "a request gives exactly its GPU", containers.gpus_are_given, ("no-gpu",)),
    Check("plugin", "a device plugin is registered", devices.plugin_is_registered),
    Check("devices", "each GPU can be given", devices.devices_are_given, ("plugin",)),
    Check("answer", "a plugin's answer gives its GPU", devices.answer_arrives, ("plugin", "gpu")),
    Check("health", "health goes down and up", agent.health_follows, ("plugin",)),
    Check("restart", "a restart of the agent loses nothing", agent.restart_loses_nothing,
          ("plugin", "gpu")),
)  # fmt: skip
