"""Each command in the help has a manual page, made from the command's own help."""

from __future__ import annotations

import re
from typing import Final

import click

from integration.cli.app import GROUPS, HIDDEN, nvshim
from tools.dist.man import pages

REQUESTS: Final = {"TH", "SH", "SS", "PP", "TP", "B", "BR", "nf", "fi"}


def test_every_command_that_is_listed_has_a_page_with_its_options() -> None:
    found = dict(pages())
    context = click.Context(nvshim)
    listed = [n for group, names in GROUPS.items() if group != HIDDEN for n in names]
    assert set(found) == {"nvshim.1", *(f"nvshim-{name}.1" for name in listed)}
    for name in listed:
        page = found[f"nvshim-{name}.1"].replace("\\-", "-")
        assert f"nvshim-{name}" in found["nvshim.1"].replace("\\-", "-")
        command = nvshim.get_command(context, name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[-1] in page, (name, option.opts)
        for each in command.commands.values() if isinstance(command, click.Group) else ():
            assert (f".SS nvshim {name} {each.name}\n" in page) is not each.hidden


def test_no_text_is_taken_for_a_request_or_loses_a_dash() -> None:
    for name, page in pages():
        for line in page.splitlines():
            request = re.match(r"[.'](\w*)", line)
            assert request is None or request[1] in REQUESTS, (name, line)
            assert not re.search(r"(?<!\\)-", line), (name, line)
        assert [line for line in page.splitlines() if line.startswith(".SH")][:2] == [
            ".SH NAME", ".SH SYNOPSIS",
        ]  # fmt: skip
