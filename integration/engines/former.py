"""A node without us: what its files would be had we never been there.

Every plan begins with it: to configure is to add our parts to the node without us, and to remove
is to leave it at that. So the one is the inverse of the other, whatever was configured before.

Rules
- Files of ours go, with the directories that were made for them. Of files of others our block goes,
  and values that we changed become what they were.
- What somebody has changed of ours since stays until forced, with an error that says so.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from integration.engines import marks, tomltext
from integration.engines.errors import ChangedByHand
from integration.engines.imports import View, imports_value, load, resolved
from integration.engines.options import default_drop_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from integration.engines.dump import Containerd
    from integration.engines.options import Options

__all__ = ["Former", "without_import", "without_us"]


@dataclass(frozen=True, slots=True)
class Former:
    """A node without us.

    Attributes:
        view: its files.
        directories: that were made for each file of ours.
    """

    view: View
    directories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def without_us(options: Options, containerd: Containerd | None) -> Former:
    """The node as it would be had we never been there.

    Raises:
        ChangedByHand: something of ours is not as we wrote it.
    """
    relative = containerd is None or containerd.relative_patterns
    files = load(View(), options.config, relative_patterns=relative)
    paths = [file.path for file in files if file.text is not None]
    paths += [path for path in _places(options) if path not in paths]
    view, directories = View(), {}
    imported = []
    for path in paths:
        text = view.text(path)
        if text is None:
            continue
        owned = marks.read_owned(text)
        if owned is None or (path == options.config and not owned.intact):
            view = view.with_text(path, _plain(path, marks.without_head(text), options))
            continue
        if owned.record.get("for", options.config) != options.config:
            continue  # of another containerd of this node
        if not owned.intact and not options.force:
            raise _by_hand(path)
        directories[path] = _made_for(path, owned.record.get("directories"))
        view = view.with_text(path, None)
        imported.append((path, owned.record.get("import")))
    for path, kind in imported:
        text = view.text(options.config)
        if text is not None:
            view = view.with_text(options.config, without_import(text, options.config, path, kind))
    return Former(view, directories)


def _made_for(path: str, noted: Any) -> tuple[str, ...]:
    """The directories of a record, but none that the file is not in: it is only a comment."""
    if not isinstance(noted, list):
        return ()
    real = os.path.realpath(path)
    return tuple(each for each in noted if isinstance(each, str) and real.startswith(f"{each}/"))


def _places(options: Options) -> list[str]:
    """Where files of ours may be that containerd does not read (yet, or any more)."""
    places = [default_drop_in(options), *filter(None, [options.drop_in])]
    try:
        names = sorted(os.listdir(options.handler_options))
    except OSError:
        names = []
    paths = [os.path.join(options.handler_options, name) for name in names]
    return places + [path for path in paths if os.path.isfile(path)]


def _plain(path: str, text: str, options: Options) -> str:
    """A file of others without our parts."""
    try:
        tomltext.parse(text)
    except tomllib.TOMLDecodeError:
        return text  # none that containerd reads, or it has been said already
    block = marks.find_block(text)
    if block is not None and not block.intact and not options.force:
        raise _by_hand(path)
    return marks.restore_values(marks.remove_block(text))


def _by_hand(path: str) -> ChangedByHand:
    return ChangedByHand(
        f"to write or remove what nvshim has put into {path}",
        found="it was changed since",
        do="look at it; --force overwrites or removes it",
    )


def without_import(text: str, root: str, path: str, kind: Any) -> str:
    """A file without what imports a file of ours by its name.

    However that is written by now: containerd does not start without a file that is imported so.

    Args:
        text: the file's.
        root: its path.
        path: what it imports.
        kind: "line" if all of ``imports`` was ours.
    """
    value = imports_value(text)
    if value is None:
        return text

    def is_ours(name: Any) -> bool:
        return "*" not in name and resolved(root, name) == path

    if kind == "line" and all(map(is_ours, tomltext.parse(text)["imports"])):
        begin = text.rfind("\n", 0, value[0]) + 1
        return tomltext.remove_line(text, begin, _line_behind(text, value[1]))
    return tomltext.remove_element(text, value, is_ours)


def _line_behind(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1
