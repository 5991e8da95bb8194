"""``python -m tools.dist.man DIRECTORY``: nvshim's manual pages, from its help.

It writes a page for the program and one for each of its commands, with their subcommands. The text
is the command's own help, so that it exists only once.

Source: man-pages(7), groff_man(7).
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from typing import TYPE_CHECKING, Final

import click

from integration.cli.app import GROUPS, HIDDEN, nvshim
from shim import VERSION
from tools.reference.commands import statuses

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pages", "write"]

_PROGRAM: Final = "nvshim"
_ROLE: Final = re.compile(r"``([^`]+)``|`([^`]+)`")


def pages() -> Iterator[tuple[str, str]]:
    """Yield each page: its file's name and its text."""
    root = click.Context(nvshim, info_name=_PROGRAM)
    yield f"{_PROGRAM}.1", _page(_PROGRAM, nvshim, "GPUs for containers, without a hook")
    for group, commands in GROUPS.items():
        for name, told in commands.items() if group != HIDDEN else ():
            command = nvshim.get_command(root, name)
            if command is not None:
                yield f"{_PROGRAM}-{name}.1", _page(f"{_PROGRAM} {name}", command, told)


def write(directory: str) -> None:
    """Write the pages.

    Args:
        directory: created if missing.
    """
    os.makedirs(directory, exist_ok=True)
    for name, text in pages():
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.write(text)


def _page(name: str, command: click.Command, told: str) -> str:
    title = name.replace(" ", "-")
    lines = [
        f'.TH {_escaped(title.upper())} 1 "" "{_PROGRAM} {VERSION}" "{_PROGRAM}"',
        ".SH NAME", f"{_escaped(title)} \\- {_escaped(told)}",
        ".SH SYNOPSIS", *_synopsis(name, command),
        ".SH DESCRIPTION", *_described(command),
        *_options(command, ".SH OPTIONS"),
    ]  # fmt: skip
    if command is nvshim:
        for group, commands in GROUPS.items():
            lines += [f".SH {group.upper()}"] if group != HIDDEN else []
            for each, what in commands.items() if group != HIDDEN else ():
                lines += [".TP", f".BR {_escaped(f'{_PROGRAM}-{each}')} (1)", _escaped(what)]
    elif isinstance(command, click.Group):
        lines += [".SH COMMANDS", *_below(name, command)]
    lines.append(".SH EXIT STATUS")
    for status, meaning in statuses():
        lines += [".TP", f".B {status}", _marked(meaning)]
    lines += [".SH SEE ALSO", f".BR {_PROGRAM} (1)"] if command is not nvshim else []
    return "\n".join(lines) + "\n"


def _below(name: str, group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        if command is None or command.hidden:
            continue
        yield f".SS {_escaped(f'{name} {each}')}"
        yield from _synopsis(f"{name} {each}", command)
        yield ".PP"
        yield from _described(command)
        yield from _options(command, ".PP")
        if isinstance(command, click.Group):
            yield from _below(f"{name} {each}", command)


def _synopsis(name: str, command: click.Command) -> Iterator[str]:
    yield f".B {_escaped(name)}"
    yield _escaped(" ".join(command.collect_usage_pieces(click.Context(command))))


def _described(command: click.Command) -> Iterator[str]:
    text = inspect.cleandoc(command.help or "").partition("\f")[0]
    for number, block in enumerate(text.split("\n\n")):
        if block.startswith("\b"):
            yield from (".PP", ".nf", *map(_escaped, block.lstrip("\b\n").splitlines()), ".fi")
        else:
            yield from ((".PP",) if number else ())
            yield _marked(" ".join(block.split()))


def _options(command: click.Command, head: str) -> Iterator[str]:
    context = click.Context(command)
    records = [
        record
        for option in command.params
        if isinstance(option, click.Option) and (record := option.get_help_record(context))
    ]
    if records:
        yield head
    for names, meaning in records:
        yield from (".TP", f".B {_escaped(names)}", _marked(meaning))


def _marked(text: str) -> str:
    """Return prose, with literals in bold."""
    return _ROLE.sub(lambda found: f"\\fB{found[1] or found[2]}\\fR", _escaped(text))


def _escaped(text: str) -> str:
    """Escape text for roff: no dash becomes a hyphen, and no line becomes a request."""
    safe = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{safe}" if safe.startswith((".", "'")) else safe


if __name__ == "__main__":
    write(sys.argv[1])
