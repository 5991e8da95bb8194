"""``nvshim undrain``: return drained devices to service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from hooks.config import Config, load_config
from integration.cli.options import completing, configured, with_output
from integration.cli.output import Output
from integration.drain.serving import drained_names, undrain


@completing
def _drained(given: Mapping[str, Any]) -> Iterable[str]:
    """Complete the devices that are out of service."""
    return drained_names(load_config(given.get("config_path")))


@click.command("undrain")
@with_output
@configured
@click.argument("devices", nargs=-1, metavar="[GPU|MIG DEVICE]...", shell_complete=_drained)
@click.option("--driver", is_flag=True, help="Return the driver to service.")
def command(output: Output, config: Config, *, devices: tuple[str, ...], driver: bool) -> None:
    """Return devices to service that `nvshim drain` took out of service; `all` for all of them.

    Name a device that the node no longer has by its UUID. This does not change a device's health:
    see `nvshim list --health`.
    """
    if not devices and not driver:
        raise click.UsageError("Name a device, or --driver.")
    marks = undrain(config, devices, driver=driver)
    lines = [f"{mark['name']} is back in service" for mark in marks]
    output.text("\n".join(lines), {"devices": marks})
