"""The way back: what each file was before an engine was configured, and what became of it.

Every plan begins with the node without us, and to remove is to leave it at that. So the one is the
inverse of the other, for every engine in the same way::

    record = read_record(path)
    former = without(record, force=False)     # the node as it would be had we never been there
    wanted = former.edited("/etc/…", text)    # with our parts
    changes(options, record, former, wanted, …)  # the files, with the record of what they were

Rules
- The record is written before the files and goes after them. So whoever is killed between two files
  leaves what the next run goes on from; of a configuration that replaces another, both are in it.
- A file that is as we left it becomes what it was, byte for byte.
- In a file that somebody has edited since, each edit of ours is taken back where its text still is.
  What somebody has changed of ours is an error that says so, until it is forced.
- Files may have passwords of registries in them: only root reads the record.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeAlias

from integration.engines.errors import ChangedByHand, RecordInvalid
from integration.engines.files import FileChange, missing_directories, read, read_text
from integration.engines.runtime_options import RuntimeOptions
from integration.json_documents import parse_json

HEAD: Final = "# Written by `nvshim configure`, which also takes it away (--remove).\n"
"""How each file begins that is ours."""

_MODE: Final = 0o600
_WORD: Final = re.compile(r"\S*\s*\Z")


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a text, by which it can be found and taken back."""

    old: str  # what stood there
    new: str  # what stands there; nowhere else in the text
    stood: bool = False  # whether ``old`` is somebody's handler, whose place ours has taken


@dataclass(frozen=True, slots=True)
class View:
    """A node's files, some of them as they would be."""

    # text by path; None for a file that is taken away
    changed: Mapping[str, str | None] = field(default_factory=dict)
    # that were made of files of others, in their order
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    # what was read of the disk, once, so that a plan is about one state of it
    cache: dict[str, str | None] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        """What is in a file; None if there is none.

        Raises:
            ConfigUnreadable: it cannot be read.
        """
        return self.changed[path] if path in self.changed else self.on_disk(path)

    def on_disk(self, path: str) -> str | None:
        """What is in a file now, whatever is planned; likewise."""
        if path not in self.cache:
            content = read(path)
            self.cache[path] = None if content is None else read_text(path, content)
        return self.cache[path]

    def with_text(self, path: str, text: str | None) -> View:
        """The same node with another text in a file, or without the file."""
        return replace(self, changed={**self.changed, path: text})

    def edited(self, path: str, text: str, *, stood: bool = False) -> View:
        """The same node with an edit in a file of others, which can be taken back by itself."""
        edit = _edit_of(self.text(path) or "", text, stood=stood)
        edits = {**self.edits, path: (*self.edits.get(path, ()), edit)}
        return View({**self.changed, path: text}, edits, self.cache)


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a file."""

    before: str | None  # what was in it; None if it was not there
    after: str  # what we have written
    edits: tuple[Edit, ...] = ()  # how the one became the other; none if all of the file is ours


@dataclass(frozen=True, slots=True)
class Record:
    """What was done to an engine's configuration."""

    path: str  # of the record
    name: str = ""  # the handler's
    remedy: str = ""  # the command that takes all of it back
    replaced: bool = False  # whether it has taken the place of somebody's
    files: Mapping[str, Written] = field(default_factory=dict)  # what became of each
    # likewise by the configuration before, which may not all be exchanged yet
    earlier: Mapping[str, Written] = field(default_factory=dict)
    # that were made for each file of ours
    directories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_text(self) -> str:
        """As it is written down."""
        shown = {key: value for key, value in asdict(self).items() if key != "path"}
        # In an order that does not depend on what was done before.
        return json.dumps(shown, indent=1, sort_keys=True) + "\n"

    def replaces(self, name: str, desired: bool | None) -> bool:  # noqa: FBT001 - an option
        """Whether a handler takes the place of somebody's.

        Args:
            name: the handler's.
            wanted: whether it is to; None for what was said before.
        """
        return self.replaced and self.name == name if desired is None else desired

    def versions(self, path: str) -> list[Written]:
        """What became of a file, by the last configuration first."""
        return [files[path] for files in (self.files, self.earlier) if path in files]


