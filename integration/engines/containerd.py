"""A runtime handler of containerd's CRI plugin: what has to be written where, and taken out again.

Rules
- **Only our own table.** Everything else that containerd reads is the same before and after, which
  containerd itself is asked (:mod:`integration.engines.dump`); otherwise nothing is written.
- **containerd 2 merges** an imported file into the root file: there the handler is a drop-in, in
  the version of the root file (a higher one is refused, or keeps the root file from being
  migrated). The root file gets an import of it only where none covers it.
- **containerd 1 replaces** a plugin's whole table by that of an imported file: a drop-in with the
  CRI plugin's table would take away what the root file says of it (sandbox image, CNI, registry,
  systemd's cgroups), now or as soon as somebody writes something there. So there the handler
  is a marked block at the end of the file whose table is in force: the last one that has it.
- containerd 1 also forgets its built-in handler ``runc`` as soon as a file names any other. Where
  that would happen, the block names it as well.
- A root file that is not there means containerd's defaults, and then no release reads conf.d. So
  one is made, with the drop-in's import or the block and nothing else.
- The drop-in sorts behind NVIDIA's (99-nvidia.toml), and has a name that no tool of NVIDIA's
  writes or removes. A handler that somebody else has configured is never changed.
- Taking out is the exact inverse: what others have not touched is byte for byte what it was.

Source: containerd-config.toml(5); containerd cmd/containerd/server/config LoadConfig, mergeConfig;
docs/cri/config.md; k3s pkg/agent/templates.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from integration.engines import marks
from integration.engines.dump import Containerd, differences, handlers
from integration.engines.errors import ConfigRefused, EngineNotInstalled
from integration.engines.files import Change, FileChange, Need, missing_directories, read
from integration.engines.former import Former, without_us
from integration.engines.handler import check_name
from integration.engines.imports import View, load
from integration.engines.options import ENGINE, Options
from integration.engines.verdict import check, check_former, refuse_generated
from integration.engines.wanted import with_us

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["plan", "plan_removal"]


def plan(options: Options) -> Change:
    """What has to change so that containerd has the handler.

    Args:
        options: what is wanted.

    Returns:
        The change, which is empty if it has it already.

    Raises:
        EnginesError: it cannot be had, or not without changing something else.
    """
    check_name(options.runtime_name)
    containerd = Containerd(options.program)
    refuse_generated(options, load(View(), options.config, relative_patterns=containerd.merges))
    former = without_us(options, containerd)
    before = containerd.dump(former.view, options.config)
    check_former(options, former.view, before)
    wanted, notes = with_us(options, containerd, former, before)
    after = containerd.dump(wanted, options.config)
    if lost := handlers(before).keys() - handlers(after).keys():
        kept = {name: handlers(before)[name] for name in lost}
        wanted, notes = with_us(options, containerd, former, before, kept)
        after = containerd.dump(wanted, options.config)
    check(options, before, after)
    return _change(options, containerd, former, wanted, after, notes=notes)


def plan_removal(options: Options) -> Change:
    """What has to change so that nothing of ours is left.

    Args:
        options: where to look (``config``, ``drop_in``, ``handler_options``).

    Returns:
        The change, which is empty if there is nothing of ours.

    Raises:
        EnginesError: a file cannot be read, or was changed by hand.
    """
    notes = []
    containerd = after = None
    try:
        containerd = Containerd(options.program)
    except EngineNotInstalled as error:
        notes.append(f"not looked at by containerd: {error.found}")
    former = without_us(options, containerd)
    if containerd is not None:
        try:
            after = containerd.dump(former.view, options.config)
        except ConfigRefused as error:
            # It is no reason to stay.
            notes.append(f"what is left is refused by containerd: {error.found}")
    return _change(options, containerd, former, former.view, after, notes=notes)


def _change(
    options: Options,
    containerd: Containerd | None,
    former: Former,
    wanted: View,
    after: Mapping[str, Any] | None,
    *,
    notes: Sequence[str],
) -> Change:
    files = [
        change
        for path, text in wanted.exchanged.items()
        if (change := _file_change(path, text, former)) is not None
    ]
    files.sort(key=lambda change: _rank(options, change))
    need, why = _need(options, containerd, after, changed=bool(files))
    return Change(ENGINE, tuple(files), need, why, options.config, tuple(notes))


def _file_change(path: str, text: str | None, former: Former) -> FileChange | None:
    old, new = read(path), None if text is None else text.encode()
    if old == new:
        return None
    directories: tuple[str, ...] = ()
    if new is None:
        directories = former.directories.get(path, ())
    elif old is None:
        directories = missing_directories(path)
    return FileChange(path, old, new, directories=directories)


def _rank(options: Options, change: FileChange) -> int:
    """What is referred to is there before the reference, and goes after it."""
    is_options = os.path.dirname(change.path) == options.handler_options
    if change.new is None:
        return 4 if is_options else 2 if change.path == options.config else 3
    owned = change.path != options.config and marks.read_owned(change.new.decode()) is not None
    return 0 if is_options else 1 if owned else 2


def _need(
    options: Options,
    containerd: Containerd | None,
    after: Mapping[str, Any] | None,
    *,
    changed: bool,
) -> tuple[Need, str]:
    if not changed:
        return Need.NOTHING, "nothing changes: containerd needs no restart"
    if containerd is not None and after is not None:
        try:
            now = containerd.dump(View(), options.config)
        except ConfigRefused:
            now = None
        if now is not None and next(differences(now, after), None) is None:
            return Need.NOTHING, "nothing that containerd reads changes: it needs no restart"
    return Need.RESTART, (
        "containerd reads its configuration when it starts: it needs a restart; "
        "running containers go on meanwhile"
    )
