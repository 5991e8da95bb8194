"""``nvidia-ctk runtime configure``: an engine's configuration, by ``nvshim configure``."""

from __future__ import annotations

from typing import Any

import click

from integration import exits
from integration.cli import configure as ours
from integration.cli.nvidia_ctk.given import Given
from integration.compat.gocli import GoGroup
from integration.compat.runtime_configure import arguments_of


@click.group("runtime", cls=GoGroup)
def command() -> None:
    """A collection of runtime-related utilities for the NVIDIA Container Toolkit."""


@command.command("configure")
@click.option("--runtime", "engine", default="docker", help="docker, containerd or crio.",
              type=click.Choice(["docker", "containerd", "crio"]))  # fmt: skip
@click.option("--config", "path", default="", metavar="FILE", help="The engine's configuration.")
@click.option("--drop-in-config", "drop_in", default="", metavar="FILE", help="The drop-in.")
@click.option("--executable-path", "program", default="", metavar="FILE", help="The engine.")
@click.option("--config-mode", "mode", default="", help="config-file.")
@click.option("--config-source", "config_source", type=click.Choice(["command", "file"]),
              help="Changes nothing.")  # fmt: skip
@click.option("--oci-hook-path", default="", help="An error.")
@click.option("--nvidia-runtime-name", "name", default="nvidia", help="The handler's name.")
@click.option("--nvidia-runtime-path", "--runtime-path", "runtime_path", default="",
              help="Changes nothing, unless it is the shim.")  # fmt: skip
@click.option("--nvidia-runtime-hook-path", "hook_path", default="", help="Changes nothing.")
@click.option("--nvidia-set-as-default", "--set-as-default", "set_default", is_flag=True,
              help="Containers that name no runtime get it.")  # fmt: skip
@click.option("--cdi.enabled", "--cdi.enable", "--enable-cdi", "enable_cdi", is_flag=True,
              help="Have the engine apply CDI specs.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Change nothing; show what would be changed.")
@click.pass_obj
def configure(given: Given, /, **flags: Any) -> None:
    """Add a runtime to the specified container engine."""
    arguments, notes = arguments_of(**flags)
    for note in notes:
        given.stderr.warning(note)
    given.stderr.debug(f"nvshim configure {' '.join(arguments)}")
    try:
        ours.command.main(arguments, prog_name="nvshim configure", standalone_mode=False)
    except click.exceptions.Exit as ended:
        # A dry run of the original does not say so if there is something to change.
        if ended.exit_code != exits.FOUND:
            raise
    if not flags["dry_run"]:
        given.stderr.info(f"It is recommended that {flags['engine']} daemon be restarted.")
