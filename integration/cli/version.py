"""``nvshim version``: show the running version."""

from __future__ import annotations

import click

from api.errors import printable
from integration.cli.options import with_output
from integration.cli.output import Output
from integration.inspection.node import own_version


@click.command("version")
@with_output
def command(output: Output) -> None:
    """Show the version, its revision and its location."""
    found = own_version()
    revision = f" ({found['revision']})" if found["revision"] else ""
    text = f"nvshim {found['version']}{revision}, Python {found['python']}\n{found['path']}"
    output.text("\n".join(map(printable, text.splitlines())), found)
