"""``nvidia-ctk config``: show and change NVIDIA's config.toml."""

from __future__ import annotations

import os
import sys

import click

from hooks.config import DEFAULT_PATH, NVIDIA_PATH
from integration.compat import toolkit_config
from integration.compat.gocli import GoGroup


@click.group("config", cls=GoGroup, invoke_without_command=True)
@click.option("-c", "--config-file", "--config", "path", metavar="FILE",
              help="Use this file instead of the node's.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="KEY[=VALUE]",
              help="Set a key; repeatable.")  # fmt: skip
@click.option("-i", "--in-place", is_flag=True, help="Write the result to the file that was read.")
@click.option("-o", "--output", default="", metavar="FILE",
              help="Write the result to this file; by default stdout.")  # fmt: skip
@click.pass_context
def command(
    ctx: click.Context, /, *, path: str | None, settings: tuple[str, ...], in_place: bool,
    output: str,
) -> None:  # fmt: skip
    """Interact with the NVIDIA Container Toolkit configuration."""
    if ctx.invoked_subcommand is not None:
        return

    global_flags = ctx.obj
    named = os.environ.get("NVIDIA_CTK_CONFIG_FILE_PATH")
    file = path or global_flags.config_file or named or NVIDIA_PATH
    text = toolkit_config.with_settings(toolkit_config.read(file), settings, file)
    for note in toolkit_config.notes_of(text, file, settings):
        global_flags.stderr.warning(note)
    if settings and os.path.exists(DEFAULT_PATH):
        global_flags.stderr.warning(f"{DEFAULT_PATH} exists, so the shim does not read {file}")
    if in_place and not os.path.exists(file):
        global_flags.stderr.warning(toolkit_config.policy_of(text, file))
    _write_config(text, file if in_place else output)


@command.command("default")
@click.option(
    "-o", "--output", default="", metavar="FILE", help="Write this file; by default stdout."
)
def default(output: str) -> None:
    """Generate the default NVIDIA Container Toolkit configuration file."""
    _write_config(toolkit_config.DEFAULT, output)


def _write_config(text: str, output: str) -> None:
    if output:
        toolkit_config.write(output, text)
    else:
        sys.stdout.write(text)
