"""``nvshim devices``: create the driver's device nodes and their links in /dev/char."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from typing import Any, Final

import click

from hooks.config import Config
from integration.cli.options import DirectoryPath, configured, found_if, with_listing
from integration.cli.output import Column, Output
from integration.devices.creating import CreateOptions, StepState, refuse_failures
from integration.devices.creating import create as make

_COLUMNS: Final = (
    Column("KIND", "kind"),
    Column("PATH", "path"),
    Column("NUMBERS", "numbers"),
    Column("STATE", "state"),
    Column("REASON", "reason"),
)


@click.group("devices")
def command() -> None:
    """Create missing device nodes of the driver, and missing links in /dev/char."""


@command.command("create")
@with_listing
@configured
@click.option("--control", "control_only", is_flag=True,
              help="Create only control nodes, not those of GPUs and capabilities.")  # fmt: skip
@click.option("--nodes/--no-nodes", default=True, help="Create device nodes.")
@click.option("--links/--no-links", default=True, help="Create links in dev/char.")
@click.option("--load-kernel-modules", "modules", is_flag=True,
              help="Load nvidia, nvidia-uvm and nvidia-modeset first.")  # fmt: skip
@click.option("--dev-root", metavar="PATH", type=DirectoryPath(exists=True),
              help="Create the nodes in dev below this directory instead of the "
              "configuration's.")  # fmt: skip
@click.option("--driver-root", metavar="PATH", type=DirectoryPath(exists=True),
              help="Search kernel modules below this directory instead of the "
              "configuration's.")  # fmt: skip
@click.option("--dry-run", is_flag=True,
              help="Change nothing; exit with 3 if something is missing.")  # fmt: skip
def create(
    output: Output, config: Config, dev_root: str | None, driver_root: str | None, **options: Any
) -> None:
    """Create missing device nodes and links; existing ones stay as they are."""
    if dev_root is not None:
        config = replace(config, dev=os.path.join(os.path.abspath(dev_root), "dev"))
    if driver_root is not None:
        config = replace(config, driver_root=os.path.abspath(driver_root))
    steps = make(config, CreateOptions(**options))
    output.rows([asdict(step) for step in steps], _COLUMNS, name="path")
    sys.stdout.flush()
    refuse_failures(steps)
    found_if(options["dry_run"] and any(step.state == StepState.ABSENT for step in steps))
