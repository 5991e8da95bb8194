"""A group of commands that are imported when they are asked for.

``nvshim --help`` imports no command at all, and ``nvshim list`` that one and nothing of the others.
So a command's module imports at its top what it needs.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class LazyGroup(click.Group):
    """A group whose commands are in modules of their own, each as ``command``.

    Args:
        modules: where each command is, by its name, in the order of the help.
        unlisted: those of them that neither help nor completion lists.
    """

    def __init__(
        self,
        *args: Any,
        modules: Mapping[str, str],
        unlisted: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules
        self._unlisted = unlisted

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names; those of other modules come first."""
        named = [name for name in self._modules if name not in self._unlisted]
        return [*named, *super().list_commands(ctx)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that a word names; an error says which one may be meant."""
        word = args[0]
        if not word.startswith("-") and self.get_command(ctx, word) is None:
            meant = difflib.get_close_matches(word, self.list_commands(ctx), 3)
            words = " or ".join(f"'{each}'" for each in meant)
            asked = f" Did you mean {words}?" if meant else ""
            raise click.UsageError(f"No such command '{word}'.{asked}", ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of them, which is imported."""
        module = self._modules.get(cmd_name)
        if module is None:
            return super().get_command(ctx, cmd_name)
        command = importlib.import_module(module).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.command is no command")
        _keep_lines(command)
        return command


def _keep_lines(command: click.Command) -> None:
    """Lines after click's mark stay lines: in a raw docstring the mark is two characters."""
    if command.help:
        command.help = command.help.replace("\\b\n", "\b\n")
    if isinstance(command, click.Group):
        for each in command.commands.values():
            _keep_lines(each)
