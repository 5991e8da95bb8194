"""``nvshim devices``: nodes of NVIDIA's driver, and their links in /dev/char."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from typing import Any, Final

import click

from hooks.config import Config
from integration.cli.options import configured, found_if, with_listing
from integration.cli.output import Column, Output
from integration.devices.creating import State, Wish, refuse_failures
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
    """Make the driver's device nodes and /dev/char links that are missing."""


@command.command("create")
@with_listing
@configured
@click.option("--control", "control_only", is_flag=True,
              help="Only nodes that belong to no GPU and no capability.")  # fmt: skip
@click.option("--nodes/--no-nodes", default=True, help="Whether nodes are made.")
@click.option("--links/--no-links", default=True, help="Whether links in dev/char are made.")
@click.option("--load-kernel-modules", "modules", is_flag=True,
              help="Load nvidia, nvidia-uvm and nvidia-modeset first.")  # fmt: skip
@click.option("--dev-root", metavar="PATH", type=click.Path(exists=True, file_okay=False),
              help="The directory whose dev has the nodes, in place of the "
              "configuration's.")  # fmt: skip
@click.option("--driver-root", metavar="PATH", type=click.Path(exists=True, file_okay=False),
              help="Where kernel modules are looked for, in place of the "
              "configuration's.")  # fmt: skip
@click.option("--dry-run", is_flag=True,
              help="Change nothing; end with 3 if there would be something to make.")  # fmt: skip
def create(
    output: Output, config: Config, dev_root: str | None, driver_root: str | None, **wish: Any
) -> None:
    """Make what is missing; what is there stays as it is."""
    if dev_root is not None:
        config = replace(config, dev=os.path.join(os.path.abspath(dev_root), "dev"))
    if driver_root is not None:
        config = replace(config, driver_root=os.path.abspath(driver_root))
    steps = make(config, Wish(**wish))
    output.rows([asdict(step) for step in steps], _COLUMNS, name="path")
    sys.stdout.flush()
    refuse_failures(steps)
    found_if(wish["dry_run"] and any(step.state == State.ABSENT for step in steps))
