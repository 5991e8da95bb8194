"""``nvidia-ctk runtime configure``: configure an engine through ``nvshim configure``."""

from __future__ import annotations

from typing import Any

import click

from integration import exits
from integration.cli import configure as ours
from integration.cli.nvidia_ctk.global_flags import GlobalFlags
from integration.compat.gocli import GoGroup
from integration.compat.runtime_configure import arguments_of


@click.group("runtime", cls=GoGroup)
def command() -> None:
    """A collection of runtime-related utilities for the NVIDIA Container Toolkit."""


@command.command("configure")
@click.option("--runtime", "engine", default="docker", help="docker, containerd or crio.",
              type=click.Choice(["docker", "containerd", "crio"]))  # fmt: skip
@click.option(
    "--config", "path", default="", metavar="FILE", help="The engine's configuration file."
)
@click.option("--drop-in-config", "drop_in", default="", metavar="FILE", help="The drop-in file.")
@click.option("--executable-path", "program", default="", metavar="FILE",
              help="The engine's executable.")  # fmt: skip
@click.option("--config-mode", "mode", default="", help="Only config-file is supported.")
@click.option("--config-source", "config_source", type=click.Choice(["command", "file"]),
              help="Has no effect.")  # fmt: skip
@click.option("--oci-hook-path", default="", help="Not supported.")
@click.option("--nvidia-runtime-name", "name", default="nvidia", help="The handler's name.")
@click.option("--nvidia-runtime-path", "--runtime-path", "runtime_path", default="",
              help="Has no effect, unless it is the shim's path.")  # fmt: skip
@click.option("--nvidia-runtime-hook-path", "hook_path", default="", help="Has no effect.")
@click.option("--nvidia-set-as-default", "--set-as-default", "set_default", is_flag=True,
              help="Make it the default runtime.")  # fmt: skip
@click.option("--cdi.enabled", "--cdi.enable", "--enable-cdi", "enable_cdi", is_flag=True,
              help="Enable CDI in the engine.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Change nothing; show the change.")
@click.pass_obj
def configure(global_flags: GlobalFlags, /, **flags: Any) -> None:
    """Add a runtime to the specified container engine."""
    arguments, notes = arguments_of(**flags)
    for note in notes:
        global_flags.stderr.warning(note)
    global_flags.stderr.debug(f"nvshim configure {' '.join(arguments)}")
    try:
        ours.command.main(arguments, prog_name="nvshim configure", standalone_mode=False)
    except click.exceptions.Exit as ended:
        # The original's dry run exits with 0 even if there is something to change.
        if ended.exit_code != exits.FOUND:
            raise
    if not flags["dry_run"]:
        global_flags.stderr.info(f"It is recommended that {flags['engine']} daemon be restarted.")
