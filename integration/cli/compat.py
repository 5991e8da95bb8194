"""``nvshim compat``: NVIDIA's commands, for scripts that call them."""

from __future__ import annotations

import click

from integration.cli.lazy import LazyGroup

_COMMANDS = {
    "nvidia-ctk": "integration.cli.nvidia_ctk",
    "nvidia-container-cli": "integration.cli.nvidia_container_cli",
}


@click.group("compat", cls=LazyGroup, modules=_COMMANDS)
def command() -> None:
    """Act as nvidia-ctk or nvidia-container-cli, with their flags and output.

    A link to nvshim with one of these names does the same.
    """
