"""Record what each file contained before an engine was configured, and restore it.

Every plan starts from the node without our changes, and a removal ends there. So a removal is the
inverse of configuring, in the same way for every engine::

    record = read_record(path)
    previous = without(record, force=False)     # the node as if nvshim had never changed it
    desired = previous.edited("/etc/…", text)   # with our parts
    changes(options, record, previous, desired, …)  # the files, and the new record

Rules
- The record is written before the files and removed after them. If a run is killed between two
  files, the next one continues from there. While one configuration replaces another, the record
  contains both.
- A file that has not changed since we wrote it gets its earlier content back, byte for byte.
- In a file that has been edited since, each of our edits is undone where its text is still present.
  If our part was edited, that is an error unless forced.
- Files may contain registry passwords, so only root can read the record.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeAlias

from integration import tomltext
from integration.engines.errors import ChangedByHand, EnginesError, RecordInvalid
from integration.engines.files import FileChange, missing_directories, read, read_text
from integration.engines.runtime_options import RuntimeOptions
from integration.json_documents import parse_json

HEAD: Final = "# Written by `nvshim configure`, which also takes it away (--remove).\n"
"""The first line of each file of ours."""

_MODE: Final = 0o600
_WORD: Final = re.compile(r"\S*\s*\Z")


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a text that can be found and undone later."""

    old: str  # the text before
    new: str  # the text after; unique in the file
    stood: bool = False  # whether ``old`` is an existing handler that ours replaces


@dataclass(frozen=True, slots=True)
class View:
    """A node's files, some of them with planned contents."""

    # planned text by path; None for a file that is removed
    changed: Mapping[str, str | None] = field(default_factory=dict)
    # edits of files that are not ours, in order
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    # contents read from disk, once, so that a plan sees one state
    cache: dict[str, str | None] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        """Return a file's text; None if there is no file.

        Raises:
            ConfigUnreadable: it cannot be read.
        """
        return self.changed[path] if path in self.changed else self.on_disk(path)

    def on_disk(self, path: str) -> str | None:
        """Return a file's text on disk, whatever is planned; None if there is no file."""
        if path not in self.cache:
            content = read(path)
            self.cache[path] = None if content is None else read_text(path, content)
        return self.cache[path]

    def with_text(self, path: str, text: str | None) -> View:
        """Return the same node with another text in a file; None removes the file."""
        return replace(self, changed={**self.changed, path: text})

    def edited(self, path: str, text: str, *, stood: bool = False) -> View:
        """Return the same node with an edit of a file that is not ours, which can be undone."""
        edit = _edit_of(self.text(path) or "", text, stood=stood)
        edits = {**self.edits, path: (*self.edits.get(path, ()), edit)}
        return View({**self.changed, path: text}, edits, self.cache)


@dataclass(frozen=True, slots=True)
class Written:
    """What we did to a file."""

    before: str | None  # its text before; None if there was no file
    after: str  # the text that we wrote
    edits: tuple[Edit, ...] = ()  # from ``before`` to ``after``; none if the whole file is ours


@dataclass(frozen=True, slots=True)
class Record:
    """What we did to an engine's configuration."""

    path: str  # the record's own path
    name: str = ""
    remedy: str = ""  # the command that undoes everything
    replaced: bool = False  # whether ours replaces an existing handler
    files: Mapping[str, Written] = field(default_factory=dict)  # by path
    # the same for the previous configuration, some of whose files may still be in place
    earlier: Mapping[str, Written] = field(default_factory=dict)
    # the directories created for each file of ours
    directories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_text(self) -> str:
        """Return the record as the text of its file."""
        shown = {key: value for key, value in asdict(self).items() if key != "path"}
        # Sorted, so that the order does not depend on earlier configurations.
        return json.dumps(shown, indent=1, sort_keys=True) + "\n"

    def replaces(self, name: str, desired: bool | None) -> bool:  # noqa: FBT001 - an option
        """Whether our handler replaces an existing one.

        Args:
            name: the handler's name.
            desired: the option; None to keep the earlier choice.
        """
        return self.replaced and self.name == name if desired is None else desired

    def versions(self, path: str) -> list[Written]:
        """Return what we did to a file, the latest configuration first."""
        return [files[path] for files in (self.files, self.earlier) if path in files]


Undo: TypeAlias = "Callable[[str, Written, str, bool], str | None]"
"""Removes our part from a file that was edited since. Arguments: its path, what we did to it, its
text, and whether to discard edits of our part. Returns the text without our part."""


