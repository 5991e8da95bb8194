"""``nvshim completion SHELL``: print the completion script of a shell."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from integration.cli.app import COMPLETION_VARIABLE, nvshim

_HELP: Final = """Print the completion script for SHELL; save it where SHELL loads completions.

\b
bash:  nvshim completion bash >/etc/bash_completion.d/nvshim
zsh:   nvshim completion zsh >/usr/local/share/zsh/site-functions/_nvshim
fish:  nvshim completion fish >/etc/fish/completions/nvshim.fish
"""


@click.command("completion", help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """``nvshim completion``: see its help."""
    known = get_completion_class(shell)
    if known is None:  # the choice above leaves only shells that click knows
        raise click.BadParameter(f"no completion for {shell}")
    click.echo(known(nvshim, {}, "nvshim", COMPLETION_VARIABLE).source())
