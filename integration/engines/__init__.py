"""Configuring container engines for the shim: containerd, Docker and CRI-O.

What is to be done is planned first, as a value that can be shown, and then done::

    options = ContainerdOptions(runtime_name="nvidia", set_default=True)
    change = plan(options)          # reads only; containerd has validated it
    print(change.diff(), change.need, change.why)
    apply(change)                   # each file in one step; a crash leaves old or new ones
    apply(plan_removal(options))    # the exact inverse

Rules
- Only our own table is added. What others wrote stays as it is, byte for byte, and the engine
  itself is asked whether it reads everything else as before.
- To remove is the exact inverse, also of a part that somebody has edited around since.
- What somebody has changed of ours is an error and not overwritten. A handler of our name that
  somebody else has configured is replaced only if a person says so, and comes back with --remove.
- Nothing is restarted here (:mod:`integration.engines.restart` does, when a person asks for it); a
  change says whether the engine needs it.

Modules: ``runtime_options`` has what all engines have; ``containerd`` (with ``options``,
``former``, ``wanted``, ``verdict``, ``imports``, ``dump``), ``docker``, ``crio``; ``tomltext`` and
``jsontext`` edit text, ``undo`` has the record of what was there before and the way back, ``files``
replaces files.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final, TypeAlias

from integration.engines import containerd, crio, docker
from integration.engines.files import Change, FileChange, Need, apply
from integration.engines.options import Options as ContainerdOptions

Options: TypeAlias = ContainerdOptions | docker.Options | crio.Options

__all__ = [
    "Change",
    "ContainerdOptions",
    "FileChange",
    "Need",
    "Options",
    "apply",
    "containerd",
    "crio",
    "docker",
    "plan",
    "plan_removal",
]


_MODULES: Final[Mapping[type, ModuleType]] = {
    ContainerdOptions: containerd, docker.Options: docker, crio.Options: crio,
}  # fmt: skip


def plan(options: Options) -> Change:
    """What has to change so that an engine knows our runtime; nothing if it does already.

    Raises:
        EnginesError: it cannot be had, or not without changing something else.
    """
    change: Change = _MODULES[type(options)].plan(options)
    return change


def plan_removal(options: Options) -> Change:
    """What has to change so that nothing of ours is left in an engine's configuration, if it is.

    Args:
        options: of the engine, with the same places as when it was configured.

    Raises:
        EnginesError: a file cannot be read, or was changed by hand, or the engine would not be as
            well off without us.
    """
    change: Change = _MODULES[type(options)].plan_removal(options)
    return change
