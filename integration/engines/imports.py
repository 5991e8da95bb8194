"""Which files containerd reads, in its order, of a node as it is or as it would be.

Rules
- A node is a :class:`~integration.engines.undo.View`: what is planned can be looked at before any
  of it is written.
- Files are read as containerd reads them: the root file, then what it imports, then what those
  import, each once, by its path. A pattern has its matches sorted by name; a path without ``*``
  has to be there.
- The version of a file without ``version`` is 1.

Source: containerd cmd/containerd/server/config LoadConfig, resolveImports (services/server/config
in 1.x, of which older releases look for relative patterns from their own working directory).
"""

from __future__ import annotations

import fnmatch
import glob
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from integration import tomltext
from integration.engines.errors import ConfigInvalid
from integration.engines.undo import View

_VERSIONS: Final = range(1, 5)


@dataclass(frozen=True, slots=True)
class File:
    """A file of the configuration."""

    path: str  # of it
    text: str | None  # what is in it; None for one that is imported and not there
    table: Mapping[str, Any]  # the same, parsed
    # the files that it imports, in order, each import with those that it names
    imports: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def version(self) -> int:
        """Of its format."""
        version: int = self.table.get("version", 1) or 1
        return version


def load(view: View, root: str, *, relative_patterns: bool = True) -> list[File]:
    """The files of a configuration, in the order in which they are merged.

    Args:
        view: the node.
        root: the path of the root file.
        relative_patterns: whether relative patterns are meant from the importing file's directory,
            not from containerd's own (see ``Containerd.relative_patterns``).

    Returns:
        The root file first; one that is not there has no text.

    Raises:
        ConfigUnreadable: a file cannot be read.
        ConfigInvalid: a file is no TOML, or of an unknown version.
    """
    files: dict[str, File] = {}
    pending = [root]
    while pending:
        path = pending.pop(0)
        if path in files:
            continue
        text = view.text(path)
        table = {} if text is None else parse(path, text)
        imports = []
        for pattern in _patterns(path, table):
            where = "/" if "*" in pattern and not relative_patterns else path
            absolute = resolved(where, pattern)
            imports.append((absolute, tuple(matches(view, absolute))))
        files[path] = File(path, text, table, tuple(imports))
        pending += [match for _, matches in imports for match in matches]
    return list(files.values())


def parse(path: str, text: str) -> dict[str, Any]:
    """A file's content.

    Raises:
        ConfigInvalid: it is no TOML, or of a version that nobody knows.
    """
    try:
        table = tomltext.parse(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid(f"to read {path}", found=f"no TOML: {error}") from error
    version = table.get("version", 1)
    # 0 is what containerd itself takes for none.
    if not isinstance(version, int) or isinstance(version, bool) or (version or 1) not in _VERSIONS:
        raise ConfigInvalid(
            f"to read {path}", found=f"version = {version!r}; known are versions 1 to 4",
            do="update nvshim, or see whether the file is containerd's",
        )  # fmt: skip
    return table


def matches(view: View, pattern: str) -> list[str]:
    """The files of a node that a pattern names, sorted; a path without ``*`` names itself."""
    if "*" not in pattern:
        return [pattern]
    found = set(glob.glob(pattern, include_hidden=True))
    found |= {path for path in view.exchanged if _is_match(path, pattern)}
    return sorted(path for path in found if view.exchanged.get(path, "") is not None)


def covers(file: File, path: str) -> bool:
    """Whether a file imports a path, be it there or not."""
    return any(
        _is_match(path, pattern) if "*" in pattern else path == pattern
        for pattern, _ in file.imports
    )


def resolved(path: str, pattern: str) -> str:
    """Where an import leads to."""
    return os.path.normpath(os.path.join(os.path.dirname(path), pattern))


def imports_value(text: str) -> tuple[int, int] | None:
    """Where the value of ``imports`` is in a text; None if there is none."""
    for statement in tomltext.statements(text):
        if statement.path == ("imports",) and statement.key:
            return statement.value
    return None


def _patterns(path: str, table: Mapping[str, Any]) -> list[str]:
    patterns = table.get("imports", [])
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise ConfigInvalid(f"to read {path}", found="imports is no list of strings")
    return patterns


def _is_match(path: str, pattern: str) -> bool:
    """Whether a pattern of Go's filepath.Glob names a path: ``*`` is within one directory."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
