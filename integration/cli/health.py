"""``nvshim health``: return failed devices to service; ``nvshim list --health`` shows them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import click

from hooks.config import Config, load_config
from integration.cli.kinds import HEALTH
from integration.cli.options import completing, configured, found_if, with_listing
from integration.cli.output import Column, Output
from integration.node.device_health.report import clear as return_to_service
from integration.node.device_health.report import health_rows, read_health

_SHORT: Final = len("GPU-00000000")


def _time(value: Any) -> str:
    if not value:
        return "-"
    then = dt.datetime.fromtimestamp(value, tz=dt.UTC)
    return then.isoformat(timespec="seconds").replace("+00:00", "Z")


def _why(row: Mapping[str, Any]) -> str:
    drained = row["out_of_service"] and f"out of service {row['out_of_service']}"
    return "; ".join(filter(None, (drained, row["reason"], row["do"])))


_COLUMNS: Final = (
    # Enough characters for `health clear`.
    Column("DEVICE", lambda row: row["uuid"][:_SHORT]),
    Column("UUID", "uuid", wide=True),
    Column("STATE", "state"),
    Column("SINCE", "since", _time),
    Column("CONTAINERS", "containers", wide=True),
    Column("REASON, AND WHAT TO DO", _why),
)


@completing
def _devices(given: Mapping[str, Any]) -> Iterable[str]:
    """Complete the UUIDs of the monitored devices."""
    return read_health(load_config(given.get("config_path"))) or ()


@click.group("health")
def command() -> None:
    """Return failed devices to service; `nvshim list --health` shows their state."""


@command.command("list", hidden=True)
@with_listing
@configured
def list_(output: Output, config: Config) -> None:
    """Show the health of each device, as `nvshim list --health` does."""
    show_health(output, config)


@command.command("clear")
@with_listing
@configured
@click.argument(
    "devices", nargs=-1, required=True, metavar="[GPU|MIG DEVICE]...", shell_complete=_devices
)
def clear(output: Output, config: Config, *, devices: Sequence[str]) -> None:
    """Return unhealthy devices to service; a GPU together with its MIG devices.

    Name a device by index (3, 3:0), UUID or PCI address; the start of a UUID is enough, and `all`
    is every GPU. A device that does not answer stays unhealthy, and one that fails again becomes
    unhealthy again. The exit status is 3 if a device is still not allocatable. The output is that
    of `nvshim list --health`.
    """
    _show(output, return_to_service(config, devices))


def show_health(output: Output, config: Config) -> None:
    """Show the health of each device, and exit with 3 if one is not allocatable.

    Raises:
        HealthUnknown: no agent monitors the devices.
    """
    _show(output, health_rows(config))


def _show(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    output.kind = HEALTH
    output.rows(rows, _COLUMNS, name="uuid")
    found_if(not all(row["given"] for row in rows))
