"""The configuration: what holds, where each value comes from, and changing one.

Rules
- A key is written ``TABLE.KEY`` (``policy.mode``); its value as TOML has it.
- A file is changed as an editor would: comments and order stay, a link is followed, owner and mode
  are kept. What is to be written is checked as the shim will check it; a file that would not be
  valid is not written. It appears whole, or not at all.
- Where NVIDIA's configuration is in use, a file of ours would take its place. So the first value
  that is set takes all of it over: what it meant, written in our words.
- A value that somebody else has written meanwhile is not overwritten.

Source: TOML 1.0; :mod:`hooks.config`, :mod:`hooks.config.nvidia`.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from api.errors import NvshimError
from hooks.config import TABLES, Config, find_files, parse_config, parse_toml
from hooks.config.nvidia import KEYS, parse_nvidia_config
from hooks.config.values import LOOK
from hooks.errors import ConfigUnreadable
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
    """The file that the configuration is read from."""

    path: str  # of the file in use; that of ours if there is none
    kind: str  # OURS or NVIDIAS; DEFAULT if there is none
    ours: str  # where a file of ours is, or would be


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that holds."""

    name: str  # ``TABLE.KEY``
    value: Any  # as TOML has it; None for what no value of TOML says
    origin: str  # DEFAULT, OURS or NVIDIAS
    allowed: str  # which values it can have, for people

    def to_json(self) -> dict[str, Any]:
        """As an answer has it."""
        return {
            "key": self.name,
            "value": self.value,
            "origin": self.origin,
            "wanted": self.allowed,
        }


@dataclass(frozen=True, slots=True)
class Change:
    """What is to become of a file."""

    path: str  # of the file
    before: bytes | None  # its content; None if there is none
    after: bytes  # its content to be
    notes: tuple[str, ...] = ()  # what a reader has to know of it

    @property
    def is_needed(self) -> bool:
        """Whether anything differs."""
        return (self.before or b"") != self.after

    @property
    def diff(self) -> str:
        """What differs, as diff -u has it."""
        before, after = (
            (content or b"").decode(errors="replace").splitlines(keepends=True)
            for content in (self.before, self.after)
        )
        old = "/dev/null" if self.before is None else self.path
        return "".join(difflib.unified_diff(before, after, old, self.path))


def setting_names() -> list[str]:
    """Every key that there is, in the order of the documentation."""
    return [f"{table}.{key}" for table, keys in TABLES.items() for key in keys]


def find_source(path: str | None = None) -> Source:
    """The file that holds, found as :func:`hooks.config.load_config` finds it."""
    (ours, named), (nvidias, nvidias_named) = find_files(path)
    if named or os.path.lexists(ours):
        return Source(ours, OURS, ours)
    if nvidias_named or os.path.lexists(nvidias):
        return Source(nvidias, NVIDIA, ours)
    return Source(ours, DEFAULT, ours)


def read_settings(source: Source) -> tuple[list[Setting], tuple[str, ...]]:
    """Every value that holds.

    Returns:
        The settings in the order of the documentation, and notes for people.

    Raises:
        ConfigError: the file cannot be read, or is not valid.
    """
    content = b"" if source.kind == DEFAULT else _content(source.path)
    if source.kind == NVIDIA:
        config, written = parse_nvidia_config(content, source.path), {}
    else:
        config, written = parse_config(content, source.path), parse_toml(content, source.path)
    defaults = {each.name: each.default for each in fields(Config)}
    found = []
    for table, keys in TABLES.items():
        for key, (field, _, allowed) in keys.items():
            value = getattr(config, field)
            origin = DEFAULT
            if key in written.get(table, {}):
                origin = OURS
            elif source.kind == NVIDIA and value != defaults[field]:
                origin = NVIDIA
            found.append(Setting(f"{table}.{key}", _as_toml(key, value), origin, allowed))
    return found, config.notes


