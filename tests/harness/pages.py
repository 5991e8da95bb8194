"""The headings, links and commands of the documentation's pages, for tests.

A block of commands is fenced as ``sh``, without prompts, so that it can be copied. A line that ends
with a backslash continues in the next one. A block ``output`` right after it is what its last
command prints: the test expects these lines in this order, and ``…`` matches anything.

A block that cannot be run in a test has a comment before it with the reason, and is listed::

    <!-- not run: there is no systemd here -->

A block whose last command ends with another status than 0 says so::

    <!-- run: ends with 3 -->
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from tests.harness.launcher import REPOSITORY
from tools.reference.markdown import slug

__all__ = ["Block", "Command", "anchors", "blocks", "links", "pages", "read_page"]


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page."""

    text: str  # the command, on one or several lines
    output: tuple[str, ...]  # the lines of its output on the page, with ``…`` for anything


@dataclass(frozen=True, slots=True)
class Block:
    """A block of commands."""

    page: str  # its file, relative to the repository
    line: int  # its first line
    commands: tuple[Command, ...]
    status: int  # the expected status of the last command
    reason: str  # why it is not run; "" if it is run

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return every page for users, relative to the repository."""
    found = ["README.md"]
    for directory, _, names in os.walk(os.path.join(REPOSITORY, "docs")):
        found += [
            os.path.relpath(os.path.join(directory, name), REPOSITORY)
            for name in names
            if name.endswith(".md")
        ]
    return sorted(found)


def read_page(name: str) -> str:
    """Return a page's text.

    Args:
        name: relative to the repository.
    """
    with open(os.path.join(REPOSITORY, name), encoding="utf-8") as file:
        return file.read()


_FENCE: Final = re.compile(r"^(```+)(\w*)[^\n]*\n(.*?)^\1[ ]*$", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"<!--\s*(not run|run):\s*((?:(?!-->).)*?)\s*-->\s*\Z", re.DOTALL)
_STATUS: Final = re.compile(r"ends with (\d+)")


def blocks(name: str, text: str | None = None) -> list[Block]:
    """Return the blocks of commands of a page.

    Args:
        text: its text; by default it is read.

    Raises:
        ValueError: a comment before a block is malformed, a block has no command, or a block of
            output does not follow commands.
    """
    text = read_page(name) if text is None else text
    found: list[Block] = []
    end = -1
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 1
        if fence[2] == "output":
            if not found or text[end : fence.start()].strip():
                raise ValueError(f"{name}:{line}: output of no command")
            found[-1] = _with_output(found[-1], fence[3])
        elif fence[2] == "sh":
            status, reason = 0, ""
            if comment := _COMMENT.search(text[: fence.start()]):
                if comment[1] == "not run":
                    reason = " ".join(comment[2].split())
                elif ends := _STATUS.fullmatch(comment[2]):
                    status = int(ends[1])
                else:
                    raise ValueError(f"{name}:{line}: unknown remark: {comment[2]}")
            commands = tuple(_commands(fence[3]))
            if not commands:
                raise ValueError(f"{name}:{line}: no command")
            found.append(Block(name, line, commands, status, reason))
            end = fence.end()
    return found


def _commands(text: str) -> Iterator[Command]:
    typed: list[str] = []
    for line in text.splitlines():
        if not typed and (not line.strip() or line.startswith("#")):
            continue
        typed.append(line)
        if not line.endswith("\\"):
            yield Command("\n".join(typed), ())
            typed = []
    if typed:
        yield Command("\n".join(typed), ())


def _with_output(block: Block, output: str) -> Block:
    lines = tuple(line for line in output.splitlines() if line.strip())
    last = replace(block.commands[-1], output=lines)
    return replace(block, commands=(*block.commands[:-1], last))


_LINK: Final = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def links(text: str) -> list[str]:
    """Return the targets of a page's links and images, except those in code."""
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text)))


_HEADING: Final = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
_IDENTIFIER: Final = re.compile(r'\bid="([^"]+)"')


def anchors(text: str) -> set[str]:
    """Return the anchors of a page."""
    plain = _FENCE.sub("", text)
    found: set[str] = set(_IDENTIFIER.findall(plain))
    for heading in _HEADING.findall(plain):
        name, count = slug(heading), 1
        while name in found:
            name, count = f"{slug(heading)}_{count}", count + 1
        found.add(name)
    return found
