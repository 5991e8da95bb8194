"""Publish the device plugin's settings, and reload them whenever their sources change.

Rules
- If new settings are invalid, the agent reports the error and keeps the previous ones.
- The agent reads a file after writing to it has stopped, so that it never reads half a file.
- Kubernetes updates a ConfigMap volume by switching a symbolic link in the mounted directory. So
  the agent watches that directory and the link's target.
- SIGHUP also reloads the settings, as in NVIDIA's plugin: its config-manager sends it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import anyio

from api.errors import NvshimError
from integration.node.service import Context
from integration.node.settings.source import Source
from integration.node.state.topic import version_of, wait_any
from integration.node.values.resources import Settings
from integration.node.values.service_name import ServiceName
from integration.watcher import ANY, Watcher, first_of

# Seconds without a change after which a file counts as complete.
_WRITING: Final = 0.3
_LONGEST_SWARM: Final = 1.0


async def keep_settings(context: Context, fault: Callable[[str, str], None]) -> None:
    """Publish the settings, now and whenever they change.

    Args:
        fault: called with a subject and what is wrong with it; "" if nothing is wrong.
    """
    source, state = context.options.settings, context.state
    if source is None:
        _publish(context, Settings())
        return
    with Watcher(_WRITING, _LONGEST_SWARM) as watcher:
        while True:
            version = version_of(state.reloads)
            _load(source, context, fault)
            interests = dict.fromkeys(_directories_of(source.watched), ANY)
            await first_of(
                partial(watcher.change, interests) if interests else anyio.sleep_forever,
                partial(wait_any, state.reloads, since=version),
            )


def _load(source: Source, context: Context, fault: Callable[[str, str], None]) -> None:
    try:
        _publish(context, source.load())
    except NvshimError as error:
        kept = "" if context.state.settings.value is None else "; the previous ones stay in force"
        fault("settings", f"{error}{kept}")
    else:
        fault("settings", "")


def _publish(context: Context, settings: Settings) -> None:
    if settings == context.state.settings.value:
        return
    context.say("info", "settings of the device plugin", source=settings.source or "none")
    for note in settings.notes:
        context.say("warning", note)
    context.state.settings.publisher(ServiceName.PLUGIN).publish(settings)


def _directories_of(paths: Iterable[str]) -> set[str]:
    """Return the directories where a change may affect these files and directories."""
    directories = set()
    for path in paths:
        for each in (path, os.path.realpath(path)):
            is_directory = os.path.isdir(each)
            directories.add(each if is_directory else os.path.dirname(os.path.abspath(each)))
    return directories
