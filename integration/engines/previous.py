"""Compute the configuration as it would be if nvshim had never changed it.

See :mod:`integration.engines.undo` for the rules that all engines share. containerd adds one: it
does not start if a file imported by name is missing. So that import is removed together with the
file, even if someone has reformatted it since.
"""

from __future__ import annotations

import tomllib
from typing import Any

from integration import tomltext
from integration.engines import undo
from integration.engines.imports import imports_value, is_of_any_version, resolved
from integration.engines.options import PLUGINS, Options, handlers_path
from integration.engines.undo import Record, View, Written
from integration.handlers import calls_our_shim


def without_nvshim(options: Options, record: Record) -> View:
    """Return the node as it would be if nvshim had never changed it.

    Raises:
        ChangedByHand: our part was edited.
    """

    def undone(path: str, written: Written, text: str, force: bool) -> str | None:  # noqa: FBT001 - see Undo
        found = undo.undo_edits(path, written, text, force)
        for table in _tables_of_ours(found or "", record.name):
            if not force:
                raise undo.changed_by_hand(path)
            found = tomltext.cut(found or "", table)
        return None if found is None else _with_version(found, text)

    view = undo.without(record, force=options.force, undo=undone)
    gone = [path for path, text in view.changed.items() if text is None]
    text = view.text(options.config)
    if not gone or text is None:
        return view
    had = next((w.before for w in record.versions(options.config) if w.before is not None), text)
    without = _without_imports(text, options.config, gone, had_any=imports_value(had) is not None)
    return view if without == text else view.with_text(options.config, without)


def _with_version(text: str, now: str) -> str:
    """Return a text with its current version, if someone has come to rely on it.

    We added the version to a file without one; since then someone added plugin tables.
    """
    try:
        table, version = tomltext.parse(text), tomltext.parse(now).get("version")
    except tomllib.TOMLDecodeError:
        return text  # containerd does not read it either
    if table.get("version") or not version or is_of_any_version(table):
        return text
    return tomltext.insert_line(text, 0, f"version = {version}")


def _tables_of_ours(text: str, name: str) -> list[tuple[str, ...]]:
    """Return the paths of the handler's tables, if it is ours."""
    try:
        document = tomltext.parse(text)
    except tomllib.TOMLDecodeError:
        return []  # containerd does not read it either
    found = []
    for path in {handlers_path(version) for version in PLUGINS}:
        at: Any = document
        for part in (*path, name):
            at = at.get(part, {}) if isinstance(at, dict) else {}
        if isinstance(at, dict) and calls_our_shim(at.get("runtime_type"), at.get("runtime_path")):
            found.append((*path, name))
    return found


def _without_imports(text: str, root: str, paths: list[str], *, had_any: bool) -> str:
    """Return a file's text without imports of these files by name.

    Args:
        text: the file's text.
        root: the file's path.
        paths: the imported files that will be removed.
        had_any: whether the file had imports before our change.
    """
    value = imports_value(text)
    if value is None:
        return text

    def is_ours(name: Any) -> bool:
        return "*" not in name and resolved(root, name) in paths

    if not had_any and all(map(is_ours, tomltext.parse(text)["imports"])):
        begin, end = text.rfind("\n", 0, value[0]) + 1, text.find("\n", value[1])
        return text[:begin] + ("" if end < 0 else text[end + 1 :])
    return tomltext.remove_element(text, value, is_ours)
