"""``nvshim help``: show the help of a command, also of hidden commands."""

from __future__ import annotations

import click

from integration.cli.app import EVERYTHING


@click.command("help")
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="List internal commands too.")
@click.pass_context
def command(context: click.Context, words: tuple[str, ...], *, everything: bool) -> None:
    """Show the help of a command, as COMMAND --help does."""
    context = context.find_root()
    context.meta[EVERYTHING] = everything
    current = context.command
    for word in words:
        if not isinstance(current, click.Group):
            raise click.UsageError(f"{context.command_path} has no subcommands.", context)
        name, found, _ = current.resolve_command(context, [word])
        if found is not None:
            current, context = found, click.Context(found, info_name=name, parent=context)
    click.echo(current.get_help(context))
