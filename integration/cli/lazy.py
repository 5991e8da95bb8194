"""A group of commands that are imported when they are asked for.

``nvshim --help`` imports no command at all, and ``nvshim list`` that one and nothing of the others.
So a command's module imports at its top what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LazyGroup"]


class LazyGroup(click.Group):
    """A group whose commands are in modules of their own, each as ``command``.

    Args:
        modules: where each command is, by its name, in the order of the help.
    """

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names; those of other modules come first."""
        return [*self._modules, *super().list_commands(ctx)]

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