def read_setting(source: Source, name: str) -> Setting:
    """The value of one key.

    Args:
        source: where it is read from.
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
        path: of a file of ours, or of NVIDIA's toolkit.

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
    """Give a key a value.

    Args:
        source: the configuration in use; it is the file of ours that changes.
        name: ``TABLE.KEY``.
        words: the value: one word as it is or as TOML writes it, or the entries of a list.

    Returns:
        What is to become of the file.

    Raises:
        SettingUnknown: there is no such key.
        SettingRefused: it cannot have that value.
        ConfigError: the file is not valid as it is.
    """
    table, key = _split(name)
    _, check, allowed = TABLES[table][key]
    value = next((v for v in _readings(words) if check(v) is not None), None)
    if value is None:
        raise SettingRefused(
            f"{name} = {' '.join(words) or 'nothing'}",
            found="is not a value that it can have",
            do=f"give it {allowed}",
        )
    before, text, notes = _start(source)
    section = tomltext.parse(text).get(table, {})
    if section.get(key) != value or key not in section:
        text = tomltext.with_value(text, (table,), key, value)
    return _checked(source.ours, before, text, notes)


def remove_setting(source: Source, name: str) -> Change:
    """Take a key out of our file, so that its default holds.

    Args:
        source: the configuration in use.
        name: ``TABLE.KEY``.

    Returns:
        What is to become of the file: nothing, if it does not have the key.

    Raises:
        SettingUnknown: there is no such key.
        SettingRefused: the value is NVIDIA's file's.
        ConfigError: the file is not valid as it is.
    """
    table, key = _split(name)
    if source.kind != OURS:
        if source.kind == NVIDIA:
            raise SettingRefused(
                f"to remove {name} from {source.ours}",
                found=f"there is none; {source.path} is in use, and NVIDIA's",
                do="set the key to what it is to be",
            )
        return Change(source.ours, None, b"")
    before, text, notes = _start(source)
    return _checked(source.ours, before, tomltext.cut(text, (table, key)), notes)


def write_change(change: Change) -> None:
    """Put a changed file in place.

    Raises:
        SettingsChanged: the file is not any more what that was decided by.
        SettingsNotWritten: it cannot be written; it is as it was.
    """
    asked = f"to write {change.path}"
    try:
        if read_file(change.path) != change.before:
            raise SettingsChanged(
                asked, found="somebody else has changed it meanwhile", do="ask again"
            )
        replace_file(change.path, change.after)
    except OSError as error:
        raise SettingsNotWritten(
            asked, found=os.strerror(error.errno or 0).lower(), do="ask as root"
        ) from error


def _split(name: str) -> tuple[str, str]:
    table, _, key = name.partition(".")
    if key in TABLES.get(table, {}):
        return table, key
    names = setting_names()
    if not key and table in TABLES:
        raise SettingUnknown(
            f"the key {name}",
            found="is a table of the configuration, and not a key",
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


def _readings(words: Sequence[str]) -> list[Any]:
    """What words can mean: the value that TOML reads of one, itself, a list of all."""
    readings: list[Any] = []
    if len(words) == 1:
        try:
            # In brackets, a comment behind the value or a second line is no TOML.
            document = tomltext.parse(f"value = [{words[0]}]")
        except tomllib.TOMLDecodeError:
            document = {}
        if document.keys() == {"value"} and len(document["value"]) == 1:
            readings += document["value"]
        readings.append(words[0])
    return [*readings, list(words)]


def _start(source: Source) -> tuple[bytes | None, str, tuple[str, ...]]:
    """Our file as it is, and the text that a change of it starts from."""
    before = _read(source.ours)
    if before is not None:
        parse_config(before, source.ours)  # what is wrong now is not to be blamed on the change
        return before, before.decode(), ()
    if source.kind != NVIDIA:
        return None, "", ()
    note = f"{source.path} was in use; what it says was taken over into {source.ours}"
    return None, _converted(source), (note,)


def _converted(source: Source) -> str:
    """NVIDIA's configuration in our words."""
    text = f"# Taken over from {source.path}, which is not read any more.\n"
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
            f"configuration {path}", found="no such file", do="name one that is there"
        )
    return content


def _read(path: str) -> bytes | None:
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigUnreadable(
            f"configuration {path}",
            found=os.strerror(error.errno or 0).lower(),
            do="make the file readable",
        ) from error


def _as_toml(key: str, value: Any) -> Any:
    """A value of :class:`Config` as TOML has it."""
    if key in {"driver-root", "kubelet-root"} and value is None:
        return LOOK
    if key == "other-hooks":
        return "leave-out" if value else "fail"
    return list(value) if isinstance(value, tuple) else value


def as_words(value: Any) -> str:
    """A value as a person writes it in TOML; "" for none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(as_words(entry) for entry in value) + "]"
    if isinstance(value, str):
        # A basic string of TOML is written like one of JSON.
        return json.dumps(value, ensure_ascii=False)
    return f"{value:g}"
