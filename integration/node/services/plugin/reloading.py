"""The device plugin's settings: published, and read again whenever their sources change.

Rules
- Settings that cannot be used leave those before in force, and it is said what is wrong with them.
- What is written is read when it is quiet again, and not while it is half there.
- A volume of Kubernetes' is exchanged by a link in the directory that is mounted, so that is
  watched, and what the link leads to.
- A hangup of the agent's (SIGHUP) has them read again too: so NVIDIA's plugin is told, by its
  config-manager and by people.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio

from api.errors import NvshimError
from integration.node.state.topic import version_of, wait_any
from integration.node.values.resources import Settings
from integration.node.values.service_name import ServiceName
from integration.watcher import ANY, Watcher, first_of

if TYPE_CHECKING:
    from integration.node.service import Context
    from integration.node.settings.source import Source

# Seconds without a change after which a file is taken to be written.
_WRITING: Final = 0.3
_LONGEST_SWARM: Final = 1.0


async def keep_settings(context: Context, fault: Callable[[str, str], None]) -> None:
    """Post the settings, now and whenever they change.

    Args:
        fault: takes what is wrong with a concern; "" if nothing is.
    """
    source, state = context.options.settings, context.state
    if source is None:
        _post(context, Settings())
        return
    with Watcher(_WRITING, _LONGEST_SWARM) as watcher:
        while True:
            version = version_of(state.reloads)
            _load(source, context, fault)
            wanted = dict.fromkeys(_directories_of(source.watched), ANY)
            await first_of(
                partial(watcher.change, wanted) if wanted else anyio.sleep_forever,
                partial(wait_any, state.reloads, since=version),
            )


def _load(source: Source, context: Context, fault: Callable[[str, str], None]) -> None:
    try:
        _post(context, source.load())
    except NvshimError as error:
        kept = "" if context.state.settings.value is None else "; those before stay in force"
        fault("settings", f"{error}{kept}")
    else:
        fault("settings", "")


def _post(context: Context, settings: Settings) -> None:
    if settings == context.state.settings.value:
        return
    context.say("info", "settings of the device plugin", source=settings.source or "none")
    for note in settings.notes:
        context.say("warning", note)
    context.state.settings.publisher(ServiceName.PLUGIN).publish(settings)


def _directories_of(paths: Iterable[str]) -> set[str]:
    """The directories in which something of these files and directories can change."""
    found = set()
    for path in paths:
        for each in (path, os.path.realpath(path)):
            found.add(each if os.path.isdir(each) else os.path.dirname(os.path.abspath(each)))
    return found
