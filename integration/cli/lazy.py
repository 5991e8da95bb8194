"""A group whose commands are imported on use.

``nvshim --help`` imports no command, and ``nvshim list`` imports only its own module. A command's
module can therefore import what it needs at the top.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """A group whose commands are in separate modules, each as ``command``.

    Args:
        modules: the module of each command, by name, in the order of the help.
        unlisted: the commands that help and completion do not list.
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
        """Return the commands' names, those of the separate modules first."""
        named = [name for name in self._modules if name not in self._unlisted]
        return [*named, *super().list_commands(ctx)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that a word names; the error suggests similar names."""
        word = args[0]
        if not word.startswith("-") and self.get_command(ctx, word) is None:
            meant = difflib.get_close_matches(word, self.list_commands(ctx), 3)
            words = " or ".join(f"'{each}'" for each in meant)
            hint = f" Did you mean {words}?" if meant else ""
            raise click.UsageError(f"No such command '{word}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        module = self._modules.get(cmd_name)
        if module is None:
            return super().get_command(ctx, cmd_name)
        command = importlib.import_module(module).command
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}.command is not a click command")
        _keep_lines(command)
        return command


def _keep_lines(command: click.Command) -> None:
    r"""Turn the two characters ``\b`` of a raw docstring into click's mark for unwrapped lines."""
    if command.help:
        command.help = command.help.replace("\\b\n", "\b\n")
    if isinstance(command, click.Group):
        for each in command.commands.values():
            _keep_lines(each)