def read_record(path: str) -> Record:
    """Return a record; an empty one if there is none.

    Raises:
        ConfigUnreadable: it cannot be read.
        RecordInvalid: the file is not a record of ours.
    """
    content = read(path)
    if content is None:
        return Record(path)
    try:
        found: dict[str, Any] = parse_json(read_text(path, content))
        files, earlier = (
            {
                each: Written(
                    _text(what["before"]), str(what["after"]),
                    tuple(Edit(**edit) for edit in what["edits"]),
                )
                for each, what in found[key].items()
            }
            for key in ("files", "earlier")
        )  # fmt: skip
        directories = {each: tuple(map(str, made)) for each, made in found["directories"].items()}
        name, remedy = str(found["name"]), str(found["remedy"])
        replaced = bool(found["replaced"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordInvalid(
            f"to read {path}",
            found="it is not a record that this version of nvshim wrote",
            do="remove the handler from the engine's configuration by hand, then delete the record",
        ) from error
    return Record(path, name, remedy, replaced, files, earlier, directories)


def without(
    record: Record,
    *,
    force: bool,
    undo: Undo | None = None,
) -> View:
    """Return the node as it would be if nvshim had never changed it.

    Args:
        record: what we did to it.
        force: whether to discard edits of our part.
        undo: removes our part from a file that was edited since; by default :func:`undo_edits`.

    Raises:
        ChangedByHand: our part was edited.
    """
    view = View()
    for path in {**record.earlier, **record.files}:
        text = view.on_disk(path)
        found = _former(path, record.versions(path), text, force=force, undo=undo or undo_edits)
        if found != text:
            view = view.with_text(path, found)
    return view


def _former(
    path: str,
    versions: list[Written],
    text: str | None,
    *,
    force: bool,
    undo: Undo,
) -> str | None:
    if text is None:
        return None
    for written in versions:
        if text == written.after:
            return written.before
    if any(text == written.before for written in versions):
        return text
    return undo(path, versions[0], text, force)


def undo_edits(path: str, written: Written, text: str, force: bool) -> str | None:  # noqa: FBT001 - see Undo
    """Undo our edits in a text that was edited since.

    A value of ours that was edited stays. So does one whose removal would leave invalid TOML, for
    example if someone has added to an array that was empty before.

    Raises:
        ChangedByHand: the whole file is ours, or the place of the replaced handler was not found.
    """
    if not written.edits:
        if not force:
            raise changed_by_hand(path)
        return written.before
    for edit in reversed(written.edits):
        if text.count(edit.new) == 1:
            undone = text.replace(edit.new, edit.old)
            if _is_toml(undone) or not _is_toml(text):
                text = undone
                continue
        # The edit's first and last line may still be there.
        first, last = _ends(edit.new)
        begin, end = text.find(first), text.rfind(last)
        if force and first != last and 0 <= begin < end:
            text = text[:begin] + edit.old + text[end + len(last) :]
        elif edit.stood and not force and _ends(edit.old)[0].strip() not in text:
            raise changed_by_hand(path)
    return text


def _is_toml(text: str) -> bool:
    try:
        tomltext.parse(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def changed_by_hand(path: str) -> EnginesError:
    """Return the error for a file whose part of ours was edited."""
    return ChangedByHand(
        f"to write or remove nvshim's part of {path}",
        found="it was edited since nvshim wrote it",
        do="compare it with what you want; --force overwrites or removes it",
    )


def changes(
    options: RuntimeOptions,
    record: Record,
    previous: View,
    desired: View,
    *,
    config: str,
    replaced: bool = False,
    mode: Mapping[str, int] | None = None,
    staging: str | None = None,
) -> tuple[FileChange, ...]:
    """Return the file changes that lead to the desired node, in the order to write them.

    A file is written before any reference to it, and removed after the last one. An existing
    handler is removed only when ours is in place, and is restored before ours is removed.

    Args:
        options: the desired configuration.
        record: the record of what we did before.
        previous: the node without our changes.
        desired: the node with our changes; ``previous`` for a removal.
        config: the engine's own file, which refers to the others.
        replaced: whether ours replaces an existing handler.
        mode: the modes of new files that should not have 0644; no engine reads these files.
        staging: see :class:`FileChange`; for the files that an engine reads.
    """
    files = {
        path: Written(previous.text(path), after, desired.edits.get(path, ()))
        for path, after in desired.changed.items()
        if after is not None and after != previous.text(path)
    }
    made = {path: _made_for(path, record) for path in (*files, record.path)}
    new = Record(
        record.path, options.runtime_name, options.remedy, replaced, files,
        record.earlier if files == record.files else record.files,
        {path: directories for path, directories in made.items() if directories},
    )  # fmt: skip
    texts = {**previous.changed, **desired.changed, record.path: new.to_text() if files else None}
    modes = {record.path: _MODE, **(mode or {})}
    planned = [
        FileChange.of(
            path, previous.on_disk(path), text, made=record.directories.get(path, ()),
            mode=modes.get(path), staging=None if path in modes else staging,
        )
        for path, text in texts.items()
    ]  # fmt: skip

    def rank(change: FileChange) -> int:
        if change.path == record.path:
            return 0 if change.new is not None else 9
        if change.path == config:
            return 3
        if any(edit.stood for edit in desired.edits.get(change.path, ())):
            return 4  # a handler that ours replaces, once ours is in effect
        return 4 if change.new is None else 1 if change.old is None else 2

    return tuple(sorted(filter(None, planned), key=rank))


def _made_for(path: str, record: Record) -> tuple[str, ...]:
    """Return the directories created for a file, now or by an earlier configuration."""
    directory = os.path.dirname(os.path.realpath(path))
    made = {each for several in record.directories.values() for each in several}
    made = {each for each in made if f"{directory}/".startswith(f"{each}/")}
    return tuple(sorted(made | set(missing_directories(path))))


def _edit_of(before: str, after: str, *, stood: bool) -> Edit:
    """Return the smallest edit of a text whose result is unique in it."""
    start = _common(before, after)
    tail = _common(before[start:][::-1], after[start:][::-1])
    while after.count(after[start : len(after) - tail]) != 1 and (start or tail):
        if start:
            found = _WORD.search(after, 0, start)
            start = start - 1 if found is None else min(found.start(), start - 1)
        else:
            tail -= 1
    return Edit(before[start : len(before) - tail], after[start : len(after) - tail], stood)


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _ends(text: str) -> tuple[str, str]:
    """Return a text's first line, with the blank lines before it, and its last line."""
    lines = text.splitlines(keepends=True)
    blank = next((n for n, line in enumerate(lines) if line.strip()), 0)
    return "".join(lines[: blank + 1]), lines[-1] if lines else ""


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
