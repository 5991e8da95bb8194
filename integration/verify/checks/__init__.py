"""The checks, in the order in which they run.

A check is skipped if one that it depends on failed, so a missing handler is one failure and not
one per container. A check skips itself if the node has no kubelet or no agent.
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

    name: str  # for --only and --skip
    title: str  # what it checks, in a few words
    # Run the check and return a sentence on success; raise CheckFailed, CheckSkipped or CriError.
    run: Callable[[Node], str]
    needs: tuple[str, ...] = ()  # the checks that must not have failed


CHECKS: Final = (
    Check("handler", "the engine runs pods with the shim's handler", containers.handler_is_ours),
    Check("exit", "exit codes are reported", containers.exit_code_is_reported, ("handler",)),
    Check("exec", "exec works", containers.exec_works, ("exit",)),
    Check("no-gpu", "without a request, no GPU", containers.no_gpu_without_request, ("exit",)),
    Check("gpu", "a request gets exactly its GPU", containers.each_gpu_is_isolated, ("no-gpu",)),
    Check("plugin", "a device plugin is registered", devices.plugin_is_registered),
    Check("devices", "each GPU can be allocated", devices.devices_are_allocatable, ("plugin",)),
    Check("answer", "the plugin's answer gives its GPU", devices.allocation_works,
          ("plugin", "gpu")),
    Check("health", "a failing GPU is withdrawn and returned", agent.health_follows, ("plugin",)),
    Check("restart", "an agent restart loses nothing", agent.restart_loses_nothing,
          ("plugin", "gpu")),
)  # fmt: skip
