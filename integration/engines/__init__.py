"""Configure container engines for the shim: containerd, Docker and CRI-O.

A change is planned first, as a value that can be shown, and then applied::

    options = ContainerdOptions(runtime_name="nvidia", set_default=True)
    change = plan(options)          # reads only; containerd has validated it
    print(change.diff(), change.need, change.why)
    apply(change)                   # replaces each file atomically
    apply(plan_removal(options))    # the exact inverse

Rules
- We add only our own table. Everything else stays byte for byte as it was, and the engine itself
  confirms that it reads the rest as before.
- Removal is the exact inverse, even if other parts of the file were edited in between.
- If our part was edited, we stop with an error and overwrite nothing. We replace an existing
  handler of the same name only with ``replace``; --remove restores it.
- This room restarts nothing unless asked (:mod:`integration.engines.restart`). A change states
  whether the engine needs a restart.

Modules: ``runtime_options`` has the options of every engine. ``containerd`` uses ``options``,
``previous``, ``desired``, ``checks``, ``imports``, ``effective_config`` and ``cri_trial``;
``docker`` and ``crio`` are one module each. ``jsontext`` edits JSON text, ``undo`` records the
previous contents and restores them, ``files`` replaces files.
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
    """Return the change that adds our handler to an engine; empty if it is already there.

    Raises:
        EnginesError: it is not possible, or only by changing something else as well.
    """
    change: Change = _MODULES[type(options)].plan(options)
    return change


def plan_removal(options: Options) -> Change:
    """Return the change that removes everything of ours from an engine's configuration.

    Args:
        options: the engine's options, with the same paths as when it was configured.

    Raises:
        EnginesError: a file cannot be read or was edited by hand, or the engine would be worse off
            than before.
    """
    change: Change = _MODULES[type(options)].plan_removal(options)
    return change
