"""Read the configuration, show where each value comes from, and change one.

Rules
- A key is written ``TABLE.KEY`` (``policy.mode``), a value as in TOML.
- A file is edited in place: comments and order stay, a link is followed, owner and mode stay. The
  new text is checked as the shim checks it; an invalid file is not written. The write is atomic.
- If a file of ours exists, NVIDIA's configuration is no longer read. So the first ``set`` converts
  all of NVIDIA's configuration if that was in use.
- If the file has changed since it was read, it is not overwritten.

Source: TOML 1.0; :mod:`hooks.config`, :mod:`hooks.config.nvidia`.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.errors import NvshimError
from hooks.config import TABLES, Config, find_files, parse_config, parse_toml
from hooks.config.nvidia import KEYS, parse_nvidia_config
from hooks.errors import ConfigUnreadable
from hooks.schema import Kind, WrongValue
from integration import tomltext
from integration.files import read_file, replace_file
from integration.inspection.errors import (
    SettingRefused,
    SettingsChanged,
    SettingsNotWritten,
    SettingUnknown,
)

DEFAULT: Final = "default"
OURS: Final = "file"
NVIDIA: Final = "nvidia"

_OF_NVIDIA: Final = frozenset(key.partition(".")[0] for key in KEYS)


@dataclass(frozen=True, slots=True)
class Source:
    """The file that contains the configuration."""

    path: str  # the file in use; our file if there is none
    kind: str  # OURS or NVIDIA; DEFAULT if there is no file
    ours: str  # the path of our file, which need not exist


@dataclass(frozen=True, slots=True)
class Setting:
    """A value in effect."""

    name: str  # ``TABLE.KEY``
    value: Any  # as in TOML; None if TOML cannot express it
    origin: str  # DEFAULT, OURS or NVIDIA
    allowed: str  # a description of the allowed values

    def to_json(self) -> dict[str, Any]:
        """Return plain values for output."""
        return {
            "key": self.name,
            "value": self.value,
            "origin": self.origin,
            "wanted": self.allowed,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """A planned change of a file."""

    path: str
    before: bytes | None  # the content now; None if there is no file
    after: bytes  # the content afterwards
    notes: tuple[str, ...] = ()  # for the user

    @property
    def is_needed(self) -> bool:
        """Whether the content changes."""
        return (self.before or b"") != self.after

    @property
    def diff(self) -> str:
        """The change as diff -u shows it."""
        before, after = (
            (content or b"").decode(errors="replace").splitlines(keepends=True)
            for content in (self.before, self.after)
        )
        old = "/dev/null" if self.before is None else self.path
        return "".join(difflib.unified_diff(before, after, old, self.path))


def setting_names() -> list[str]:
    """Return every key, in the order of the documentation."""
    return [f"{table}.{key}" for table, keys in TABLES.items() for key in keys]


def find_source(path: str | None = None) -> Source:
    """Return the file in use, found as :func:`hooks.config.load_config` finds it."""
    (ours, named), (nvidias, nvidias_named) = find_files(path)
    if named or os.path.lexists(ours):
        return Source(ours, OURS, ours)
    if nvidias_named or os.path.lexists(nvidias):
        return Source(nvidias, NVIDIA, ours)
    return Source(ours, DEFAULT, ours)


def read_settings(source: Source) -> tuple[list[Setting], tuple[str, ...]]:
    """Return every value in effect.

    Returns:
        The settings in the order of the documentation, and notes for the user.

    Raises:
        ConfigError: the file cannot be read, or is not valid.
    """
    content = b"" if source.kind == DEFAULT else _content(source.path)
    if source.kind == NVIDIA:
        config, written = parse_nvidia_config(content, source.path), {}
    else:
        config, written = parse_config(content, source.path), parse_toml(content, source.path)
    found = []
    for table, keys in TABLES.items():
        for key, setting in keys.items():
            value = getattr(config, setting.field)
            origin = DEFAULT
            if key in written.get(table, {}):
                origin = OURS
            elif source.kind == NVIDIA and value != setting.default:
                origin = NVIDIA
            kind = setting.kind
            found.append(Setting(setting.key, kind.written(value), origin, kind.wanted))
    return found, config.notes


def read_setting(source: Source, name: str) -> Setting:
    """Return the value of one key.

    Args:
        source: the configuration in use.
        name: ``TABLE.KEY``.

    Raises:
        SettingUnknown: there is no such key.
        ConfigError: the file cannot be read, or is not valid.
    """
    table, key = _split(name)
    found, _ = read_settings(source)
    return next(setting for setting in found if setting.name == f"{table}.{key}")


def validate(path: str) -> Config:
    """Check a file as the shim would.

    Args:
        path: a file of ours, or of NVIDIA's toolkit.

    Raises:
        ConfigError: it cannot be read, or is not valid.
    """
    content = _content(path)
    (ours, _), (nvidias, _) = find_files()
    names = parse_toml(content, path).keys()
    looks_like_nvidias = names & _OF_NVIDIA and not names & TABLES.keys()
    if path == nvidias or (path != ours and looks_like_nvidias):
        return parse_nvidia_config(content, path)
    return parse_config(content, path)


def set_setting(source: Source, name: str, words: Sequence[str]) -> Change:
    """Plan to set a key.

    Args:
        source: the configuration in use; the change is made in our file.
        name: ``TABLE.KEY``.
        words: the value: one word, plain or as TOML writes it, or the entries of a list.

    Returns:
        The change of the file.

    Raises:
        SettingUnknown: there is no such key.
        SettingRefused: the key does not allow this value.
        ConfigError: the file is already invalid.
    """
    table, key = _split(name)
    kind = TABLES[table][key].kind
    value = next((v for v in _readings(words) if _is_allowed(kind, v)), None)
    if value is None:
        raise SettingRefused(
            f"to set {name} to {' '.join(words) or 'nothing'}",
            found="the key does not allow this value",
            do=f"set it to {kind.wanted}",
        )
    before, text, notes = _start(source)
    section = tomltext.parse(text).get(table, {})
    if section.get(key) != value or key not in section:
        text = tomltext.with_value(text, (table,), key, value)
    return _checked(source.ours, before, text, notes)


def remove_setting(source: Source, name: str) -> Change:
    """Plan to remove a key from our file, so that its default applies.

    Args:
        source: the configuration in use.
        name: ``TABLE.KEY``.

    Returns:
        The change of the file; empty if the file does not have the key.

    Raises:
        SettingUnknown: there is no such key.
        SettingRefused: the value comes from NVIDIA's file, or is in an inline table.
        ConfigError: the file is already invalid.
    """
    table, key = _split(name)
    if source.kind != OURS:
        if source.kind == NVIDIA:
            raise SettingRefused(
                f"to remove {name} from {source.ours}",
                found=f"that file does not exist; NVIDIA's {source.path} is in use",
                do="set the key to the value that you want",
            )
        return Change(source.ours, None, b"")
    before, text, notes = _start(source)
    text = tomltext.cut(text, (table, key))
    if key in tomltext.parse(text).get(table, {}):
        raise SettingRefused(
            f"to remove {name} from {source.ours}",
            found="it is in an inline table",
            do=f"write {table} = {{ … }} as a table of its own, [{table}]",
        )
    return _checked(source.ours, before, text, notes)


def write_change(change: Change) -> None:
    """Write a changed file.

    Raises:
        SettingsChanged: the file has changed since the change was planned.
        SettingsNotWritten: it cannot be written; it is unchanged.
    """
    asked = f"to write {change.path}"
    try:
        if read_file(change.path) != change.before:
            raise SettingsChanged(
                asked, found="the file has changed meanwhile", do="run the command again"
            )
        replace_file(change.path, change.after)
    except OSError as error:
        raise SettingsNotWritten(
            asked, found=os.strerror(error.errno or 0).lower(), do="run the command as root"
        ) from error


def _split(name: str) -> tuple[str, str]:
    table, _, key = name.partition(".")
    if key in TABLES.get(table, {}):
        return table, key
    names = setting_names()
    if not key and table in TABLES:
        raise SettingUnknown(
            f"the key {name}",
            found="is a table of the configuration, not a key",
            do=f"name one of its keys: {', '.join(f'{table}.{each}' for each in TABLES[table])}",
        )
    meant = difflib.get_close_matches(name, names, 1)
    if not key:
        alone = [each.partition(".")[2] for each in names]
        meant = [names[alone.index(each)] for each in difflib.get_close_matches(name, alone, 1)]
    raise SettingUnknown(
        f"the key {name}",
        found="does not exist",
        do=f"did you mean {meant[0]}?" if meant else "see `nvshim config show`",
    )


def _is_allowed(kind: Kind, value: Any) -> bool:
    try:
        kind.check(value)
    except WrongValue:
        return False
    return True


def _readings(words: Sequence[str]) -> list[Any]:
    """Return what words can mean: the TOML value of a single word, the word itself, a list."""
    readings: list[Any] = []
    if len(words) == 1:
        try:
            # In brackets, a trailing comment or a second line is not valid TOML.
            document = tomltext.parse(f"value = [{words[0]}]")
        except tomllib.TOMLDecodeError:
            document = {}
        if document.keys() == {"value"} and len(document["value"]) == 1:
            readings += document["value"]
        readings.append(words[0])
    return [*readings, list(words)]


def _start(source: Source) -> tuple[bytes | None, str, tuple[str, ...]]:
    """Return our file as it is, the text that a change starts from, and notes."""
    before = _read(source.ours)
    if before is not None:
        parse_config(before, source.ours)  # report an error that is there before our change
        return before, before.decode(), ()
    if source.kind != NVIDIA:
        return None, "", ()
    note = f"{source.path} was in use; its values were copied to {source.ours}"
    return None, _converted(source), (note,)


def _converted(source: Source) -> str:
    """Return NVIDIA's configuration as a text in our format."""
    text = f"# Copied from {source.path}, which is no longer read.\n"
    settings, _ = read_settings(source)
    for setting in settings:
        if setting.origin == NVIDIA:
            table, _, key = setting.name.partition(".")
            text = tomltext.with_value(text, (table,), key, setting.value)
    return text


def _checked(path: str, before: bytes | None, text: str, notes: tuple[str, ...]) -> Change:
    try:
        parse_config(text.encode(), path)
    except NvshimError as error:
        raise SettingRefused(f"to change {path}", found=error.found, do=error.do) from error
    return Change(path, before, text.encode(), notes)


def _content(path: str) -> bytes:
    content = _read(path)
    if content is None:
        raise ConfigUnreadable(
            f"to read the configuration {path}", found="no such file", do="name an existing file"
        )
    return content


def _read(path: str) -> bytes | None:
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigUnreadable(
            f"to read the configuration {path}",
            found=os.strerror(error.errno or 0).lower(),
            do="make the file readable",
        ) from error


def as_words(value: Any) -> str:
    """Return a value as TOML text; "" for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(as_words(entry) for entry in value) + "]"
    if isinstance(value, str):
        # A basic string of TOML is written like a JSON string.
        return json.dumps(value, ensure_ascii=False)
    return f"{value:g}"