Undo: TypeAlias = "Callable[[str, Written, str, bool], str | None]"
"""Takes our part out of a file that somebody has edited since: of its path, what became of it, its
text, and whether what somebody has changed of ours is lost, it makes the text without us."""


def read_record(path: str) -> Record:
    """A record; an empty one if there is none.

    Raises:
        ConfigUnreadable: it cannot be read.
        RecordInvalid: it is none of ours.
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
            found="it is not a record that this version of nvshim has written",
            do="take the handler out of the engine's configuration by hand, and remove the record",
        ) from error
    return Record(path, name, remedy, replaced, files, earlier, directories)


def without(
    record: Record,
    *,
    force: bool,
    undo: Undo | None = None,
) -> View:
    """The node as it would be had we never been there.

    Args:
        record: what was done to it.
        force: whether what somebody has changed of ours is lost.
        undo: takes our part out of a file that somebody has edited since; by default
            :func:`undo_edits`.

    Raises:
        ChangedByHand: something of ours is not as we wrote it.
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
    """Take our edits back in a text that somebody else has edited.

    A value of ours that somebody has changed stays.

    Raises:
        ChangedByHand: all of the file is ours; or where somebody's handler stood cannot be told
            any more.
    """
    if not written.edits:
        if not force:
            raise changed_by_hand(path)
        return written.before
    for edit in reversed(written.edits):
        if text.count(edit.new) == 1:
            text = text.replace(edit.new, edit.old)
            continue
        # Its first and its last line may still be there.
        first, last = _ends(edit.new)
        begin, end = text.find(first), text.rfind(last)
        if force and first != last and 0 <= begin < end:
            text = text[:begin] + edit.old + text[end + len(last) :]
        elif edit.stood and not force and _ends(edit.old)[0].strip() not in text:
            raise changed_by_hand(path)
    return text


def changed_by_hand(path: str) -> ChangedByHand:
    """The error of a file in which somebody has changed what is ours."""
    return ChangedByHand(
        f"to write or remove what nvshim has put into {path}",
        found="somebody has changed it since",
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
    """What has to be done so that the node is as it is wanted, in the order in which it is done.

    What is referred to is there before the reference, and goes after it.

    Args:
        options: what is wanted.
        record: of what was done before.
        former: the node without us.
        wanted: the node with our parts, or the former one.
        config: the engine's own file, which refers to others.
        replaced: whether the handler takes the place of somebody's.
        mode: of files that are made, where it is another than 0644.
        staging: see :class:`FileChange`.
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
            mode=modes.get(path), staging=None if path == record.path else staging,
        )
        for path, text in texts.items()
    ]  # fmt: skip

    def rank(change: FileChange) -> int:
        if change.path == record.path:
            return 0 if change.new is not None else 9
        if change.path == config:
            return 3
        return 4 if change.new is None else 1 if change.old is None else 2

    return tuple(sorted(filter(None, planned), key=rank))


def _made_for(path: str, record: Record) -> tuple[str, ...]:
    """The directories that are made for a file, also when they were made before."""
    directory = os.path.dirname(os.path.realpath(path))
    made = {each for several in record.directories.values() for each in several}
    made = {each for each in made if f"{directory}/".startswith(f"{each}/")}
    return tuple(sorted(made | set(missing_directories(path))))


def _edit_of(before: str, after: str, *, stood: bool) -> Edit:
    """The smallest edit of a text whose result is nowhere else in it."""
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
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _ends(text: str) -> tuple[str, str]:
    """The first line of a text with what is blank before it, and its last line."""
    lines = text.splitlines(keepends=True)
    blank = next((n for n, line in enumerate(lines) if line.strip()), 0)
    return "".join(lines[: blank + 1]), lines[-1] if lines else ""


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
