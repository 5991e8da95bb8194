r"""How our parts of somebody's TOML files are marked, so that they can be taken out again.

A file that is ours as a whole begins with two comments, the second of which is a record::

    # Written by `nvshim configure containerd`, which also takes it away (--remove).
    # nvshim {"sha256": "…", …}

In a file of others our tables are a block at its end, and a value of theirs that had to change
carries what it was before::

    default_runtime_name = "nvidia" # nvshim {"was": "default_runtime_name = \"runc\"", "is": …}

    # >>> nvshim {"sha256": "…"}
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
      runtime_type = "io.containerd.nvidia.v1"
    # <<< nvshim

Rules
- The checksum is of all that follows the record, to the end of the file or of the block. What
  does not match it was changed by hand.
- Marks are comments: whoever reads the file without us reads valid TOML that means the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from integration.engines import tomltext
from integration.engines.tomltext import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "Ours",
    "add_block",
    "find_block",
    "owned",
    "read_owned",
    "remove_block",
    "restore_values",
    "set_value",
    "without_head",
]

_HEAD: Final = "# Written by `nvshim configure {engine}`, which also takes it away (--remove)."
_HEAD_BEGINS: Final = "# Written by `nvshim configure "
_RECORD: Final = "# nvshim "
_BEGIN: Final = "# >>> nvshim "
_END: Final = "# <<< nvshim"


@dataclass(frozen=True, slots=True)
class Ours:
    """What is ours of a file: all of it, or a block.

    Attributes:
        record: what we noted when it was written.
        body: what follows the record.
        intact: whether it is as we wrote it.
        begin: where the first line of it begins.
        end: behind the end of its last one.
    """

    record: Mapping[str, Any]
    body: str
    intact: bool
    begin: int
    end: int


def owned(engine: str, body: str, record: Mapping[str, Any]) -> str:
    """The text of a file that is ours.

    Args:
        engine: for whom it is written.
        body: what it says.
        record: what is to be noted beside the checksum.
    """
    noted = {"sha256": _digest(body), **record}
    return f"{_HEAD.format(engine=engine)}\n{_RECORD}{json.dumps(noted)}\n{body}"


def read_owned(text: str) -> Ours | None:
    """What a file of ours says.

    Args:
        text: of any file.

    Returns:
        None if the file is none of ours.
    """
    if not text.startswith(_HEAD_BEGINS):
        return None
    _, _, rest = text.partition("\n")
    line, _, body = rest.partition("\n")
    record = _record(line, _RECORD)
    if record is None:
        return None
    return Ours(record, body, record.get("sha256") == _digest(body), 0, len(text))


def without_head(text: str) -> str:
    """A file that was ours, and is now of others, without the lines that say it is ours."""
    found = read_owned(text)
    return text if found is None else found.body


def add_block(text: str, body: str) -> str:
    """Put a block at the end of a file.

    Args:
        text: the file's.
        body: what is to be in the block: lines without the end of the last.
    """
    ending = tomltext.line_ending(text)
    record = {"sha256": _digest(body.replace("\n", ending))}
    return tomltext.append(text, f"{_BEGIN}{json.dumps(record)}\n{body}\n{_END}")


def find_block(text: str) -> Ours | None:
    """Our block in a file.

    Args:
        text: valid TOML.

    Returns:
        None if there is none. A block whose end somebody took away ends where the next table
        begins that cannot be in it: at its own first line; it is not intact.
    """
    first: tuple[int, int, Mapping[str, Any]] | None = None
    for start, end in _comments(text):
        line = tomltext.before_end(text[start:end])
        if first is None:
            record = _record(line, _BEGIN)
            first = None if record is None else (start, end, record)
        elif line == _END:
            begin, body_at, record = first
            body = tomltext.before_end(text[body_at:start])
            return Ours(record, body, record.get("sha256") == _digest(body), begin, end)
    if first is None:
        return None
    begin, body_at, record = first
    return Ours(record, "", intact=False, begin=begin, end=body_at)


def remove_block(text: str) -> str:
    """A file without our block.

    Args:
        text: valid TOML.
    """
    found = find_block(text)
    return text if found is None else tomltext.remove_line(text, found.begin, found.end)


def set_value(text: str, table: tuple[str, ...], key: str, value: Any) -> str | None:
    """Give a key of a file another value, and note beside it what it was.

    Args:
        text: valid TOML.
        table: in which the key is to be.
        key: which.
        value: what :func:`tomltext.to_value` can write.

    Returns:
        None if there is neither the key nor the header of its table.
    """
    header = None
    now = tomltext.to_value(value)
    for statement in tomltext.statements(text):
        if statement.kind is Kind.KEY and statement.path == (*table, key):
            begin, _ = statement.value
            stop = _end_of_line(text, statement)
            name = text[statement.start : begin]
            mark = json.dumps({"was": text[statement.start : stop], "is": now})
            return f"{text[: statement.start]}{name}{now} {_RECORD}{mark}{text[stop:]}"
        if statement.kind is Kind.TABLE and statement.table == table:
            header = statement
    if header is None:
        return None
    indentation = text[text.rfind("\n", 0, header.start) + 1 : header.start]
    mark = json.dumps({"was": None, "is": now})
    line = f"{indentation}  {tomltext.to_key(key)} = {now} {_RECORD}{mark}"
    return tomltext.insert_line(text, header.end, line)


def restore_values(text: str) -> str:
    """A file with the values that :func:`set_value` changed as they were.

    A value that somebody changed after us stays; only our note goes.

    Args:
        text: valid TOML.
    """
    for statement in reversed(list(tomltext.statements(text))):
        mark = _record(statement.comment, _RECORD)
        if statement.kind is not Kind.KEY or mark is None or "was" not in mark:
            continue
        stop = _end_of_line(text, statement)
        if text[slice(*statement.value)] != mark.get("is"):
            text = text[: statement.value[1]] + text[stop:]
        elif mark["was"] is None:
            begin = text.rfind("\n", 0, statement.start) + 1
            text = tomltext.remove_line(text, begin, statement.end)
        else:
            text = f"{text[: statement.start]}{mark['was']}{text[stop:]}"
    return text


def _end_of_line(text: str, statement: tomltext.Statement) -> int:
    return len(tomltext.before_end(text[: statement.end])) if statement.end else 0


def _comments(text: str) -> Iterator[tuple[int, int]]:
    """The lines that are comments and nothing else, and so not within a statement."""
    at = 0
    for statement in tomltext.statements(text):
        yield from _comment_lines(text, at, statement.start)
        at = statement.end
    yield from _comment_lines(text, at, len(text))


def _comment_lines(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    # Not splitlines: there is more that ends a line to Python than to TOML.
    for line in re.findall(r"[^\n]*\n|[^\n]+", text[begin:end]):
        if line.startswith("#"):
            yield begin, begin + len(line)
        begin += len(line)


def _record(line: str, prefix: str) -> Mapping[str, Any] | None:
    if not line.startswith(prefix):
        return None
    try:
        found = json.loads(line.removeprefix(prefix))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
