"""``nvshim compat``: NVIDIA's commands, for the scripts that call them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["command"]

_COMMANDS: Final[Mapping[str, str]] = {
    "nvidia-ctk": "integration.cli.nvidia_ctk",
    "nvidia-container-cli": "integration.cli.nvidia_container_cli",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of the help."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """One of them, which is imported."""
        del ctx
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        found = importlib.import_module(module).command
        return found if isinstance(found, click.Command) else None


@click.group("compat", cls=_Lazy)
def command() -> None:
    """Act as nvidia-ctk or nvidia-container-cli, with their flags and their output.

    nvshim does so as well if it is called by a link with that name.
    """
