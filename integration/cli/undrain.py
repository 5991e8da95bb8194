"""``nvshim undrain``: return to service what was taken out of it."""

from __future__ import annotations

import click

from hooks.config import Config
from integration.cli.options import configured, with_output
from integration.cli.output import Output
from integration.drain.serving import drained_names, undrain


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The devices that are out of service."""
    del param
    from hooks.config import load_config  # noqa: PLC0415 - only a shell asks

    known = drained_names(load_config(ctx.params.get("config_path")))
    return [name for name in known if name.lower().startswith(incomplete.lower())]


@click.command("undrain")
@with_output
@configured
@click.argument("devices", nargs=-1, metavar="[GPU|MIG DEVICE]...", shell_complete=_complete)
@click.option("--driver", is_flag=True, help="The driver.")
def command(output: Output, config: Config, *, devices: tuple[str, ...], driver: bool) -> None:
    """Return devices to service that `nvshim drain` has taken out of it; `all` for every one.

    A device that the node does not have any more is named by its UUID. Whether a device is healthy
    is another matter: `nvshim list --health`.
    """
    if not devices and not driver:
        raise click.UsageError("Name a device, or --driver.")
    marks = undrain(config, devices, driver=driver)
    lines = [f"{mark['name']} is in service again" for mark in marks]
    output.text("\n".join(lines), {"devices": marks})
