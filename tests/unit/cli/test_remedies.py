"""Commands that errors and the doctor's findings name: each is one that nvshim takes."""

from __future__ import annotations

import re
import shlex

import click

from integration.cli import app
from integration.doctor.checks import CHECKS
from tests.tools.reference.error_codes import every_error
from tests.tools.reference.sources import remedies


def _named() -> set[str]:
    """Every command of nvshim that a remedy names."""
    texts = [text for several in remedies().values() for text in several]
    texts += [kind.remedy for kind in every_error()]
    texts += [check.remedy for check in CHECKS]
    found = {text for each in texts for text in re.findall(r"`(nvshim [^`…]+)`", each)}
    found |= {line for check in CHECKS for line in check.command.split(" && ")}
    return {line for line in found if line.startswith("nvshim ")}


def test_commands_of_remedies_are_ones_that_nvshim_takes() -> None:
    named = _named()
    assert {"nvshim list", "nvshim configure docker --replace"} <= named
    assert [wrong for line in sorted(named) if (wrong := _what_is_wrong(line))] == []


def _what_is_wrong(line: str) -> str:
    """What nvshim does not take of a command line; "" if it takes it."""
    words = shlex.split(line)[1:]
    command: click.Command = app.nvshim
    context = click.Context(command, info_name="nvshim")
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        if found is None:
            return f"{line}: there is no {words[0]}"
        context = click.Context(found, parent=context, info_name=words[0])
        command, words = found, words[1:]
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    wrong = {word for word in words if word.startswith("-")} - options
    return f"{line}: it has no {', '.join(sorted(wrong))}" if wrong else ""
