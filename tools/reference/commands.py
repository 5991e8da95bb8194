"""nvshim's commands, arguments and options, from click; and its exit statuses."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click

from integration import exits
from integration.cli.app import COMMANDS, GROUPS, HIDDEN, nvshim
from integration.cli.node_options import parameter_of
from integration.node.settings.table import FLAGS
from tools.reference.markdown import code, prose, table

__all__ = ["exit_statuses", "page", "problem", "statuses", "walk"]

_HEAD: Final = """\
# nvshim

`nvshim help` lists the commands, and `nvshim help COMMAND` says what one does.
[Variables](variables.md) can stand for some options.

Answers go to stdout and everything else to stderr. A table fits the terminal, or 80 columns where
there is none; `-o wide` shows all of it, `-o name` and `-q` the names that other commands take.

With `-o json` or `-o yaml` an answer is an object with `apiVersion` and `kind`; of many things,
they are in `items`. Its keys are an interface: [the schema](nvshim.schema.json) has them all. A
failure is one line with a [code](errors.md), in these two forms an object of the kind `Error`.

## Exit statuses

"""

_SHARED: Final = """\
## Options of many commands

Commands that answer have `-o`; those that list things have `-q` and `--no-headers`, too.

"""
# NVIDIA's device plugin's own: another page lists differences, and --help lists all of them.
_PLUGINS: Final = frozenset(map(parameter_of, FLAGS))
_OF_PLUGIN: Final = (
    "And the flags of NVIDIA's device plugin (`--help`); [what differs]"
    "(../node-agent.md#the-device-plugin).\n"
)

# If this many commands share an option, it is described once; also within one group.
_MANY: Final = 4
_MANY_OF_GROUP: Final = 2

_INTERNAL: Final = tuple(f"nvshim {name}" for name in GROUPS[HIDDEN])
"""Commands that the help does not list; their own help lists their options."""

_NVIDIAS: Final = "nvshim compat "


def walk() -> Iterator[tuple[str, click.Command]]:
    """Yield every command with its full name, groups before their commands."""
    context = click.Context(nvshim, info_name="nvshim")
    for name in COMMANDS:
        command = nvshim.get_command(context, name)
        if command is not None:
            yield from _below(f"nvshim {name}", command)


def problem(words: Sequence[str]) -> str:
    """Return why nvshim would refuse a call's arguments; "" if it would not.

    Args:
        words: the call, from ``nvshim`` on. A word in capitals is a placeholder.
    """
    command: click.Command = nvshim
    rest = list(words[1:])
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if not rest[0].islower():
            return ""
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            return rest[0]
        command, rest = found, rest[1:]
    names = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    names |= {"-h", "--help"}
    given = {word.partition("=")[0] for word in rest if word.startswith("-")}
    return ", ".join(sorted(given - names))


def _below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            if below is not None and not below.hidden:
                yield from _below(f"{name} {each}", below)


def page() -> str:
    """Return the page of all commands."""
    every = [(name, command, _options(command)) for name, command in walk()]
    counted = Counter(row for name, _, rows in every for row in rows)
    shared = [row for row, count in counted.items() if count >= _MANY]
    told: list[tuple[str, str]] = []
    parts = [_HEAD + exit_statuses(), _SHARED + table(("option", "meaning"), shared)]
    for name, command, rows in every:
        if name.startswith(_NVIDIAS):
            continue
        is_below = name.count(" ") > 1
        told = told if is_below else []
        text = f"{'###' if is_below else '##'} {name}\n\n"
        if (usage := _usage(name, command)) and not isinstance(command, click.Group):
            text += f"{usage}\n"
        text += f"{_help(command)}\n"
        if not name.startswith(_INTERNAL):
            if isinstance(command, click.Group):
                told = _shared_within(name, every, shared)
                text += table(("option of several", "meaning"), told) if told else ""
            else:
                text += _told(command, rows, [*shared, *told])
        if name == _NVIDIAS.strip():
            nvidias = [(code(each), _help(c)) for each, c, _ in every if each.startswith(_NVIDIAS)]
            text += table(("command", "as the original, with its options (`--help`)"), nvidias)
        parts.append(text)
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _shared_within(
    group: str,
    every: list[tuple[str, click.Command, list[tuple[str, str]]]],
    besides: list[tuple[str, str]],
) -> list[tuple[str, str]]:
    """Return the options that several commands of a group share, without those of many commands."""
    within = [rows for name, _, rows in every if name.startswith(f"{group} ")]
    counted = Counter(row for rows in within for row in rows if row not in besides)
    return [row for row, count in counted.items() if count >= _MANY_OF_GROUP]


def _told(
    command: click.Command, rows: list[tuple[str, str]], shared: list[tuple[str, str]]
) -> str:
    """Return a command's own options as a table, and the names of those it shares."""
    own = [row for row in rows if row not in shared]
    text = table(("option", "meaning"), own) if own else ""
    others = [_name(row[0]) for row in rows if row in shared and "-headers" not in row[0]]
    if any(option.name in _PLUGINS for option in command.params):
        text += f"\n{_OF_PLUGIN}"
    if told := [name for name in others if name != "`-o`"]:
        text += f"\n[Also](#options-of-many-commands) {', '.join(told)}.\n"
    return text


def _name(option: str) -> str:
    """Return the shortest name of an option: ``-o`` of ``-o, --output [table|json]``."""
    return code(re.split(r"[ ,]", option.strip("`"), maxsplit=1)[0])


def statuses() -> list[tuple[str, str]]:
    """Return the exit statuses and their meanings, from the docstring that lists them."""
    text = inspect.cleandoc(exits.__doc__ or "")
    rows: list[tuple[str, str]] = []
    for line in text.splitlines():
        if found := re.match(r"(\d+)\s+(.*)", line):
            rows.append((found[1], found[2]))
        elif rows and line.startswith("  "):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
    known = {str(value) for name, value in vars(exits).items() if name.isupper()}
    if {status for status, _ in rows} != known:
        raise LookupError(
            "the statuses in the docstring of integration.exits differ from its constants"
        )
    return rows


def exit_statuses() -> str:
    """Return the table of exit statuses."""
    return table(("status", "meaning"), [(status, prose(text)) for status, text in statuses()])


def _usage(name: str, command: click.Command) -> str:
    """Return the usage line; "" if it takes only options."""
    words = command.collect_usage_pieces(click.Context(command, info_name=name))
    return f"    {name} {' '.join(words)}\n" if len(words) > 1 else ""


def _help(command: click.Command) -> str:
    text = inspect.cleandoc(command.help or "").partition("\f")[0]
    blocks = []
    for block in text.split("\n\n"):
        if block.startswith("\b"):
            lines = block.lstrip("\b\n").splitlines()
            blocks.append("\n".join(f"    {line}" for line in lines))
        elif block.strip():
            blocks.append(prose(block))
    return "\n\n".join(blocks) + "\n"


def _options(command: click.Command) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    context = click.Context(command)
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden and option.name not in _PLUGINS:
            record = option.get_help_record(context)
            if record is not None:
                rows.append((code(record[0]), prose(_meant(option)) + _said(option)))
    return rows


def _meant(option: click.Option) -> str:
    return option.help or ""


def _said(option: click.Option) -> str:
    notes = []
    default: Any = option.default
    if isinstance(default, (str, int, float)) and not isinstance(default, bool) and default != "":
        notes.append(f"default {code(str(default))}")
    if option.multiple and "repeat" not in _meant(option) and "several times" not in _meant(option):
        notes.append("repeatable")
    if option.required:
        notes.append("has to be given")
    return f" ({'; '.join(notes)})" if notes else ""
