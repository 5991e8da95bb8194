"""``nvidia-ctk config``: NVIDIA's config.toml, shown and set."""

from __future__ import annotations

import os
import sys

import click

from hooks.config import DEFAULT_PATH, NVIDIA_PATH
from integration.compat import toolkit_config
from integration.compat.gocli import GoGroup


@click.group("config", cls=GoGroup, invoke_without_command=True)
@click.option("-c", "--config-file", "--config", "path", metavar="FILE",
              help="The file, in place of the node's.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="KEY[=VALUE]", help="Set a key; may be "
              "repeated.")  # fmt: skip
@click.option("-i", "--in-place", is_flag=True, help="Write the file that was read.")
@click.option("-o", "--output", default="", metavar="FILE", help="The file; by default stdout.")
@click.pass_context
def command(
    ctx: click.Context, /, *, path: str | None, settings: tuple[str, ...], in_place: bool,
    output: str,
) -> None:  # fmt: skip
    """Interact with the NVIDIA Container Toolkit configuration."""
    if ctx.invoked_subcommand is not None:
        return

    given = ctx.obj
    named = os.environ.get("NVIDIA_CTK_CONFIG_FILE_PATH")
    file = path or given.config_file or named or NVIDIA_PATH
    text = toolkit_config.with_settings(toolkit_config.read(file), settings, file)
    for note in toolkit_config.notes_of(text, file, settings):
        given.stderr.warning(note)
    if settings and os.path.exists(DEFAULT_PATH):
        given.stderr.warning(f"{DEFAULT_PATH} is there, so {file} is not read")
    if in_place and not os.path.exists(file):
        given.stderr.warning(toolkit_config.policy_of(text, file))
    _write_config(text, file if in_place else output)


@command.command("default")
@click.option("-o", "--output", default="", metavar="FILE", help="The file; by default stdout.")
def default(output: str) -> None:
    """Generate the default NVIDIA Container Toolkit configuration file."""
    _write_config(toolkit_config.DEFAULT, output)


command.add_command(default, "create-default")
command.add_command(default, "generate-default")


def _write_config(text: str, output: str) -> None:
    if output:
        toolkit_config.write(output, text)
    else:
        sys.stdout.write(text)
