"""Count phrases that make the project's texts hard to read, and keep their number from rising.

``python -m tools.plain_words`` is part of ``make lint``. It reads Markdown pages, comments,
docstrings and messages, counts the phrases listed in ``plain_words.txt``, and prints the rate of
each room: hits per 1,000 words.

A room is a Markdown page, or a folder of code. A room of 500 words or more may have at most
:data:`TARGET` hits per 1,000 words. Rooms that have not reached this yet are listed with their
present limit in ``plain_words.json``. A limit only falls: ``--update`` lowers those of the rooms
that have improved.

A low rate does not make a text good. The phrases are symptoms: rewrite the sentence, and do not
only replace the word.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from tools import REPOSITORY

__all__ = ["Room", "lowered", "measure", "over_limit", "passages", "pattern_of", "room_of"]

TARGET: Final = 2
"""Hits per 1,000 words that every room may have."""
SMALLEST: Final = 500
"""Rooms with fewer words have no limit: a single hit would exceed it."""

_PHRASES: Final = os.path.join(REPOSITORY, "tools/plain_words.txt")
_LIMITS: Final = os.path.join(REPOSITORY, "tools/plain_words.json")

# Folders whose subfolders are separate rooms. Elsewhere a room is at most two levels deep.
_DEEP: Final = ("integration/node", "integration/node/services", "tests/unit")
# A string with fewer words is a key, a path or a name, and not a message.
_MESSAGE_WORDS: Final = 4


@dataclass
class Room:
    """Words and hits of a page or folder. ``found`` has density, place and text of passages."""

    words: int = 0
    hits: int = 0
    found: list[tuple[float, str, str]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Return the hits per 1,000 words."""
        return 1000 * self.hits / self.words if self.words else 0.0


# -- phrases ----------------------------------------------------------------------------------


def pattern_of(lines: Iterable[str]) -> re.Pattern[str]:
    """Compile a list of phrases into one expression. Lines that start with ``#`` are comments."""
    phrases = [line.strip() for line in lines]
    written = [
        r"\s+".join(
            r"\w+(?:\s+\w+){0,4}" if word == "*" else re.escape(word) for word in phrase.split()
        )
        for phrase in phrases
        if phrase and not phrase.startswith("#")
    ]
    # The longest first, so that a phrase that contains another phrase is one hit.
    return re.compile(rf"\b(?:{'|'.join(sorted(written, key=len, reverse=True))})\b", re.IGNORECASE)


# -- prose of a file --------------------------------------------------------------------------


