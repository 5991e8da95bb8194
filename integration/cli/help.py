"""``nvshim help``: the help of a command, and of the commands that ``--help`` leaves out."""

from __future__ import annotations

import click

from integration.cli.app import EVERYTHING


@click.command("help")
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="List internal commands, too.")
@click.pass_context
def command(context: click.Context, words: tuple[str, ...], *, everything: bool) -> None:
    """Show the help of a command, as COMMAND --help does."""
    context = context.find_root()
    context.meta[EVERYTHING] = everything
    asked = context.command
    for word in words:
        if not isinstance(asked, click.Group):
            raise click.UsageError(f"{context.command_path} has no commands", context)
        name, found, _ = asked.resolve_command(context, [word])
        if found is not None:
            asked, context = found, click.Context(found, info_name=name, parent=context)
    click.echo(asked.get_help(context))
