"""``nvshim status``: the installed versions, the current one, and the shims that use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from api.errors import printable
from integration.cli.install import with_place
from integration.cli.options import found_if, with_listing
from integration.cli.output import Column, Format, Output
from integration.install.status import status
from integration.install_layout import InstallLayout

_COLUMNS = (
    Column("NAME", "name"),
    Column("VERSION", "version", wide=True),
    Column("REVISION", "revision", wide=True),
    Column("ROLE", "role"),
    Column("SHIMS", "shims", right=True),
    Column("FORK SERVERS", "fork_servers", right=True),
    Column("PROBLEM", "problem"),
)


@click.command("status")
@with_place
@click.option("--verify", is_flag=True, help="Verify every file of every version.")
@with_listing
def command(output: Output, *, layout: InstallLayout, verify: bool) -> None:
    """Show the installed versions; the exit status is 3 if the installation has a problem."""
    answer = status(layout, verify=verify)
    if output.form.is_document:
        output.document(answer)
    else:
        if answer["versions"]:
            output.rows(answer["versions"], _COLUMNS)
        if output.form is not Format.NAME:
            output.text("".join(f"{line}\n" for line in _notes(answer)), answer)
    found_if(answer["problems"])


def _notes(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer["being_changed"]:
        yield "an installation is running now"
    if answer["unseen_shims"]:
        yield "some shims may not be visible from here; run the command on the node, as root"
    yield from map(printable, answer["problems"])