def passages(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file in passages, each with the number of its first line.

    Args:
        name: the file's name, which shows its language. Other languages have no passages.
        text: the file's content.
    """
    suffix = os.path.splitext(name)[1]
    if suffix == ".md" or name.endswith("NOTES.txt"):
        yield from _markdown(text)
    elif suffix in {".c", ".h"}:
        yield from _c(text)
    elif suffix == ".py":
        yield from _strings(text)
        yield from _python_comments(text)
    elif suffix in {".sh", ".toml", ".yaml", ".yml"} or os.path.basename(name) == "Makefile":
        yield from _hash_comments(text)


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and tables, without code, HTML comments and the targets of links."""
    text = re.sub(r"^```.*?^```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", _blank, text)
    text = re.sub(r"\]\([^)\s]*\)", _blank, text)
    number = 1
    for block in re.split(r"(\n[ \t]*\n)", text):
        if block.strip():
            before = block[: len(block) - len(block.lstrip())]
            yield number + before.count("\n"), block
        number += block.count("\n")


def _blank(match: re.Match[str]) -> str:
    """Keep the line breaks of removed text, so that line numbers stay correct."""
    return " " + "\n" * match[0].count("\n")


def _c(text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"/\*(.*?)\*/|(?<!:)//([^\n]*)", text, re.DOTALL):
        yield text.count("\n", 0, match.start()) + 1, match[1] or match[2] or ""


_LEAVES: Final = (ast.Name, ast.expr_context, ast.operator, ast.unaryop, ast.boolop)


def _strings(text: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings and messages, without the values that f-strings insert."""
    todo: list[ast.AST] = [ast.parse(text)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "" for part in node.values]
            prose = "".join(str(part) for part in parts)
            todo += [part for part in node.values if not isinstance(part, ast.Constant)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            prose = node.value
        else:
            # ast.iter_child_nodes takes three times as long.
            for child in vars(node).values():
                if isinstance(child, list):
                    todo += [each for each in child if isinstance(each, ast.AST)]
                elif isinstance(child, ast.AST) and not isinstance(child, _LEAVES):
                    todo.append(child)
            continue
        if len(prose.split()) >= _MESSAGE_WORDS:
            yield node.lineno, prose


_STRING_OR_COMMENT: Final = re.compile(
    r"""(?s:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(\#.*)"""
)


def _python_comments(text: str) -> Iterator[tuple[int, str]]:
    # The tokenizer of the standard library takes half of the time of a whole run.
    line, at = 1, 0
    comments = []
    for match in _STRING_OR_COMMENT.finditer(text):
        if match[1]:
            line, at = line + text.count("\n", at, match.start()), match.start()
            comments.append((line, match[1]))
    yield from _joined(comments)


def _hash_comments(text: str) -> Iterator[tuple[int, str]]:
    lines = enumerate(text.splitlines(), 1)
    yield from _joined(
        (number, match[0]) for number, line in lines if (match := re.search(r"(?:^|\s)#.*", line))
    )


def _joined(comments: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Join comments on consecutive lines: a phrase may be split between two."""
    first, last, words = 0, -1, ""
    for number, comment in comments:
        if number != last + 1 and words:
            yield first, words
            words = ""
        first, last = first if words else number, number
        words += comment.lstrip("#: \t") + "\n"
    if words:
        yield first, words


# -- rooms and limits -------------------------------------------------------------------------


def room_of(name: str) -> str:
    """Return the room of a file: a Markdown page itself, or the folder of another file."""
    if name.endswith(".md"):
        return name
    folders = name.split("/")[:-1]
    depth = 2 + sum("/".join(folders[:end]) in _DEEP for end in (2, 3))
    return "/".join(folders[:depth]) or "."


def measure(files: Iterable[tuple[str, str]], phrases: re.Pattern[str]) -> dict[str, Room]:
    """Count words and hits in files.

    Args:
        files: the name and the text of each.
        phrases: matches each hit.
    """
    rooms: dict[str, Room] = {}
    for name, text in files:
        room = rooms.setdefault(room_of(name), Room())
        for line, prose in passages(name, text):
            words = len(prose.split())
            hits = len(phrases.findall(prose))
            room.words += words
            room.hits += hits
            if hits:
                # By density, so that a short sentence with two hits comes before a long page.
                density = hits / max(words, 12)
                room.found.append((density, f"{name}:{line}", " ".join(prose.split())))
    return rooms


def over_limit(rooms: Mapping[str, Room], limits: Mapping[str, int]) -> list[str]:
    """Return a message for each room whose rate is above its limit."""
    return [
        f"{name}: {room.rate:.1f} of the listed phrases in 1,000 words, "
        f"{limits.get(name, TARGET)} are allowed"
        for name, room in sorted(rooms.items())
        if room.words >= SMALLEST and room.rate > limits.get(name, TARGET)
    ]


def lowered(rooms: Mapping[str, Room], limits: Mapping[str, int]) -> dict[str, int]:
    """Return the limits that the rooms need now, none higher than before.

    A room that has reached the target, or that no longer exists, needs no separate limit.
    """
    needed = {
        name: min(limit, math.ceil(rooms[name].rate))
        for name, limit in limits.items()
        if name in rooms and rooms[name].words >= SMALLEST
    }
    return {name: limit for name, limit in sorted(needed.items()) if limit > TARGET}


# -- the program ------------------------------------------------------------------------------


def _files() -> Iterator[tuple[str, str]]:
    """Read the files that git tracks or would add."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in sorted(set(listed.stdout.splitlines())):
        path = os.path.join(REPOSITORY, name)
        if os.path.isfile(path) and "_pb2.py" not in name and "/fuzz/corpus/" not in name:
            with open(path, encoding="utf-8", errors="replace") as file:
                yield name, file.read()


def _limits() -> dict[str, int]:
    with open(_LIMITS, encoding="utf-8") as file:
        limits: dict[str, int] = json.load(file)
    return limits


def _write_limits(limits: Mapping[str, int]) -> None:
    with open(f"{_LIMITS}.new", "w", encoding="utf-8") as file:
        json.dump(limits, file, indent=2)
        file.write("\n")
    os.replace(f"{_LIMITS}.new", _LIMITS)


def main() -> int:
    """Print the rates; return 1 if a room is above its limit."""
    parser = argparse.ArgumentParser(prog="python -m tools.plain_words")
    parser.add_argument("--rates", action="store_true", help="print the rate of every room")
    parser.add_argument("--worst", type=int, default=0, help="print the N densest passages")
    parser.add_argument("--update", action="store_true", help="lower the limits of improved rooms")
    parser.add_argument("room", nargs="*", help="print only rooms that start with this")
    options = parser.parse_args()

    with open(_PHRASES, encoding="utf-8") as file:
        rooms = measure(_files(), pattern_of(file))
    limits = _limits()
    if options.update:
        limits = lowered(rooms, limits)
        _write_limits(limits)
    shown = {
        name: room for name, room in rooms.items() if name.startswith(tuple(options.room) or "")
    }
    if options.rates:
        for name, room in sorted(shown.items(), key=lambda item: -item[1].rate):
            if room.words >= SMALLEST:
                print(f"{room.rate:6.1f}  {name}: {room.hits} in {room.words} words")
    found = [hit for room in shown.values() for hit in room.found]
    for _, place, text in sorted(found, key=lambda hit: -hit[0])[: options.worst]:
        print(f"{place}: {text[:160]}")
    total = Room(sum(r.words for r in shown.values()), sum(r.hits for r in shown.values()))
    print(f"listed phrases per 1,000 words: {total.rate:.1f}; rooms above {TARGET}: {len(limits)}")
    problems = over_limit(rooms, limits)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(
            "Rewrite the sentences: python -m tools.plain_words --worst 20 ROOM",
            file=sys.stderr,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
